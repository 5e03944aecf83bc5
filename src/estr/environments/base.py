"""The environment interface: reset, step, verifier, tools. A user implements it in a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

Message = dict[str, str]
"""A chat message: ``{"role": "system" | "user" | "assistant" | "tool", "content": text}``."""


@dataclass(frozen=True)
class Problem:
    """One problem of a task; plain data, so that it can be stored and sent to another process."""

    task_id: str  # stable and unique inside the task
    prompt: str  # for people; what the model reads is the messages an environment's reset returns
    answer: Any = None  # what the verifier needs
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What the environment says after one assistant turn.

    ``messages`` (of any role but ``assistant``) are appended to the conversation, and the policy acts again unless
    ``done``. ``delay`` is artificial tool latency in seconds: the trajectory waits that long, its worker does not.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    delay: float = 0.0


@runtime_checkable
class Environment(Protocol):
    """One episode; a failure (exception, time-out, a reward that is not a finite number) costs only its trajectory.

    ``blocking`` says that ``step`` may wait (network, subprocess): it then runs in a thread of its
    own under ``task.tool_timeout``; an environment that only computes sets it to False and is called in place.
    """

    blocking: bool
    stop: tuple[str, ...]  # texts that end an assistant turn, kept in the turn

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        """The opening messages; called once, before the first ``step``. Randomness is derived from ``seed``."""
        ...

    def step(self, text: str) -> Reply:
        """Called with the text of each finished assistant turn."""
        ...

    def reward(self) -> float:
        """The verifier: the score of the episode as it stands, normally in [0, 1]."""
        ...


@runtime_checkable
class Restorable(Protocol):
    """What an environment may implement beside :class:`Environment` so that an episode can go on from its last finished
    turn in another process; one that does not is begun anew after a crash."""

    def state(self) -> Any:
        """Everything that ``step`` and ``reward`` depend on, as JSON can hold it; called in place before each ``step``,
        so it must be cheap."""
        ...

    def restore(self, problem: Problem, seed: int, state: Any) -> None:
        """Called once, instead of ``reset``: be as you were when ``state`` was taken."""
        ...


@runtime_checkable
class Task(Protocol):
    """A named source of problems and of environments to solve them in."""

    name: str

    def train_problem(self, index: int) -> Problem:
        """The training problem of the run's ``index``-th group, any ``index >= 0``: epochs are the task's business,
        and no epoch repeats the order of another."""
        ...

    def eval_problems(self, count: int) -> Sequence[Problem]:
        """Up to ``count`` held-out problems, the same ones at every call."""
        ...

    def environment(self) -> Environment:
        """A new environment for one episode. Cheap: what takes time or holds a resource belongs into ``reset``."""
        ...

    def demonstrations(self, seed: int) -> Iterator[list[Message]]:
        """Whole conversations for supervised warm-up (may be endless); empty where a task has none."""
        ...
