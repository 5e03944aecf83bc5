"""What the command does when it is interrupted outside a run's loop, and when nobody reads what it says."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

from estr.errors import StopNow

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_INTERRUPTED = 130


@contextlib.contextmanager
def signals_stop() -> Iterator[None]:
    """SIGINT and SIGTERM raise :class:`StopNow` inside; one that comes while that is dealt with ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, _stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    leave_on_signals(_INTERRUPTED)
    raise StopNow


def leave_on_signals(status: int) -> None:
    """From now on a signal ends the process with ``status`` and without a word: all is said and done."""
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: os._exit(status))


def say(text: str) -> None:
    """Write a line to standard error; where nobody reads it any more, this and all later ones go nowhere."""
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Let what is written to ``stream`` go nowhere, what is in its buffer included."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
