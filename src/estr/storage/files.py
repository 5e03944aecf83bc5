"""Durable files: whole or not there, and disk errors said in a sentence."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from estr.errors import EstrError, RunError

_ASIDE = re.compile(r"\..+\.(\d+)-[0-9a-f]{8}\.tmp")
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
_CAUSES = {
    errno.ENOSPC: "the disk is full; free some space and resume the run",
    errno.EDQUOT: "the disk quota is used up; free some space and resume the run",
    errno.EFBIG: "the file would be larger than the system allows (see `ulimit -f`)",
    errno.EROFS: "the file system is read-only; choose a directory that can be written",
    errno.EACCES: "permission denied; choose a directory that can be written",
    errno.EPERM: "permission denied; choose a directory that can be written",
    errno.EIO: "the disk reported an input/output error; check it before you resume",
    errno.EMFILE: "too many open files (see `ulimit -n`)",
}


@contextmanager
def disk_errors(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an ``OSError`` inside the block into a ``RunError``: ``cannot <action> <path>: <cause>``.

    So with what libraries written in Rust raise in its place: any exception whose text holds ``(os error N)``.
    """
    try:
        yield
    except EstrError:
        raise
    except OSError as error:
        cause = _CAUSES.get(error.errno or 0) or error.strerror or str(error) or type(error).__name__
        raise RunError(f"cannot {action} {os.fspath(path)}: {cause}") from error
    except Exception as error:
        if (number := rust_error(error)) is None:
            raise
        cause = _CAUSES.get(number) or os.strerror(number)
        raise RunError(f"cannot {action} {os.fspath(path)}: {cause}") from error


def rust_error(error: Exception) -> int | None:
    """The number of the system's error that an exception of a Rust library tells of; None where it tells of none."""
    number = _RUST_ERROR.search(str(error))
    return None if number is None else int(number[1])


def write_all(descriptor: int, data: bytes) -> None:
    """``os.write`` until every byte is written (one call may write fewer)."""
    view = memoryview(data)
    while view:
        written = os.write(descriptor, view)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        view = view[written:]


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make renames inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: str | os.PathLike[str]) -> None:
    """Make a file that another library wrote durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` aside, sync it, rename it to ``path`` and sync the directory.

    Raises:
        OSError: nothing has changed under ``path`` then, and nothing is left beside it.
    """
    target = Path(path)
    aside = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(target.parent)


def remove_orphans(directory: Path) -> None:
    """Remove what processes that no longer run left aside in ``write_atomic``."""
    for leftover in directory.glob(".*.tmp"):
        match = _ASIDE.fullmatch(leftover.name)
        if match is not None and not _runs(int(match[1])):
            leftover.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def remove_leftovers(directory: Path, name: str = "*") -> None:
    """Remove what a killed ``write_atomic`` of ``name`` left aside (only the one writer of it may call this)."""
    for leftover in directory.glob(f".{name}.*.tmp"):
        if leftover.is_file():
            leftover.unlink(missing_ok=True)
