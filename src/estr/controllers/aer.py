"""AER: an entropy bonus for hard prompts, whose size holds entropy at a share of its initial level."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from estr.advantages.base import group_rewards
from estr.controllers.regularizer import EntropyRegularizer, regularizers
from estr.registry import choose, within
from estr.state import finite_mean


@regularizers.register(
    "aer",
    description="Entropy bonus by prompt, larger for lower group accuracy, steered to tau times the first entropy.",
    formula="lam(x) = alpha max(0, 1 - acc(x)/rho); loss -= mean_x lam(x) H(x); alpha += eta (tau H0 - H), alpha >= 0",
    source="Adaptive Entropy Regularization, arXiv 2510.10959 (abstract); formulas are ours, tau the paper's",
    confidence="reading of the abstract",
    scope="group",
)
@dataclass
class AdaptiveEntropy(EntropyRegularizer):
    """``difficulty`` "relative" is max(0, 1 - acc/rho), "absolute" max(0, rho - acc). A reward above ``correct_above``
    is correct. ``initial_entropy`` None takes the first observation.

    ``controller`` "proportional" moves alpha by ``eta`` times the error; "step" by +-``delta`` inside [0, 1], and pays
    only while entropy is at or below its target (Skywork-OR1, TRL). ``aggregate`` "prompt" means over each prompt's
    tokens, then over prompts; "token" over all tokens.
    """

    state_fields: ClassVar[tuple[str, ...]] = ("anchor", "alpha", "active")

    tau: float = 0.4
    rho: float = 0.5
    eta: float = 0.005
    initial_alpha: float = 0.01
    initial_entropy: float | None = None
    difficulty: str = "relative"
    controller: str = "proportional"
    delta: float = 0.005
    aggregate: str = "prompt"
    correct_above: float = 0.0
    anchor: float | None = field(default=None, init=False)
    alpha: float = field(default=0.0, init=False)
    active: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        within("tau", self.tau, 0.0)
        within("rho", self.rho, 0.0, 1.0, open_low=True)
        within("eta", self.eta, 0.0)
        within("initial_alpha", self.initial_alpha, 0.0)
        within("delta", self.delta, 0.0)
        if self.initial_entropy is not None:
            within("initial_entropy", self.initial_entropy, 0.0)
        choose("difficulty", self.difficulty, ("relative", "absolute"))
        choose("controller", self.controller, ("proportional", "step"))
        choose("aggregate", self.aggregate, ("prompt", "token"))
        self.anchor, self.alpha = self.initial_entropy, self.initial_alpha

    @property
    def target_entropy(self) -> float | None:
        """tau H0, or None before the first observation."""
        return None if self.anchor is None else self.tau * self.anchor

    def coefficient(self, reward: Any, group: Any) -> Tensor:
        """lam of each trajectory's prompt, float64 [S]; 0 where no reward of the group is valid."""
        groups = group_rewards(reward, group)
        correct = torch.where(groups.valid, (groups.value > self.correct_above).double(), torch.nan)
        accuracy = group_rewards(correct, group).mean
        if self.difficulty == "relative":
            hardness = (1 - accuracy / self.rho).clamp(min=0.0)
        else:
            hardness = (self.rho - accuracy).clamp(min=0.0)
        alpha = self.alpha if self.active else 0.0
        return alpha * torch.where(groups.count > 0, hardness, 0.0)

    def token_weight(self, *, sequence: Tensor, reward: Any, group: Any) -> Tensor:
        coefficient = self.coefficient(reward, group)[sequence]
        if self.aggregate == "token":
            return coefficient / max(sequence.numel(), 1)
        prompt = group_rewards(reward, group).index[sequence]
        tokens = torch.bincount(prompt)
        return coefficient / (tokens[prompt] * (tokens > 0).sum())

    def observe(self, entropy: Tensor, sequence: Tensor) -> dict[str, float]:
        mean = finite_mean(entropy)
        if math.isfinite(mean):
            self.anchor = mean if self.anchor is None else self.anchor
            self._move(self.tau * self.anchor - mean)
        target = self.target_entropy
        return {"aer/alpha": self.alpha, **({} if target is None else {"aer/target_entropy": target})}

    def _move(self, error: float) -> None:
        """Raise alpha where entropy is below its target (a positive error)."""
        if self.controller == "proportional":
            self.alpha = max(0.0, self.alpha + self.eta * error)
        else:
            self.alpha = min(max(self.alpha + math.copysign(self.delta, error) * (error != 0), 0.0), 1.0)
            self.active = error >= 0
