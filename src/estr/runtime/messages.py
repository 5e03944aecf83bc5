"""What the runtime's processes say to each other; plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from estr.environments.base import Message, Problem
from estr.schedule import Ticket
from estr.storage.encoding import loads
from estr.storage.ledger_rows import Packed, packed
from estr.storage.spool import decode_trajectory
from estr.trajectory import Trajectory


@dataclass(frozen=True)
class VersionWindow:
    """Imposed staleness (CONTRACT section 3, lockstep): which version samples action token i."""

    newest: int  # newest version that exists
    target: int
    inter: int
    intra: int
    intra_every: int

    def __call__(self, action: int) -> int:
        wanted = self.target - self.inter - max(0, self.intra - action // self.intra_every)
        return min(self.newest, max(0, wanted))


@dataclass(frozen=True)
class Progress:
    """A conversation as it stood when a turn had ended, to go on from in another process.

    ``trajectory`` holds its rows so far; the last of them ends with the ``turn_tokens`` tokens of that turn, to which
    the environment has not answered. ``messages`` are those before the turn, ``environment`` the state before its
    answer.
    """

    trajectory: Trajectory
    messages: list[Message]
    turn_tokens: int
    end: str
    environment: Any

    @property
    def context(self) -> dict[str, Any]:
        """All but the trajectory, as JSON holds it."""
        return {name: getattr(self, name) for name in ("messages", "turn_tokens", "end", "environment")}


@dataclass(frozen=True)
class KeptTurn:
    """A :class:`Progress` as the ledger keeps it: the learner's process files it and does not look into it."""

    ticket: Ticket
    packed: Packed

    @classmethod
    def of(cls, progress: Progress) -> KeptTurn:
        trajectory = progress.trajectory
        ticket = Ticket(trajectory.group, trajectory.sibling, trajectory.attempt)
        return cls(ticket, packed(trajectory, progress.context))

    @property
    def progress(self) -> Progress:
        return Progress(decode_trajectory(self.packed.payload), **loads(self.packed.context))


def job_key(one: Job | Ticket | Trajectory) -> str:
    """What an engine calls the conversation of an attempt at a sibling of a group."""
    return f"{one.group}/{one.sibling}/{one.attempt}"


@dataclass(frozen=True)
class Job:
    """One trajectory to generate."""

    group: int
    sibling: int
    attempt: int
    problem: Problem
    run_seed: int
    min_version: int = 0  # the first token is sampled under this version or a newer one
    window: VersionWindow | None = None
    explore: bool = False  # an exploring sampler (CUTS) treats it
    heat: float = 0.0  # a temperature of its own to draw tokens at; 0: none
    kept: KeptTurn | None = None  # where an earlier process left it

    @property
    def key(self) -> str:
        return job_key(self)


@dataclass(frozen=True)
class Finished:
    """A whole trajectory. It travels between processes as the ledger will keep it, so that it is packed only once."""

    trajectory: Trajectory

    @cached_property
    def packed(self) -> Packed:
        return packed(self.trajectory)

    def __reduce__(self) -> tuple[Callable[[Packed], Finished], tuple[Packed]]:
        return _finished, (self.packed,)


def _finished(row: Packed) -> Finished:
    finished = Finished(decode_trajectory(row.payload))
    vars(finished)["packed"] = row
    return finished


@dataclass(frozen=True)
class Failed:
    """A trajectory that could not be finished, with the reason in one sentence."""

    job: Job
    reason: str
    final: bool = False  # trying again cannot help


@dataclass(frozen=True)
class Synced:
    """An engine took weights: its canary's largest error against the learner's."""

    version: int
    canary_error: float


@dataclass
class Work:
    """What an engine did in a stretch of time."""

    decode_steps: int = 0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    tool_seconds: list[float] = field(default_factory=list)  # of each environment reply that came in it

    def add(self, other: Work) -> None:
        self.decode_steps += other.decode_steps
        self.sampled_tokens += other.sampled_tokens
        self.prefilled_tokens += other.prefilled_tokens
        self.tool_seconds += other.tool_seconds

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "tool_seconds": [round(seconds, 4) for seconds in self.tool_seconds]}


@dataclass(frozen=True)
class Interval:
    """A stretch of time of one actor, in seconds of the monotonic clock."""

    actor: str
    kind: str
    start: float
    end: float
    version: int = -1
    work: Work | None = None


@dataclass
class Activity:
    """Intervals and counters an engine reports now and then."""

    intervals: list[Interval] = field(default_factory=list)
    sampled_tokens: int = 0


@dataclass(frozen=True)
class Ready:
    """A worker has loaded its model."""


@dataclass(frozen=True)
class Alive:
    """A worker that had nothing else to say for a while."""


@dataclass(frozen=True)
class Died:
    """A worker ended without being asked to, with the reason in one sentence; ``said``: by the worker itself."""

    reason: str
    said: bool = False


@dataclass(frozen=True)
class Members:
    """How many engines there are from now on."""

    engines: int


Event = Finished | KeptTurn | Failed | Synced | Activity | Ready | Alive | Died | Members
