"""All of storage together: a scripted run killed again and again ends as if it had never been killed."""

import collections
import functools
import os
import random

import numpy as np
import pytest
import torch

from estr.config import Config, RolloutConfig
from estr.storage.checkpoints import (
    checkpoint_path,
    latest_checkpoint,
    retain_checkpoints,
    save_checkpoint,
    withdraw_checkpoints_after,
)
from estr.storage.ledger import Ledger
from estr.storage.metrics import MetricsWriter, TimelineWriter, read_metrics
from estr.storage.rollout_files import RolloutWriter, read_rollouts
from estr.storage.rollouts import Settlement, rows_from
from estr.storage.run_directory import RunDirectory
from estr.trajectory import Segment, Trajectory, derive_seed

STEPS, SIZE, AHEAD, FAILING = 6, 2, 2, 3


def generate(group, sibling, attempt=0):
    seed = derive_seed(0, group, sibling, attempt)
    floats = np.full(2, -0.5, np.float32)
    tokens = np.array([seed % 1000, 1], np.int32)
    segment = Segment(tokens, np.ones(2, np.bool_), floats, -floats, np.zeros(2, np.int32))
    return Trajectory(group, sibling, attempt, f"t{group}", "p", seed, [segment], finish_reason="stop")


class ScriptedRun:
    """One optimizer step trains one group, in order; group FAILING loses a first attempt of sibling 0; the "model" is a
    count of what it was trained on."""

    def __init__(self, path):
        self.run = RunDirectory.open(path, lock=True) if path.exists() else RunDirectory.create(path, Config())
        self.metrics = MetricsWriter(self.run.metrics_path)
        self.timeline = TimelineWriter(self.run.timeline_path)
        self.rollouts = RolloutWriter(self.run)
        self.ledger = Ledger(self.run)
        self.resume()

    def resume(self):
        checkpoint, _ = latest_checkpoint(self.run)
        self.step = checkpoint.step if checkpoint else 0
        self.weights = checkpoint.tensors()["weights"] if checkpoint else torch.zeros(STEPS, SIZE)
        rewind = self.ledger.rewind_to(self.step, checkpoint.state["ledger"] if checkpoint else None)
        for writer in (self.metrics, self.timeline, self.rollouts):
            writer.withdraw_after(self.step)
        withdraw_checkpoints_after(self.run, self.step)
        for dropped in rewind.dropped:
            self.store(dropped.trajectory, self.step + 1, Settlement("dropped", drop_reason=dropped.reason))
        for one in rewind.in_flight:
            self.issue(one.group, one.sibling, one.attempt)

    def checkpoint(self):
        self.metrics.sync()
        state = {"ledger": self.ledger.position()}
        save_checkpoint(self.run, self.step, None, None, {"weights": self.weights}, state)
        self.ledger.commit(self.step, prune_through=retain_checkpoints(self.run, 2)[0])

    def store(self, trajectory, step, settlement):
        self.rollouts.write(step, rows_from(trajectory, settlement, RolloutConfig()))

    def issue(self, group, sibling, attempt=0):
        one = generate(group, sibling, attempt)
        self.ledger.issue(group, sibling, attempt, seed=one.seed, group_size=SIZE, task_id=one.task_id, prompt="p")

    def admit(self):
        while self.ledger.next_group < min(self.step + AHEAD + 1, STEPS):
            group = self.ledger.next_group
            with self.ledger.batch():
                for sibling in range(SIZE):
                    self.issue(group, sibling)

    def work(self):
        for one in self.ledger.in_flight():
            if (one.group, one.sibling, one.attempt) != (FAILING, 0, 0):
                self.ledger.finish(generate(one.group, one.sibling, one.attempt))
                continue
            with self.ledger.batch():
                self.ledger.drop(one.trajectory_id, "failed", self.step + 1, one.trajectory())
                self.issue(one.group, one.sibling, 1)
            self.store(one.trajectory(), self.step + 1, Settlement("dropped", drop_reason="failed"))

    def train(self):
        batch = [one for one in self.ledger.finished() if one.group == self.step]
        if len(batch) < SIZE:
            return
        self.step += 1
        self.ledger.settle([one.trajectory_id for one in batch], self.step)
        for one in batch:
            self.weights[one.group, one.sibling] += 1
            settlement = Settlement("trained", trained_step=self.step, target_version=self.step - 1)
            self.store(one, self.step, settlement)
        self.metrics.write(self.step, {"version": self.step})
        self.timeline.write("learner", "train", self.step, self.step + 1, version=self.step)
        if self.step % 2 == 0:
            self.checkpoint()

    def finish(self):
        while self.step < STEPS:
            self.admit()
            self.work()
            self.train()
        self.ledger.close()
        self.run.close()


def in_child(action):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_killed_at(path, call):
    """Run until the ``call``-th write, fsync, rename or unlink; half of a killed write is done."""
    seen = 0

    def counted(name, real):
        def wrapper(*arguments, **named):
            nonlocal seen
            seen += 1
            if seen == call:
                if name == "write":
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os._exit(9)
            return real(*arguments, **named)

        return wrapper

    for name in ("write", "fsync", "rename", "unlink"):
        setattr(os, name, counted(name, getattr(os, name)))
    ScriptedRun(path).finish()


def check_complete(path):
    run = RunDirectory.open(path)
    assert [record["step"] for record in read_metrics(run)] == list(range(1, STEPS + 1))
    weights = latest_checkpoint(run).checkpoint.tensors()["weights"]
    assert weights.tolist() == [[1.0] * SIZE] * STEPS
    rows = read_rollouts(run).to_pylist()
    names = collections.Counter(row["trajectory_id"] for row in rows)
    assert set(names.values()) == {1}
    with Ledger(run) as ledger:
        history = {name: (state, step) for name, state, step, _ in ledger.history()}
    assert {row["trajectory_id"]: row["state"] for row in rows} == {name: state for name, (state, _) in history.items()}
    assert sum(state == "trained" for state, _ in history.values()) == STEPS * SIZE
    for row in rows:
        if row["state"] == "trained":
            assert history[row["trajectory_id"]] == ("trained", row["trained_step"])
            assert row["seed"] == derive_seed(0, int(row["group_id"]), row["sibling"], row["attempt"])
    leftovers = [entry.name for entry in run.path.rglob("*") if entry.name.endswith(".tmp") or ".tmp-" in entry.name]
    assert leftovers == []


def test_an_undisturbed_run(tmp_path):
    ScriptedRun(tmp_path / "run").finish()
    check_complete(tmp_path / "run")
    assert [row["drop_reason"] for row in read_rollouts(tmp_path / "run").to_pylist() if row["drop_reason"]] == [
        "failed"
    ]


@pytest.mark.parametrize("seed", range(2))
def test_killed_again_and_again_every_trajectory_is_trained_exactly_once(tmp_path, seed):
    draw, path, kills = random.Random(seed), tmp_path / "run", 0
    for _ in range(60):
        code = in_child(functools.partial(run_killed_at, path, draw.randint(5, 80)))
        assert code in (0, 9)
        kills += code == 9
        if code == 0:
            break
    else:
        ScriptedRun(path).finish()
    assert kills >= 2
    check_complete(path)


def test_a_run_that_is_finished_can_be_resumed_without_change(tmp_path):
    ScriptedRun(tmp_path / "run").finish()
    ScriptedRun(tmp_path / "run").finish()
    check_complete(tmp_path / "run")


def test_a_torn_newest_checkpoint_costs_only_the_steps_after_the_one_before(tmp_path):
    path = tmp_path / "run"
    ScriptedRun(path).finish()
    run = RunDirectory.open(path)
    (checkpoint_path(run, STEPS) / "trainer.safetensors").write_bytes(b"torn")
    again = ScriptedRun(path)
    assert again.step == STEPS - 2
    again.finish()
    check_complete(path)
