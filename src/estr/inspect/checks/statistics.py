"""Identities that any staleness and any engine noise keep, and statistics that tell when they are broken.

For tokens a sampled from μ, whatever π is: E[−log μ(a)] = H(μ), E[π/μ] = 1 and E[log π/μ] ≤ 0. Deviations from these
at successive tokens are a martingale difference sequence, so plain standard errors hold although tokens of one
trajectory depend on each other. A fault must break an identity by more than SIGNIFICANT standard errors and by a size
that matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estr.inspect.dump import Dump, Floats, Ints

SIGNIFICANT = 5.0  # standard errors
FEWEST = 150  # tokens below which nothing is said
BINS = 24

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Mean:
    """A mean with its standard error."""

    value: float
    error: float
    count: int

    @property
    def t(self) -> float:
        if self.error > 0:
            return self.value / self.error
        return float(np.sign(self.value) * np.inf) if self.value and self.count > 1 else 0.0


def mean_of(x: Floats) -> Mean:
    """Mean and standard error of the finite values of x [n]."""
    x = x[np.isfinite(x)]
    if len(x) < 2:
        return Mean(0.0, 0.0, len(x))
    return Mean(float(x.mean()), float(x.std(ddof=1) / np.sqrt(len(x))), len(x))


@dataclass(frozen=True)
class Slope:
    """How y follows x inside bins of a third variable: slope, its standard error, share of variance explained."""

    value: float
    error: float
    r2: float


def slope_within(y: Floats, x: Floats, bins: Ints) -> Slope:
    """Least squares of y on x [n] after means over ``bins`` [n] are taken out; the error allows unequal variances."""
    x, y = x - _group_mean(x, bins), y - _group_mean(y, bins)
    spread = float(x @ x)
    if spread <= 0:
        return Slope(0.0, np.inf, 0.0)
    value = float(x @ y) / spread
    residual = y - value * x
    error = float(np.sqrt((x**2 * residual**2).sum())) / spread
    total = float(y @ y)
    return Slope(value, error, 1.0 - float(residual @ residual) / total if total > 0 else 0.0)


def quantile_bins(x: Floats, bins: int = BINS) -> Ints:
    """A bin of about equal count for each finite x [n]."""
    edges = np.unique(np.quantile(x, np.linspace(0, 1, bins + 1)[1:-1]))
    return np.searchsorted(edges, x, side="right").astype(np.int64)


def position_bins(dump: Dump, chosen: Mask) -> Ints:
    """Bins of tokens whose positions are alike in entropy; one bin where no entropy is stored."""
    for column in (dump.entropy, dump.learner_entropy):
        values = column[chosen]
        if np.isfinite(values).mean() > 0.9:
            return quantile_bins(np.nan_to_num(values))
    return np.zeros(int(chosen.sum()), np.int64)


def wrong_side(x: Floats, sign: float) -> float:
    """Share of Σx² that comes from values of the other sign than ``sign``."""
    total = float((x**2).sum())
    return float((np.minimum(sign * x, 0.0) ** 2).sum()) / total if total > 0 else 1.0


@dataclass(frozen=True)
class Fit:
    """Whether ``other`` explains ``target`` better than ``own`` does.

    ``score`` is the mean of (target − own)² − (target − other)² over the mean of (own − other)²: +1 where other is what
    the target belongs to, −1 where own is, 0 where neither has to do with it.
    """

    score: float
    error: float  # of the score
    count: int

    @property
    def t(self) -> float:
        return self.score / self.error if self.error > 0 else 0.0


def compare(target: Floats, own: Floats, other: Floats, weight: Floats | None = None) -> Fit:
    """Compare two explanations of ``target`` [n]; ``weight`` [n] makes the means those of another policy."""
    there = np.isfinite(target) & np.isfinite(own) & np.isfinite(other)
    weight = np.ones(int(there.sum())) if weight is None else weight[there]
    target, own, other = target[there], own[there], other[there]
    scale = float(((own - other) ** 2).mean()) if len(own) else 0.0
    if scale <= 1e-9:
        return Fit(0.0, np.inf, len(own))
    gain = mean_of(weight * ((target - own) ** 2 - (target - other) ** 2))
    return Fit(gain.value / scale, gain.error / scale, gain.count)


def neighbor(values: Floats, row: Ints, step: int) -> Floats:
    """The value ``step`` action tokens further on in the same row [N]; NaN where there is none."""
    out = np.full(len(values), np.nan)
    if len(values) <= abs(step):
        return out
    here, there = (slice(None, -step), slice(step, None)) if step > 0 else (slice(-step, None), slice(None, step))
    same = row[here] == row[there]
    out[here] = np.where(same, values[there], np.nan)
    return out


def freshest(dump: Dump, use: Mask) -> Mask:
    """The tokens of ``use`` with the smallest lags, enough to judge by; all of them where lags are unknown."""
    lag = dump.lag[use]
    if not np.isfinite(lag).all() or len(lag) <= 4 * FEWEST:
        return use
    most = np.partition(lag, 4 * FEWEST)[4 * FEWEST]
    return use & (dump.lag <= most)


def temperatures(dump: Dump) -> list[tuple[float, Mask]]:
    """Every sampling temperature other than 1 with enough tokens, and which tokens it sampled."""
    by_token = dump.temperature[dump.row]
    found = []
    for value in np.unique(by_token[np.isfinite(by_token)]):
        chosen = by_token == value
        if value > 0 and abs(value - 1.0) > 1e-3 and chosen.sum() >= FEWEST:
            found.append((float(value), chosen))
    return found


def _group_mean(x: Floats, bins: Ints) -> Floats:
    count = np.bincount(bins)
    means: Floats = (np.bincount(bins, weights=x) / np.maximum(count, 1))[bins]
    return means
