"""SIGINT, SIGTERM and SIGHUP: the first asks for a checkpoint and a stop, a second of the others stops at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from estr.errors import EstrError, StopNow

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(EstrError):  # noqa: N818
    """The run was asked to stop and has stopped cleanly."""

    exit_status = 130


class Interrupts:
    """Context in which the signals are caught; ``check`` raises :class:`Interrupted` once one has come.

    ``word`` is written to standard error as the first one comes. While ``immediate`` is set, the first one stops at
    once as well: nothing is there yet that is worth a checkpoint.
    """

    def __init__(self, word: str = "") -> None:
        self._asked = False
        self._word = word
        self._previous: dict[signal.Signals, Any] = {}
        self.immediate = False

    @property
    def asked(self) -> bool:
        return self._asked

    def check(self) -> None:
        if self._asked:
            raise Interrupted("interrupted")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked and number == signal.SIGHUP:
            return  # a terminal that is closed sends it twice
        if self._asked or self.immediate:
            raise StopNow
        self._asked = True
        if self._word:
            with contextlib.suppress(OSError):  # not print: the signal may have come in the middle of one
                os.write(2, f"{self._word}\n".encode())

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in _SIGNALS if number != signal.SIGHUP or _not_ignored(number)]
            self._previous = {number: signal.signal(number, self._handle) for number in heeded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


def _not_ignored(number: signal.Signals) -> bool:
    """Under nohup a run goes on when its terminal is closed."""
    return signal.getsignal(number) is not signal.SIG_IGN
