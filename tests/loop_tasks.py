"""Tasks for tests of the whole loop. Runs name them ``loop_tasks:Class``; worker processes import this file."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from estr.environments.base import Message, Problem, Reply


class Echo:
    """Answers to anything for a few turns, so that a model that was never trained has turns, tools and rewards.

    ``delay`` seconds of artificial latency come with every reply to an even problem. Rewards take 256 values, or as
    many as ``coarse`` says.
    """

    name = "echo"

    def __init__(
        self,
        *,
        turns: int = 3,
        delay: float = 0.0,
        stop: Sequence[str] = ("e", "1"),
        words: int = 4,
        coarse: int = 256,
    ) -> None:
        self.turns, self.delay, self.stop, self.words, self.coarse = turns, delay, tuple(stop), words, coarse

    def train_problem(self, index: int) -> Problem:
        return Problem(f"echo-{index}", " ".join(["Say", str(index), *["please"] * (index % self.words)]), index)

    def eval_problems(self, count: int) -> Sequence[Problem]:
        return [Problem(f"echo-eval-{i}", f"Tell {i}", i) for i in range(count)]

    def environment(self) -> EchoEnvironment:
        return EchoEnvironment(self)

    def demonstrations(self, seed: int) -> Iterator[list[Message]]:
        return iter(())


class EchoEnvironment:
    blocking = False

    def __init__(self, task: Echo) -> None:
        self.task, self.stop = task, task.stop
        self.said: list[str] = []

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        self.problem = problem
        return [{"role": "user", "content": problem.prompt}]

    def step(self, text: str) -> Reply:
        self.said.append(text)
        delay = self.task.delay if self.problem.answer % 2 == 0 else 0.0
        answer = {"role": "tool", "content": f"{len(self.said)} {len(text)}"}
        return Reply((answer,), done=len(self.said) >= self.task.turns, delay=delay)

    def reward(self) -> float:
        """A number in [0, 1) that depends on every letter."""
        digest = hashlib.blake2b("|".join(self.said).encode()).digest()[0]
        return digest * self.task.coarse // 256 / self.task.coarse


class Faulty(Echo):
    """One named fault: in every problem, or in those whose number is ``only`` modulo ``every``.

    A file at ``flag`` switches the fault off. A tool that hangs does so for 60 s, after it made the file ``mark``.
    """

    name = "faulty"

    def __init__(
        self, *, how: str, every: int = 1, only: int = 0, flag: str = "", mark: str = "", turns: int = 2
    ) -> None:
        super().__init__(turns=turns)
        self.how, self.every, self.only, self.flag, self.mark = how, every, only, flag, mark

    def broken(self, index: int) -> bool:
        return index % self.every == self.only and not (self.flag and Path(self.flag).exists())

    def train_problem(self, index: int) -> Problem:
        if self.how == "problem" and self.broken(index):
            raise LookupError("the shelf is empty")
        if self.how == "long" and self.broken(index):
            return Problem(f"echo-{index}", "word " * 3000, index)
        return super().train_problem(index)

    def eval_problems(self, count: int) -> Sequence[Problem]:
        if self.how == "held-out":
            raise LookupError("the cupboard is bare")
        return super().eval_problems(count)

    def environment(self) -> FaultyEnvironment:
        return FaultyEnvironment(self)


class FaultyEnvironment(EchoEnvironment):
    task: Faulty

    def __init__(self, task: Faulty) -> None:
        super().__init__(task)
        self.blocking = task.how == "hang"

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        if self.task.how == "reset" and self.task.broken(problem.answer):
            raise ConnectionError("no such database")
        return super().reset(problem, seed)

    def step(self, text: str) -> Reply:
        if self.task.broken(self.problem.answer):
            if self.task.how == "hang":
                if self.task.mark:
                    Path(self.task.mark).touch()
                time.sleep(60)
            if self.task.how == "step":
                raise ConnectionError("the tool hung up")
        return super().step(text)

    def reward(self) -> float:
        if self.task.how == "reward" and self.task.broken(self.problem.answer):
            raise ZeroDivisionError("no answer to divide by")
        return super().reward()
