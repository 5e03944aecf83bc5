"""GTPO and GRPO-S: rewards shaped token by token with entropy, inside each group's successes and failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from estr.advantages.base import group_rewards
from estr.advantages.returns import check_tokens, tokens_from_start
from estr.advantages.reweighting import Reweighting, rules, same_shape
from estr.registry import choose, within


@rules.register(
    "gtpo",
    description="Replace advantages by entropy-shaped rewards, normalized apart for successes and failures of a group.",
    formula="O+: a1 r + a2 H/sum(H) d;  O-: -a1 - a2 (1/H)/sum(1/H) h, sums over sequences alive at the position",
    source="arXiv 2508.04349, equations 3, 5 and 6; teilomillet/textpolicy grpo.py (GRPO-S unverified)",
    confidence="third-party code",
    scope="token",
)
@dataclass
class Gtpo(Reweighting):
    """``reweight(advantage, sequence=..., entropy=..., reward=..., group=...)``; replaces the old advantage.

    ``sequence`` int64 [N] and ``entropy`` [N] by token, ``reward`` [S] and ``group`` int64 [S] by trajectory. A reward
    above ``correct_above`` is a success. Each set is normalized to mean 0 and population deviation 1 inside its group,
    so among successes the low-entropy tokens become negative. ``level`` "sequence" uses each trajectory's mean entropy
    (GRPO-S). Tokens of an invalid reward or a non-finite entropy get 0; ``invalid`` counts them.
    """

    alpha1: float = 1.0
    alpha2: float = 0.1
    level: str = "token"
    correct_above: float = 0.0
    eps: float = 1e-8
    invalid: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        choose("level", self.level, ("token", "sequence"))
        within("eps", self.eps, 0.0, open_low=True)
        within("alpha1", self.alpha1, 0.0)
        within("alpha2", self.alpha2, 0.0)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("sequence", "entropy", "reward", "group")

    def reweight(self, advantage: Tensor, **fields: Any) -> Tensor:
        same_shape(advantage, sequence=fields["sequence"], entropy=fields["entropy"])
        shaped, subset, valid = self.shape(**fields)
        self.invalid = int((~valid).sum())
        return torch.where(valid, _normalize(shaped, subset, valid, self.eps), 0.0).to(advantage.dtype)

    def shape(self, *, sequence: Tensor, entropy: Tensor, reward: Any, group: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Shaped rewards float64 [N], the number of each token's set (group and outcome) [N], which are valid [N]."""
        check_tokens(entropy, sequence)
        groups = group_rewards(reward, group)
        correct = groups.value > self.correct_above
        subset = (2 * groups.index + correct)[sequence]
        valid = groups.valid[sequence] & entropy.isfinite()
        entropy = torch.where(valid, entropy.detach().double(), 0.0)
        if self.level == "sequence":
            entropy = _sequence_mean(entropy, sequence, valid)
            position, counted = torch.zeros_like(sequence), valid & (tokens_from_start(sequence) == 0)
        else:
            position, counted = tokens_from_start(sequence), valid
        share = self._share(entropy, correct[sequence], _cells(subset, position), counted)
        value = groups.value[sequence]
        shaped = torch.where(
            correct[sequence], self.alpha1 * value + self.alpha2 * share, -self.alpha1 - self.alpha2 * share
        )
        return shaped, subset, valid

    def _share(self, entropy: Tensor, correct: Tensor, cell: Tensor, counted: Tensor) -> Tensor:
        """Each token's part of its cell's total (entropy where correct, else its inverse), times the cell's size."""
        mass = torch.where(correct, entropy, 1 / (entropy + self.eps))
        number = int(cell.max()) + 1 if cell.numel() else 0
        total = mass.new_zeros(number).index_add_(0, cell, torch.where(counted, mass, 0.0))[cell]
        size = mass.new_zeros(number).index_add_(0, cell, counted.double())[cell]
        return torch.where(total > 0, mass / total.clamp(min=torch.finfo(torch.float64).tiny) * size, 1.0)


def _cells(subset: Tensor, position: Tensor) -> Tensor:
    return torch.unique(torch.stack([subset, position]), dim=1, return_inverse=True)[1]


def _sequence_mean(value: Tensor, sequence: Tensor, valid: Tensor) -> Tensor:
    number = int(sequence.max()) + 1 if sequence.numel() else 0
    total = value.new_zeros(number).index_add_(0, sequence, torch.where(valid, value, 0.0))
    count = value.new_zeros(number).index_add_(0, sequence, valid.double())
    return (total / count.clamp(min=1))[sequence]


def _normalize(value: Tensor, subset: Tensor, valid: Tensor, eps: float) -> Tensor:
    number = int(subset.max()) + 1 if subset.numel() else 0
    weight = valid.double()
    count = value.new_zeros(number).index_add_(0, subset, weight).clamp(min=1)
    mean = (value.new_zeros(number).index_add_(0, subset, weight * value) / count)[subset]
    variance = value.new_zeros(number).index_add_(0, subset, weight * (value - mean).square()) / count
    return (value - mean) / (variance.sqrt()[subset] + eps)
