"""Numbers of a comparison as people read them."""

from __future__ import annotations

from estr.compare.statistics import Difference, Interval
from estr.report.series import number, percent

_SHARES = ("collapsed", "masked_fraction", "clip_fraction")
_REWARDS = ("final", "auc", "best")


def interval_words(key: str, found: Interval | None) -> str:
    """Mean ± half width of the 95 % interval: 0.612 ± 0.031; shares in percent, a collapse rate without interval."""
    if found is None:
        return "–"
    say = percent if key in _SHARES else (lambda v: f"{v:.3f}") if key in _REWARDS else number
    if found.high is None or key == "collapsed":
        return say(found.mean)
    return f"{say(found.mean)} ± {say(found.high - found.mean)}"


def difference_words(found: Difference | None) -> str:
    """Mean paired difference with its corrected interval: +0.031 [−0.010, +0.072]."""
    if found is None:
        return ""
    if found.low is None or found.high is None:
        return signed(found.mean)
    return f"{signed(found.mean)} [{signed(found.low)}, {signed(found.high)}]"


def p_words(found: Difference | None) -> str:
    if found is None or found.p_holm is None:
        return ""
    return f"{found.p_holm:.3f}" if found.p_holm >= 0.001 else "< 0.001"


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
