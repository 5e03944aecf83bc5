"""Writing and reading rollouts/*.parquet: a file appears by rename, and no trajectory stands in two of them."""

from __future__ import annotations

import io
import os
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from estr.errors import RunError, UsageError
from estr.storage.files import disk_errors, remove_leftovers, sync_directory, write_atomic
from estr.storage.rollouts import SCHEMA, Row, Settled, to_table

_NAME = re.compile(r"step-(\d{6,})(?:\.\d+)?(-finished)?\.parquet")
_REMEMBERED = 16_384  # ids of stored rows
_WAIT = 300.0  # seconds a foreground call waits for the background thread


class RolloutWriter:
    """Writes the rows settled in one optimizer step to ``rollouts/step-000123.parquet`` (zstd).

    With ``background`` a thread encodes and writes; its errors are raised by the next call. Call ``flush`` before a
    checkpoint is committed, so that rows up to it are on disk. ``after_store`` is called after each file, by that
    thread: the place for other work that nothing waits for.
    """

    def __init__(self, run: Any, *, background: bool = False) -> None:
        self.directory = Path(getattr(run, "rollouts", run))
        with disk_errors("write to", self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.directory)
        self._known: _Newest | None = None
        self._worker = _Worker(self._store) if background else None
        self.after_store: Callable[[], None] = lambda: None

    def write(self, step: int, rows: Sequence[Row]) -> None:
        """Store rows settled in optimizer step ``step``; rows of state ``finished`` go to a file of their own.

        Raises:
            RunError: a ``trajectory_id`` is stored already, or the disk fails (this call's write, or with
                ``background`` an earlier one); no partial file is left.
            ValueError: a trained row belongs to another step.
        """
        self._take(step, [(row["trajectory_id"], row["state"], row["trained_step"]) for row in rows])
        self._write(step, rows, [row["state"] for row in rows])

    def write_settled(self, step: int, settled: Sequence[Settled]) -> None:
        """``write`` for trajectories whose rows are yet to be made; with ``background`` its thread makes them."""
        about = [(one, one.settlement.state, one.settlement.trained_step) for one in settled]
        self._take(step, [(name, state, trained) for one, state, trained in about for name in one.names()])
        self._write(step, settled, [state for _, state, _ in about])

    def _write(self, step: int, entries: Sequence[Row | Settled], states: Sequence[str]) -> None:
        for finished, suffix in ((False, ""), (True, "-finished")):
            part = [entry for entry, state in zip(entries, states, strict=True) if (state == "finished") is finished]
            if part:
                self._submit(step, suffix, part)

    def withdraw_after(self, step: int) -> int:
        """Remove the rows settled beyond ``step`` and all that are only finished; returns how many files that were."""
        self.flush()
        withdrawn = [path for path in self.directory.glob("*.parquet") if _beyond(path.name, step)]
        with disk_errors("withdraw rollouts from", self.directory):
            for path in withdrawn:
                path.unlink()
            sync_directory(self.directory)
        self._known = _Newest(_stored_ids(self.directory))
        return len(withdrawn)

    @property
    def _ids(self) -> _Newest:
        """Ids of rows that are stored; read only when files that a resume withdraws are gone."""
        if self._known is None:
            self._known = _Newest(_stored_ids(self.directory))
        return self._known

    def flush(self) -> None:
        """Wait until everything written so far is on disk."""
        if self._worker is not None:
            self._worker.flush()

    def close(self) -> None:
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close()

    def _take(self, step: int, rows: Sequence[tuple[str, str, int | None]]) -> None:
        """Note ids of rows that are to be written, with their state and the step that trained them, or refuse all."""
        fresh: set[str] = set()
        for name, state, trained in rows:
            if name in self._ids or name in fresh:
                raise RunError(f"the trajectory {name} is in {self.directory} already; it must not be stored twice")
            if state == "trained" and trained != step:
                raise ValueError(f"{name} was trained in step {trained}, not in step {step}")
            fresh.add(name)
        self._ids.add(fresh)

    def _submit(self, step: int, suffix: str, entries: list[Row | Settled]) -> None:
        if self._worker is not None:
            self._worker.submit(step, suffix, entries)
        else:
            self._store(step, suffix, entries)

    def _store(self, step: int, suffix: str, entries: list[Row | Settled]) -> None:
        made = [entry.rows() if isinstance(entry, Settled) else [entry] for entry in entries]
        rows = [row for some in made for row in some]
        buffer = io.BytesIO()
        pq.write_table(to_table(rows), buffer, compression="zstd")
        path = _free_name(self.directory, step, suffix)
        try:
            with disk_errors("write", path):
                write_atomic(path, buffer.getvalue())
        except RunError:
            path.unlink(missing_ok=True)  # where only the directory could not be synced
            self._ids.forget(row["trajectory_id"] for row in rows)
            raise
        self.after_store()

    def __enter__(self) -> RolloutWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def retain_rollouts(run: Any, oldest: int) -> int:
    """Remove the files of steps before ``oldest``; returns how many.

    No resume reads rows of the past: what it may have to train again is in the spool.
    """
    directory = Path(getattr(run, "rollouts", run))
    matches = ((path, _NAME.fullmatch(path.name)) for path in directory.glob("*.parquet"))
    old = [path for path, match in matches if match is not None and int(match[1]) < oldest]
    with disk_errors("remove old rollouts from", directory):
        for path in old:
            path.unlink(missing_ok=True)
    return len(old)


def stored_steps(run: Any) -> set[int]:
    """The optimizer steps of which there is a file of settled rows."""
    directory = Path(getattr(run, "rollouts", run))
    matches = (_NAME.fullmatch(path.name) for path in directory.glob("*.parquet"))
    return {int(match[1]) for match in matches if match is not None and match[2] is None}


def read_rollouts(run_or_path: Any, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows of a run, a directory of Parquet files, or one file, oldest step first.

    ``columns`` that a file does not have are left out; a run without rollouts gives an empty table.

    Raises:
        UsageError: there is no such file, or it is not Parquet.
    """
    given = Path(getattr(run_or_path, "path", run_or_path))
    tables = [_read(path, columns) for path in rollout_files(given)]
    if not tables:
        empty = SCHEMA.empty_table()
        return empty if columns is None else empty.select([name for name in columns if name in SCHEMA.names])
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise UsageError(f"the Parquet files of {given} do not fit each other: {_first_line(error)}") from error


def rollout_files(path: Path) -> list[Path]:
    """The Parquet files of a run directory, of a directory, or the one file.

    Raises:
        UsageError: there is nothing at ``path``.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"{path} does not exist; give a run directory or a Parquet file")
    inside = path / "rollouts"
    directory = inside if inside.is_dir() else path
    return sorted(file for file in directory.glob("*.parquet") if not file.name.startswith("."))


def _read(path: Path, columns: Sequence[str] | None) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            present = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
            table = file.read(columns=present)
        table.validate(full=True)  # a damaged file may hold text that is no UTF-8
        return table
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as Parquet: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]


class _Newest:
    """The newest ids of stored rows. All of them would fill the memory of a long run: that nothing is settled twice is
    the ledger's word, and this a look at the rows themselves."""

    def __init__(self, ids: Iterable[str]) -> None:
        self._ids: set[str] = set()
        self._order: deque[str] = deque()
        self.add(ids)

    def add(self, ids: Iterable[str]) -> None:
        for name in ids:
            self._ids.add(name)
            self._order.append(name)
        while len(self._order) > _REMEMBERED:
            self._ids.discard(self._order.popleft())

    def forget(self, ids: Iterable[str]) -> None:
        self._ids.difference_update(ids)

    def __contains__(self, name: str) -> bool:
        return name in self._ids


def _stored_ids(directory: Path) -> dict[str, None]:
    """Ids of all stored rows, in the order of their files; raises RunError where one stands twice."""
    ids: dict[str, None] = {}
    for path in rollout_files(directory):
        try:
            found = _read(path, ["trajectory_id"]).column("trajectory_id").to_pylist()
        except UsageError as error:
            raise UsageError(f"{error}; move it away to go on without the rows it holds") from error
        repeated = next((name for name in found if name in ids), None)
        if repeated is not None or len(set(found)) < len(found):
            name = repeated or next(name for name in found if found.count(name) > 1)
            raise RunError(
                f"the trajectory {name} stands twice in {directory}, the second time in {path.name}: move that away"
            )
        ids.update(dict.fromkeys(found))
    return ids


def _beyond(name: str, step: int) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and (match[2] is not None or int(match[1]) > step)


def _free_name(directory: Path, step: int, suffix: str) -> Path:
    path, count = directory / f"step-{step:06d}{suffix}.parquet", 0
    while os.path.lexists(path):
        count += 1
        path = directory / f"step-{step:06d}.{count}{suffix}.parquet"
    return path


class _Worker:
    """One thread that runs jobs in order; after an error it runs no more, and every later call raises it."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run
        self._jobs: queue.Queue[tuple[Any, ...] | threading.Event | None] = queue.Queue(maxsize=8)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="rollout-writer", daemon=True)
        self._thread.start()

    def submit(self, *job: Any) -> None:
        self._raise()
        self._put(job)

    def flush(self) -> None:
        done = threading.Event()
        self._put(done)
        if not done.wait(_WAIT):
            raise RunError(f"waited {_WAIT:g} s for rollouts to be written; is the disk responding?")
        self._raise()

    def close(self) -> None:
        self._put(None)
        self._thread.join(_WAIT)
        if self._thread.is_alive():
            raise RunError(f"waited {_WAIT:g} s for rollouts to be written; is the disk responding?")
        self._raise()

    def _put(self, item: tuple[Any, ...] | threading.Event | None) -> None:
        try:
            self._jobs.put(item, timeout=_WAIT)
        except queue.Full:
            raise RunError(f"waited {_WAIT:g} s for rollouts to be written; is the disk responding?") from None

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
            elif self._error is None:
                try:
                    self._run(*job)
                except BaseException as error:
                    self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
