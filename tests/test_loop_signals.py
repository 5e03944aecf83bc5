"""Signals outside a run's loop and inside an evaluation, kills between a checkpoint and its mark, and closed pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from estr.cli import main as command
from estr.cli.stopping import say
from estr.errors import StopNow
from estr.runtime import saving
from estr.runtime.interrupts import Interrupted, Interrupts
from estr.runtime.setup import Parts
from estr.storage.checkpoints import Best, best_checkpoint, checkpoint_steps
from estr.storage.metrics import read_metrics
from estr.storage.run_directory import RunDirectory
from loop_helpers import COMMAND, estr, go_on, metrics_without_clock, small, started, train, wait_for, write_config

EVALUATED: dict[str, Any] = {"run": {"steps": 4, "eval_every": 2, "eval_prompts": 3}}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_outside_a_run_is_a_sentence(capsys: Any, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    before = signal.getsignal(number)
    monkeypatch.setitem(command.COMMANDS, "tasks", lambda arguments: signal.raise_signal(number))
    outcome = estr(capsys, "tasks")
    assert (outcome.status, outcome.complaint) == (130, "interrupted")
    assert signal.getsignal(number) is before


def test_a_signal_while_the_engines_start_stops_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = write_config(tmp_path / "run.toml", schedule={"mode": "async"}, runtime={"engines": 1})
    with started(tmp_path, "train", config, "--output", run) as process:
        wait_for(lambda: "starting the engines" in process.err_path.read_text(), "the engines to start")
        process.send(signal.SIGTERM)
        outcome = process.finish()
    assert outcome.status == 130
    assert outcome.complaint == f"stopped at once; go on with: estr resume {run}"


def test_the_first_signal_is_answered_at_once_and_the_second_obeyed(capfd: Any) -> None:
    with Interrupts("stopping soon") as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err == "stopping soon\n"
        with pytest.raises(Interrupted):
            interrupts.check()
        with pytest.raises(StopNow):
            signal.raise_signal(signal.SIGINT)
    with Interrupts() as interrupts:
        interrupts.immediate = True
        with pytest.raises(StopNow):
            signal.raise_signal(signal.SIGTERM)


def test_a_closed_terminal_asks_for_a_checkpoint_unless_the_run_was_told_to_ignore_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with Interrupts() as interrupts:
            for _ in range(2):  # the shell and the kernel send one each
                signal.raise_signal(signal.SIGHUP)
            assert interrupts.asked
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            assert not interrupts.asked
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("at", [2, 3], ids=["amid the run", "at its end"])
def test_an_interrupted_evaluation_is_made_up_for(tmp_path: Path, at: int) -> None:
    """It stops between two decode steps, the step that it belongs to is kept, and the resume gives the same run."""

    def press(parts: Parts) -> None:
        assert parts.evaluator is not None
        evaluate, calls = parts.evaluator.evaluate, []

        def pressed(tensors: Any, check: Any) -> Any:
            calls.append(1)
            if len(calls) == at:
                signal.raise_signal(signal.SIGINT)
            return evaluate(tensors, check)

        parts.evaluator.evaluate = pressed  # type: ignore[method-assign]

    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(small(**EVALUATED), run, hook=press)
    step = 2 * (at - 1)
    assert checkpoint_steps(RunDirectory(run))[-1] == step
    assert "eval/reward" not in read_metrics(run)[-1]
    go_on(run)
    straight = train(small(**EVALUATED), tmp_path / "straight")
    assert metrics_without_clock(run) == metrics_without_clock(straight)
    assert best_checkpoint(RunDirectory(run)) == best_checkpoint(RunDirectory(straight))


def test_a_kill_between_a_checkpoint_and_its_mark_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(saving, "mark_best", killed)
    run = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        train(small(**EVALUATED), run)
    monkeypatch.undo()
    assert best_checkpoint(RunDirectory(run)) is None
    marked: list[Best | None] = []

    def look(*_: object) -> None:
        marked.append(best_checkpoint(RunDirectory(run)))
        raise ZeroDivisionError

    monkeypatch.setattr("estr.runtime.run.Run._train_batch", look)
    with pytest.raises(ZeroDivisionError):
        go_on(run)
    assert marked == [Best(2, read_metrics(run)[1]["eval/reward"])]


def test_a_finished_run_without_a_report_gets_one(tmp_path: Path, capsys: Any) -> None:
    config, run = write_config(tmp_path / "run.toml", run={"steps": 1}), tmp_path / "run"
    assert estr(capsys, "train", config, "--output", run).status == 0
    (run / "report.html").unlink()
    outcome = estr(capsys, "resume", run)
    assert (outcome.status, outcome.out.splitlines()[-1]) == (0, f"report {run / 'report.html'}")
    assert (run / "report.html").is_file()
    assert "report" not in estr(capsys, "resume", run).out.splitlines()[-1]


def test_an_interrupt_while_the_report_is_written_says_that_the_run_is_finished(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("estr.report.write_report", lambda *_: signal.raise_signal(signal.SIGINT))
    config, run = write_config(tmp_path / "run.toml", run={"steps": 1}), tmp_path / "run"
    outcome = estr(capsys, "train", config, "--output", run)
    assert outcome.status == 130
    assert outcome.complaint == f"the run is finished; write its report with: estr report {run}"


def test_what_nobody_reads_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        say("into the pipe")
        say("and more")
        monkeypatch.undo()
    monkeypatch.setattr(sys, "stderr", None)
    say("nowhere at all")


def test_a_run_goes_on_when_its_standard_error_is_closed(tmp_path: Path) -> None:
    """As in ``estr train ... 2>&1 | head -1``."""
    config, run = write_config(tmp_path / "run.toml", run={"steps": 2}), tmp_path / "run"
    script = '"$@" 2>&1 | head -1; exit ${PIPESTATUS[0]}'
    (tmp_path / "loop_tasks.py").write_text((Path(__file__).parent / "loop_tasks.py").read_text())
    ended = subprocess.run(
        ["bash", "-c", script, "bash", *COMMAND, "train", str(config), "--output", str(run)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(ended.stdout.splitlines()) == 1
    assert len(read_metrics(run)) == 2
    assert checkpoint_steps(RunDirectory(run)) == [2]
