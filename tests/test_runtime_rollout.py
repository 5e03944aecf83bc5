"""Episodes on a scripted engine: turns, tools, rewards, failures, latency, forks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from estr.environments.base import Environment, Message, Problem, Reply
from estr.environments.registry import make_task
from estr.models.tokenizer import builtin_tokenizer
from estr.runtime.messages import Failed, Finished, Job, VersionWindow
from estr.runtime.rollout import EpisodeLimits, RolloutWorker
from scripted import ScriptedEngine


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return builtin_tokenizer()


PROBLEM = Problem("p-1", "What is 12*5?", 60)


class OneTask:
    """A task with one problem in the given environment."""

    name = "one"

    def __init__(self, make: Any) -> None:
        self._make = make

    def train_problem(self, index: int) -> Problem:
        return PROBLEM

    def eval_problems(self, count: int) -> Sequence[Problem]:
        return [PROBLEM]

    def environment(self) -> Environment:
        return self._make()

    def demonstrations(self, seed: int) -> Iterator[list[Message]]:
        return iter(())


def worker(
    tokenizer: Any, script: Any, make: Any = None, *, clock: Any = None, end: str = "stop", **changes: Any
) -> Any:
    make = make or (lambda: make_task("calculator").environment())
    limits = EpisodeLimits(**({"max_new_tokens": 30, "max_turns": 4, "tool_timeout": 30.0} | changes))
    engine = ScriptedEngine(tokenizer, script, end=end)
    keywords = {"clock": clock} if clock is not None else {"wait_for_tools": False}
    return RolloutWorker(engine, OneTask(make), tokenizer, limits, **keywords)  # type: ignore[arg-type]


def job(sibling: int = 0) -> Job:
    return Job(group=3, sibling=sibling, attempt=0, problem=PROBLEM, run_seed=0)


def run_one(worker: RolloutWorker) -> Finished | Failed:
    worker.submit(job())
    (result,) = worker.run_all()
    assert worker.running == 0
    return result


def solved(key: str, turn: int) -> str:
    return ["<calc>12*5</calc>", "#### 60"][turn]


def test_a_solved_problem_has_two_turns_and_reward_one(tokenizer: Any) -> None:
    result = run_one(worker(tokenizer, solved))
    assert isinstance(result, Finished)
    trajectory = result.trajectory
    assert (trajectory.reward, trajectory.turns, trajectory.finish_reason) == (1.0, 2, "stop")
    assert trajectory.trajectory_id == "00000003-000"
    assert "60" in trajectory.text


def test_fault_B22_only_sampled_tokens_are_actions(tokenizer: Any) -> None:
    result = run_one(worker(tokenizer, solved))
    assert isinstance(result, Finished)
    (segment,) = result.trajectory.segments
    acted = tokenizer.decode(segment.tokens[segment.action].tolist())
    assert acted == "<calc>12*5</calc>#### 60"
    flips = (segment.action[1:] != segment.action[:-1]).sum()
    assert flips == 3, "prompt, call, tool reply, answer"


def test_fault_F2_glue_after_a_turn_is_not_an_action(tokenizer: Any) -> None:
    result = run_one(worker(tokenizer, solved))
    assert isinstance(result, Finished)
    (segment,) = result.trajectory.segments
    end = tokenizer.eos_token_id
    assert end in segment.tokens.tolist(), "the template closes the call's turn"
    assert not segment.action[segment.tokens == end].any()


def test_too_many_turns_end_the_episode(tokenizer: Any) -> None:
    result = run_one(worker(tokenizer, lambda key, turn: "<calc>1+1</calc>", max_turns=3))
    assert isinstance(result, Finished)
    assert (result.trajectory.finish_reason, result.trajectory.turns, result.trajectory.reward) == ("turns", 3, 0.0)


def test_a_turn_cut_by_its_limit_ends_the_episode(tokenizer: Any) -> None:
    result = run_one(worker(tokenizer, lambda key, turn: "<calc>1+", end="length"))
    assert isinstance(result, Finished)
    assert (result.trajectory.finish_reason, result.trajectory.reward) == ("length", 0.0)


class Broken:
    """An environment that misbehaves in one named way."""

    blocking, stop = False, ("</calc>",)

    def __init__(self, how: str) -> None:
        self.how = how
        self.blocking = how == "hangs"

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        if self.how == "reset":
            raise RuntimeError("no such database")
        return [{"role": "user", "content": "x"}]

    def step(self, text: str) -> Reply:
        if self.how == "step":
            raise RuntimeError("tool broke")
        if self.how == "hangs":
            threading.Event().wait(60)
        return Reply(done=True)

    def reward(self) -> float:
        if self.how == "reward":
            raise ZeroDivisionError("verifier broke")
        return float("nan") if self.how == "nan" else 1.0


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("reset", "no such database"),
        ("step", "tool broke"),
        ("reward", "verifier broke"),
        ("nan", "not a finite number"),
        ("hangs", "took longer than"),
    ],
)
def test_a_broken_environment_costs_only_its_trajectory(tokenizer: Any, how: str, words: str) -> None:
    broken = worker(tokenizer, solved, lambda: Broken(how), tool_timeout=0.05)
    result = run_one(broken)
    assert isinstance(result, Failed)
    assert words in result.reason
    assert "p-1" in result.reason
    assert not result.final


def test_a_prompt_that_does_not_fit_fails_for_good(tokenizer: Any) -> None:
    small = worker(tokenizer, solved)
    small.engine.max_context = 3
    result = run_one(small)
    assert isinstance(result, Failed)
    assert result.final
    assert "leaves no room" in result.reason


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_artificial_latency_is_waited_for_without_holding_anybody(tokenizer: Any) -> None:
    clock = Clock()
    task = make_task("calculator", latency="fixed", latency_seconds=2.0)
    waiting = worker(tokenizer, solved, task.environment, clock=clock)
    waiting.submit(job())
    assert waiting.tick() == []
    assert waiting.idle
    assert waiting.running == 1
    clock.now = 1.9
    assert waiting.tick() == []
    clock.now = 2.1
    (result,) = waiting.tick()
    assert isinstance(result, Finished)
    assert result.trajectory.reward == 1.0


def test_without_waiting_latency_is_skipped(tokenizer: Any) -> None:
    task = make_task("calculator", latency="fixed", latency_seconds=20.0)
    assert isinstance(run_one(worker(tokenizer, solved, task.environment)), Finished)


def test_seeds_depend_on_group_sibling_turn_and_attempt() -> None:
    from estr.trajectory import derive_seed

    seeds = {derive_seed(0, group, sibling, turn, 0) for group in range(5) for sibling in range(5) for turn in range(5)}
    assert len(seeds) == 125
    assert derive_seed(1, 0, 0, 0, 0) != derive_seed(0, 0, 0, 0, 0)


def test_a_cancelled_group_leaves_nothing_behind(tokenizer: Any) -> None:
    some = worker(tokenizer, solved)
    for sibling in range(3):
        some.submit(job(sibling))
    some.cancel_group(3)
    assert some.running == 0
    assert some.tick() == []


def test_the_version_window_is_the_contract_rule() -> None:
    window = VersionWindow(newest=100, target=20, inter=8, intra=3, intra_every=2)
    assert [window(i) for i in range(8)] == [9, 9, 10, 10, 11, 11, 12, 12]
    assert VersionWindow(100, 2, 8, 3, 1)(0) == 0
    assert VersionWindow(newest=5, target=7, inter=0, intra=0, intra_every=1)(0) == 5


class Forgetful:
    """Renders like ChatML, but drops what earlier assistant turns thought."""

    TEMPLATE = (
        "{% for m in messages %}"
        "<|{{ m['role'] }}|>"
        "{% if m['role'] == 'assistant' and not loop.last and '</think>' in m['content'] %}"
        "{{ m['content'].split('</think>')[-1] }}"
        "{% else %}{{ m['content'] }}{% endif %}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def test_fault_F3_a_template_that_drops_thinking_forks_into_segments(tokenizer: Any) -> None:
    forgetful = builtin_tokenizer()
    forgetful.chat_template = Forgetful.TEMPLATE
    script = ["hm</think><calc>12*5</calc>", "#### 60"]
    result = run_one(worker(forgetful, lambda key, turn: script[turn]))
    assert isinstance(result, Finished)
    trajectory = result.trajectory
    assert trajectory.forks == 1
    first, second = trajectory.segments
    assert "hm</think>" in forgetful.decode(first.tokens.tolist())
    assert "hm" not in forgetful.decode(second.tokens.tolist())
    assert forgetful.decode(second.tokens[second.action].tolist()) == "#### 60"
    assert trajectory.action_count == first.action_count + second.action_count
