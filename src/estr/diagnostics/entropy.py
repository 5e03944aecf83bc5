"""How the log-ratio δ grows with the entropy of the position: bins and a power-law fit, in plain numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class EntropyBins:
    """Statistics of δ in B bins of H (nats); a bin without tokens has count 0 and NaN means."""

    edges: Floats  # [B + 1], nats
    count: NDArray[np.int64]  # [B]
    entropy: Floats  # [B], mean H of the tokens of a bin
    delta_abs: Floats  # [B], mean |δ|
    delta_squared: Floats  # [B], mean δ²


@dataclass(frozen=True)
class PowerLawFit:
    """E[δ²] = coefficient · H^exponent, and the linear law E[δ²] = slope · H beside it.

    ``exponent``, ``coefficient`` and ``r2`` come from a straight line through the bins in logarithms, each bin weighted
    by its tokens. ``slope`` is least squares through the origin over tokens: σ² of the logit noise in the linear law
    that entropy-scaled trust regions rest on (arXiv 2607.22186, appendix A).
    """

    exponent: float
    coefficient: float
    slope: float
    r2: float
    bins: EntropyBins


def delta_by_entropy(delta: ArrayLike, entropy: ArrayLike, bins: int | ArrayLike = 20) -> EntropyBins:
    """Means of |δ| and δ² in bins of H.

    ``delta`` [N] = log π − log μ and ``entropy`` [N] in nats; pairs that are not finite are left out. ``bins`` is a
    number of bins of about equal count (fewer where many tokens share one H) or increasing edges in nats, the last
    one inclusive. Raises ValueError where lengths differ or edges do not increase.
    """
    delta_, entropy_ = _finite_pairs(delta, entropy)
    edges = _edges(entropy_, bins)
    index = np.searchsorted(edges, entropy_, side="right") - 1
    index[entropy_ == edges[-1]] = len(edges) - 2
    inside = (index >= 0) & (index < len(edges) - 1)
    index, delta_, entropy_ = index[inside], delta_[inside], entropy_[inside]
    count = np.bincount(index, minlength=len(edges) - 1)
    return EntropyBins(
        edges=edges,
        count=count.astype(np.int64),
        entropy=_bin_means(index, entropy_, count),
        delta_abs=_bin_means(index, np.abs(delta_), count),
        delta_squared=_bin_means(index, delta_**2, count),
    )


def fit_power_law(
    delta: ArrayLike, entropy: ArrayLike, bins: int | ArrayLike = 20, minimum_count: int = 5
) -> PowerLawFit | None:
    """Fit E[δ²] against H over ``delta`` [N] and ``entropy`` [N] (nats).

    Bins with fewer than ``minimum_count`` tokens, without entropy or without any deviation carry no logarithm and are
    left out of the fit; None where fewer than three remain.
    """
    table = delta_by_entropy(delta, entropy, bins)
    with np.errstate(invalid="ignore"):
        usable = (table.count >= minimum_count) & (table.entropy > 0) & (table.delta_squared > 0)
    if usable.sum() < 3:
        return None
    x, y = np.log(table.entropy[usable]), np.log(table.delta_squared[usable])
    weight = table.count[usable].astype(np.float64)
    exponent, intercept, r2 = _weighted_line(x, y, weight)
    delta_, entropy_ = _finite_pairs(delta, entropy)
    slope = float((delta_**2 * entropy_).sum() / (entropy_**2).sum())
    with np.errstate(over="ignore"):  # two nearly equal entropies can give any intercept
        scale = float(np.exp(intercept))
    return PowerLawFit(exponent, scale, slope, r2, table)


def _finite_pairs(delta: ArrayLike, entropy: ArrayLike) -> tuple[Floats, Floats]:
    delta_, entropy_ = np.asarray(delta, np.float64), np.asarray(entropy, np.float64)
    if delta_.shape != entropy_.shape or delta_.ndim != 1:
        raise ValueError(f"delta and entropy must be [N] and alike, got {delta_.shape} and {entropy_.shape}")
    finite = np.isfinite(delta_) & np.isfinite(entropy_)
    return delta_[finite], entropy_[finite]


def _edges(entropy: Floats, bins: int | ArrayLike) -> Floats:
    if not isinstance(bins, int):
        edges = np.asarray(bins, np.float64)
        if edges.ndim != 1 or len(edges) < 2 or (np.diff(edges) <= 0).any():
            raise ValueError("edges of entropy bins must be two or more increasing numbers")
        return edges
    if bins < 1:
        raise ValueError(f"the number of entropy bins must be at least 1, got {bins}")
    if not len(entropy):
        return np.array([0.0, 1.0])
    edges = np.unique(np.quantile(entropy, np.linspace(0, 1, bins + 1)))
    return edges if len(edges) > 1 else np.array([edges[0], edges[0] + 1.0])


def _bin_means(index: NDArray[np.intp], values: Floats, count: NDArray[np.intp]) -> Floats:
    sums = np.bincount(index, weights=values, minlength=len(count))
    return np.where(count > 0, sums / np.maximum(count, 1), np.nan)


def _weighted_line(x: Floats, y: Floats, weight: Floats) -> tuple[float, float, float]:
    """Slope, intercept and R² of a weighted straight line."""
    weight = weight / weight.sum()
    x_mean, y_mean = float(weight @ x), float(weight @ y)
    spread = float(weight @ (x - x_mean) ** 2)
    slope = float(weight @ ((x - x_mean) * (y - y_mean))) / spread
    intercept = y_mean - slope * x_mean
    total = float(weight @ (y - y_mean) ** 2)
    residual = float(weight @ (y - intercept - slope * x) ** 2)
    return slope, intercept, 1.0 - residual / total if total > 0 else 1.0
