"""What one optimizer step reports: metrics, and for each trajectory what the learner saw."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from estr.errors import RunError
from estr.trajectory import Segment, Trajectory

PerSegment = list[NDArray[np.float32]]
"""One float32 array [L] per segment, aligned with its tokens, NaN where a token is no action."""


@dataclass
class TrainedTrajectory:
    """One trajectory of a minibatch. The columns are None where it took no part in the loss."""

    trajectory: Trajectory
    advantage: float
    token_advantage: PerSegment | None = None  # only where advantages differ by token
    learner_logprob: PerSegment | None = None
    learner_entropy: PerSegment | None = None  # nats
    proximal_logprob: PerSegment | None = None


class BrokenWeights(RunError):  # noqa: N818
    """The weights after an optimizer step are no policy any more; nothing of it may be published or stored."""


@dataclass
class StepResult:
    """One optimizer step. ``version`` is that after it; a skipped step leaves it at ``version_before``."""

    version_before: int
    version: int
    target_version: int  # the learner's version at the moment of training
    skipped: bool
    reason: str | None  # why it was skipped
    divergence: str | None  # a diagnosis, where learner.max_skipped_steps or more were skipped in a row
    metrics: dict[str, float]  # finite numbers by the keys of metrics.jsonl
    trajectories: list[TrainedTrajectory] = field(default_factory=list)
    action_tokens: int = 0  # that entered the loss
    read_tokens: int = 0  # that the model read in the step's forward and backward pass
    dropped: list[tuple[Trajectory, str]] = field(default_factory=list)  # of the rollout batch, with the reason


def aligned(segments: list[Segment], columns: list[NDArray[np.float32]]) -> PerSegment:
    """Values of action tokens written where those tokens stand, NaN elsewhere."""
    result = []
    for segment, values in zip(segments, columns, strict=True):
        column = np.full(len(segment.tokens), np.nan, np.float32)
        column[segment.action] = values
        result.append(column)
    return result
