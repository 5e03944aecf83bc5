"""TECRL without a critic: what entropy is still to come counts as advantage, at a price set by a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from estr.advantages.base import group_rewards
from estr.advantages.returns import discounted_returns, tokens_from_start
from estr.controllers.regularizer import EntropyRegularizer, regularizers
from estr.registry import choose, within


def entropy_budget(target_entropy: float, gamma: float, length: float, rho: float = 1.0) -> float:
    """rho H (1 - gamma^T)/(1 - gamma): the entropy a trajectory of ``length`` tokens should have in sum, in nats."""
    horizon = length if gamma == 1 else (1 - gamma**length) / (1 - gamma)
    return rho * target_entropy * horizon


@regularizers.register(
    "tecrl",
    description="Entropy of whole trajectories on a budget: later entropy enters the advantage at a controlled price.",
    formula="G_t = H_t + gamma G_{t+1}; A += alpha (gamma G_{t+1} - b); loss -= alpha mean H; ln alpha += lr (B - G_0)",
    source="TECRL / DSAC-E, arXiv 2511.11592 (critics for continuous control); this critic-free form is our adaptation",
    confidence="adaptation",
    scope="sequence",
)
@dataclass
class TrajectoryEntropy(EntropyRegularizer):
    """``budget`` None is ``entropy_budget`` of ``target_entropy`` (nats a token) at each trajectory's own length.

    ``baseline`` of the entropy-to-go: "batch" (mean over all tokens), "group" (over the group's tokens) or "none".
    alpha rises while trajectories have less entropy than the budget, and is held inside [1e-8, ``max_alpha``].
    Entropies that are not finite count as 0; ``invalid`` is their number in the last ``observe``.
    """

    state_fields: ClassVar[tuple[str, ...]] = ("log_alpha",)

    gamma: float = 0.99
    target_entropy: float = 0.3
    rho: float = 1.0
    budget: float | None = None
    learning_rate: float = 0.01
    initial_alpha: float = 0.01
    max_alpha: float = 1.0
    baseline: str = "batch"
    log_alpha: float = field(default=0.0, init=False)
    invalid: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        within("gamma", self.gamma, 0.0, 1.0)
        within("learning_rate", self.learning_rate, 0.0)
        within("max_alpha", self.max_alpha, 0.0, open_low=True)
        within("initial_alpha", self.initial_alpha, 0.0, self.max_alpha, open_low=True)
        choose("baseline", self.baseline, ("batch", "group", "none"))
        self.log_alpha = math.log(self.initial_alpha)

    @property
    def alpha(self) -> float:
        """The price of one nat."""
        return math.exp(self.log_alpha)

    def entropy_to_go(self, entropy: Tensor, sequence: Tensor) -> Tensor:
        """G, float64 [N]: the discounted entropy from each token on, its own included."""
        return discounted_returns(torch.where(entropy.isfinite(), entropy, 0.0), sequence, self.gamma)

    def future(self, entropy: Tensor, sequence: Tensor) -> Tensor:
        """gamma G_{t+1}, float64 [N]; 0 for a sequence's last token."""
        own = torch.where(entropy.isfinite(), entropy, 0.0).detach().double()
        return self.entropy_to_go(entropy, sequence) - own

    def advantage(self, advantage: Tensor, *, entropy: Tensor, sequence: Tensor, group: Any) -> Tensor:
        future = self.future(entropy, sequence)
        bonus = self.alpha * (future - self._baseline(future, sequence, group))
        return (advantage.detach().double() + bonus).to(advantage.dtype)

    def token_weight(self, *, sequence: Tensor, reward: Any, group: Any) -> Tensor:
        size = max(sequence.numel(), 1)
        return torch.full(sequence.shape, self.alpha / size, dtype=torch.float64, device=sequence.device)

    def observe(self, entropy: Tensor, sequence: Tensor) -> dict[str, float]:
        self.invalid = int((~entropy.isfinite()).sum())
        if entropy.numel() == 0:
            return {"tecrl/alpha": self.alpha}
        first = tokens_from_start(sequence) == 0
        total = float(self.entropy_to_go(entropy, sequence)[first].mean())
        budget = self._budget(sequence)
        moved = self.log_alpha + self.learning_rate * (budget - total)
        self.log_alpha = min(max(moved, math.log(1e-8)), math.log(self.max_alpha))
        return {"tecrl/alpha": self.alpha, "tecrl/trajectory_entropy": total, "tecrl/budget": budget}

    def _budget(self, sequence: Tensor) -> float:
        if self.budget is not None:
            return self.budget
        lengths = [length for length in torch.bincount(sequence).tolist() if length]
        return sum(entropy_budget(self.target_entropy, self.gamma, n, self.rho) for n in lengths) / len(lengths)

    def _baseline(self, future: Tensor, sequence: Tensor, group: Any) -> Tensor:
        if self.baseline == "none" or future.numel() == 0:
            return torch.zeros_like(future)
        if self.baseline == "batch":
            return future.mean().expand_as(future)
        return group_rewards(future, torch.as_tensor(group)[sequence]).mean
