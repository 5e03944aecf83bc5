"""The law R = b - a e^H: what score a policy reaches by spending its entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class EntropyLaw:
    """R = b - a e^H with H in nats; ``r2`` is the share of the score's variance it explains (1 where there is none)."""

    a: float
    b: float
    r2: float

    @property
    def ceiling(self) -> float:
        """The score at zero entropy, b - a."""
        return self.b - self.a

    def predict(self, entropy: float) -> float:
        """The score at this entropy."""
        return self.b - self.a * math.exp(entropy)


def fit_entropy_law(entropy: Any, score: Any) -> EntropyLaw:
    """Least squares of ``score`` [K] on [-e^H, 1] for ``entropy`` [K], one entry per checkpoint of one run.

    Pairs that are not finite are left out. Raises ``ValueError`` where shapes differ or fewer than two different
    entropies are left. Source: arXiv 2505.22617 and its documentation in verl (docs/algo/entropy.md).
    """
    h, r = np.asarray(entropy, dtype=np.float64), np.asarray(score, dtype=np.float64)
    if h.ndim != 1 or h.shape != r.shape:
        raise ValueError(f"entropy and score must both have shape [K], but have {list(h.shape)} and {list(r.shape)}")
    finite = np.isfinite(h) & np.isfinite(r)
    h, r = h[finite], r[finite]
    if np.unique(h).size < 2:
        raise ValueError("the law R = b - a e^H needs at least two checkpoints of different entropy")
    features = np.stack([-np.exp(h), np.ones_like(h)], axis=1)
    (a, b), *_ = np.linalg.lstsq(features, r, rcond=None)
    spread = float(np.square(r - r.mean()).sum())
    left = float(np.square(r - features @ np.array([a, b])).sum())
    return EntropyLaw(float(a), float(b), 1 - left / spread if spread > 0 else 1.0)
