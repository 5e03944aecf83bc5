"""Environments under a time limit, tasks by name, and the page on tasks of one's own."""

from __future__ import annotations

import itertools
import math
import re
import sys
import threading
from pathlib import Path

import pytest

from estr.environments import Problem, Reply, make_task, tasks
from estr.environments.calculator import CalculatorTask
from estr.environments.runner import EnvironmentFailure, run_step, score, start, start_reset, start_reward
from estr.errors import UsageError

PROBLEM = Problem("p", "2+2?", 4)
OPENING = [{"role": "user", "content": "2+2?"}]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Scripted:
    """An environment that answers with what it is given: a value, an exception to raise, or a function to call."""

    stop = ()

    def __init__(self, answer, blocking=False):
        self.answer, self.blocking = answer, blocking

    def _do(self):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer() if callable(self.answer) else self.answer

    def reset(self, problem, seed):
        return self._do()

    def step(self, text):
        return self._do()

    def reward(self):
        return self._do()


def settled(pending):
    """Wait for a thread's outcome, then poll it."""
    pending.wait()
    return pending.poll()


@pytest.mark.parametrize("blocking", [False, True])
def test_a_reply_arrives(blocking):
    reply = Reply(({"role": "tool", "content": "4"},))
    assert settled(start(Scripted(reply, blocking), "x")) == reply
    assert settled(start_reset(Scripted(OPENING, blocking), PROBLEM, 0)) == OPENING
    assert settled(start_reward(Scripted(0.5, blocking))) == 0.5
    assert run_step(Scripted(reply, blocking), "x") == reply
    assert score(Scripted(1, blocking)) == 1.0


def test_only_blocking_environments_run_in_a_thread():
    for blocking in (False, True):
        threads = []
        environment = Scripted(
            lambda seen=threads: seen.append(threading.current_thread()) or Reply(done=True), blocking
        )
        settled(start(environment, "x"))
        assert (threads[0] is threading.current_thread()) != blocking
        assert threads[0].daemon or not blocking


def test_a_hanging_tool_costs_only_its_trajectory():
    clock, released = Clock(), threading.Event()
    hanging = start(Scripted(lambda: released.wait() and Reply(done=True), blocking=True), "x", 30.0, clock)
    other = start(Scripted(Reply(done=True)), "x", 30.0, clock)
    assert other.poll() == Reply(done=True)
    assert hanging.poll() is None
    clock.now += 29.9
    assert hanging.poll() is None
    clock.now += 0.1
    failure = hanging.poll()
    assert failure == EnvironmentFailure("Scripted.step took longer than 30 s (task.tool_timeout)")
    released.set()
    hanging._done.wait(10)
    assert hanging.poll() == failure


def test_waiting_for_a_hanging_tool_ends():
    released = threading.Event()
    failure = run_step(Scripted(released.wait, blocking=True), "x", timeout=0.05)
    released.set()
    assert isinstance(failure, EnvironmentFailure)


def test_delay_is_folded_in():
    clock = Clock()
    pending = start(Scripted(Reply(delay=2.0)), "x", 30.0, clock)
    assert pending.poll() is None
    clock.now += 1.9
    assert pending.poll() is None
    clock.now += 0.2
    assert pending.poll() == Reply(delay=2.0)
    clock.now += 100
    assert pending.poll() == Reply(delay=2.0)
    assert start(Scripted(Reply(delay=20.0)), "x", 30.0, clock).wait() == Reply(delay=20.0)


def test_a_delay_beyond_the_limit_is_a_time_out_at_the_limit():
    clock = Clock()
    pending = start(Scripted(Reply(delay=31.0)), "x", 30.0, clock)
    clock.now += 29
    assert pending.poll() is None
    clock.now += 1
    assert isinstance(pending.poll(), EnvironmentFailure)


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (ValueError("no\nroom"), "Scripted.step raised ValueError: no room"),
        (SystemExit(3), "Scripted.step raised SystemExit: 3"),
        (RecursionError(), "Scripted.step raised RecursionError"),
        (UnprintableError(), "Scripted.step raised UnprintableError"),
        ("4", "Scripted.step returned str, not a Reply"),
        (None, "Scripted.step returned NoneType, not a Reply"),
        (Reply(delay=math.nan), "Scripted.step returned a delay of nan, not a number of seconds"),
        (Reply(delay=-1), "Scripted.step returned a delay of -1, not a number of seconds"),
        (Reply("4"), "Scripted.step returned str, not a list of messages"),
        (Reply(({"role": "tool"},)), "Scripted.step returned a message without the texts 'role' and 'content'"),
        (Reply(({"role": "tool", "content": 4},)), "Scripted.step returned a message without the texts"),
    ],
)
def test_failures_are_one_sentence(answer, sentence, blocking):
    failure = settled(start(Scripted(answer, blocking), "x"))
    assert isinstance(failure, EnvironmentFailure)
    assert failure.sentence.startswith(sentence)
    assert "\n" not in failure.sentence


def test_long_causes_are_cut():
    failure = run_step(Scripted(ValueError("x" * 10_000)), "x")
    assert len(failure.sentence) < 400


def test_fault_f2_an_environment_may_not_speak_as_the_assistant():
    failure = run_step(Scripted(Reply(({"role": "assistant", "content": "#### 4"},))), "x")
    assert failure.sentence == "Scripted.step spoke in the role 'assistant'; it may be system, user, tool"
    examples = [*OPENING, {"role": "assistant", "content": "#### 4"}, *OPENING]
    assert start_reset(Scripted(examples), PROBLEM, 0).poll() == examples
    assert isinstance(start_reset(Scripted(examples[:2]), PROBLEM, 0).poll(), EnvironmentFailure)
    assert isinstance(start_reset(Scripted([]), PROBLEM, 0).poll(), EnvironmentFailure)


@pytest.mark.parametrize("value", [math.nan, math.inf, "1.0", None, 1j, [1], 10**400])
def test_a_reward_must_be_a_finite_number(value):
    failure = score(Scripted(value))
    assert isinstance(failure, EnvironmentFailure)
    assert failure.sentence.startswith("Scripted.reward returned ")
    assert failure.sentence.endswith("not a finite number")


def test_an_environment_without_blocking_gets_a_thread():
    environment = Scripted(lambda: Reply(({"role": "tool", "content": threading.current_thread().name},)))
    del environment.blocking
    reply = run_step(environment, "x")
    assert reply.messages[0]["content"] != threading.current_thread().name


def test_the_table_of_tasks():
    table = tasks()
    assert {"calculator", "gsm8k"} <= set(table)
    for info in table.values():
        assert info.description.endswith(".")
        for option in info.options.values():
            assert option.description.endswith(".")
            option.check(option.default)


def test_tasks_by_name():
    task = make_task("calculator", default_seed=3, levels=[2])
    assert task.train_problem(0) == CalculatorTask(seed=3, levels=[2]).train_problem(0)
    assert make_task("calculator", default_seed=3, seed=4).seed == 4
    with pytest.raises(UsageError, match="no task 'calculater'; did you mean 'calculator'"):
        make_task("calculater")
    with pytest.raises(UsageError, match="task 'calculator' has no option 'path'"):
        make_task("calculator", path="x.jsonl")
    with pytest.raises(UsageError, match="did you mean 'levels'"):
        make_task("calculator", level=1)
    with pytest.raises(UsageError, match="cannot read task"):
        make_task("gsm8k", path="/nowhere/x.jsonl")


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page's code block as a module in the current folder."""
    text = (Path(__file__).resolve().parents[1] / "docs" / "your-own-task.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S)
    (tmp_path / "guess.py").write_text(code[1])
    (tmp_path / "broken.py").write_text("1/0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    monkeypatch.delitem(sys.modules, "guess", raising=False)
    yield text
    sys.modules.pop("guess", None)


def test_the_page_on_your_own_task_runs(page):
    options = dict(re.findall(r"^(\w+) = (\d+)$", re.search(r"\[task\]\n(.*?)```", page, re.S)[1], re.M))
    task = make_task("guess:GuessTask", default_seed=1, **{key: int(value) for key, value in options.items()})
    assert (task.seed, task.highest) == (1, 50)
    assert {p.answer for p in task.eval_problems(99)} == set(range(5, 51, 5))
    assert all(task.train_problem(i).answer % 5 for i in range(50))
    for messages in itertools.islice(task.demonstrations(0), 20):
        environment, replies = task.environment(), []
        secret = int(messages[-1]["content"].rstrip("?"))
        environment.reset(Problem("p", messages[0]["content"], secret), 0)
        for said in messages[1::2]:
            replies += run_step(environment, said["content"]).messages
        assert replies == messages[2::2]
        assert score(environment) == pytest.approx(1 / len(messages[1::2]))


def test_errors_of_tasks_of_ones_own(page):
    with pytest.raises(UsageError, match="'guess:GuessTask' has no option 'higest'; did you mean 'highest'"):
        make_task("guess:GuessTask", higest=3)
    with pytest.raises(UsageError, match="has no option 'path'"):
        make_task("guess:GuessTask", path="x")
    with pytest.raises(UsageError, match="no class 'GuesTask'; did you mean 'GuessTask'"):
        make_task("guess:GuesTask")
    with pytest.raises(UsageError, match="cannot import 'gues'"):
        make_task("gues:GuessTask")
    with pytest.raises(UsageError, match="not a task: GuessEnvironment has no name, train_problem"):
        make_task("guess:GuessEnvironment")
    with pytest.raises(UsageError, match="cannot be made: TypeError"):
        make_task("builtins:int", base="x")
    with pytest.raises(UsageError, match="task 'broken:X': cannot import 'broken': ZeroDivisionError"):
        make_task("broken:X")
