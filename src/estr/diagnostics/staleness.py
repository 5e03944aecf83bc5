"""Staleness of stored trajectories from the versions stamped on their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Staleness:
    """Per trajectory, in optimizer steps; NaN where it cannot be known (no action token, not trained)."""

    intra: NDArray[np.float64]  # [S], v_last - v_first
    inter: NDArray[np.float64]  # [S], v_target - v_last
    spans: NDArray[np.bool_]  # [S], tokens of two or more versions


def trajectory_staleness(version: ArrayLike, trajectory: ArrayLike, target_version: ArrayLike) -> Staleness:
    """Δ_intra and Δ_inter of S trajectories.

    ``version`` [N] and ``trajectory`` [N] (non-decreasing, 0..S-1) belong to action tokens in the order they were
    sampled; ``target_version`` [S] is the learner's version when it trained them, NaN or negative where it did not.
    Raises ValueError where shapes differ or trajectories are not in order.
    """
    version_, trajectory_ = np.asarray(version, np.int64), np.asarray(trajectory, np.int64)
    target = np.asarray(target_version, np.float64)
    _check(version_, trajectory_, len(target))
    index = np.arange(len(target))
    begin = np.searchsorted(trajectory_, index, side="left")
    end = np.searchsorted(trajectory_, index, side="right")
    filled = end > begin
    first, last = np.full(len(target), np.nan), np.full(len(target), np.nan)
    first[filled], last[filled] = version_[begin[filled]], version_[end[filled] - 1]
    known_target = np.where(target >= 0, target, np.nan)
    switches = (version_[1:] != version_[:-1]) & (trajectory_[1:] == trajectory_[:-1])
    spans = np.bincount(trajectory_[1:][switches], minlength=len(target)) > 0
    return Staleness(intra=last - first, inter=known_target - last, spans=spans)


def multi_version_share(spans: ArrayLike, trained_step: ArrayLike, after_step: int = 10) -> tuple[float | None, int]:
    """Share of the trajectories trained after step ``after_step`` that span two or more versions, and their number.

    ``spans`` bool [S]; ``trained_step`` [S], NaN or negative where a trajectory was not trained. The share is None
    where no trajectory was trained that late.
    """
    selected = np.asarray(trained_step, np.float64) > after_step
    count = int(selected.sum())
    return (float(np.asarray(spans, bool)[selected].mean()) if count else None), count


def integer_histogram(values: ArrayLike) -> dict[int, int]:
    """Value → count of finite whole numbers, in increasing order."""
    values_ = np.asarray(values, np.float64)
    unique, count = np.unique(values_[np.isfinite(values_)].astype(np.int64), return_counts=True)
    return dict(zip(unique.tolist(), count.tolist(), strict=True))


def _check(version: NDArray[np.int64], trajectory: NDArray[np.int64], trajectories: int) -> None:
    if version.shape != trajectory.shape or version.ndim != 1:
        raise ValueError(f"version and trajectory must be [N] and alike, got {version.shape} and {trajectory.shape}")
    if len(trajectory) and (trajectory[0] < 0 or trajectory[-1] >= trajectories or (np.diff(trajectory) < 0).any()):
        raise ValueError(f"trajectory must be non-decreasing and within 0..{trajectories - 1}")
