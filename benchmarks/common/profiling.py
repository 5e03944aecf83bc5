"""Where a loop's time goes: the shares of named parts, from Python's own profiler."""

from __future__ import annotations

import cProfile
import pstats
import time
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


def operator_shares(work: Callable[[], Any], parts: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """The same for a loop with a backward pass, from torch's profiler: operators by themselves, and what no operator
    accounts for as one part."""
    from torch.profiler import ProfilerActivity, profile

    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    wall = time.perf_counter() - start
    found = dict.fromkeys([*parts, "other operators"], 0.0)
    for entry in profiler.key_averages():
        name = entry.key.lower()
        part = next((part for part, words in parts.items() if any(word in name for word in words)), "other operators")
        found[part] += entry.self_cpu_time_total / 1e6
    total = max(wall, sum(found.values()))
    found[REST] = total - sum(found.values())
    return {part: round(seconds / total, 4) for part, seconds in found.items()}
