"""metrics.jsonl and timeline.jsonl: one JSON object a line, readable while the run goes on.

Each line of metrics.jsonl is one ``write`` to the kernel as it happens, so that a killed process loses nothing; lines
of timeline.jsonl go there together about once a second. ``sync`` (fsync) is called with each checkpoint only: after a
power cut, lines beyond the last checkpoint are withdrawn on resume anyway.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from estr.errors import RunError, UsageError
from estr.storage.encoding import clean_text
from estr.storage.files import disk_errors, remove_leftovers, write_all, write_atomic

Record = dict[str, Any]
_TOGETHER = 1.0  # seconds over which lines of the timeline are gathered


class JsonLinesWriter:
    """Appends objects to a JSON Lines file; what a killed writer left of a last line is cut off on opening."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        self._open()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, keys sorted; None, NaN and infinite values are left out.

        Raises:
            RunError: the disk is full or broken; the file then ends with the line before.
        """
        self._write_lines(encode_line(record) + "\n")

    def _write_lines(self, lines: str) -> None:
        assert self._descriptor is not None, f"{self.path} is closed"
        with disk_errors("write", self.path):
            size = os.fstat(self._descriptor).st_size
            try:
                write_all(self._descriptor, lines.encode())
            except OSError:
                os.ftruncate(self._descriptor, size)
                raise

    def sync(self) -> None:
        """Make every line so far survive a power cut."""
        assert self._descriptor is not None, f"{self.path} is closed"
        with disk_errors("write", self.path):
            os.fsync(self._descriptor)

    def withdraw(self, keep: Callable[[Record], bool]) -> int:
        """Rewrite the file (by rename) with the lines that ``keep`` accepts; returns how many were withdrawn."""
        records = read_json_lines(self.path)
        kept = [record for record in records if keep(record)]
        if len(kept) < len(records):
            self._rewrite(kept)
        return len(records) - len(kept)

    def withdraw_beyond(self, key: str, limit: int) -> int:
        """Withdraw the lines whose ``key`` is a number greater than ``limit``; returns how many.

        Raises:
            UsageError: a line in which it is no number.
        """
        for number, record in enumerate(read_json_lines(self.path), 1):
            if isinstance(record.get(key, 0), bool) or not isinstance(record.get(key, 0), int | float):
                raise UsageError(f"{self.path}, line {number}: {key} is no number; mend or remove that line")
        return self.withdraw(lambda record: record.get(key, 0) <= limit)

    def _rewrite(self, records: list[Record]) -> None:
        with disk_errors("write", self.path):
            write_atomic(self.path, "".join(encode_line(record) + "\n" for record in records).encode())
        self.close()
        self._open()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        with disk_errors("open", self.path):
            remove_leftovers(self.path.parent, self.path.name)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            _cut_torn_line(self._descriptor)

    def __enter__(self) -> JsonLinesWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MetricsWriter(JsonLinesWriter):
    """metrics.jsonl: one object per optimizer step, with the keys of CONTRACT section 4."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the line of optimizer step ``step`` (1-based: the version after it)."""
        self.append({**metrics, "step": step})

    def withdraw_after(self, step: int) -> int:
        """Withdraw the lines of steps beyond ``step``; returns how many."""
        return self.withdraw_beyond("step", step)

    def amend(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add to the line of ``step`` what was not known when it was written."""
        records = read_json_lines(self.path)
        self._rewrite([{**record, **metrics} if record.get("step") == step else record for record in records])


class TimelineWriter(JsonLinesWriter):
    """timeline.jsonl: what each process did when, in seconds since the run started.

    A killed process loses the lines that wait to be written with others.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._waiting: list[str] = []
        self._written = time.monotonic()

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line, to be written with others; raises RunError as soon as that fails."""
        self._waiting.append(encode_line(record) + "\n")
        if time.monotonic() - self._written >= _TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait."""
        if self._waiting:
            self._write_lines("".join(self._waiting))
            self._waiting.clear()
        self._written = time.monotonic()

    def sync(self) -> None:
        self.flush()
        super().sync()

    def withdraw(self, keep: Callable[[Record], bool]) -> int:
        self.flush()
        return super().withdraw(keep)

    def close(self) -> None:
        """Close the file; lines that cannot be written any more are given up, so that what ended the run is told."""
        if self._descriptor is not None:
            with contextlib.suppress(RunError):
                self.flush()
        super().close()

    def write(
        self,
        actor: str,
        kind: str,
        start: float,
        end: float,
        version: int | None = None,
        work: Mapping[str, Any] | None = None,
    ) -> None:
        """Append one interval: ``actor`` (``learner``, ``engine-0``…) did ``kind`` (``generate``, ``train``, ``wait``…)
        from ``start`` to ``end`` with the weights of ``version``. ``work`` is what an engine got done in it:
        decode_steps, sampled_tokens, prefilled_tokens, and tool_seconds of each environment reply."""
        self.append(
            {"actor": actor, "kind": kind, "start": start, "end": end, "version": version, **(work if work else {})}
        )

    def withdraw_after(self, step: int) -> int:
        """Withdraw the intervals that ran under versions beyond ``step``; returns how many."""
        return self.withdraw_beyond("version", step)


def encode_line(record: Mapping[str, Any]) -> str:
    """One line of strict JSON, keys sorted; None, NaN and infinite values are left out."""
    values = {key: _number(value) for key, value in record.items()}
    present = {clean_text(key): value for key, value in values.items() if value is not None}
    return json.dumps(present, sort_keys=True, allow_nan=False)


def _number(value: Any) -> Any:
    """``value`` as JSON holds it, or None where it is missing."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _number(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_number(item) for item in value]
    if hasattr(value, "tolist"):
        return _number(value.tolist())
    raise TypeError(f"a {type(value).__name__} cannot be a metric")


def read_metrics(run_or_path: Any) -> list[Record]:
    """The lines of a run's metrics.jsonl (a run directory, its path, or the file); empty where there are none yet.

    Raises:
        UsageError: a line before the last is malformed. A torn last line is left out: its writer was killed.
    """
    return read_json_lines(_inside(run_or_path, "metrics.jsonl"))


def read_timeline(run_or_path: Any) -> list[Record]:
    """The intervals of a run's timeline.jsonl; as ``read_metrics``."""
    return read_json_lines(_inside(run_or_path, "timeline.jsonl"))


def read_json_lines(path: str | os.PathLike[str]) -> list[Record]:
    """The objects of a JSON Lines file; a last line without its line break is left out."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"cannot read {os.fspath(path)}: {error.strerror}") from error
    lines = data.split(b"\n")[:-1]
    return [_decode_line(line, number, path) for number, line in enumerate(lines, 1) if line.strip()]


def _decode_line(line: bytes, number: int, path: str | os.PathLike[str]) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise UsageError(f"{os.fspath(path)}, line {number}: not a JSON object")
    return record


def _inside(run_or_path: Any, name: str) -> Path:
    path = Path(getattr(run_or_path, "path", run_or_path))
    return path / name if path.is_dir() else path


def _cut_torn_line(descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    end = size
    while end > 0:
        start = max(0, end - 65536)
        position = os.pread(descriptor, end - start, start).rfind(b"\n")
        if position >= 0:
            end = start + position + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
