"""A resume of a run directory from which somebody has removed something, or that another version has written."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from estr.runtime.interrupts import Interrupted
from estr.storage.metrics import read_metrics
from loop_helpers import Watcher, ask_to_stop, estr, small, train

AT = 3


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after three steps."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Interrupted):
        train(small(), path, Watcher(on_step=lambda step: ask_to_stop() if step == AT else None))
    return path


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def remove(*names: str) -> Callable[[Path], None]:
    def removing(run: Path) -> None:
        for name in names:
            path = run / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return removing


def cut(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[1:]))


@pytest.mark.parametrize(
    ("harm", "note"),
    [
        (remove("metrics.jsonl"), "metrics.jsonl lacks 3 steps, 1 to 3, of the 3 up to the checkpoint"),
        (cut, "metrics.jsonl lacks step 1 of the 3 up to the checkpoint"),
        (remove("rollouts"), "rollouts/ lacks 3 steps, 1 to 3, of the 3 up to the checkpoint"),
        (remove("rollouts/step-000002.parquet"), "rollouts/ lacks step 2 of the 3 up to the checkpoint"),
    ],
)
def test_what_is_missing_is_said_in_a_line(run: Path, capsys: Any, harm: Callable[[Path], None], note: str) -> None:
    harm(run)
    outcome = estr(capsys, "resume", run)
    assert outcome.status == 0, outcome.err
    assert [line for line in outcome.err.splitlines() if "lacks" in line] == [
        f"note: {note}: was it removed? The run goes on without"
    ]
    assert [line["step"] for line in read_metrics(run)][-3:] == [4, 5, 6]


def test_of_what_is_whole_nothing_is_said(run: Path, capsys: Any) -> None:
    outcome = estr(capsys, "resume", run)
    assert (outcome.status, "lacks" in outcome.err) == (0, False)


@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_a_ledger_that_is_gone_is_named_as_that(run: Path, capsys: Any, how: str) -> None:
    for path in (run / "spool").glob("ledger.sqlite*"):
        path.unlink()
    if how == "emptied":
        (run / "spool" / "ledger.sqlite").touch()
    outcome = estr(capsys, "resume", run)
    assert outcome.status == 1
    assert "is empty, but up to step 3" in outcome.complaint
    assert "it was removed or emptied" in outcome.complaint
    assert len(read_metrics(run)) == AT


def test_a_ledger_of_another_version_is_named_as_that(run: Path, capsys: Any) -> None:
    with sqlite3.connect(run / "spool" / "ledger.sqlite") as connection:
        connection.execute("UPDATE meta SET value = '1' WHERE key = 'format'")
    outcome = estr(capsys, "resume", run)
    assert outcome.status == 1
    assert "was written by another version of estr (its format is 1, this one reads 3)" in outcome.complaint


@pytest.mark.parametrize(("name", "key"), [("metrics", "step"), ("timeline", "version"), ("evaluations", "step")])
@pytest.mark.parametrize("value", ['"two"', "[1]", "true"])
def test_a_line_with_a_wrong_number_is_named(run: Path, capsys: Any, name: str, key: str, value: str) -> None:
    path = run / f"{name}.jsonl"
    before = path.read_text().splitlines()[:1] if path.exists() else []
    path.write_text("\n".join([*before, f'{{"{key}": {value}}}']) + "\n")
    outcome = estr(capsys, "resume", run)
    assert outcome.status == 2
    assert outcome.complaint == f"{path}, line {len(before) + 1}: {key} is no number; mend or remove that line"


def test_a_finished_run_from_before_there_were_records_is_finished(run: Path, capsys: Any) -> None:
    assert estr(capsys, "resume", run).status == 0
    (run / "run.json").unlink()
    assert estr(capsys, "runs", run).out.splitlines()[1].split()[1] == "finished"
    assert "is finished: 6 of 6 steps are done" in estr(capsys, "resume", run).out
