"""A task that any trainer can be given: one turn, and the share of even digits in it as the reward."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from estr.environments.base import Message, Problem, Reply


class Digits:
    """One episode of :class:`DigitsTask`."""

    blocking = False
    stop: tuple[str, ...] = ()

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        self._text = ""
        return [{"role": "user", "content": problem.prompt}]

    def step(self, text: str) -> Reply:
        self._text = text
        return Reply(done=True)

    def reward(self) -> float:
        return sum(ch in "02468" for ch in self._text) / (1 + len(self._text))


class DigitsTask:
    """Prompts of made-up sums."""

    name = "digits"

    def train_problem(self, index: int) -> Problem:
        return Problem(f"digits-{index}", prompt(index))

    def eval_problems(self, count: int) -> Sequence[Problem]:
        return [Problem(f"held-out-{i}", prompt(-1 - i)) for i in range(count)]

    def environment(self) -> Digits:
        return Digits()

    def demonstrations(self, seed: int) -> Iterator[list[Message]]:
        return iter(())


def prompt(index: int) -> str:
    source = random.Random(index)
    return "Add up: " + " ".join(str(source.randrange(1000)) for _ in range(source.randint(4, 12)))
