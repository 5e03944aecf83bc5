"""What an engine is connected to: pipe and shared memory on one machine, mailbox and object store under Ray."""

from __future__ import annotations

from typing import Protocol

from estr.runtime.messages import Event
from estr.transport import Publication


class Channel(Protocol):
    """Where messages come from and events go to."""

    def poll(self, timeout: float | None = 0.0, /) -> bool:
        """Whether there is a message; waits up to ``timeout`` seconds for one."""
        ...

    def recv(self) -> object: ...

    def send(self, event: Event, /) -> None: ...


class Weights(Protocol):
    """An engine's end of the weights; see :class:`estr.transport.WeightReader`."""

    version: int

    @property
    def latest(self) -> int: ...

    def poll(self) -> Publication | None: ...

    def leave(self) -> None: ...
