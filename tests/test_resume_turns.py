"""A multi-turn trajectory goes on from its last finished turn: in another engine, after a crash, under new weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estr.environments.base import Reply, Restorable
from estr.environments.registry import make_task
from estr.environments.runner import EnvironmentFailure, take_state
from estr.errors import RunError
from estr.models.builtin import resolve_model
from estr.models.load import load_model, merged_state
from estr.runtime.builders import build_rollout_worker, build_task
from estr.runtime.messages import Failed, Finished, Job, KeptTurn, Progress
from estr.runtime.rollout import RolloutWorker
from estr.storage.ledger import Ledger
from estr.trajectory import derive_seed
from loop_helpers import plain_model, replay, small
from loop_tasks import Echo, EchoEnvironment


class Memory(EchoEnvironment):
    """An Echo that can be restored; ``waits`` makes its answers come late."""

    def state(self) -> Any:
        if self.task.how == "raises":
            raise LookupError("nothing to tell")
        return {"said": self.said, "odd": {1} if self.task.how == "odd" else None}

    def restore(self, problem: Any, seed: int, state: Any) -> None:
        self.reset(problem, seed)
        self.said = list(state["said"])

    def step(self, text: str) -> Reply:
        reply = super().step(text)
        return Reply(reply.messages, reply.done, self.task.waits)


class Remembering(Echo):
    def __init__(self, *, how: str = "", waits: float = 0.0, restorable: bool = True) -> None:
        super().__init__(turns=3)
        self.how, self.waits, self.restorable = how, waits, restorable

    def environment(self) -> EchoEnvironment:
        return Memory(self) if self.restorable else EchoEnvironment(self)


class Home:
    """A model with two versions of weights, and workers around it."""

    def __init__(self) -> None:
        self.config = small(rollout={"max_turns": 5})
        self.path = resolve_model(self.config.model, build_task(self.config))
        loaded = load_model(self.path, "float32")
        self.tokenizer = loaded.tokenizer
        base = {name: tensor.clone() for name, tensor in merged_state(loaded.model).items()}
        turned = {name: -tensor if name == "model.norm.weight" else tensor for name, tensor in base.items()}
        self.weights = {0: base, 1: turned}

    def worker(self, version: int = 0, clock: Any = None, **task: Any) -> RolloutWorker:
        made = build_rollout_worker(
            self.config, Remembering(**task), load_model(self.path, "float32").model, self.tokenizer, keep_progress=True
        )
        made.engine.set_weights(version, self.weights[version], own=True)
        if clock is not None:
            made._clock = clock
        return made


@pytest.fixture(scope="module")
def home() -> Home:
    return Home()


def job(progress: Progress | None = None) -> Job:
    return Job(4, 1, 0, Echo().train_problem(4), run_seed=7, kept=None if progress is None else KeptTurn.of(progress))


def run(worker: RolloutWorker, one: Job) -> tuple[list[Progress], Finished | Failed]:
    worker.submit(one)
    *turns, last = (result.progress if isinstance(result, KeptTurn) else result for result in worker.run_all())
    assert worker.running == 0
    assert worker.engine.running == 0
    return turns, last


def through_the_ledger(progress: Progress, path: Path) -> Progress:
    """As the ledger of a killed run gives it back."""
    trajectory = progress.trajectory
    with Ledger(path / "ledger.sqlite") as ledger:
        ledger.issue(trajectory.group, trajectory.sibling, 0, seed=trajectory.seed, group_size=2)
        ledger.keep_turn(trajectory, progress.context)
    with Ledger(path / "ledger.sqlite") as ledger:
        ((stored, context),) = ledger.turns()
    return Progress(stored, **context)


def test_each_turn_but_the_last_is_reported(home: Home) -> None:
    turns, result = run(home.worker(), job())
    assert isinstance(result, Finished)
    assert [one.trajectory.turns for one in turns] == [1, 2]
    assert result.trajectory.turns == 3
    assert result.trajectory.resumed_at == []
    (whole,) = result.trajectory.segments
    for one in turns:
        (row,) = one.trajectory.segments
        np.testing.assert_array_equal(row.tokens, whole.tokens[: len(row.tokens)])
        assert row.action[-one.turn_tokens :].all()
        assert one.end == "stop"
    assert run(home.worker(restorable=False), job())[0] == []


def test_fault_E5_an_episode_killed_in_its_second_turn_goes_on_there(home: Home, tmp_path: Path) -> None:
    """Under the same weights the rest is the same, token for token; nothing of the first turn is sampled again."""
    turns, whole = run(home.worker(), job())
    progress = through_the_ledger(turns[0], tmp_path)
    worker = home.worker()
    _, again = run(worker, job(progress))
    assert isinstance(again, Finished)
    assert isinstance(whole, Finished)
    assert again.trajectory.resumed_at == [1]
    assert again.trajectory.turns == 3
    assert (again.trajectory.reward, again.trajectory.text) == (whole.trajectory.reward, whole.trajectory.text)
    (row,), (other,) = again.trajectory.segments, whole.trajectory.segments
    for name in ("tokens", "action", "version"):
        np.testing.assert_array_equal(getattr(row, name), getattr(other, name))
    np.testing.assert_allclose(row.logprob, other.logprob, atol=1e-5)
    sampled = whole.trajectory.action_count - turns[0].trajectory.action_count
    assert worker.engine.counters.sampled_tokens == sampled


def test_under_newer_weights_old_tokens_keep_what_is_known_and_new_ones_are_of_now(home: Home, tmp_path: Path) -> None:
    turns, _ = run(home.worker(version=0), job())
    progress = through_the_ledger(turns[0], tmp_path)
    _, result = run(home.worker(version=1), job(progress))
    assert isinstance(result, Finished)
    (row,), (before,) = result.trajectory.segments, turns[0].trajectory.segments
    span = slice(0, len(before.tokens))
    for name in ("tokens", "action", "logprob", "entropy", "version"):
        np.testing.assert_array_equal(getattr(row, name)[span], getattr(before, name))
    assert set(row.version[row.action].tolist()) == {0, 1}
    assert (row.version[span.stop :][row.action[span.stop :]] == 1).all()
    model = plain_model(home.path, home.weights[1])
    everything = row.version.copy()
    row.version[row.action] = 1  # all keys and values were computed again, under version 1
    distributions = replay({1: model}, row)
    later = np.flatnonzero(everything[row.action] == 1)
    at = np.flatnonzero(row.action)[later]
    expected = [float(distributions[i][int(row.tokens[p])]) for i, p in zip(later.tolist(), at.tolist(), strict=True)]
    np.testing.assert_allclose(row.logprob[at], expected, atol=1e-4)


def test_a_tool_that_had_not_answered_is_asked_again(home: Home, tmp_path: Path) -> None:
    now = [0.0]
    worker = home.worker(clock=lambda: now[0], waits=5.0)
    worker.submit(job())
    results: list[Any] = []
    while not results:
        results += worker.tick()
    (progress,) = (result.progress for result in results)
    assert progress.trajectory.turns == 1
    _, result = run(home.worker(), job(through_the_ledger(progress, tmp_path)))
    assert isinstance(result, Finished)
    assert (result.trajectory.turns, result.trajectory.resumed_at) == (3, [1])


def test_going_on_twice_is_recorded_twice(home: Home) -> None:
    turns, _ = run(home.worker(), job())
    further, _ = run(home.worker(), job(turns[0]))
    assert [one.trajectory.turns for one in further] == [1, 2]
    _, result = run(home.worker(), job(further[1]))
    assert isinstance(result, Finished)
    assert result.trajectory.resumed_at == [1, 2]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("raises", "Memory.state raised LookupError: nothing to tell"),
        ("odd", "Memory.state returned what JSON cannot hold: TypeError"),
    ],
)
def test_a_state_that_cannot_be_taken_costs_only_its_trajectory(home: Home, how: str, sentence: str) -> None:
    _, result = run(home.worker(how=how), job())
    assert isinstance(result, Failed)
    assert sentence in result.reason


def test_a_state_that_does_not_fit_costs_only_its_trajectory(home: Home) -> None:
    turns, _ = run(home.worker(), job())
    turns[0].environment["state"] = {}
    _, result = run(home.worker(), job(turns[0]))
    assert isinstance(result, Failed)
    assert "Memory.restore raised KeyError" in result.reason


def test_an_environment_that_is_no_longer_restorable_begins_anew(home: Home) -> None:
    turns, _ = run(home.worker(), job())
    _, result = run(home.worker(restorable=False), job(turns[0]))
    assert isinstance(result, Finished)
    assert (result.trajectory.turns, result.trajectory.resumed_at) == (3, [])


def test_the_calculator_can_be_restored_at_any_turn() -> None:
    task = make_task("calculator", latency="lognormal")
    problem, said = task.train_problem(3), ["<calc>2*3</calc>", "<calc>6+1</calc>", "#### 7"]
    for cut in range(3):
        environment, twin = task.environment(), task.environment()
        assert isinstance(twin, Restorable)
        environment.reset(problem, 5)
        for text in said[:cut]:
            environment.step(text)
        state = take_state(environment)
        assert not isinstance(state, EnvironmentFailure)
        twin.restore(problem, 5, json.loads(json.dumps(state))["state"])
        for text in said[cut:]:
            assert environment.step(text) == twin.step(text)
        assert environment.reward() == twin.reward()


def test_the_ledger_keeps_turns_only_of_what_is_in_flight(tmp_path: Path, home: Home) -> None:
    turns, result = run(home.worker(), job())
    assert isinstance(result, Finished)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        with pytest.raises(RunError, match="never issued"):
            ledger.keep_turn(turns[0].trajectory, {})
        for sibling in (0, 1):
            ledger.issue(4, sibling, 0, seed=derive_seed(7, 4, sibling, 0), group_size=2)
        for one in turns:
            ledger.keep_turn(one.trajectory, one.context)
        assert [trajectory.turns for trajectory, _ in ledger.turns()] == [2], "the last one counts"
        ledger.finish(result.trajectory)
        assert ledger.turns() == []
        with pytest.raises(RunError, match="only what is in flight has turns to come"):
            ledger.keep_turn(turns[1].trajectory, {})
        ledger.rewind_to(0)
        ledger.forget_groups(0)
        assert ledger.next_group == 0
