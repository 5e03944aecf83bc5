"""Small helpers for curves over a run: thinning, smoothing, and numbers as words."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from estr.report.svg import superscript

Floats = NDArray[np.float64]


def finite_points(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Only the points whose both coordinates are finite."""
    keep = np.isfinite(x) & np.isfinite(y)
    return x[keep], y[keep]


def thin(x: Floats, y: Floats, points: int = 360) -> tuple[Floats, Floats]:
    """At most ``points`` points: means over runs of neighbors, so that no drawing grows with the run."""
    if len(x) <= points:
        return x, y
    edges = np.linspace(0, len(x), points + 1).astype(int)[:-1]
    count = np.diff(np.append(edges, len(x)))
    return np.add.reduceat(x, edges) / count, np.add.reduceat(y, edges) / count


def smooth(y: Floats, window: int) -> Floats:
    """Centered moving average of ``window`` points, narrower at both ends."""
    if window <= 1 or len(y) < 3:
        return y
    half = min(window // 2, (len(y) - 1) // 2)
    total = np.concatenate([[0.0], np.cumsum(y)])
    index = np.arange(len(y))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(y))
    return (total[high] - total[low]) / (high - low)


def smoothing_window(points: int) -> int:
    """About a twelfth of the run, at most 101 steps."""
    return max(1, min(101, points // 12))


def number(value: float | None, digits: int = 3) -> str:
    """A number for a sentence: 0.873, 1,234,567, 2.1·10⁻⁵, or an en dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1e4:
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}·10{superscript(int(exponent))}"
    return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def score(value: float | None) -> str:
    """A reward with three decimals, or an en dash."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def percent(value: float | None) -> str:
    """A share as a percentage with as many digits as it needs."""
    if value is None or not math.isfinite(value):
        return "–"
    share = 100 * value
    if share == 0 or share >= 10:
        return f"{share:.0f}\u00a0%"
    return f"{share:.1f}\u00a0%" if share >= 0.1 else f"{share:.2g}\u00a0%"


def duration(seconds: float | None) -> str:
    """Seconds as 48 s, 5 min 03 s or 2 h 07 min."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
