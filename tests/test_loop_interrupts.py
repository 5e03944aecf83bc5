"""Runs that are killed, interrupted, or that fail on a full disk, and what a resume makes of them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

from estr.storage import metrics, rollout_files
from estr.storage.checkpoints import checkpoint_steps, load_checkpoint
from estr.storage.metrics import read_metrics
from estr.storage.rollout_files import read_rollouts
from estr.storage.run_directory import RunDirectory
from estr.trajectory import derive_seed
from loop_helpers import (
    Command,
    alive,
    estr,
    go_on,
    metrics_without_clock,
    rollouts,
    shared_files,
    small,
    snapshot,
    started,
    stored,
    train,
    wait_for,
    write_config,
)

STEPS = 12
ASYNC: dict[str, Any] = {
    "run": {"steps": STEPS},
    "task": {"name": "loop_tasks:Echo", "delay": 0.2},
    "schedule": {"mode": "async", "max_staleness": 2},
    "runtime": {"engines": 1, "learner_threads": 1},
}


def lines(run: Path) -> int:
    return len(read_metrics(run)) if run.exists() else 0


def caught(command: Command, run: Path, at: int) -> tuple[list[int], list[Path]]:
    """Wait until a run has made ``at`` steps; its engine processes and shared files."""
    wait_for(lambda: command.process.poll() is not None or lines(run) >= at, f"step {at}")
    assert command.process.poll() is None, command.err_path.read_text()
    children, shared = command.children, shared_files(command.process.pid)
    assert (len(children), len(shared)) == (1, 1)
    return children, shared


def gone(children: list[int]) -> bool:
    return not any(alive(pid) for pid in children)


def test_fault_E2_E3_a_run_that_is_killed_then_interrupted_trains_every_group_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 before there is a checkpoint; resumed from the start; Ctrl-C as a terminal sends it, to all processes;
    resumed to the end. The kills leave no process and no shared memory."""
    config, run = write_config(tmp_path / "run.toml", **ASYNC), tmp_path / "run"
    with started(tmp_path, "train", config, "--output", run, forked=True) as command:
        children, orphans = caught(command, run, 2)
        command.send(signal.SIGKILL)
        command.finish()
        wait_for(lambda: gone(children), "the engine to end with its parent")
    assert list((run / "checkpoints").iterdir()) == []
    with started(tmp_path, "resume", run, forked=True) as command:
        wait_for(lambda: f"step 0 of {STEPS}" in command.err_path.read_text(), "the run to start again")
        children, shared = caught(command, run, 4)
        assert not any(path.exists() for path in orphans)
        command.send(signal.SIGINT, group=True)
        outcome = command.finish()
        assert gone(children)
    assert outcome.status == 130
    assert outcome.complaint == f"interrupted; go on with: estr resume {run}"
    assert not any(path.exists() for path in shared)
    assert (run / "report.html").exists()
    stopped = lines(run)
    assert load_checkpoint(run / f"checkpoints/step-{stopped:06d}").kind == "interrupted"
    assert stopped < STEPS

    resumed = estr(capsys, "resume", run)
    assert resumed.status == 0, resumed.err
    assert f"step {stopped} of {STEPS}" in resumed.err
    assert [line["step"] for line in read_metrics(run)] == list(range(1, STEPS + 1))
    rows = stored(run)
    assert len(rows) == read_rollouts(run).num_rows, "nothing was dropped"
    assert sorted((int(row.group_id), row.sibling) for row in rows) == [
        (g, s) for g in range(2 * STEPS) for s in (0, 1)
    ]
    assert all(row.seed == derive_seed(0, int(row.group_id), row.sibling, 0) for row in rows)
    assert all(row.target_version - row.version[row.action].max() >= 0 for row in rows if row.trained_step > stopped)


def test_a_second_interrupt_stops_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first one waits for a tool that hangs; nobody has to wait with it."""
    mark = tmp_path / "hangs"
    task = {"name": "loop_tasks:Faulty", "how": "hang", "mark": str(mark), "tool_timeout": 50.0}

    def press_twice() -> None:
        wait_for(mark.exists, "the tool to hang")
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    presser = threading.Thread(target=press_twice)
    presser.start()
    try:
        outcome = estr(capsys, "train", write_config(tmp_path / "run.toml", task=task), "--output", tmp_path / "run")
    finally:
        presser.join()
    assert outcome.status == 130
    assert outcome.complaint == f"stopped at once; go on with: estr resume {tmp_path / 'run'}"


# ---------------------------------------------------------------------- disks

FULL: dict[str, Any] = {"run": {"steps": 8, "checkpoint_every": 2}, "learner": {"minibatches": 2}}


@pytest.mark.parametrize(
    ("module", "function", "where"),
    [(rollout_files, "write_atomic", "rollouts/step-000005.parquet"), (metrics, "write_all", "metrics.jsonl")],
    ids=["rollouts", "metrics"],
)
def test_a_disk_that_fails_once_costs_nothing_but_time(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    function: str,
    where: str,
) -> None:
    """Something of step 5, the first of two minibatches, cannot be written. Exit status 1; what was written before is
    whole; no checkpoint is made between minibatches; resumed, the run is the one that would have been."""
    config, run = write_config(tmp_path / "run.toml", **FULL), tmp_path / "run"
    write = getattr(module, function)

    def full_at_step_5(target: Any, data: bytes) -> None:
        if b'"step": 5' in data or str(target).endswith("step-000005.parquet"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(target, data)

    monkeypatch.setattr(module, function, full_at_step_5)
    outcome = estr(capsys, "train", config, "--output", run)
    assert outcome.status == 1
    assert f"cannot write {run}/{where}: the disk is full; free some space" in outcome.complaint
    assert f"what was reached is in {run}" in outcome.complaint
    assert max(checkpoint_steps(RunDirectory.open(run))) == 4
    monkeypatch.undo()
    go_on(run)
    straight = train(small(**FULL), tmp_path / "straight")
    assert metrics_without_clock(run) == metrics_without_clock(straight)
    assert rollouts(run) == rollouts(straight)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 5 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=False)


def test_a_full_disk_ends_the_run_in_a_sentence_and_loses_nothing(
    tmp_path: Path, tiny_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run = write_config(tmp_path / "run.toml", **FULL), tiny_disk / "run"
    outcome = estr(capsys, "train", config, "--output", run)
    assert outcome.status == 1
    assert "the disk is full; free some space and resume the run" in outcome.complaint
    for path in (run / "rollouts").glob("*.parquet"):
        pq.read_table(path)
    read_metrics(run)
    steps = checkpoint_steps(RunDirectory.open(run))
    assert steps
    for step in steps:
        load_checkpoint(run / f"checkpoints/step-{step:06d}")
    before = {name: data for name, data in snapshot(run).items() if name.startswith("checkpoints")}
    subprocess.run(["mount", "-o", "remount,size=60m", str(tiny_disk)], check=True)
    assert {name: data for name, data in snapshot(run).items() if name.startswith("checkpoints")} == before
    resumed = estr(capsys, "resume", run)
    assert resumed.status == 0, resumed.err
    assert [line["step"] for line in read_metrics(run)] == list(range(1, 9))
    assert len(stored(run)) == 16
