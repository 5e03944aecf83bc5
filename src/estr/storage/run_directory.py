"""The run directory: everything a run keeps, each thing at its place."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path
from types import TracebackType

from estr.config.load import dump_config, load_config
from estr.config.sections import Config
from estr.errors import EstrError, UsageError
from estr.storage.files import disk_errors, remove_orphans, sync_directory, write_atomic
from estr.storage.lock import FileLock, is_locked

_LOCK = ".lock"


class RunDirectory:
    """One run's files. ``create`` makes it, ``open`` finds it; the lock is held until ``close`` or the process ends.

    Attributes are paths: ``path``, ``config_path``, ``metrics_path``, ``timeline_path``, ``rollouts``, ``spool``,
    ``ledger_path``, ``checkpoints``, ``report_path``, ``lock_path``.
    """

    def __init__(self, path: str | os.PathLike[str], lock: FileLock | None = None) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.toml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.timeline_path = self.path / "timeline.jsonl"
        self.rollouts = self.path / "rollouts"
        self.spool = self.path / "spool"
        self.ledger_path = self.spool / "ledger.sqlite"
        self.checkpoints = self.path / "checkpoints"
        self.report_path = self.path / "report.html"
        self.lock_path = self.path / _LOCK
        self._lock = lock

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Config) -> RunDirectory:
        """A new, locked run directory that appears complete with its ``config.toml``.

        Raises:
            UsageError: something stands at ``path`` already.
            RunError: the disk is full or cannot be written.
        """
        target = Path(os.path.abspath(path))
        if os.path.lexists(target):
            raise UsageError(f"{target} exists already; choose another --output, or go on with: estr resume {target}")
        with disk_errors("create the run directory", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(target)
            aside, lock = target.parent / f".{target.name}.new-{secrets.token_hex(6)}", None
            try:
                lock = _fill(aside, config)
                os.rename(aside, target)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                if lock is not None:
                    lock.release()
                raise
            sync_directory(target.parent)
        lock.path = target / _LOCK
        return cls(target, lock)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, lock: bool = False) -> RunDirectory:
        """An existing run; with ``lock`` for this process alone (to go on with it), else for reading.

        Raises:
            UsageError: ``path`` is no run directory, or (with ``lock``) another process works on it.
            RunError: it cannot be locked because it cannot be written.
        """
        directory = Path(os.path.abspath(path))
        if not directory.exists():
            raise UsageError(f"{path} does not exist; a run directory is made by: estr train CONFIG.toml --output DIR")
        if not directory.is_dir():
            raise UsageError(f"{path} is a file, not a run directory")
        if not (directory / "config.toml").is_file():
            raise UsageError(f"{path} is not a run directory: it has no config.toml")
        run = cls(directory)
        if lock:
            run._lock = FileLock(run.lock_path)
            run._lock.acquire()
            with disk_errors("write to", directory):
                for part in (run.rollouts, run.spool, run.checkpoints):
                    part.mkdir(exist_ok=True)
                remove_orphans(directory)
        return run

    @property
    def locked(self) -> bool:
        """Whether this object holds the run's lock."""
        return self._lock is not None and self._lock.held

    @property
    def in_use(self) -> bool:
        """Whether any process, this one included, works on the run now."""
        return self.locked or is_locked(self.lock_path)

    def config(self) -> Config:
        """The run's resolved configuration.

        Raises:
            UsageError: the file was edited into something invalid.
        """
        return load_config(self.config_path, stored=True).config

    def close(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"


def _fill(aside: Path, config: Config) -> FileLock:
    aside.mkdir()
    lock = FileLock(aside / _LOCK)
    lock.acquire()
    try:
        for part in ("rollouts", "spool", "checkpoints"):
            (aside / part).mkdir()
        write_atomic(aside / "config.toml", dump_config(config).encode())
    except BaseException:
        lock.release()
        raise
    return lock


def _remove_abandoned(target: Path) -> None:
    """Remove siblings that a killed ``create`` of the same path left behind."""
    for sibling in target.parent.glob(f".{_escaped(target.name)}.new-*"):
        if not (sibling / _LOCK).exists():
            with contextlib.suppress(OSError):
                sibling.rmdir()
            continue
        lock = FileLock(sibling / _LOCK)
        try:
            lock.acquire()
        except (EstrError, OSError):
            continue
        shutil.rmtree(sibling, ignore_errors=True)
        lock.release()


def _escaped(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)
