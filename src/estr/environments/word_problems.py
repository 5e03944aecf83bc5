"""Arithmetic word problems made on the fly: templates over a closed vocabulary, and the numbers that go into them."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from estr.environments.arithmetic import CalculatorError, evaluate, format_number

LARGEST_RESULT = 9999
HELD_OUT_SHARE = 4
"""One in this many operand tuples of every template belongs to the held-out part."""

NAMES = ("Ann", "Ben", "Eva", "Ida", "Leo", "Max", "Mia", "Omar", "Sam", "Tom", "Yuki", "Zoe")
ITEMS = ("apples", "balls", "books", "cards", "coins", "cups", "eggs", "pens", "plums", "seeds", "shells", "stamps")

_SMALL, _NUMBER = (2, 12), (2, 99)


@dataclass(frozen=True)
class Template:
    """``text`` with the slots {n}, {m} (names), {item} and the operands {a}..{d}; ``steps`` refer to operands and
    to earlier results by {x} (first), {y} (second). ``ranges`` are the inclusive ranges of the operands."""

    name: str
    text: str
    steps: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def level(self) -> int:
        """Number of operations."""
        return len(self.steps)


def _template(name: str, steps: str, ranges: Sequence[tuple[int, int]], text: str) -> Template:
    slots = tuple(re.sub(r"([a-dxy])", r"{\1}", step) for step in steps.split())
    return Template(name, text, slots, tuple(ranges))


TEMPLATES = (
    _template("buy", "a+b", [_NUMBER, _NUMBER],
              "{n} has {a} {item} and buys {b} more. How many {item} does {n} have now?"),
    _template("give", "a-b", [_NUMBER, _NUMBER],
              "{n} has {a} {item} and gives {b} to {m}. How many {item} does {n} have left?"),
    _template("boxes", "a*b", [_NUMBER, _SMALL],
              "{n} fills {a} boxes with {b} {item} each. How many {item} are in the boxes?"),
    _template("share", "a/b", [_NUMBER, _SMALL],
              "{n} shares {a} {item} among {b} friends. How many {item} does each friend get?"),
    _template("bus", "a-b", [_NUMBER, _NUMBER],
              "A bus has {a} seats and {b} people sit down. How many seats are free?"),
    _template("read", "a*b", [_NUMBER, _SMALL],
              "{n} reads {a} pages a day for {b} days. How many pages does {n} read?"),
    _template("bags", "a*b x+c", [_SMALL, _NUMBER, _NUMBER],
              "{n} buys {a} bags of {b} {item} and finds {c} more. How many {item} does {n} have?"),
    _template("trade", "a-b x+c", [_NUMBER, _NUMBER, _NUMBER],
              "{n} has {a} {item}, gives {b} to {m} and then buys {c}. How many {item} does {n} have now?"),
    _template("bake", "a*b x-c", [_SMALL, _NUMBER, _NUMBER],
              "{n} bakes {a} trays of {b} cakes and sells {c} cakes. How many cakes are left?"),
    _template("pick", "a+b x/c", [_NUMBER, _NUMBER, _SMALL],
              "{n} picks {a} {item}, {m} picks {b}, and they share all among {c} friends. "
              "How many does each friend get?"),
    _template("shop", "a*b c-x", [_SMALL, _SMALL, _NUMBER],
              "{n} has {c} dollars and buys {a} {item} for {b} dollars each. How many dollars are left?"),
    _template("walk", "a*b x+c", [_NUMBER, _SMALL, _NUMBER],
              "{n} walks {a} miles a day for {b} days, {m} walks {c} miles. How many miles do they walk together?"),
    _template("market", "a*b x-c y+d", [_SMALL, _NUMBER, _NUMBER, _NUMBER],
              "{n} buys {a} bags of {b} {item}, gives {c} to {m} and finds {d} more. "
              "How many {item} does {n} have now?"),
    _template("wages", "a*b x-c y/d", [_NUMBER, _SMALL, _NUMBER, _SMALL],
              "{n} earns {a} dollars a day for {b} days, pays {c} and shares the rest among {d} friends. "
              "How many dollars does each get?"),
    _template("farm", "a*b c*d x+y", [_NUMBER, _SMALL, _NUMBER, _SMALL],
              "A farm has {a} rows of {b} trees and {c} rows of {d} plants. How many trees and plants are there?"),
    _template("gift", "a+b x-c y/d", [_NUMBER, _NUMBER, _NUMBER, _SMALL],
              "{n} has {a} {item} and {m} has {b}. They sell {c} and share the rest among {d} friends. "
              "How many does each get?"),
    _template("train", "a*b x-c y+d", [_SMALL, _NUMBER, _NUMBER, _NUMBER],
              "A train has {a} cars with {b} people each. Then {c} people leave and {d} enter. "
              "How many people are on it now?"),
    _template("stall", "a*b c*d x+y", [_NUMBER, _SMALL, _NUMBER, _SMALL],
              "{n} sells {a} {item} for {b} dollars each and {c} cakes for {d} dollars each. "
              "How many dollars does {n} get?"),
)  # fmt: skip


@dataclass(frozen=True)
class WordProblem:
    """A template with its numbers, names and object."""

    template: Template
    numbers: tuple[int, ...]
    names: tuple[str, str]
    item: str

    @property
    def prompt(self) -> str:
        n, m = self.names
        return self.template.text.format(n=n, m=m, item=self.item, **self._operands())

    def solve(self) -> list[tuple[str, str]]:
        """The solution, one (expression, result) a step: ``[("12*5", "60"), ("60+7", "67")]``."""
        return run_steps(self.template.steps, self._operands())

    @property
    def answer(self) -> int:
        return int(self.solve()[-1][1])

    def _operands(self) -> dict[str, str]:
        return operands(self.numbers)


def operands(numbers: Sequence[int]) -> dict[str, str]:
    """The slots {a}, {b}, ... with their numbers."""
    return dict(zip("abcd", map(str, numbers), strict=False))


def run_steps(steps: Sequence[str], slots: dict[str, str]) -> list[tuple[str, str]]:
    """Fill in and calculate ``steps`` one after the other; raises `CalculatorError` where a step has no value."""
    done: list[tuple[str, str]] = []
    for step, slot in zip(steps, "xyz", strict=False):
        expression = step.format(**slots)
        result = format_number(evaluate(expression))
        slots = {**slots, slot: result}
        done.append((expression, result))
    return done


def is_sound(template: Template, numbers: Sequence[int]) -> bool:
    """Whether every step's result is a whole number in 0..9999 (and the answer above 0)."""
    try:
        results = [Fraction(result) for _, result in run_steps(template.steps, operands(numbers))]
    except CalculatorError:
        return False
    return results[-1] > 0 and all(r.denominator == 1 and 0 <= r <= LARGEST_RESULT for r in results)


def is_held_out(template: Template, numbers: Sequence[int]) -> bool:
    """Whether a template with these numbers belongs to evaluation; depends on nothing else, not even the seed."""
    key = f"{template.name}/{','.join(map(str, numbers))}"
    return hashlib.blake2b(key.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def draw(key: str, levels: Sequence[int], held_out: bool) -> WordProblem:
    """The problem that belongs to ``key`` (a text: the whole source of randomness), from one part of the split."""
    rng = random.Random(key)
    level = rng.choice(tuple(levels))
    template = rng.choice([template for template in TEMPLATES if template.level == level])
    first, second = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    while True:
        numbers = tuple(rng.randint(low, high) for low, high in template.ranges)
        if is_held_out(template, numbers) == held_out and is_sound(template, numbers):
            return WordProblem(template, numbers, (first, second), item)
