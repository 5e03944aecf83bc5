"""Errors that reach a person: one sentence that says what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
import signal
import threading
from collections.abc import Iterable


class EstrError(Exception):
    """Base of every error this package raises on purpose; ``exit_status`` is what the command line returns."""

    exit_status = 1


class UsageError(EstrError):
    """A wrong command, configuration or input file (exit status 2)."""

    exit_status = 2


class RunError(EstrError):
    """A failure at run time: verifier, worker, disk, divergence (exit status 1)."""

    exit_status = 1


class StopNow(KeyboardInterrupt):
    """A signal asked this process to stop at once; a KeyboardInterrupt that is none may come from a user's code."""


def asked_to_stop(error: BaseException) -> bool:
    """Whether ``error`` is a person's interrupt, and not one that a task or an environment raised itself."""
    if isinstance(error, StopNow):
        return True
    plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, KeyboardInterrupt) and plain and threading.current_thread() is threading.main_thread()


class MissingExtraError(UsageError):
    """A feature whose optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs the package {package!r}; install it with: pip install 'estr[{extra}]'")


_LISTED = 24  # names in a sentence that lists all
_SHOWN = 60  # characters of a value in a sentence


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name closest to ``name``, as the end of a sentence: ``"; did you mean 'tau'?"``, or a list of all."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name)[:_SHOWN], names, n=1, cutoff=0.5)
    close = close or [known for known in names if known.lower() == str(name).lower()]
    if close:
        return f"; did you mean {close[0]!r}?"
    if len(names) > _LISTED:
        return f"; known are {', '.join(names[:_LISTED])} and {len(names) - _LISTED} more"
    return f"; known are {', '.join(names)}" if names else ""


def shown(value: object) -> str:
    """A value as an error repeats it: as in Python, on one line, and of something long the beginning."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def plain(name: str) -> str:
    """A name as an error says it: as it is written where it is short and printable, else as `shown`."""
    return name if name.isprintable() and len(name) <= _SHOWN else shown(name)
