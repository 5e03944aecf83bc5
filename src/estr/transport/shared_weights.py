"""Two weight buffers and a version word in a memory-mapped file (DESIGN decision 8).

The file has a header of 64-bit words, a canary per buffer and two buffers of all parameters. The publisher writes the
buffer that is not the latest one, after every reader has left it, then moves the version word. A reader says in its own
word which buffer it uses *before* it uses it and looks again whether that buffer still holds the version it wants; if
the publisher was faster it tries again. No locks, no pickling; a reader that died is taken out by ``forget_reader``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from estr.errors import RunError

MAX_READERS = 256
CANARY_TOKENS = 64
_PREFIX, _SUFFIX = "estr-", ".weights"
_LATEST_BUFFER, _BUFFER_VERSION, _READERS = 0, 1, 4
_WORDS = _READERS + MAX_READERS
_NOBODY = -1
_ALIGN = 64


def shared_directory(size: int, fallback: Path) -> Path:
    """/dev/shm where it has room for ``size`` bytes, else ``fallback``."""
    shm = Path("/dev/shm")
    if shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > size + (64 << 20):
        return shm
    return fallback


def remove_leftovers(directory: Path = Path("/dev/shm")) -> list[Path]:
    """Remove weight files whose publisher is gone: a live one holds a kernel lock on its file."""
    removed = []
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path)
    return removed


_LOCK = threading.Lock()


def _fence() -> None:
    """Make what was stored before visible to other processes before anything is loaded after: taking a lock is a full
    memory barrier, and without one a processor may do a load earlier than a store to another place."""
    with _LOCK:
        pass


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return (
            int(np.prod(self.shape, dtype=np.int64)) * torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()
        )


def _layout(tensors: Mapping[str, Tensor]) -> tuple[list[_Entry], int]:
    entries, offset = [], 0
    for name, tensor in tensors.items():
        entry = _Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)
        entries.append(entry)
        offset += -(-entry.size // _ALIGN) * _ALIGN
    return entries, offset


class _Mapped:
    """The mapped file: header words, canaries, buffers."""

    def __init__(self, file: int, entries: Sequence[_Entry], size: int) -> None:
        self.entries, self.size = entries, size
        self._map = mmap.mmap(file, self.total(size))
        whole = np.frombuffer(self._map, dtype=np.uint8)
        self.words: NDArray[np.int64] = whole[: _WORDS * 8].view(np.int64)
        start = _WORDS * 8
        self.canaries: NDArray[np.float32] = (
            whole[start : start + 2 * CANARY_TOKENS * 4].view(np.float32).reshape(2, CANARY_TOKENS)
        )
        start = self.total(0)
        self._buffers = [whole[start + i * size : start + (i + 1) * size] for i in range(2)]

    @staticmethod
    def total(size: int) -> int:
        return -(-(_WORDS * 8 + 2 * CANARY_TOKENS * 4) // 4096) * 4096 + 2 * size

    def tensors(self, buffer: int) -> dict[str, Tensor]:
        """Views into a buffer."""
        views = {}
        for entry in self.entries:
            raw = torch.from_numpy(self._buffers[buffer][entry.offset : entry.offset + entry.size])
            views[entry.name] = raw.view(getattr(torch, entry.dtype)).view(entry.shape)
        return views


class WeightPublisher:
    """The learner's end. ``tensors`` give names, shapes and types; their values are published by ``publish``."""

    def __init__(self, tensors: Mapping[str, Tensor], directory: Path, *, readers: int) -> None:
        if readers > MAX_READERS:
            raise ValueError(f"at most {MAX_READERS} readers, got {readers}")
        self._readers = readers
        entries, size = _layout(tensors)
        self.path = directory / f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}{_SUFFIX}"
        self.manifest = json.dumps(
            {"path": str(self.path), "size": size, "entries": [[e.name, e.dtype, e.shape, e.offset] for e in entries]}
        )
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_SH)
            os.posix_fallocate(self._file, 0, _Mapped.total(size))
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise RunError(
                f"no room for {2 * size:,} bytes of shared weights in {directory}: {error.strerror}"
            ) from error
        self._mapped = _Mapped(self._file, entries, size)
        self._mapped.words[:] = _NOBODY

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        canary: NDArray[np.float32],
        *,
        timeout: float = 60.0,
        gone: Callable[[], Iterable[int]] = tuple,
    ) -> int:
        """Copy ``tensors`` into the free buffer and make them the latest; returns the bytes copied.

        Waits until every reader has left that buffer, or is among those that ``gone`` (asked while waiting) says have
        died; raises RunError naming the readers that did not in time.
        """
        if odd := sorted(set(tensors) ^ {entry.name for entry in self._mapped.entries}):
            raise ValueError(f"published weights differ from the agreed names in {odd[0]!r}")
        words = self._mapped.words
        buffer = 1 - int(words[_LATEST_BUFFER]) if words[_LATEST_BUFFER] != _NOBODY else 0
        words[_BUFFER_VERSION + buffer] = _NOBODY
        _fence()
        self._wait_until_left(buffer, timeout, gone)
        with torch.no_grad():
            for name, view in self._mapped.tensors(buffer).items():
                view.copy_(tensors[name])
        self._mapped.canaries[buffer] = np.nan
        self._mapped.canaries[buffer, : len(canary)] = canary
        words[_BUFFER_VERSION + buffer] = version
        words[_LATEST_BUFFER] = buffer
        return self._mapped.size

    def _wait_until_left(self, buffer: int, timeout: float, gone: Callable[[], Iterable[int]]) -> None:
        words = self._mapped.words[_READERS : _READERS + self._readers]
        deadline = time.monotonic() + timeout
        while (words == buffer).any():
            for reader in gone():
                self.forget_reader(reader)
            if time.monotonic() > deadline:
                names = ", ".join(str(i) for i in np.flatnonzero(words == buffer))
                raise RunError(f"engine {names} has not taken the latest weights for {timeout:.0f} s; is it alive?")
            time.sleep(0.0005)

    def forget_reader(self, reader: int) -> None:
        """A reader is gone: what it used is free."""
        self._mapped.words[_READERS + reader] = _NOBODY

    def close(self) -> None:
        """Remove the file; readers that still map it keep their view until they end."""
        self.path.unlink(missing_ok=True)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@dataclass(frozen=True)
class Publication:
    """One version as a reader sees it; ``tensors`` are views into shared memory, valid until ``leave`` or the next."""

    version: int
    tensors: dict[str, Tensor]
    canary: NDArray[np.float32]


class WeightReader:
    """An engine's end: ``poll`` between two decode steps."""

    def __init__(self, manifest: str, reader: int) -> None:
        spec = json.loads(manifest)
        entries = [_Entry(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in spec["entries"]]
        file = os.open(spec["path"], os.O_RDWR | os.O_CLOEXEC)
        self._mapped = _Mapped(file, entries, spec["size"])
        os.close(file)
        self._word = _READERS + reader
        self.version = _NOBODY

    @property
    def latest(self) -> int:
        """The newest published version, -1 where there is none yet; two words are read, nothing is claimed."""
        buffer = int(self._mapped.words[_LATEST_BUFFER])
        return _NOBODY if buffer == _NOBODY else int(self._mapped.words[_BUFFER_VERSION + buffer])

    def poll(self) -> Publication | None:
        """The newest version if it is newer than the one in use (which is left by this call), else None."""
        words = self._mapped.words
        while True:
            buffer = int(words[_LATEST_BUFFER])
            if buffer == _NOBODY:
                return None
            version = int(words[_BUFFER_VERSION + buffer])
            if version in (self.version, _NOBODY):
                return None
            words[self._word] = buffer
            _fence()
            if int(words[_BUFFER_VERSION + buffer]) == version:
                break
        self.version = version
        canary = self._mapped.canaries[buffer]
        return Publication(version, self._mapped.tensors(buffer), canary[~np.isnan(canary)].copy())

    def leave(self) -> None:
        """Say that nothing of the shared buffers is used any more (the weights were converted to a copy)."""
        self._mapped.words[self._word] = _NOBODY
