"""Estimators whose scale is that of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from estr.advantages.base import AdvantageEstimator, Groups, estimators, group_rewards, result_dtype
from estr.advantages.returns import discounted_returns, place_at_end
from estr.registry import choose, within


@estimators.register(
    "reinforce_pp",
    description="Returns whitened over all action tokens of the batch, optionally after subtracting the group's mean.",
    formula="A = (G - mean) / sqrt(var_unbiased + eps) over tokens, G the discounted return of the final reward",
    source="Hu et al., REINFORCE++, arXiv 2501.03262, equations 5 to 7; verl core_algos.py",
    confidence="official code",
    scope="batch",
)
@dataclass
class ReinforcePlusPlus(AdvantageEstimator):
    """REINFORCE++ and, with ``baseline = "group"``, its baseline variant.

    The population is the batch, not the group: a group of one has an advantage, and only a batch of equal rewards gives
    exactly 0. Every trajectory counts with its number of action tokens (``length``); called without ``length``, every
    trajectory counts once. ``gamma`` below 1 makes advantages differ by token: call ``tokens``.
    """

    baseline: str = "none"
    gamma: float = 1.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        choose("baseline", self.baseline, ("none", "group"))
        within("gamma", self.gamma, 0.0, 1.0)
        within("eps", self.eps, 0.0)

    @property
    def token_level(self) -> bool:
        return self.gamma != 1.0

    def estimate(self, groups: Groups, length: Tensor | None) -> Tensor:
        if self.token_level:
            raise ValueError("reinforce_pp with gamma below 1 has one advantage per token; call .tokens(...)")
        weight = torch.ones_like(groups.value) if length is None else length
        return self._whiten(self._centered(groups), torch.where(groups.valid, weight, 0.0))

    def tokens(self, reward: Any, group: Any, sequence: Tensor, *, penalty: Tensor | None = None) -> Tensor:
        groups = group_rewards(reward, group)
        self.invalid = int((~groups.valid).sum())
        value = place_at_end(self._centered(groups), sequence)
        if penalty is not None:
            value = value - penalty.detach().double()
        valid = groups.valid[sequence]
        white = self._whiten(discounted_returns(value, sequence, self.gamma), valid.double())
        return torch.where(valid, white, 0.0).to(result_dtype(reward))

    def _centered(self, groups: Groups) -> Tensor:
        if self.baseline == "none":
            return groups.value
        return torch.where(groups.equal, 0.0, groups.value - groups.mean)

    def _whiten(self, value: Tensor, weight: Tensor) -> Tensor:
        counted = value[weight > 0]
        if counted.numel() == 0 or bool((counted == counted[0]).all()):
            return torch.zeros_like(value)
        total = weight.sum()
        mean = (weight * value).sum() / total
        variance = (weight * (value - mean).square()).sum() / (total - 1).clamp(min=1)
        return (value - mean) / (variance + self.eps).sqrt()
