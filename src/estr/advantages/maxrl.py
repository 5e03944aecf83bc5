"""Maximum-likelihood reinforcement learning: the group's success rate as the scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from estr.advantages.base import AdvantageEstimator, Groups, estimators
from estr.registry import within


@estimators.register(
    "maxrl",
    description="Reward minus the group's mean, divided by that mean (the success rate), so hard prompts weigh more.",
    formula="A = (r - mean_g) / (mean_g + eps); a group of one: A = r",
    source="Tajwar et al., Maximum Likelihood Reinforcement Learning, arXiv 2602.02710; TRL MaxRLTrainer",
    confidence="paper",
    scope="group",
)
@dataclass
class MaxRl(AdvantageEstimator):
    """Needs rewards of at least 0 (a negative one raises ``ValueError``: the mean would change the sign of the scale).

    A group of one keeps its reward as advantage, which is the estimator of the likelihood's gradient with one sample;
    a mean baseline would leave it nothing to learn from. A group without any success gives 0.
    """

    eps: float = 0.0

    def __post_init__(self) -> None:
        within("eps", self.eps, 0.0)

    def estimate(self, groups: Groups, length: Tensor | None) -> Tensor:
        if bool((groups.value < 0).any()):
            raise ValueError(
                "maxrl needs rewards of at least 0 (the group's mean is its scale); shift them or use another estimator"
            )
        scale = torch.where(groups.mean > 0, groups.mean + self.eps, 1.0)
        centered = torch.where(groups.equal, 0.0, (groups.value - groups.mean) / scale)
        return torch.where(groups.count == 1, groups.value, centered)
