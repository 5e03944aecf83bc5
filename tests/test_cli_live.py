"""What a person sees of a run: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from estr.cli.live import LineReporter, describe
from estr.cli.main import main
from loop_helpers import write_config

METRICS = {
    "reward/mean": 0.5,
    "eval/reward": 0.25,
    "throughput/trained_tokens_per_second": 1234.0,
    "staleness/inter_mean": 1.0,
    "staleness/intra_mean": 0.5,
    "gate/masked_fraction": 0.021,
}


def test_a_step_in_one_line() -> None:
    assert describe(METRICS) == "reward 0.500, held-out 0.250, 1,234 tokens/s, staleness 1.0+0.5, masked 2.10%"
    assert describe({}) == ""


def test_plain_lines_come_a_few_seconds_apart_and_for_each_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = LineReporter()
    reporter.start(Path("runs/a"), 0, 9)
    for step in range(1, 10):
        reporter.step(step, {"reward/mean": 0.5} | ({"eval/reward": 0.25} if step == 4 else {}))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "run directory runs/a, step 0 of 9"
    assert [line.split(":")[0] for line in lines[1:]] == ["step 1/9", "step 4/9", "step 9/9"]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Standard error is a terminal of 100 columns; what was shown on it is there when the block ends."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown: list[str] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end was closed
            while data := os.read(ours, 4096):
                shown.append(data.decode(errors="replace"))

    reader = threading.Thread(target=read)
    reader.start()
    with open(theirs, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        try:
            yield shown
        finally:
            monkeypatch.undo()
    reader.join(10)
    os.close(ours)


def test_a_terminal_shows_how_far_the_run_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, run = write_config(tmp_path / "run.toml", run={"steps": 3}), tmp_path / "run"
    with terminal(monkeypatch) as shown:
        assert main(["train", str(config), "--output", str(run)]) == 0
    text = "".join(shown)
    assert "3/3" in text
    assert "tokens/s" in text
    assert "masked" in text
    assert "Traceback" not in text


def test_an_error_on_a_terminal_stands_below_the_live_view(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = {"name": "loop_tasks:Faulty", "how": "problem"}
    config = write_config(tmp_path / "run.toml", task=task)
    with terminal(monkeypatch) as shown:
        assert main(["train", str(config), "--output", str(tmp_path / "run")]) == 1
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", "".join(shown).replace("\r", "\n"))
    assert any(line.startswith("estr: the task raised LookupError for problem 0") for line in plain.splitlines())
