"""Rollout batches from which nothing can be learned, named once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from estr.learner.results import StepResult, TrainedTrajectory

_PATIENCE = 3  # steps in a row


class ZeroSignal:
    """Gives ``notice`` one sentence when every advantage was 0 for several optimizer steps in a row."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice, self._in_a_row, self._said = notice, 0, False

    def see(self, result: StepResult) -> None:
        """Look at one optimizer step."""
        zero = bool(result.trajectories) and all(map(_is_zero, result.trajectories))
        self._in_a_row = self._in_a_row + 1 if zero else 0
        if self._said or self._in_a_row < _PATIENCE:
            return
        self._said = True
        reward = result.metrics.get("reward/mean", float("nan"))
        self._notice(
            f"nothing could be learned in {_PATIENCE} steps in a row: rewards within each group are all equal (their "
            f"mean is {reward:.3g}), so every advantage is 0. The task is too hard or too easy for the model, or its "
            "verifier is at fault: look at the rewards, change the task, or raise rollout.group_size"
        )


def _is_zero(record: TrainedTrajectory) -> bool:
    by_token = record.token_advantage or []
    return record.advantage == 0 and not any(np.nan_to_num(column).any() for column in by_token)
