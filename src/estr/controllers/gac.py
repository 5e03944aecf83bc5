"""GAC: take out of a gradient what only repeats the previous one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from estr.controllers.base import AllReduce, StepController, inner_products, steps
from estr.registry import choose, within


@steps.register(
    "gac",
    description="Shrink the gradient's part along the previous gradient while the two are aligned too well.",
    formula="c = cos(g, p): c <= low: g;  low < c <= high: parallel part times low/c;  c > high: orthogonal part alone",
    source="Gradient Alignment Control, arXiv 2603.01501 (abstract); thresholds, sign, reference and factor are ours",
    confidence="reading of the abstract",
    scope="step",
)
@dataclass
class GradientAlignment(StepController):
    """``mode`` "exact" sets the parallel part so that the new cosine is ``low``. Beyond ``high``, ``above`` "project"
    keeps the orthogonal part and "skip" asks for no optimizer step. ``cosine`` "absolute" treats opposed gradients too.
    ``reference`` is the previous gradient as it came ("raw") or as it was applied ("applied").

    Keeps one float32 copy of the gradient (``state_tensors``). The first step, and one whose predecessor or own norm is
    zero or not finite, passes unchanged.
    """

    state_fields: ClassVar[tuple[str, ...]] = ("seen",)

    low: float = 0.2
    high: float = 0.9
    mode: str = "projection"
    above: str = "project"
    cosine: str = "signed"
    reference: str = "raw"
    seen: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        within("low", self.low, 0.0, 1.0)
        within("high", self.high, self.low, 1.0)
        choose("mode", self.mode, ("projection", "exact"))
        choose("above", self.above, ("project", "skip"))
        choose("cosine", self.cosine, ("signed", "absolute"))
        choose("reference", self.reference, ("raw", "applied"))
        if self.mode == "exact" and self.low == 1.0:
            raise ValueError("low must be below 1 with mode 'exact': no parallel part gives a cosine of 1")
        self._previous: list[Tensor] = []

    def transform(self, gradients: Sequence[Tensor], all_reduce: AllReduce | None = None) -> dict[str, float]:
        self._check_shapes(gradients)
        self.skip = False
        norm2 = inner_products(gradients, gradients, all_reduce)
        if not math.isfinite(norm2):
            return {}
        raw = [gradient.detach().float().clone() for gradient in gradients]
        metrics = self._align(gradients, norm2, all_reduce) if self._previous else {}
        if self.reference == "raw":
            self._previous = raw
        elif not self.skip:
            self._previous = [gradient.detach().float().clone() for gradient in gradients]
        self.seen += 1
        return metrics

    def _align(self, gradients: Sequence[Tensor], norm2: float, all_reduce: AllReduce | None) -> dict[str, float]:
        dot = inner_products(gradients, self._previous, all_reduce)
        previous2 = inner_products(self._previous, self._previous, all_reduce)
        if norm2 <= 0 or previous2 <= 0:
            return {}
        cosine = dot / math.sqrt(norm2 * previous2)
        measure = abs(cosine) if self.cosine == "absolute" else cosine
        self.skip = measure > self.high and self.above == "skip"
        kept = 1.0 if measure <= self.low or self.skip else self._kept(measure)
        if kept != 1.0:
            for gradient, previous in zip(gradients, self._previous, strict=True):
                gradient.sub_((1 - kept) * dot / previous2 * previous.to(gradient.device))
        return {"gac/cosine": cosine, "gac/parallel_kept": kept, "gac/skip": float(self.skip)}

    def _kept(self, measure: float) -> float:
        """The share of the parallel part that stays, for a cosine above ``low``."""
        if measure > self.high:
            return 0.0
        if self.mode == "projection":
            return self.low / measure
        orthogonal = math.sqrt(max(1 - measure**2, 0.0))
        return self.low / math.sqrt(1 - self.low**2) * orthogonal / measure

    def state_tensors(self) -> dict[str, Tensor]:
        return {f"previous.{number}": tensor for number, tensor in enumerate(self._previous)}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        names = [f"previous.{number}" for number in range(len(tensors))]
        if set(names) != set(tensors):
            raise ValueError(f"gac keeps previous.0, previous.1, ..., but {sorted(tensors)[:3]} were given")
        self._previous = [torch.as_tensor(tensors[name]).detach().float().clone() for name in names]

    def _check_shapes(self, gradients: Sequence[Tensor]) -> None:
        if self._previous and [g.shape for g in gradients] != [p.shape for p in self._previous]:
            raise ValueError(
                "gac was given gradients of other shapes than at the step before; pass the same parameters"
            )
