"""The numbers a comparison stands on: intervals by Student's t, paired differences, Holm's correction, curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

Floats = NDArray[np.float64]
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over ``count`` seeds and its two-sided interval; ``low`` and ``high`` are None for fewer than two."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @property
    def ends(self) -> tuple[float, float] | None:
        """The interval, where there is one."""
        return (self.low, self.high) if self.low is not None and self.high is not None else None


@dataclass(frozen=True)
class Difference:
    """A mean paired difference; ``p`` is two-sided, ``p_holm`` and the interval are corrected over the family."""

    mean: float
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None
    count: int

    @property
    def ends(self) -> tuple[float, float] | None:
        """The interval, where there is one."""
        return (self.low, self.high) if self.low is not None and self.high is not None else None

    @property
    def decided(self) -> bool:
        """Whether the corrected interval excludes 0."""
        return self.ends is not None and (self.ends[0] > 0 or self.ends[1] < 0)


def t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t."""
    return float(stdtrit(freedom, probability))


def mean_interval(values: Sequence[float] | Floats, level: float = LEVEL) -> Interval:
    """Mean ± t·s/√n of finite values; raises ValueError where there are none."""
    finite = _finite(values)
    if not len(finite):
        raise ValueError("a mean needs at least one finite value")
    mean = float(finite.mean())
    half = _half_width(finite, level)
    return (
        Interval(mean, None, None, len(finite))
        if half is None
        else Interval(mean, mean - half, mean + half, len(finite))
    )


def t_test(differences: Sequence[float] | Floats) -> float | None:
    """Two-sided p of mean 0; None for fewer than two values. Without spread it is 1 where the mean is 0, else 0."""
    values = _finite(differences)
    if len(values) < 2:
        return None
    mean, error = float(values.mean()), _standard_error(values)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2.0 * stdtr(len(values) - 1, -abs(mean) / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values (Scand. J. Statist. 6, 1979), in the order given."""
    return [min(1.0, p * factor) for p, factor in zip(p_values, holm_factors(p_values), strict=True)]


def holm_factors(p_values: Sequence[float]) -> list[float]:
    """What each p-value is multiplied by: m − rank + 1, or more where a smaller p-value is adjusted above it."""
    count, factors, largest = len(p_values), [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        p = p_values[index]
        largest = max(largest, p * (count - rank))
        factors[index] = largest / p if p > 0 else float(count - rank)
    return factors


def paired_differences(families: Sequence[Sequence[float] | Floats], level: float = LEVEL) -> list[Difference]:
    """Each family member's paired differences against one baseline, corrected together by Holm.

    The interval of a member has confidence 1 − (1 − level)/c with c its Holm factor, so that it excludes 0 exactly
    where its adjusted p-value is below 1 − level. Members with fewer than two pairs are not part of the correction.
    """
    samples = [_finite(values) for values in families]
    p_values = [t_test(values) for values in samples]
    tested = [index for index, p in enumerate(p_values) if p is not None]
    factors = dict(zip(tested, holm_factors([p_values[i] or 0.0 for i in tested]), strict=True))
    return [
        _difference(values, p, factors.get(index), level)
        for index, (values, p) in enumerate(zip(samples, p_values, strict=True))
    ]


def area_under_curve(step: Sequence[float] | Floats, value: Sequence[float] | Floats) -> float:
    """Mean height of a curve over its steps (trapezoids over the span); the value itself for a single point."""
    x, y = np.asarray(step, np.float64), np.asarray(value, np.float64)
    if not len(x):
        return math.nan
    if len(x) == 1 or x[-1] == x[0]:
        return float(y.mean())
    return float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum() / (x[-1] - x[0]))


def collapse_start(reward: Sequence[float] | Floats) -> int | None:
    """Index of the evaluation from which held-out reward stays below half of its best to the end; None without one.

    The best is that of all evaluations before, so what never rose has not collapsed.
    """
    values = np.asarray(reward, np.float64)
    if not len(values) or values.max() <= 0:
        return None
    below = values < values.max() / 2
    below[: int(values.argmax())] = False
    if not below[-1]:
        return None
    stays = np.flatnonzero(~below)
    return int(stays[-1]) + 1


def _difference(values: Floats, p: float | None, factor: float | None, level: float) -> Difference:
    mean = float(values.mean()) if len(values) else math.nan
    if p is None or factor is None:
        return Difference(mean, None, None, None, None, len(values))
    half = _half_width(values, 1 - (1 - level) / factor)
    assert half is not None
    return Difference(mean, mean - half, mean + half, p, min(1.0, p * factor), len(values))


def _half_width(values: Floats, level: float) -> float | None:
    if len(values) < 2:
        return None
    return t_quantile((1 + level) / 2, len(values) - 1) * _standard_error(values)


def _standard_error(values: Floats) -> float:
    if np.ptp(values) == 0:  # rounding of the mean would leave a spread of 1e-17
        return 0.0
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def _finite(values: Sequence[float] | Floats) -> Floats:
    array = np.asarray(values, np.float64)
    return array[np.isfinite(array)]
