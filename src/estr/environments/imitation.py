"""Demonstrations for supervised warm-up: whole conversations, a known share of them flawed in named ways."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

from estr.environments import tool_call
from estr.environments.arithmetic import CalculatorError
from estr.environments.base import Message
from estr.environments.episode import opening
from estr.environments.word_problems import LARGEST_RESULT, WordProblem, operands, run_steps

CORRECT, WRONG_ARGUMENT, NO_CALL = "correct", "wrong_argument", "no_call"


def conversation(problem: WordProblem, steps: Sequence[tuple[str, str]], answer: str) -> list[Message]:
    """Problem, one call and one tool reply a step, final answer."""
    messages = opening(problem.prompt)
    for expression, result in steps:
        messages.append({"role": "assistant", "content": f"{tool_call.OPEN}{expression}{tool_call.CLOSE}"})
        messages.append({"role": "tool", "content": result})
    messages.append({"role": "assistant", "content": f"#### {answer}"})
    return messages


def demonstrate(problem: WordProblem, kind: str, rng: random.Random) -> list[Message] | None:
    """A conversation of one kind; None where this problem admits no such flaw.

    * ``correct``: one call a step, then the right answer.
    * ``wrong_argument``: in one call a number is wrong (its digits swapped, or another number of the problem in its
      place) or the operation is; everything after it is consistent with the tool's reply, and the answer is wrong.
    * ``no_call``: no call at all, a plausible wrong guess as the answer.
    """
    steps = problem.solve()
    if kind == CORRECT:
        return conversation(problem, steps, steps[-1][1])
    if kind == NO_CALL:
        return conversation(problem, [], str(_guess(problem, rng)))
    flawed = _with_wrong_argument(problem, rng)
    return None if flawed is None else conversation(problem, flawed, flawed[-1][1])


def stream(problems: Iterator[WordProblem], shares: dict[str, float], seed: int) -> Iterator[tuple[str, list[Message]]]:
    """Endless (kind, conversation); the kinds are drawn independently with probabilities ``shares``."""
    rng = random.Random(f"demonstrations/{seed}")
    while True:
        kind = rng.choices(list(shares), list(shares.values()))[0]
        messages = None
        while messages is None:
            messages = demonstrate(next(problems), kind, rng)
        yield kind, messages


def _guess(problem: WordProblem, rng: random.Random) -> int:
    answer = problem.answer
    near = [answer + shift for shift in range(-10, 11) if shift and answer + shift >= 0]
    return rng.choice([*near, *(number for number in problem.numbers if number != answer)])


def _with_wrong_argument(problem: WordProblem, rng: random.Random) -> list[tuple[str, str]] | None:
    index = rng.randrange(len(problem.template.steps))
    candidates = _wrong_steps(problem.template.steps[index], problem)
    rng.shuffle(candidates)
    for wrong in candidates:
        steps = (*problem.template.steps[:index], wrong, *problem.template.steps[index + 1 :])
        try:
            done = run_steps(steps, operands(problem.numbers))
        except CalculatorError:
            continue
        results = [Fraction(result) for _, result in done]
        whole = all(r.denominator == 1 and 0 <= r <= LARGEST_RESULT for r in results)
        if whole and results[-1] != problem.answer:
            return done
    return None


def _wrong_steps(step: str, problem: WordProblem) -> list[str]:
    """``step`` (``{a}*{b}``) with one operand slot filled wrongly or another operator."""
    slots = operands(problem.numbers)
    wrong = [re.sub(r"(?<=\})[-+*/]", operator, step) for operator in "+-*"]
    for slot in re.findall(r"\{([a-d])\}", step):
        number = slots[slot]
        others = {value for value in slots.values() if value != number}
        if number[::-1] != number and number[-1] != "0":
            others.add(number[::-1])
        wrong += [step.replace(f"{{{slot}}}", other) for other in sorted(others)]
    return [candidate for candidate in wrong if candidate != step]
