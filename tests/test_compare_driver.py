"""Many runs over a few cores, with a trainer that follows a script: resumed, failed, interrupted, never twice."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from estr.cli.comparing import Progress, time_left
from estr.compare.driver import Driver, Status, estr_command
from estr.compare.plan import Plan, PlannedRun, entries_of, points_of
from estr.compare.study import read_study
from estr.errors import UsageError
from estr.runtime.interrupts import Interrupted

TRAINER = Path(__file__).parent / "compare_trainer.py"
STUDY = """[run]
steps = 4
[schedule]
mode = "lockstep"
[compare]
recipes = ["grpo", "estr"]
seeds = [0, 1]
"""


def planned(folder: Path, text: str = STUDY) -> list[PlannedRun]:
    path = folder / "study.toml"
    path.write_text(text)
    study = read_study(path)
    plan = Plan(study)
    plan.cells(entries_of(study), points_of(study), study.section.seeds)
    return plan.runs


def with_fate(folder: Path, fate: int, seeds: str = "[0, 1]") -> list[PlannedRun]:
    variant = f"[compare.variants.estr]\nset.run.keep_rollouts = {fate}\n"
    return planned(folder, STUDY.replace("[0, 1]", seeds) + variant)


def scripted(folder: Path) -> Callable[[PlannedRun, Path, Path], list[str]]:
    return lambda run, config, directory: [
        sys.executable,
        str(TRAINER),
        str(folder / "calls"),
        str(config),
        str(directory),
    ]


def calls(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def driver(folder: Path, **options) -> Driver:
    return Driver(folder / "out", 2, command=scripted(folder), **options)


def test_every_run_is_a_directory_and_is_not_run_again(tmp_path: Path) -> None:
    runs = planned(tmp_path)
    statuses = driver(tmp_path)(runs)
    assert {name: status.state for name, status in statuses.items()} == dict.fromkeys(
        ("grpo-s0", "estr-s0", "grpo-s1", "estr-s1"), "finished"
    )
    assert (tmp_path / "out" / "runs" / "estr-s1" / "config.toml").is_file()
    assert len(calls(tmp_path)) == 4
    assert {call["threads"] for call in calls(tmp_path)} == {"1"}
    assert {status.state for status in driver(tmp_path)(runs).values()} == {"finished"}
    assert len(calls(tmp_path)) == 4


def test_a_failed_run_is_told_and_the_study_goes_on_then_it_is_taken_up_again(tmp_path: Path) -> None:
    runs = with_fate(tmp_path, 1, "[0]")
    statuses = driver(tmp_path)(runs)
    assert statuses["grpo-s0"].state == "finished"
    assert (statuses["estr-s0"].state, statuses["estr-s0"].reason) == ("failed", "the verifier broke")
    assert driver(tmp_path)(runs)["estr-s0"].state == "finished"
    assert [(call["name"], call["resumed"]) for call in calls(tmp_path)][-1] == ("estr-s0", True)
    assert len(calls(tmp_path)) == 3


def test_a_run_that_could_not_begin_is_told_with_its_own_words(tmp_path: Path) -> None:
    status = driver(tmp_path)(with_fate(tmp_path, 4, "[0]"))["estr-s0"]
    assert (status.state, status.reason) == ("failed", "estr: nothing can begin")
    assert (tmp_path / "out" / "logs" / "estr-s0.log").read_text() == "estr: nothing can begin\n"


def test_a_diverged_run_has_ended(tmp_path: Path) -> None:
    runs = with_fate(tmp_path, 2, "[0]")
    assert driver(tmp_path)(runs)["estr-s0"].state == "diverged"
    assert driver(tmp_path)(runs)["estr-s0"].state == "diverged"
    assert len(calls(tmp_path)) == 2


def test_another_configuration_under_the_same_name_is_refused(tmp_path: Path) -> None:
    driver(tmp_path)(planned(tmp_path))
    with pytest.raises(UsageError, match="made from another configuration"):
        driver(tmp_path)(planned(tmp_path, STUDY.replace("steps = 4", "steps = 6")))


def test_an_interrupt_reaches_the_runs_which_end_before_it_is_told(tmp_path: Path) -> None:
    runs = with_fate(tmp_path, 3, "[0, 1, 2]")
    ready = [tmp_path / "out" / "runs" / f"estr-s{seed}" / "ready" for seed in (0, 1)]

    class Interrupter:
        def changed(self, status: Status, statuses: object) -> None: ...

        def tick(self, statuses: object, seconds: float) -> None:
            if all(path.exists() for path in ready):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="goes on"):
        driver(tmp_path, observer=Interrupter())(runs)
    for path in ready:
        assert json.loads((path.parent / "run.json").read_text())["state"] == "interrupted"
    assert not (tmp_path / "out" / "runs" / "estr-s2").exists()


def test_no_more_runs_at_once_than_workers(tmp_path: Path) -> None:
    seen = []

    class Counter:
        def changed(self, status: Status, statuses: list[Status]) -> None:
            seen.append(sum(one.state == "running" for one in statuses))

        def tick(self, statuses: object, seconds: float) -> None: ...

    driver(tmp_path, observer=Counter())(planned(tmp_path))
    assert max(seen) == 2


def test_report_only_trains_nothing(tmp_path: Path) -> None:
    statuses = driver(tmp_path, train=False)(planned(tmp_path))
    assert {status.state for status in statuses.values()} == {"waiting"}
    assert not (tmp_path / "calls").exists()


def test_checkpoints_of_finished_runs_may_be_removed(tmp_path: Path) -> None:
    driver(tmp_path, keep_checkpoints=False)(planned(tmp_path))
    run = tmp_path / "out" / "runs" / "grpo-s0"
    assert not (run / "checkpoints").exists()
    assert (run / "metrics.jsonl").is_file()


def test_commands_train_first_and_resume_what_has_begun(tmp_path: Path) -> None:
    run = planned(tmp_path)[0]
    directory = tmp_path / "run"
    assert estr_command(run, tmp_path / "c.toml", directory)[3:] == [
        "train",
        str(tmp_path / "c.toml"),
        "--output",
        str(directory),
    ]
    directory.mkdir()
    assert estr_command(run, tmp_path / "c.toml", directory)[3:] == ["resume", str(directory)]


def test_time_left_counts_the_steps_of_this_call_alone(tmp_path: Path) -> None:
    runs = planned(tmp_path)
    statuses = driver(tmp_path)(runs)
    done, waiting = list(statuses.values())[:2], Status(runs[2], tmp_path / "nowhere")
    assert time_left([*done, waiting], 16.0) == pytest.approx(4 * 16.0 / 8)  # 8 steps took 16 s, 4 are missing
    done[0].steps_before = 4
    assert time_left([*done, waiting], 16.0) == pytest.approx(4 * 16.0 / 4)
    assert time_left([waiting], 16.0) is None


def test_lines_say_what_began_and_what_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driver(tmp_path, observer=Progress())(with_fate(tmp_path, 1, "[0]"))
    lines = capsys.readouterr().err.splitlines()
    assert "grpo-s0 begins" in lines
    assert any(line.startswith("estr-s0 failed: the verifier broke (") for line in lines)
