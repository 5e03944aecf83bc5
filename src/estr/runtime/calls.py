"""Which jobs' environments are at work in an engine process, written where it outlives the process."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_SIZE = 1 << 16  # bytes of the mapped file


class Calls:
    """Counts calls by job key; :class:`SharedCalls` also lets another process see them."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}

    @contextlib.contextmanager
    def during(self, key: str) -> Iterator[None]:
        """``key`` is at work inside the block."""
        self.begin(key)
        try:
            yield
        finally:
            self.end(key)

    def begin(self, key: str) -> None:
        self._running[key] = self._running.get(key, 0) + 1
        self._changed()

    def end(self, key: str) -> None:
        count = self._running.pop(key, 0) - 1
        if count > 0:
            self._running[key] = count
        self._changed()

    @property
    def running(self) -> list[str]:
        return list(self._running)

    def _changed(self) -> None:
        pass


class SharedCalls(Calls):
    """Keeps the keys in a small mapped file, so that they can be read after a SIGKILL. Raises OSError where the file
    cannot be made."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _SIZE)
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)

    def _changed(self) -> None:
        text = json.dumps(self.running).encode()[: _SIZE - 1]
        self._map[: len(text) + 1] = text + b"\0"


def read_calls(path: Path) -> set[str]:
    """The keys that the process behind ``path`` recorded last; empty where nothing legible is there."""
    try:
        return {str(key) for key in json.loads(path.read_bytes().partition(b"\0")[0])}
    except (OSError, ValueError, TypeError, RecursionError):
        return set()
