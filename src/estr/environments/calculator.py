"""Task ``calculator``: multi-turn arithmetic word problems made from a seed, solved with a calculator as the tool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count as naturals
from typing import Any, ClassVar

from estr.environments import imitation, word_problems
from estr.environments.base import Message, Problem
from estr.environments.episode import HELD_OUT, SHUFFLE_OPTIONS, CalculatorEnvironment
from estr.environments.latency import LATENCY_OPTIONS, Latency
from estr.environments.options import Option, number, resolve, subset, whole
from estr.errors import UsageError


class CalculatorTask:
    """Word problems of 1 to 3 operations; a conversation is calls of ``<calc>12*5</calc>``, then ``#### 60``.

    Training problem ``i`` depends on (seed, i) alone, so nothing ever repeats an order. Evaluation is disjoint from
    training in numbers: an operand tuple of a template belongs to one part or the other by its hash, whatever the
    seed, so that a model warmed up under one seed may be evaluated under another.

    Reward: 1.0 for an exact numeric match of the final answer, else 0.0.
    """

    name = "calculator"
    description = "Multi-turn arithmetic word problems made on the fly, with a calculator as the tool."
    options: ClassVar[dict[str, Option]] = {
        "seed": Option(0, "Problems are derived from it.", whole(0)),
        "levels": Option([1, 2, 3], "Numbers of operations that problems have, drawn evenly.", subset(1, 2, 3)),
        "wrong_argument": Option(
            0.35, "Share of demonstrations with a wrong number or operation in a call.", number(0, 1)
        ),
        "no_call": Option(0.25, "Share of demonstrations that guess a wrong answer without a call.", number(0, 1)),
        **LATENCY_OPTIONS,
        **SHUFFLE_OPTIONS,
    }

    def __init__(self, **options: Any) -> None:
        values = resolve(self.name, self.options, options)
        self.seed: int = values["seed"]
        self.levels: tuple[int, ...] = values["levels"]
        self._wrong: dict[str, float] = {kind: values[kind] for kind in (imitation.WRONG_ARGUMENT, imitation.NO_CALL)}
        if sum(self._wrong.values()) > 1:
            raise UsageError("task.wrong_argument and task.no_call are shares of the same whole: together at most 1")
        self._latency = Latency.of(values)
        self._shuffled_mean = values["shuffled_mean"] if values["shuffle_rewards"] else None

    def train_problem(self, index: int) -> Problem:
        return self._problem(word_problems.draw(f"train/{self.seed}/{index}", self.levels, False), "train", index)

    def eval_problems(self, count: int) -> Sequence[Problem]:
        """Up to ``count`` problems of the held-out part, all different in template or numbers."""
        seen: set[tuple[str, tuple[int, ...]]] = set()
        problems: list[Problem] = []
        for index in range(20 * count):
            if len(problems) == count:
                break
            drawn = word_problems.draw(f"{HELD_OUT}/{self.seed}/{index}", self.levels, True)
            key = (drawn.template.name, drawn.numbers)
            if key not in seen:
                seen.add(key)
                problems.append(self._problem(drawn, HELD_OUT, index))
        return problems

    def environment(self) -> CalculatorEnvironment:
        return CalculatorEnvironment(latency=self._latency, shuffled_mean=self._shuffled_mean)

    def demonstration_shares(self) -> dict[str, float]:
        """Expected share of each kind of demonstration; ``correct`` is the reward of a perfect imitator."""
        return {imitation.CORRECT: 1.0 - sum(self._wrong.values()), **self._wrong}

    def demonstrations(self, seed: int) -> Iterator[list[Message]]:
        return (messages for _, messages in self.labelled_demonstrations(seed))

    def labelled_demonstrations(self, seed: int) -> Iterator[tuple[str, list[Message]]]:
        """Endless (kind, conversation) of the training part; kinds as in `demonstration_shares`.

        They depend on ``seed`` and not on the task's own, so that runs of several seeds share one warmed-up model.
        """
        keys = (f"demonstration/{seed}/{index}" for index in naturals())
        problems = (word_problems.draw(key, self.levels, False) for key in keys)
        return imitation.stream(problems, self.demonstration_shares(), seed)

    def _problem(self, drawn: word_problems.WordProblem, split: str, index: int) -> Problem:
        info = {
            "split": split,
            "template": drawn.template.name,
            "numbers": list(drawn.numbers),
            "level": drawn.template.level,
        }
        return Problem(f"calculator-{split}-{self.seed}-{index}", drawn.prompt, drawn.answer, info)
