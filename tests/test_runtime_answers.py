"""Answers of problems that are more than plain data: what a resume compares, and what engine processes can be sent."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from estr.environments.base import Problem
from estr.runtime.fingerprint import _canonical, fingerprint
from loop_helpers import TESTS, estr, small, write_config
from loop_tasks import Echo


class Opaque:
    """Its text holds its address."""


@dataclass
class Held:
    names: set[str]
    item: Any


class Answers(Echo):
    """Problems whose answers are what ``answer`` makes."""

    name = "answers"

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def train_problem(self, index: int) -> Problem:
        return Problem(f"echo-{index}", f"Say {index}", self.answer())


class Unsendable(Echo):
    """Every answer is a function that no other process can be given."""

    name = "unsendable"

    def train_problem(self, index: int) -> Problem:
        return Problem(f"echo-{index}", f"Say {index}", lambda: index)


def compared(answer: Any) -> str:
    return str(fingerprint(small(), Answers(answer), Path("/nowhere"))["task"]["sequence of problems"])


@pytest.mark.parametrize("answer", [Opaque, lambda: [Opaque()], lambda: Held({"a"}, Opaque()), lambda: {"k": Opaque()}])
def test_answers_are_compared_without_addresses(answer: Any) -> None:
    kept = [answer(), answer()]  # so that their addresses differ
    assert compared(lambda: kept[0]) == compared(lambda: kept[1])


def test_answers_that_differ_are_told_apart() -> None:
    assert compared(lambda: [1, 2]) != compared(lambda: [2, 1])
    assert compared(lambda: Held({"a"}, 1)) != compared(lambda: Held({"b"}, 1))


@pytest.mark.parametrize("answer", [3, "x", [1, (2,), ()], {"a": [None]}, (1, 2.5)])
def test_plain_answers_are_compared_as_runs_before_did(answer: Any) -> None:
    assert _canonical(answer) == repr(answer)


def test_an_answer_that_holds_itself_is_no_reason_to_refuse() -> None:
    answer: list[Any] = []
    answer.append(answer)
    assert compared(lambda: answer) == compared(lambda: answer)


def test_a_repr_that_raises_is_no_reason_to_refuse() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    assert compared(Broken) == compared(Broken)


def test_sets_are_compared_alike_in_every_process() -> None:
    program = "from estr.runtime.fingerprint import _canonical; print(_canonical([{'a', 'b', 'c', 'd', 'e'}]))"
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=TESTS,
            env={"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": ":".join(p for p in sys.path if p)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_an_answer_that_no_process_can_be_sent_ends_the_run_at_once(tmp_path: Path, capsys: Any) -> None:
    config = write_config(
        tmp_path / "run.toml",
        task={"name": "test_runtime_answers:Unsendable"},
        schedule={"mode": "async", "wait_timeout": 1e6},
        runtime={"engines": 1},
    )
    outcome = estr(capsys, "train", config, "--output", tmp_path / "run")
    assert outcome.status == 1
    assert "problem echo-0 cannot be sent to an engine process" in outcome.complaint
    assert "its answer and info must be plain data" in outcome.complaint
