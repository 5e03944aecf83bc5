"""Task ``gsm8k``: grade-school word problems (Cobbe et al., arXiv 2110.14168) solved with the calculator."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count as naturals
from pathlib import Path
from typing import Any, ClassVar

from estr.environments import gsm8k_data
from estr.environments.arithmetic import format_number
from estr.environments.base import Message, Problem
from estr.environments.episode import HELD_OUT, SHUFFLE_OPTIONS, CalculatorEnvironment
from estr.environments.gsm8k_data import Row
from estr.environments.latency import LATENCY_OPTIONS, Latency
from estr.environments.options import Option, resolve, text, whole
from estr.errors import UsageError

INSTRUCTIONS = (
    "Solve the problem step by step. For arithmetic write <calc>EXPRESSION</calc> and wait for the result. "
    "End with a line '#### NUMBER'."
)


class Gsm8kTask:
    """The episode of task ``calculator`` on GSM8K, or on any file of its format.

    Training problems go through the file in an order of its own in every epoch, derived from the seed. Held out are
    ``eval_path``, or else the file ``test.jsonl`` beside ``path``, or else the last tenth of ``path``; without a
    ``path``, train and test split come from the Hugging Face hub.

    Demonstrations are the worked solutions with their annotations turned into calls; the tool's replies are the
    calculator's. In the published files 27,995 of the 27,998 annotations state the calculator's value as a number;
    1 states it as a fraction (``3/4``; the tool says 0.75) and 2 use ``//``, no operation here (they make no call).
    """

    name = "gsm8k"
    description = "GSM8K word problems from a local JSONL file or the Hugging Face hub, with a calculator as the tool."
    options: ClassVar[dict[str, Option]] = {
        "seed": Option(0, "The order of training problems is derived from it.", whole(0)),
        "path": Option("", "JSONL file to train on; empty: from the Hugging Face hub.", text),
        "eval_path": Option("", "JSONL file held out; empty: test.jsonl beside path, else its last tenth.", text),
        "instructions": Option(INSTRUCTIONS, "Text before every problem; empty for none.", text),
        "max_problem_chars": Option(0, "Longest problem kept, in characters; 0: any.", whole(0)),
        "max_calls": Option(0, "Most calculator calls of a kept problem's worked solution; 0: any.", whole(0)),
        **LATENCY_OPTIONS,
        **SHUFFLE_OPTIONS,
    }

    def __init__(self, **options: Any) -> None:
        values = resolve(self.name, self.options, options)
        self.seed: int = values["seed"]
        self.instructions: str = values["instructions"]
        self._longest: int = values["max_problem_chars"]
        self._most_calls: int = values["max_calls"]
        self._latency = Latency.of(values)
        self._shuffled_mean = values["shuffled_mean"] if values["shuffle_rewards"] else None
        train, held_out = _load(values["path"], values["eval_path"])
        self.train_rows = self._kept(train, "training")
        self.eval_rows = self._kept(held_out, "held-out")
        self._epoch_order = lru_cache(maxsize=2)(self._order)

    def train_problem(self, index: int) -> Problem:
        epoch, position = divmod(index, len(self.train_rows))
        return self._problem(self.train_rows[self._epoch_order(f"train/{self.seed}/{epoch}")[position]], "train")

    def eval_problems(self, count: int) -> Sequence[Problem]:
        return [self._problem(row, HELD_OUT) for row in self.eval_rows[: max(0, count)]]

    def environment(self) -> CalculatorEnvironment:
        return CalculatorEnvironment(self._latency, self.instructions, self._shuffled_mean)

    def demonstrations(self, seed: int) -> Iterator[list[Message]]:
        """Endless: the worked solutions of the training rows, in another order every epoch; ``seed`` alone matters."""
        for epoch in naturals():
            for position in self._order(f"demonstrations/{seed}/{epoch}"):
                yield gsm8k_data.conversation(self.train_rows[position], self.instructions)

    def _order(self, key: str) -> list[int]:
        order = list(range(len(self.train_rows)))
        random.Random(key).shuffle(order)
        return order

    def _kept(self, rows: list[Row], part: str) -> list[Row]:
        kept = [
            row
            for row in rows
            if (not self._longest or len(row.question) <= self._longest)
            and (not self._most_calls or row.answer.count("<<") <= self._most_calls)
        ]
        if not kept:
            raise UsageError(f"task 'gsm8k' has no {part} problem: the file is empty, or its filters keep no row")
        return kept

    def _problem(self, row: Row, split: str) -> Problem:
        task_id = f"gsm8k-{split}-{row.line}"
        return Problem(task_id, row.question, format_number(row.number), {"split": split, "line": row.line})


def _load(path: str, eval_path: str) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows."""
    if not path:
        held_out = gsm8k_data.read_jsonl(eval_path) if eval_path else gsm8k_data.read_hub("test")
        return gsm8k_data.read_hub("train"), held_out
    rows = gsm8k_data.read_jsonl(path)
    sibling = Path(path).expanduser().parent / "test.jsonl"
    if not eval_path and sibling.is_file() and not sibling.samefile(Path(path).expanduser()):
        eval_path = str(sibling)
    if eval_path:
        return rows, gsm8k_data.read_jsonl(eval_path)
    held_out_count = max(1, len(rows) // 10)
    return rows[:-held_out_count], rows[-held_out_count:]
