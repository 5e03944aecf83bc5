"""Optimizer steps that cannot be applied: stop with a checkpoint and a diagnosis, or go back with a smaller rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from estr.errors import RunError
from estr.runtime.divergence import Divergence, Rollbacks
from estr.storage.checkpoints import checkpoint_steps, latest_checkpoint
from estr.storage.ledger import Ledger
from estr.storage.metrics import read_metrics
from estr.storage.run_directory import RunDirectory
from loop_helpers import SMALL, estr, small, stored, write_config

DIVERGING = SMALL["learner"] | {"learning_rate": 1e30, "max_skipped_steps": 2}


def trained_once(run: Path) -> None:
    """Every trajectory is trained once, in the step its row says, or dropped with a reason."""
    rows = {row.trajectory_id: row for state in ("trained", "dropped") for row in stored(run, state)}
    with Ledger(RunDirectory(run)) as ledger:
        history = ledger.history()
    assert len(rows) == len(history)
    for name, state, step, reason in history:
        assert (rows[name].state, rows[name].trained_step, rows[name].drop_reason) == (
            state,
            step if state == "trained" else None,
            reason,
        )


def test_it_stops_with_a_checkpoint_and_a_diagnosis(tmp_path: Path, capsys: Any) -> None:
    config = write_config(tmp_path / "run.toml", run={"steps": 20, "checkpoint_every": 100}, learner=DIVERGING)
    outcome = estr(capsys, "train", config, "--output", tmp_path / "run")
    assert outcome.status == 1
    assert "2 optimizer steps in a row were skipped at version 1, the last because" in outcome.complaint
    assert "learning rate 1e+30" in outcome.complaint
    checkpoint = latest_checkpoint(RunDirectory(tmp_path / "run")).checkpoint
    assert checkpoint is not None
    assert (checkpoint.kind, checkpoint.step) == ("diverged", 3)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]
    assert {row.drop_reason.partition(":")[0] for row in stored(tmp_path / "run", "dropped")} == {
        "step 2 was skipped",
        "step 3 was skipped",
    }
    trained_once(tmp_path / "run")


def test_it_goes_back_with_a_smaller_rate_and_trains_everything_once(tmp_path: Path, capsys: Any) -> None:
    learner = DIVERGING | {"on_divergence": "rollback", "rollback_factor": 1e-33}
    config = write_config(tmp_path / "run.toml", run={"steps": 8}, learner=learner, schedule={"mode": "lockstep"})
    outcome = estr(capsys, "train", config, "--output", tmp_path / "run")
    assert outcome.status == 0, outcome.err
    assert "going back to the start with learning rate 0.001: 2 optimizer steps in a row were skipped" in outcome.err
    metrics = read_metrics(tmp_path / "run")
    assert [line["step"] for line in metrics] == list(range(1, 9))
    assert [line["learner/learning_rate"] for line in metrics] == pytest.approx([1e-3] * 8)
    assert metrics[-1]["version"] == 8
    (record,) = json.loads((tmp_path / "run" / "rollbacks.json").read_text())["rollbacks"]
    assert (record["step"], record["to"], record["factor"]) == (3, 0, 1e-33)
    trained_once(tmp_path / "run")


def test_it_gives_up_after_so_many_times(tmp_path: Path, capsys: Any) -> None:
    learner = DIVERGING | {"on_divergence": "rollback", "rollback_factor": 0.9, "max_rollbacks": 2}
    config = write_config(tmp_path / "run.toml", run={"steps": 20}, learner=learner)
    outcome = estr(capsys, "train", config, "--output", tmp_path / "run")
    assert outcome.status == 1
    assert outcome.err.count("going back to") == 2
    assert "optimizer steps in a row were skipped" in outcome.complaint
    assert checkpoint_steps(RunDirectory(tmp_path / "run")) == [3]


class Bench:
    """A run directory with checkpoints that were never trained."""

    def __init__(self, path: Path, **learner: Any) -> None:
        self.config = small(learner={"on_divergence": "rollback", **learner})
        self.run = RunDirectory.create(path, self.config)

    def checkpoint(self, step: int, kind: str = "periodic", skipped: int = 0) -> None:
        from estr.storage.checkpoints import save_checkpoint

        save_checkpoint(self.run, step, None, None, {}, {"learner": {"skipped_in_row": skipped}}, kind)

    @property
    def rollbacks(self) -> Rollbacks:
        return Rollbacks(self.run, self.config)


def test_a_checkpoint_from_amid_the_trouble_is_not_good(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "run", max_rollbacks=3)
    bench.checkpoint(4)
    bench.checkpoint(6, skipped=1)
    bench.checkpoint(8, kind="diverged")
    good = bench.rollbacks.go_back(Divergence("NaN", 9))
    assert good is not None
    assert good.step == 4
    again = bench.rollbacks
    assert (again.factor, again.left) == (0.5, 2), "a killed run goes on with the smaller rate"
    again.go_back(Divergence("NaN", 9))
    assert again.slowed(bench.config).learner.learning_rate == pytest.approx(0.01 * 0.25)
    assert bench.config.learner.learning_rate == 0.01


def test_without_a_checkpoint_from_before_the_run_stops(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "run")
    bench.checkpoint(6, skipped=1)
    with pytest.raises(RunError, match="NaN; no checkpoint from before that is left to go back to"):
        bench.rollbacks.go_back(Divergence("NaN", 7))
    assert bench.rollbacks.left == 3


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "run")
    for text in ("{", "[]", '{"rollbacks": [{}]}', '{"rollbacks": 3}'):
        (tmp_path / "run" / "rollbacks.json").write_text(text)
        with pytest.raises(RunError, match=r"rollbacks.json cannot be read"):
            _ = bench.rollbacks


def test_steps_that_are_skipped_cost_no_good_checkpoint(tmp_path: Path, capsys: Any) -> None:
    """The weights go bad after a good while. With a checkpoint due at every step, the last good one stays, and the run
    goes back to it, not to the start, and not nowhere."""
    from estr.runtime.run import Parts
    from loop_helpers import train

    def spoil(parts: Parts) -> None:
        norm = parts.learner.optimizer.gradient_norm

        def later() -> float:
            return float("nan") if parts.learner.version >= 4 else norm()

        parts.learner.optimizer.gradient_norm = later  # type: ignore[method-assign]

    learner = SMALL["learner"] | {"max_skipped_steps": 4, "on_divergence": "rollback"}
    config = small(run={"steps": 20, "checkpoint_every": 1, "keep_checkpoints": 2}, learner=learner)
    run = tmp_path / "run"
    with pytest.raises(Divergence) as raised:
        train(config, run, hook=spoil)
    assert checkpoint_steps(RunDirectory(run)) == [3, 4]
    good = Rollbacks(RunDirectory(run), config).go_back(raised.value)
    assert good is not None
    assert good.step == 4


def test_the_newest_good_checkpoint_outlives_newer_ones_from_amid_the_trouble(tmp_path: Path) -> None:
    from estr.runtime.divergence import is_good
    from estr.storage.checkpoints import newest_step, retain_checkpoints

    bench = Bench(tmp_path / "run")
    for step in (1, 2):
        bench.checkpoint(step)
    for step in (3, 4, 5):
        bench.checkpoint(step, kind="interrupted", skipped=1)
    good = newest_step(bench.run, is_good)
    assert good == 2
    assert retain_checkpoints(bench.run, 2, (good,)) == [4, 5]
    assert checkpoint_steps(bench.run) == [2, 4, 5]
