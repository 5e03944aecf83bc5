"""A kernel lock on a file: one process holds it, and a process that died holds nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import weakref
from pathlib import Path

from estr.errors import UsageError
from estr.storage.files import disk_errors

_PATIENCE = 0.3  # seconds; as long as someone who only looks whether a lock is held may hold it
_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """``flock`` on ``path``, taken by ``acquire`` and kept until ``release`` or the end of the process.

    The descriptors are close-on-exec, and a forked child closes its copies, so that no child keeps the lock. The file's
    directory is locked as well, where its file system can: the file may be removed under a process that works on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._directory: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> None:
        """Take the lock now.

        Raises:
            UsageError: another process holds it.
            RunError: the lock file cannot be written.
        """
        if self.held:
            return
        with disk_errors("lock", self.path):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _lock_patiently(descriptor)
                self._directory = _locked_directory(self.path.parent)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            except OSError as error:
                holder = _read_holder(descriptor)
                os.close(descriptor)
                self._close_directory()
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise UsageError(
                        f"{self.path.parent} is in use by {holder}; wait for it to end, or stop it"
                    ) from None
                raise
        self._descriptor = descriptor
        _held.add(self)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._close_directory()
        _held.discard(self)

    def _close_directory(self) -> None:
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of ``path``; False where there is no such file or it cannot be read."""
    return _is_locked(path) or _is_locked(path.parent)


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    finally:
        os.close(descriptor)
    return False


def _locked_directory(path: Path) -> int | None:
    """A descriptor that holds the lock of a directory; None where its file system has none for directories."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        _lock_patiently(descriptor)
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.EWOULDBLOCK:
            raise
        return None
    return descriptor


def _lock_patiently(descriptor: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _read_holder(descriptor: int) -> str:
    try:
        pid = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
    except OSError:
        pid = ""
    return f"process {pid}" if pid.isdigit() else "another process"


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
