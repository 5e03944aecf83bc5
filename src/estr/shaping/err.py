"""ERR+: reward relief of entropy while thinking, then efficiency relative to the group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from estr.advantages.base import group_rewards
from estr.registry import choose, within
from estr.shaping.base import RewardShaping, floating, shapings


@shapings.register(
    "err",
    description="Phase 1 rewards drops of entropy while thinking; phase 2 answers that are short for their group.",
    formula="1: min(r + lam sum relu(H[t-1] - H[t] - eps) / ln(T+1), r_max);  2: r + alpha tanh(-gamma z), z of length",
    source="ERR+, arXiv 2608.28771; XrkArul/err_response err.py, naive.py",
    confidence="official code",
    scope="sequence",
)
@dataclass
class EntropyRelief(RewardShaping):
    """Phase 1: ``shape(reward, sequence=..., entropy=..., thinking=...)``; 2: ``shape(reward, length=..., group=...)``.

    ``entropy`` [N] is that of the sampling policy, ``thinking`` bool [N] marks the tokens before the first
    ``</think>`` (None: all). ``length`` int64 [S] counts action tokens. Both phases keep scores at or above ``floor``.
    A reward above ``correct_above`` is a correct answer; ``gate_on_correct`` False gives the phase-1 bonus to wrong
    answers too, as the released code does. Pairs of tokens with a non-finite entropy give no relief; ``invalid`` counts
    such tokens.
    """

    phase: int = 1
    eps: float = 0.01
    lam: float = 0.3
    reward_max: float = 1.5
    alpha: float = 0.3
    gamma: float = 0.5
    floor: float = -0.5
    gate_on_correct: bool = True
    correct_above: float = 0.0
    invalid: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        choose("phase", self.phase, (1, 2))
        within("eps", self.eps, 0.0)
        within("lam", self.lam, 0.0)
        within("alpha", self.alpha, 0.0)
        within("gamma", self.gamma, 0.0)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("sequence", "entropy", "thinking") if self.phase == 1 else ("length", "group")

    def shape(self, reward: Tensor, **fields: Any) -> Tensor:
        base = reward.detach().double()
        correct = base > self.correct_above
        if self.phase == 1:
            bonus = self.lam * self.relief(base.numel(), **fields)
            bonus = torch.where(correct, bonus, 0.0) if self.gate_on_correct else bonus
            score = (base + bonus).clamp(max=self.reward_max)
        else:
            efficiency = self.efficiency(base, **fields)
            score = base + self.alpha * torch.where(correct, efficiency, efficiency.clamp(max=0.0))
        return score.clamp(min=self.floor).to(floating(reward))

    def relief(self, sequences: int, *, sequence: Tensor, entropy: Tensor, thinking: Tensor | None = None) -> Tensor:
        """Sum of the entropy drops beyond eps over ln(T + 1), float64 [S]; 0 for fewer than two thinking tokens."""
        if thinking is not None:
            sequence, entropy = sequence[thinking], entropy[thinking]
        self.invalid = int((~entropy.isfinite()).sum())
        entropy = entropy.detach().double()
        drop = entropy[:-1] - entropy[1:] - self.eps
        inside = (sequence[:-1] == sequence[1:]) & drop.isfinite()
        drop = torch.where(inside, drop.clamp(min=0.0), 0.0)
        total = drop.new_zeros(sequences).index_add_(0, sequence[1:], drop)
        count = torch.bincount(sequence, minlength=sequences).double()
        return torch.where(count > 1, total / (count + 1).log().clamp(min=1e-300), 0.0)

    def efficiency(self, reward: Tensor, *, length: Tensor, group: Tensor) -> Tensor:
        """tanh(-gamma z) of the length within the group, float64 [S]; positive for the short.

        A group of one is measured against 2048 +- 1024 tokens. Trajectories of an invalid reward are left out.
        """
        groups = group_rewards(torch.where(reward.isfinite(), length.double(), torch.nan), group)
        std = groups.std(correction=0)
        z = torch.where(std < 1e-5, 0.0, (groups.value - groups.mean) / (std + 1e-5))
        z = torch.where(groups.count <= 1, (groups.value - 2048) / 1024, z)
        return torch.tanh(-self.gamma * z)
