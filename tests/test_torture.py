"""The short form of `make torture`, and whether the proof can fail at all."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from torture.__main__ import torture
from torture.harness import Torturer
from torture.points import POINTS
from torture.proof import Proof


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_fault_E3_killed_runs_lose_nothing(tmp_path: Path) -> None:
    torturer = Torturer(tmp_path, seed=0)
    torture(torturer, kills=8, most=4)
    assert torturer.tally.total >= 8
    assert torturer.tally.facts["trained"] >= 8


def test_fault_E3_killed_runs_of_a_real_model_lose_nothing(tmp_path: Path) -> None:
    torturer = Torturer(tmp_path, seed=1, pretended=False)
    torture(torturer, kills=2, most=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("pretended", "kills"), [(True, 100), (False, 15)])
def test_fault_E3_runs_killed_at_every_point_lose_nothing(tmp_path: Path, pretended: bool, kills: int) -> None:
    torture(Torturer(tmp_path, seed=2, pretended=pretended), kills)


def test_every_phase_has_a_point_in_every_mode_it_exists_in() -> None:
    phases = {(point.phase, mode) for point in POINTS for mode in point.modes}
    for phase in ("generating", "waiting for a tool", "finished, not taken", "in the learner", "writing a checkpoint"):
        assert {(phase, mode) for mode in ("async", "sync", "lockstep")} <= phases
    for phase in ("renaming a checkpoint", "resuming", "settling", "storing rows"):
        assert {(phase, mode) for mode in ("async", "sync", "lockstep")} <= phases
    assert {("publishing", "async"), ("publishing", "sync")} <= phases


def test_the_proof_notices_what_is_wrong(tmp_path: Path) -> None:
    """Each promise broken by hand in a copy of a whole run."""
    import shutil

    path = Torturer(tmp_path, seed=0).reference("lockstep")
    Proof(path).check(counts=True)

    def broken(name: str) -> Path:
        shutil.copytree(path, tmp_path / name)
        return tmp_path / name

    def ledger(run: Path, *statements: str) -> None:
        raw = sqlite3.connect(run / "spool" / "ledger.sqlite")
        for (trigger,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            raw.execute(f"DROP TRIGGER {trigger}")
        for statement in statements:
            raw.execute(statement)
        raw.commit()
        raw.close()

    def rows(run: Path, step: int, column: str, values: list[object]) -> None:
        file = next(run.glob(f"rollouts/step-{step:06d}*.parquet"))
        table = pq.read_table(file)
        at = table.column_names.index(column)
        pq.write_table(table.set_column(at, table.schema.field(at), [values[: len(table)]]), file)

    lost = broken("lost")
    next(lost.glob("rollouts/*.parquet")).unlink()
    twice = broken("twice")
    file = next(twice.glob("rollouts/*.parquet"))
    shutil.copy(file, file.with_name("step-000009.7.parquet"))
    short = broken("short")
    ledger(short, "UPDATE trajectories SET state = 'finished', step = NULL WHERE id = '00000000-000'")
    elsewhere = broken("elsewhere")
    ledger(elsewhere, "UPDATE trajectories SET step = 9 WHERE id = '00000000-000'")
    passed_over = broken("passed-over")
    ledger(passed_over, "DELETE FROM trajectories WHERE number = 2")
    late = broken("late")
    rows(late, 8, "target_version", [99] * 10)
    unseen = broken("unseen")
    ledger(
        unseen,
        "UPDATE trajectories SET state = 'dropped', reason = 'x' WHERE number = 0",
    )
    line = broken("line")
    (line / "metrics.jsonl").write_text("".join((line / "metrics.jsonl").read_text().splitlines(True)[:-1]))
    left = broken("left")
    (left / "checkpoints" / ".tmp-step-000001-ab").mkdir()
    for run in (lost, twice, short, elsewhere, passed_over, late, unseen, line, left):
        with pytest.raises(AssertionError):
            Proof(run).check(counts=True)
