"""Steps from which nothing can be learned, and versions of weights that a crash took away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from estr.learner.metrics import staleness_metrics
from estr.learner.results import StepResult, TrainedTrajectory
from estr.runtime.zero_signal import ZeroSignal
from estr.trajectory import Segment, Trajectory
from loop_helpers import Watcher, small, train


def sampled_by(*versions: int) -> Trajectory:
    nothing = np.zeros(len(versions), np.float32)
    tokens, action = np.zeros(len(versions), np.int32), np.ones(len(versions), bool)
    return Trajectory(0, 0, 0, "p", "p", 0, [Segment(tokens, action, nothing, nothing, np.array(versions, np.int32))])


def test_versions_that_were_lost_count_as_no_staleness_and_are_counted() -> None:
    lost, falling, sound = sampled_by(9, 9), sampled_by(8, 4), sampled_by(3, 4)
    assert staleness_metrics([lost, falling, sound, sound], target_version=5) == {
        "staleness/inter_mean": 0.75,
        "staleness/inter_max": 1.0,
        "staleness/intra_mean": 0.5,
        "staleness/intra_max": 1.0,
        "staleness/lost_versions": 0.5,
    }
    assert "staleness/lost_versions" not in staleness_metrics([sound], 5)


def result(*advantages: float, by_token: list[float] | None = None) -> StepResult:
    columns = None if by_token is None else [np.array(by_token, np.float32)]
    records = [TrainedTrajectory(sampled_by(0), value, columns) for value in advantages]
    return StepResult(0, 1, 0, False, None, None, {"reward/mean": 0.25}, records)


def test_three_steps_in_a_row_without_an_advantage_are_named_once() -> None:
    said: list[str] = []
    signal = ZeroSignal(said.append)
    for step in (result(0, 0), result(0, 0), result(0, 1), result(0), result(0), result(0, by_token=[np.nan, 2.0])):
        signal.see(step)
    assert said == []
    for _ in range(4):
        signal.see(result(0, 0, by_token=[np.nan, 0.0]))
    (sentence,) = said
    assert sentence.startswith("nothing could be learned in 3 steps in a row: rewards within each group are all equal")
    assert "mean is 0.25" in sentence


def test_a_run_without_signal_says_so(tmp_path: Path) -> None:
    watcher = Watcher()
    train(small(run={"steps": 4}, task={"coarse": 1}), tmp_path / "run", watcher)
    assert len([notice for notice in watcher.notices if "nothing could be learned" in notice]) == 1


def test_a_step_whose_tokens_are_all_invalid_is_skipped(tmp_path: Path) -> None:
    """Without a gradient the moments alone would still move the weights."""
    from estr.runtime.divergence import Divergence
    from estr.runtime.setup import Parts

    def spoil(parts: Parts) -> None:
        train_batch = parts.learner.train

        def spoiled(groups: list[list[Trajectory]]):  # type: ignore[no-untyped-def]
            for group in groups:
                for trajectory in group:
                    for segment in trajectory.segments:
                        segment.logprob[:] = np.nan
            return train_batch(groups)

        parts.learner.train = spoiled  # type: ignore[method-assign, assignment]

    with pytest.raises(Divergence, match="at version 0, the last because all its action tokens are invalid"):
        train(small(), tmp_path / "run", hook=spoil)
