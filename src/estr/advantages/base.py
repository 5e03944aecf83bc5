"""What every advantage estimator shares: its interface, and statistics over groups that leave invalid rewards out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from estr.registry import Registry

estimators: Registry[AdvantageEstimator] = Registry("advantage estimator", operator="advantage")


@dataclass(frozen=True)
class Groups:
    """Rewards by group, in float64.

    ``value`` [S] holds the rewards with 0 where one is not finite, ``valid`` [S] says where it is finite, ``index`` [S]
    numbers the groups 0..G-1. Statistics are over the valid rewards of a group and come back as one per trajectory [S].
    """

    value: Tensor
    valid: Tensor
    index: Tensor
    number: int

    @property
    def count(self) -> Tensor:
        """Valid rewards of each trajectory's group [S], float64."""
        return self._sum(self.valid.double())

    @property
    def mean(self) -> Tensor:
        """Mean reward of each trajectory's group [S]; 0 where none is valid."""
        return self._sum(self.value) / self.count.clamp(min=1)

    @property
    def equal(self) -> Tensor:
        """Whether all valid rewards of the trajectory's group are the same number [S], bool."""
        return self._extreme("amax") <= self._extreme("amin")

    def std(self, correction: int) -> Tensor:
        """Standard deviation of each trajectory's group [S] with ``correction`` degrees of freedom taken off."""
        deviation = torch.where(self.valid, self.value - self.mean, 0.0)
        return (self._sum(deviation.square()) / (self.count - correction).clamp(min=1)).sqrt()

    def _sum(self, value: Tensor) -> Tensor:
        return value.new_zeros(self.number).index_add_(0, self.index, value)[self.index]

    def _extreme(self, how: str) -> Tensor:
        neutral = float("-inf") if how == "amax" else float("inf")
        value = torch.where(self.valid, self.value, neutral)
        return value.new_full((self.number,), neutral).scatter_reduce_(0, self.index, value, how)[self.index]


def group_rewards(reward: Any, group: Any) -> Groups:
    """Rewards [S] by group id [S]; the ids may be any integers in any order.

    Raises ``ValueError`` where the two are not one-dimensional and of one length.
    """
    reward = torch.as_tensor(reward)
    group = torch.as_tensor(group, device=reward.device)
    if reward.dim() != 1 or reward.shape != group.shape:
        shapes = f"{list(reward.shape)} and {list(group.shape)}"
        raise ValueError(f"reward and group must both have shape [S], one entry per trajectory, but have {shapes}")
    if group.is_floating_point() or reward.is_complex():
        raise ValueError(f"group must hold integers and reward real numbers, not {group.dtype} and {reward.dtype}")
    value = reward.detach().double()
    valid = value.isfinite()
    unique, index = torch.unique(group, return_inverse=True)
    return Groups(torch.where(valid, value, 0.0), valid, index, unique.numel())


def result_dtype(reward: Any) -> torch.dtype:
    """float64 for float64 rewards, float32 for all others."""
    return torch.float64 if torch.as_tensor(reward).dtype == torch.float64 else torch.float32


@dataclass
class AdvantageEstimator(ABC):
    """Turns the rewards of a batch into one advantage per trajectory.

    ``estimator(reward, group, length=None)`` takes ``reward`` float [S], ``group`` int64 [S] (any ids, any order) and,
    for estimators that weigh by tokens, ``length`` int64 [S] (action tokens of each trajectory). It returns float [S]
    without graph. A reward that is NaN or infinite gives its trajectory advantage 0 and is left out of all statistics;
    ``estimator.invalid`` is their number in the last call.
    """

    invalid: int = field(default=0, init=False)

    @property
    def needs(self) -> tuple[str, ...]:
        """Further keywords this estimator is called with, beyond ``length``."""
        return ()

    @property
    def token_level(self) -> bool:
        """Whether advantages differ inside a trajectory, so that ``tokens`` must be called."""
        return False

    def __call__(self, reward: Any, group: Any, *, length: Any = None) -> Tensor:
        groups = group_rewards(reward, group)
        self.invalid = int((~groups.valid).sum())
        value = self.estimate(groups, _lengths(length, groups))
        return torch.where(groups.valid, value, 0.0).to(result_dtype(reward))

    def tokens(self, reward: Any, group: Any, sequence: Tensor, *, penalty: Tensor | None = None) -> Tensor:
        """The advantage of every action token, float [N], for flat tokens of ``sequence`` int64 [N].

        ``penalty`` [N] is what a token costs (a KL penalty inside the reward); only estimators of token-level returns
        take one, others raise ``ValueError``.
        """
        if penalty is not None:
            raise ValueError(f"{type(self).__name__} has one advantage per trajectory and takes no token penalty")
        size = torch.as_tensor(reward).numel()
        return self(reward, group, length=torch.bincount(sequence, minlength=size))[sequence]

    @abstractmethod
    def estimate(self, groups: Groups, length: Tensor | None) -> Tensor:
        """Advantages float64 [S]; what it returns for invalid rewards is overwritten with 0."""


def _lengths(length: Any, groups: Groups) -> Tensor | None:
    if length is None:
        return None
    length = torch.as_tensor(length, device=groups.value.device)
    if length.shape != groups.value.shape:
        raise ValueError(f"length must have shape {list(groups.value.shape)} like reward, but has {list(length.shape)}")
    return length.double()
