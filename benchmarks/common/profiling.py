"""Where a loop's time goes: the shares of named parts, from Python's own profiler."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Mapping, Sequence
from typing import Any

REST = "Python around it and small operations"


def shares(work: Callable[[], Any], parts: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Share of the time spent in functions whose ``file:name`` contains one of a part's words, the rest as one part.

    Built-in functions (a matrix product, say) count by themselves; the first part that matches has them.
    """
    profile = cProfile.Profile()
    profile.enable()
    work()
    profile.disable()
    found, total = dict.fromkeys([*parts, REST], 0.0), 0.0
    for (file, _, name), (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        where, total = f"{file}:{name}", total + own
        found[next((part for part, words in parts.items() if any(word in where for word in words)), REST)] += own
    return {part: round(seconds / total, 4) for part, seconds in found.items()}
