"""Environments that raise what usually ends a program: each costs its own trajectory, and Ctrl-C stays Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from estr.environments.base import Message, Problem, Reply
from estr.environments.runner import EnvironmentFailure, run_step, start_reset
from estr.errors import StopNow
from estr.runtime.interrupts import Interrupts
from estr.storage.metrics import read_metrics
from loop_helpers import estr, stored, write_config
from loop_tasks import Echo, EchoEnvironment

EXITS = {error.__name__: error for error in (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)}


class Exits(Echo):
    """Raises ``what`` in the method ``where`` of every fourth problem."""

    name = "exits"

    def __init__(self, *, what: str = "KeyboardInterrupt", where: str = "step", blocking: bool = False) -> None:
        super().__init__(turns=1)
        self.what, self.where, self.blocking = what, where, blocking

    def environment(self) -> ExitsEnvironment:
        if self.where == "environment":
            self.made = getattr(self, "made", 0) + 1
            if self.made % 9 == 8:
                raise EXITS[self.what]
        return ExitsEnvironment(self)


class ExitsEnvironment(EchoEnvironment):
    task: Exits

    def __init__(self, task: Exits) -> None:
        super().__init__(task)
        self.blocking = task.blocking

    def leave(self, where: str) -> None:
        if self.task.where == where and self.problem.answer % 4 == 1:
            raise EXITS[self.task.what]

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        opening = super().reset(problem, seed)
        self.leave("reset")
        return opening

    def step(self, text: str) -> Reply:
        self.leave("step")
        return super().step(text)

    def reward(self) -> float:
        self.leave("reward")
        return super().reward()


@pytest.fixture
def caught() -> Any:
    with Interrupts() as interrupts:
        yield interrupts


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("what", list(EXITS))
def test_it_is_a_failure_of_the_environment(caught: Any, what: str, blocking: bool) -> None:
    environment = Exits(what=what, blocking=blocking).environment()
    environment.reset(Problem("p", "Say 1", 1), 0)
    assert run_step(environment, "x", timeout=60.0) == EnvironmentFailure(f"ExitsEnvironment.step raised {what}")
    resetting = Exits(what=what, blocking=blocking, where="reset").environment()
    outcome = start_reset(resetting, Problem("p", "Say 1", 1), 0, timeout=60.0).wait()
    assert outcome == EnvironmentFailure(f"ExitsEnvironment.reset raised {what}")


class Pressed(EchoEnvironment):
    """A person presses Ctrl-C twice while the environment is at work."""

    def step(self, text: str) -> Reply:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        return Reply()


def test_a_person_is_not_a_failure_of_the_environment(caught: Any) -> None:
    environment = Pressed(Echo())
    environment.reset(Problem("p", "Say 1", 1), 0)
    with pytest.raises(StopNow):
        run_step(environment, "x")


def test_neither_is_one_where_nobody_handles_signals() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        environment = Pressed(Echo())
        environment.reset(Problem("p", "Say 1", 1), 0)
        with pytest.raises(KeyboardInterrupt):
            run_step(environment, "x")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("mode", "where"), [("lockstep", "reset"), ("lockstep", "reward"), ("lockstep", "environment"), ("async", "step")]
)
def test_a_run_goes_on_without_the_group(tmp_path: Path, capsys: Any, mode: str, where: str) -> None:
    config = write_config(
        tmp_path / "run.toml",
        task={"name": "test_environments_exits:Exits", "where": where},
        schedule={"mode": mode, "attempts": 1},
        runtime={"engines": 1},
    )
    outcome = estr(capsys, "train", config, "--output", tmp_path / "run")
    assert outcome.status == 0, outcome.err
    assert "engine process was replaced" not in outcome.err
    assert len(read_metrics(tmp_path / "run")) == 6
    dropped = stored(tmp_path / "run", "dropped")
    assert dropped
    assert all("raised KeyboardInterrupt" in row.drop_reason for row in dropped)
