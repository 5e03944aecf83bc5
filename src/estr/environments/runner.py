"""Environments under a time limit: a tool that hangs, raises or answers nonsense costs only its trajectory."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from estr.environments.base import Environment, Message, Problem, Reply, Restorable
from estr.errors import asked_to_stop

T = TypeVar("T")
Clock = Callable[[], float]
_REPLY_ROLES = ("system", "user", "tool")
_OPENING_ROLES = (*_REPLY_ROLES, "assistant")
_LONGEST_CAUSE = 300


@dataclass(frozen=True)
class EnvironmentFailure:
    """An environment that did not do its part; ``sentence`` says what happened, for a person."""

    sentence: str


class Pending(Generic[T]):
    """The outcome of one call into an environment, there or still to come.

    A blocking call runs in a daemon thread of its own; one that never returns keeps that thread until the process
    ends, and its late result goes nowhere. Artificial delay counts like time the tool took: the outcome appears that
    much later, and the time limit is on both together.
    """

    def __init__(self, what: str, timeout: float, clock: Clock) -> None:
        self._what = what
        self._timeout = timeout
        self._clock = clock
        self._started = clock()
        self._done = threading.Event()
        self._outcome: tuple[float, T | EnvironmentFailure] | None = None

    @property
    def done(self) -> bool:
        """Whether the call has returned, whatever artificial delay is still to be waited for."""
        return self._outcome is not None

    def poll(self) -> T | EnvironmentFailure | None:
        """The outcome; None while there is none yet. Never waits."""
        now = self._clock()
        deadline = self._started + self._timeout
        if self._outcome is not None:
            finished, value = self._outcome
            ready = finished + _delay(value)
            if ready < deadline:
                return value if now >= ready else None
        return self._late() if now >= deadline else None

    def wait(self) -> T | EnvironmentFailure:
        """Wait for the outcome in real time, without its artificial delay: for schedules on a logical clock."""
        self._done.wait(self._timeout)
        return self._outcome[1] if self._outcome is not None else self._late()

    def _late(self) -> EnvironmentFailure:
        return EnvironmentFailure(f"{self._what} took longer than {self._timeout:g} s (task.tool_timeout)")

    def _run(self, call: Callable[[], T]) -> None:
        try:
            value: T | EnvironmentFailure = call()
        except _InvalidError as error:
            value = EnvironmentFailure(f"{self._what} {error}")
        except BaseException as error:
            if asked_to_stop(error):
                raise
            value = EnvironmentFailure(f"{self._what} raised {_cause(error)}")
        self._finish(value)

    def _finish(self, value: T | EnvironmentFailure) -> None:
        self._outcome = (self._clock(), value)
        self._done.set()

    def _launch(self, call: Callable[[], T], blocking: bool) -> Pending[T]:
        if not blocking:
            self._run(call)
            self._started = self._clock()
            return self
        try:
            threading.Thread(target=self._run, args=(call,), daemon=True).start()
        except RuntimeError as error:
            self._finish(EnvironmentFailure(f"{self._what} could not start: {error}"))
        return self


def start_reset(
    environment: Environment, problem: Problem, seed: int, timeout: float = 30.0, clock: Clock = time.monotonic
) -> Pending[list[Message]]:
    """Begin an episode; the outcome is its opening messages. ``timeout`` in seconds."""
    pending: Pending[list[Message]] = Pending(_name(environment, "reset"), timeout, clock)
    return pending._launch(lambda: _opening(environment.reset(problem, seed)), _blocks(environment))


def start_restore(
    environment: Environment,
    problem: Problem,
    seed: int,
    state: Any,
    timeout: float = 30.0,
    clock: Clock = time.monotonic,
) -> Pending[Literal["restored"]]:
    """Bring a restorable environment into a stored state, as ``take_state`` gave it. ``timeout`` in seconds."""
    pending: Pending[Literal["restored"]] = Pending(_name(environment, "restore"), timeout, clock)
    return pending._launch(lambda: _restored(environment, problem, seed, state), _blocks(environment))


def take_state(environment: Environment) -> Any | EnvironmentFailure:
    """The state of an environment as plain JSON; None where it cannot be restored."""
    if not isinstance(environment, Restorable):
        return None
    what = _name(environment, "state")
    try:
        return json.loads(json.dumps({"state": environment.state()}, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        return EnvironmentFailure(f"{what} returned what JSON cannot hold: {_cause(error)}")
    except BaseException as error:
        if asked_to_stop(error):
            raise
        return EnvironmentFailure(f"{what} raised {_cause(error)}")


def start(environment: Environment, text: str, timeout: float = 30.0, clock: Clock = time.monotonic) -> Pending[Reply]:
    """Hand one assistant turn to the environment; the outcome is its reply. ``timeout`` in seconds."""
    pending: Pending[Reply] = Pending(_name(environment, "step"), timeout, clock)
    return pending._launch(lambda: _reply(environment.step(text)), _blocks(environment))


def start_reward(environment: Environment, timeout: float = 30.0, clock: Clock = time.monotonic) -> Pending[float]:
    """Ask for the score of the episode; the outcome is a finite number. ``timeout`` in seconds."""
    pending: Pending[float] = Pending(_name(environment, "reward"), timeout, clock)
    return pending._launch(lambda: _score(environment.reward()), _blocks(environment))


def run_step(environment: Environment, text: str, timeout: float = 30.0) -> Reply | EnvironmentFailure:
    """`start` and `Pending.wait` in one: the reply, at the latest after ``timeout`` seconds."""
    return start(environment, text, timeout).wait()


def score(environment: Environment, timeout: float = 30.0) -> float | EnvironmentFailure:
    """`start_reward` and `Pending.wait` in one."""
    return start_reward(environment, timeout).wait()


class _InvalidError(Exception):
    """An answer that no environment may give."""


def _name(environment: Environment, method: str) -> str:
    return f"{type(environment).__name__}.{method}"


def _blocks(environment: Environment) -> bool:
    return bool(getattr(environment, "blocking", True))


def _delay(value: Any) -> float:
    return value.delay if isinstance(value, Reply) else 0.0


def _restored(environment: Environment, problem: Problem, seed: int, state: Any) -> Literal["restored"]:
    assert isinstance(environment, Restorable)
    environment.restore(problem, seed, state["state"])
    return "restored"


def _reply(value: Any) -> Reply:
    if not isinstance(value, Reply):
        raise _InvalidError(f"returned {type(value).__name__}, not a Reply")
    if not isinstance(value.delay, int | float) or not math.isfinite(value.delay) or value.delay < 0:
        raise _InvalidError(f"returned a delay of {value.delay!r}, not a number of seconds")
    return Reply(tuple(_messages(value.messages, _REPLY_ROLES)), bool(value.done), float(value.delay))


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold ``text``: it has no lone half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _opening(value: Any) -> list[Message]:
    messages = _messages(value, _OPENING_ROLES)
    if not messages or messages[-1]["role"] == "assistant":
        raise _InvalidError("returned no message for the policy to answer")
    return messages


def _messages(value: Any, roles: tuple[str, ...]) -> list[Message]:
    if not isinstance(value, list | tuple):
        raise _InvalidError(f"returned {type(value).__name__}, not a list of messages")
    for message in value:
        whole = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not whole:
            raise _InvalidError("returned a message without the texts 'role' and 'content'")
        if not is_unicode(message["content"]):
            raise _InvalidError("returned a message with half a surrogate pair, which no tokenizer takes")
        if message["role"] not in roles:
            raise _InvalidError(f"spoke in the role {message['role'][:20]!r}; it may be {', '.join(roles)}")
    return list(value)


def _score(value: Any) -> float:
    try:
        score = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise _InvalidError(f"returned {_shorten(_safe_repr(value))}, not a finite number")
    return score


def _cause(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    return _shorten(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _safe_repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__}"


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_CAUSE else text[:_LONGEST_CAUSE] + "…"
