"""Estimators whose baseline is the trajectory's own group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from estr.advantages.base import AdvantageEstimator, Groups, estimators
from estr.registry import choose, within


@estimators.register(
    "grpo",
    description="Reward minus the group's mean, divided by the group's standard deviation.",
    formula="A = (r - mean_g) / (std_g + eps)",
    source="Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1; verl core_algos.py (sample deviation, eps 1e-6)",
    confidence="official code",
    scope="group",
)
@dataclass
class Grpo(AdvantageEstimator):
    """Group-relative advantage; equal rewards and a group of one give exactly 0.

    ``std``: "sample" (n - 1), "population" (n) or "none" (not divided). ``eps`` is added to the deviation.
    """

    std: str = "sample"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        choose("std", self.std, ("sample", "population", "none"))
        within("eps", self.eps, 0.0)

    def estimate(self, groups: Groups, length: Tensor | None) -> Tensor:
        centered = groups.value - groups.mean
        if self.std != "none":
            centered = centered / (groups.std(correction=int(self.std == "sample")) + self.eps)
        return torch.where(groups.equal, 0.0, centered)


@estimators.register(
    "dr_grpo",
    description="Reward minus the group's mean, not divided by the deviation.",
    formula="A = r - mean_g",
    source="Liu et al., arXiv 2503.20783, section 3.2; TRL and verl agree",
    confidence="official code",
    scope="group",
)
@dataclass
class DrGrpo(AdvantageEstimator):
    """Group-centred reward. The paper's constant length normalizer belongs to the objective's reduction, not here."""

    def estimate(self, groups: Groups, length: Tensor | None) -> Tensor:
        return torch.where(groups.equal, 0.0, groups.value - groups.mean)


@estimators.register(
    "rloo",
    description="Reward minus the mean of the other trajectories of the group.",
    formula="A = n/(n-1) (r - mean_g)",
    source="Ahmadian et al., arXiv 2402.14740, equation 8; verl core_algos.py",
    confidence="official code",
    scope="group",
)
@dataclass
class Rloo(AdvantageEstimator):
    """Leave-one-out baseline; a group of one has no others and gives 0."""

    def estimate(self, groups: Groups, length: Tensor | None) -> Tensor:
        factor = groups.count / (groups.count - 1).clamp(min=1)
        return torch.where(groups.equal, 0.0, factor * (groups.value - groups.mean))
