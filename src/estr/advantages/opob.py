"""The baseline that minimizes the variance of an importance-weighted policy gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from estr.advantages.base import AdvantageEstimator, Groups, estimators, group_rewards, result_dtype
from estr.registry import choose, within

_MAX_LOG_WEIGHT = 600.0


@estimators.register(
    "opob",
    description="Reward minus the optimal off-policy baseline: the mean reward weighted by w^2 ||score||^2.",
    formula="b = sum w^2 ||s||^2 r / (sum w^2 ||s||^2 + eps);  A = (r - b) / std_g",
    source="VCPO, arXiv 2602.17616, README formula (its code counts w twice); mit-han-lab/vcpo staleness_utils.py",
    confidence="official code",
    scope="group",
    edge="E",
)
@dataclass
class OptimalOffPolicyBaseline(AdvantageEstimator):
    """Needs ``score_norm`` [S], each trajectory's un-weighted ||grad log pi||, from one backward per trajectory.

    ``log_weight`` [S] is each trajectory's log importance weight (none: on-policy). ``aggregate`` is "mean", "median"
    or "winsorized_mean" (5 % on each side). ``scope``: "group", or "minibatch", where one baseline is taken over all
    trajectories and of their group-normalized rewards. ``normalize_by_length`` divides the norm by the number of action
    tokens. ``norm_by_std`` (group scope) divides by the group's population deviation where it exceeds 1e-8. Equal
    rewards and a group of one give exactly 0 in group scope.
    """

    aggregate: str = "mean"
    scope: str = "group"
    norm_by_std: bool = True
    normalize_by_length: bool = False
    eps: float = 1e-8

    def __post_init__(self) -> None:
        choose("aggregate", self.aggregate, ("mean", "median", "winsorized_mean"))
        choose("scope", self.scope, ("group", "minibatch"))
        within("eps", self.eps, 0.0)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("score_norm", "log_weight")

    def __call__(
        self, reward: Any, group: Any, *, length: Any = None, score_norm: Any = None, log_weight: Any = None
    ) -> Tensor:
        groups = group_rewards(reward, group)
        self.invalid = int((~groups.valid).sum())
        weight = self._weight(groups, length, score_norm, log_weight)
        value = self._within_group(groups, weight) if self.scope == "group" else self._across(groups, weight)
        return torch.where(groups.valid, value, 0.0).to(result_dtype(reward))

    def estimate(self, groups: Groups, length: Tensor | None) -> Tensor:
        raise ValueError("opob needs score_norm, one norm of the score per trajectory; none was given")

    def _weight(self, groups: Groups, length: Any, score_norm: Any, log_weight: Any) -> Tensor:
        if score_norm is None:
            raise ValueError("opob needs score_norm, one norm of the score per trajectory; none was given")
        log = torch.as_tensor(score_norm).detach().double().log()
        if log_weight is not None:
            log = log + torch.as_tensor(log_weight).detach().double()
        if self.normalize_by_length:
            if length is None:
                raise ValueError("opob with normalize_by_length needs length, the action tokens of each trajectory")
            log = log - torch.as_tensor(length).double().log()
        if log.shape != groups.value.shape:
            raise ValueError(f"score_norm must have shape {list(groups.value.shape)}, but has {list(log.shape)}")
        return torch.where(groups.valid & log.isfinite(), (2 * log).clamp(max=_MAX_LOG_WEIGHT).exp(), 0.0)

    def _within_group(self, groups: Groups, weight: Tensor) -> Tensor:
        value = groups.value.clone()
        for number in range(groups.number):
            member = groups.index == number
            value[member] -= _aggregate(groups.value[member], weight[member], self.aggregate, self.eps)
        if self.norm_by_std:
            std = groups.std(correction=0)
            value = torch.where(std > 1e-8, value / std, value)
        return torch.where(groups.equal, 0.0, value)

    def _across(self, groups: Groups, weight: Tensor) -> Tensor:
        centered = torch.where(groups.equal, 0.0, groups.value - groups.mean)
        value = centered / (groups.std(correction=0) + self.eps)
        return value - _aggregate(value, weight, self.aggregate, self.eps)


def _aggregate(value: Tensor, weight: Tensor, how: str, eps: float) -> Tensor:
    if how == "median":
        return _weighted_quantile(value, weight, 0.5)
    if how == "winsorized_mean":
        value = value.clamp(_weighted_quantile(value, weight, 0.05), _weighted_quantile(value, weight, 0.95))
    return (weight * value).sum() / (weight.sum() + eps)


def _weighted_quantile(value: Tensor, weight: Tensor, q: float) -> Tensor:
    """The smallest value at which the cumulated weight reaches the share ``q``; 0 where there is no weight."""
    if weight.sum() == 0:
        return value.new_zeros(())
    order = value.argsort()
    reached = torch.searchsorted(weight[order].cumsum(0), q * weight.sum())
    return value[order][reached.clamp(max=value.numel() - 1)]
