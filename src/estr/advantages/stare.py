"""STARE: while entropy is below its target, surprising tokens with positive advantage weigh more."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from estr.advantages.reweighting import Reweighting, rules, same_shape
from estr.registry import choose, within


@rules.register(
    "stare",
    description="Multiply the advantage of the most surprising tokens while entropy is below a target.",
    formula="A' = omega A; omega = W on the top-P surprisal of A > 0 (C2: M on that of A < 0), else 1; all 1 gate off",
    source="arXiv 2606.19236; hp-luo/STARE core_algos.py (STAREController, compute_stare_token_weights)",
    confidence="official code",
    scope="token",
)
@dataclass
class Stare(Reweighting):
    """``reweight(advantage, logprob=...)`` with ``logprob`` [N] of the policy that is about to be updated.

    ``variant`` "O1" raises positive tokens only, "C2" also lowers surprising negative ones. ``adaptive`` moves both
    weights by ``step`` per observation. ``scope`` "batch" selects among all tokens given; "part" inside each value of a
    further field ``part`` int64 [N] (the released code selects inside each micro-batch).
    """

    state_fields: ClassVar[tuple[str, ...]] = ("gate", "weight_positive", "weight_negative")

    variant: str = "O1"
    fraction: float = 0.1
    positive: float = 1.1
    negative: float = 0.9
    target_entropy: float = 0.3
    adaptive: bool = False
    step: float = 0.01
    positive_max: float = 1.5
    negative_min: float = 0.5
    scope: str = "batch"
    gate: bool = field(default=True, init=False)
    weight_positive: float = field(default=1.0, init=False)
    weight_negative: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        choose("variant", self.variant, ("O1", "C2"))
        choose("scope", self.scope, ("batch", "part"))
        within("fraction", self.fraction, 0.0, 1.0, open_low=True)
        within("positive", self.positive, 0.0, open_low=True)
        within("negative", self.negative, 0.0, open_low=True)
        within("step", self.step, 0.0)
        within("positive_max", self.positive_max, 1.0)
        within("negative_min", self.negative_min, 0.0, 1.0)
        self.weight_positive, self.weight_negative = self.positive, self.negative

    @property
    def needs(self) -> tuple[str, ...]:
        return ("logprob", "part") if self.scope == "part" else ("logprob",)

    def observe(self, entropy: float) -> dict[str, float]:
        """Gate and adapt; an entropy that is not finite changes nothing."""
        if math.isfinite(entropy):
            self.gate = entropy < self.target_entropy
            if self.adaptive:
                self._adapt(entropy)
        return {
            "stare/gate": float(self.gate),
            "stare/weight_positive": self.weight_positive,
            "stare/weight_negative": self.weight_negative,
        }

    def reweight(self, advantage: Tensor, **fields: Any) -> Tensor:
        return advantage.detach() * self.weights(advantage, **fields).to(advantage.dtype)

    def weights(self, advantage: Tensor, *, logprob: Tensor, part: Tensor | None = None) -> Tensor:
        """omega [N], float64."""
        same_shape(advantage, logprob=logprob)
        weight = torch.ones_like(advantage, dtype=torch.float64)
        if not self.gate:
            return weight
        surprisal = -logprob.detach().double()
        for member in self._parts(advantage, part):
            weight[self._top(surprisal, member & (advantage > 0))] = self.weight_positive
            if self.variant == "C2":
                weight[self._top(surprisal, member & (advantage < 0))] = self.weight_negative
        return weight

    def _adapt(self, entropy: float) -> None:
        move = math.copysign(self.step, self.target_entropy - entropy) if entropy != self.target_entropy else 0.0
        self.weight_positive = min(max(self.weight_positive + move, 1.0), self.positive_max)
        self.weight_negative = min(max(self.weight_negative - move, self.negative_min), 1.0)

    def _parts(self, advantage: Tensor, part: Tensor | None) -> list[Tensor]:
        if self.scope == "batch":
            return [torch.ones_like(advantage, dtype=torch.bool)]
        if part is None:
            raise ValueError(
                "stare with scope 'part' needs part, the number of each token's micro-batch; none was given"
            )
        same_shape(advantage, part=part)
        return [part == number for number in part.unique()]

    def _top(self, surprisal: Tensor, candidate: Tensor) -> Tensor:
        index = (candidate & surprisal.isfinite()).nonzero().squeeze(1)
        count = index.numel()
        chosen = min(count, max(1, int(count * self.fraction + 0.999999)))
        return index[surprisal[index].topk(chosen).indices] if count else index
