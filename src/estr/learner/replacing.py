"""AEPO's second rollouts: good ones take the place of the batch's first trajectories (arXiv 2510.08141)."""

from __future__ import annotations

import math

import torch

from estr.learner.rollouts import Rollouts
from estr.shaping import ArbitraryEntropy
from estr.trajectory import Trajectory

REPLACED = "replaced by a second rollout"
NOT_CHOSEN = "second rollout that was not chosen"


def put_in_place(rollouts: Rollouts, second: Rollouts, rule: ArbitraryEntropy) -> list[tuple[Trajectory, str]]:
    """Change ``rollouts`` in place as ``rule`` says; returns what does not train, with the reason.

    Both have their advantages, each within its own groups. A second rollout that takes no part in the loss (it was cut
    off and ``learner.truncated`` masks it) is never chosen.
    """
    assert second.advantage is not None
    advantage = torch.where(torch.tensor(second.learns), second.advantage, -math.inf)
    chosen = rule.select(advantage)
    indices = chosen.indices.tolist()[: len(rollouts.trajectories)]
    dropped = [(rollouts.trajectories[i], REPLACED) for i in range(len(indices))]
    dropped += [(t, NOT_CHOSEN) for j, t in enumerate(second.trajectories) if j not in set(indices)]
    for i, j in enumerate(indices):
        rollouts.replace(i, second, j, chosen.advantage)
    return dropped
