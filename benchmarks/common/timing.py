"""Alternating measurements, and their median and range."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(min(self.values))} to {number(max(self.values))})"


def number(value: float) -> str:
    """Four significant digits, thousands separated, no exponent where it can be read without."""
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.2e}"
    digits = max(0, 4 - len(str(int(abs(value))))) if abs(value) >= 1 else 4
    return f"{value:,.{digits}f}"


def alternate(contestants: Mapping[str, Callable[[], float]], repeats: int, warm: int = 1) -> dict[str, Spread]:
    """Each contestant ``repeats`` times, in turn, after ``warm`` rounds that do not count."""
    values: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(-warm, repeats):
        for name, measure in contestants.items():
            value = measure()
            if turn >= 0:
                values[name].append(value)
    return {name: Spread(tuple(found)) for name, found in values.items()}


def ratio(over: Spread, under: Spread) -> Spread:
    """Ratio of measurements that stood next to each other."""
    return Spread(tuple(a / b for a, b in zip(over.values, under.values, strict=True)))


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Lines whose columns are as wide as their widest entry."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(entry.ljust(width) for entry, width in zip(row, widths, strict=True)) for row in rows)
