"""Engines of a resumed run that die late: the checkpoint they read their model from must still be there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from estr.runtime.interrupts import Interrupted, Interrupts
from estr.runtime.run import Run
from estr.runtime.setup import prepared
from estr.storage.checkpoints import checkpoint_steps, latest_checkpoint
from estr.storage.metrics import read_metrics
from estr.storage.run_directory import RunDirectory
from forking import forked_engines
from loop_helpers import Watcher, ask_to_stop, small, train


def test_an_engine_that_dies_long_after_a_resume_is_replaced(tmp_path: Path) -> None:
    path, notices = tmp_path / "run", list[str]()
    config = small(
        run={"steps": 12, "checkpoint_every": 1, "keep_checkpoints": 1},
        schedule={"mode": "async", "max_staleness": 2, "attempts": 2},
        runtime={"engines": 1, "learner_threads": 1},
    )
    with forked_engines():
        with pytest.raises(Interrupted):
            train(config, path, Watcher(on_step=lambda step: ask_to_stop() if step == 2 else None))
        with RunDirectory.open(path, lock=True) as directory, Interrupts() as interrupts:
            checkpoint = latest_checkpoint(directory).checkpoint
            assert checkpoint is not None

            def strike(step: int) -> None:
                if step == checkpoint.step + 4:
                    os.kill(parts.pool.pids[0], signal.SIGKILL)

            watcher = Watcher(on_step=strike, on_notice=notices.append)
            with prepared(config, directory, watcher, interrupts, checkpoint) as parts:
                Run(parts, interrupts).go()
            assert checkpoint_steps(directory) == [checkpoint.step, 12]
    assert len(read_metrics(path)) == 12
    assert [notice for notice in notices if "was killed by SIGKILL" in notice]
