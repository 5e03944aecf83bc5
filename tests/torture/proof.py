"""What a run must show at its end, from its ledger, its stored rollouts and its weights alone."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from estr.config import Config
from estr.storage.checkpoints import latest_checkpoint
from estr.storage.ledger import Ledger
from estr.storage.metrics import read_metrics
from estr.storage.rollout_files import read_rollouts
from estr.storage.run_directory import RunDirectory
from estr.storage.run_record import RunRecord
from estr.trajectory import derive_seed


class Proof:
    """A finished run; ``check`` raises AssertionError at the first broken promise, ``facts`` are for the report."""

    def __init__(self, path: Path) -> None:
        self.run = RunDirectory.open(path)
        self.config: Config = self.run.config()
        self.rows: list[dict[str, Any]] = read_rollouts(self.run).to_pylist()
        with Ledger(self.run) as ledger:
            self.history = ledger.history()

    @property
    def facts(self) -> collections.Counter[str]:
        states = collections.Counter(state for _, state, _, _ in self.history)
        resumed = sum(bool(row["resumed_at"]) for row in self.rows if row["state"] == "trained")
        return collections.Counter({**states, "went on from a turn": resumed})

    def check(self, counts: bool = False) -> None:
        """``counts``: the pretended learner's count of what its weights have seen is in the last checkpoint."""
        self._all_steps()
        self._exactly_once()
        self._groups_whole()
        self._staleness()
        self._rows_fit_the_ledger()
        if counts:
            self._weights_saw_it()
        self._nothing_left_behind()

    def _all_steps(self) -> None:
        steps = [line["step"] for line in read_metrics(self.run)]
        assert steps == list(range(1, self.config.run.steps + 1)), f"steps in metrics.jsonl: {steps}"
        assert RunRecord(self.run).state == "finished"

    def _exactly_once(self) -> None:
        """Every number was given, every sibling of it has one fate: trained once, or dropped with a reason."""
        numbers = {int(name[:8]) for name, *_ in self.history}
        assert numbers == set(range(len(numbers))), "a prompt was passed over"
        assert {state for _, state, _, _ in self.history} <= {"trained", "dropped"}
        assert all(reason for _, state, _, reason in self.history if state == "dropped")
        trained = [name[:12] for name, state, _, _ in self.history if state == "trained"]
        assert len(trained) == len(set(trained)), "two attempts of one sibling were trained"

    def _groups_whole(self) -> None:
        """A group that was trained was trained whole, in one optimizer step."""
        steps = collections.defaultdict(list)
        for name, state, step, _ in self.history:
            if state == "trained":
                steps[name[:8]].append(step)
        for group, found in steps.items():
            assert len(found) == self.config.rollout.group_size, f"group {group} was trained short: {found}"
            assert len(set(found)) == 1, f"group {group} was trained in several steps: {found}"

    def _staleness(self) -> None:
        schedule, learner = self.config.schedule, self.config.learner
        steps = learner.minibatches * learner.epochs
        bounds = {
            "async": schedule.max_staleness,
            "sync": steps - 1,
            "lockstep": schedule.inter + schedule.intra + steps - 1,
        }
        for row in self.rows:
            versions = np.array(row["version"])[np.array(row["action"], bool)]
            if row["state"] == "trained" and len(versions):
                lag = row["target_version"] - int(versions[0])
                assert lag <= bounds[schedule.mode], f"{row['trajectory_id']} was trained {lag} versions late"

    def _rows_fit_the_ledger(self) -> None:
        names = collections.Counter(row["trajectory_id"] for row in self.rows)
        assert set(names.values()) <= {1}, "a trajectory stands twice in rollouts/"
        rows = {row["trajectory_id"]: row for row in self.rows if row["segment"] == 0}
        assert rows.keys() == {name for name, *_ in self.history}
        for name, state, step, reason in self.history:
            row = rows[name]
            expected = (state, step if state == "trained" else None, reason)
            assert (row["state"], row["trained_step"], row["drop_reason"]) == expected, name
            assert row["seed"] == derive_seed(self.config.run.seed, int(name[:8]), row["sibling"], row["attempt"])

    def _weights_saw_it(self) -> None:
        """The weights of the last checkpoint saw what the ledger says was trained, each once, and nothing else."""
        checkpoint = latest_checkpoint(self.run).checkpoint
        assert checkpoint is not None
        seen = checkpoint.tensors()["counts"].numpy()
        expected = np.zeros_like(seen)
        for name, state, _, _ in self.history:
            if state == "trained":
                expected[int(name[:8]), int(name[9:12])] += 1
        np.testing.assert_array_equal(seen, expected)

    def _nothing_left_behind(self) -> None:
        leftovers = [path for path in self.run.path.rglob("*") if ".tmp" in path.name or path.name.startswith(".old-")]
        assert not leftovers, f"left behind: {leftovers}"
        assert list(self.run.spool.glob("estr-*")) == []

    def weights(self) -> dict[str, bytes]:
        """The final weights, bit for bit."""
        checkpoint = latest_checkpoint(self.run).checkpoint
        assert checkpoint is not None
        return {name: value.tobytes() for name, value in load_file(checkpoint.path / "model.safetensors").items()}

    def timeless(self) -> tuple[Any, Any]:
        """Everything of metrics and rollouts that a clock has no part in."""
        clock = ("wall_time", "time/", "throughput/")
        metrics = [{k: v for k, v in line.items() if not k.startswith(clock)} for line in read_metrics(self.run)]
        rows = sorted(({k: repr(v) for k, v in row.items()} for row in self.rows), key=lambda row: row["trajectory_id"])
        return metrics, rows
