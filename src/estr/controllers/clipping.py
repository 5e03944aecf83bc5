"""Bounds on the gradient norm: a fixed one, and one that follows a rolling quantile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import Tensor

from estr.controllers.base import AllReduce, StepController, global_norm, scale_, steps
from estr.registry import choose, within

_TINY = 1e-6


@steps.register(
    "fixed_norm",
    description="Scale the gradient down to a fixed global norm.",
    formula="g *= min(1, max_norm / (||g|| + 1e-6))",
    source="Pascanu et al., arXiv 1211.5063; torch.nn.utils.clip_grad_norm_",
    confidence="official code",
    scope="step",
)
@dataclass
class FixedNorm(StepController):
    """``max_norm`` 0 never scales. A norm that is not finite leaves the gradients as they are."""

    max_norm: float = 1.0

    def __post_init__(self) -> None:
        within("max_norm", self.max_norm, 0.0)

    def transform(self, gradients: Sequence[Tensor], all_reduce: AllReduce | None = None) -> dict[str, float]:
        norm = global_norm(gradients, all_reduce)
        return _clip(gradients, norm, self.max_norm or math.inf)


@steps.register(
    "rq",
    description="Scale the gradient down to a quantile of the norms of the last steps.",
    formula="tau = quantile(last norms, q) once there are enough; g *= min(1, tau / (||g|| + 1e-6)); lr *= k^-decay",
    source="RQ-TTSA, arXiv 2606.22436 (abstract); buffer, quantile and order are our choice",
    confidence="reading of the abstract",
    scope="step",
)
@dataclass
class RollingQuantile(StepController):
    """The threshold comes from history alone (``include_current`` False) and interpolates linearly between norms.

    ``store`` "raw" lets the threshold follow a true change of scale, "clipped" lets it only shrink. Two timescales are
    two controllers with own histories, whose k-th step (from 1) is scaled by k^-``decay``: 0.4 for the fast level (the
    policy), 0.6 for the slow one, 0 for none. A norm that is not finite is neither stored nor scaled.
    """

    state_fields: ClassVar[tuple[str, ...]] = ("history", "taken")

    quantile: float = 0.9
    window: int = 100
    min_history: int = 10
    store: str = "raw"
    include_current: bool = False
    decay: float = 0.0
    history: list[float] = field(default_factory=list, init=False)
    taken: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        within("quantile", self.quantile, 0.0, 1.0)
        within("window", self.window, 1)
        within("min_history", self.min_history, 1, self.window)
        within("decay", self.decay, 0.0)
        choose("store", self.store, ("raw", "clipped"))

    def transform(self, gradients: Sequence[Tensor], all_reduce: AllReduce | None = None) -> dict[str, float]:
        self.taken += 1
        norm = global_norm(gradients, all_reduce)
        threshold = self.threshold(norm)
        metrics = _clip(gradients, norm, threshold)
        if math.isfinite(norm):
            kept = norm if self.store == "raw" else min(norm, threshold)
            self.history = [*self.history, kept][-self.window :]
        return metrics

    def scale_learning_rate(self, statistics: Mapping[str, float]) -> float:
        return float(max(self.taken, 1) ** -self.decay)

    def threshold(self, norm: float) -> float:
        """The bound for a gradient of this norm; infinite while the history is too short."""
        values = [*self.history, norm] if self.include_current and math.isfinite(norm) else self.history
        return float(np.quantile(values, self.quantile)) if len(values) >= self.min_history else math.inf


def _clip(gradients: Sequence[Tensor], norm: float, threshold: float) -> dict[str, float]:
    if not math.isfinite(norm):
        return {}
    scale = min(1.0, threshold / (norm + _TINY)) if norm > threshold else 1.0
    scale_(gradients, scale)
    bound = {"controller/threshold": threshold} if math.isfinite(threshold) else {}
    return {"controller/norm": norm, "controller/scale": scale, **bound}
