"""What the Linux kernel does for a process on request; elsewhere nothing happens."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal

_SET_PDEATHSIG, _SET_NAME = 1, 15


def end_with_parent() -> None:
    """Be killed when the parent process dies, also when it is by SIGKILL and this process is stopped."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)


def take_name(name: str) -> None:
    """Be called so by ``ps`` and ``top``."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_NAME, name.encode()[:15], 0, 0, 0)


def limit_memory(gibibytes: float) -> None:
    """Be refused more private data than that; 0: no limit."""
    if gibibytes:
        size = int(gibibytes * 2**30)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (size, size))
