"""Artificial tool latency, for studying schedules: drawn from the episode's seed, waited for by the runtime."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from estr.environments.options import Option, choice, number
from estr.errors import UsageError

_Z99 = NormalDist().inv_cdf(0.99)

LATENCY_OPTIONS = {
    "latency": Option(
        "none", "Artificial tool latency: none, fixed or lognormal.", choice("none", "fixed", "lognormal")
    ),
    "latency_seconds": Option(0.2, "Seconds of every call (fixed).", number(0)),
    "latency_median": Option(0.2, "Median seconds of a call (lognormal).", number(0)),
    "latency_p99": Option(2.0, "99th percentile in seconds (lognormal).", number(0)),
    "latency_cap": Option(5.0, "Most seconds of a call (lognormal).", number(0)),
}


@dataclass(frozen=True)
class Latency:
    """Seconds of tool latency: none, fixed, or log-normal with a given median and 99th percentile, capped.

    Log-normal: ``ln seconds ~ N(ln median, σ²)``, ``σ = ln(p99 / median) / z``, z the normal 99 % quantile.
    """

    kind: str = "none"
    seconds: float = 0.2
    median: float = 0.2
    p99: float = 2.0
    cap: float = 5.0

    def __post_init__(self) -> None:
        if self.kind == "lognormal" and not 0 < self.median <= self.p99:
            raise UsageError(
                f"task.latency_median ({self.median:g}) must be above 0 and at most task.latency_p99 ({self.p99:g})"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Latency:
        """From the values of `LATENCY_OPTIONS`."""
        names = ("seconds", "median", "p99", "cap")
        return cls(options["latency"], *(options[f"latency_{name}"] for name in names))

    def draw(self, seed: int, turn: int) -> float:
        """The delay in seconds of the call in turn ``turn`` of the episode with ``seed``; the same at every call."""
        if self.kind == "none":
            return 0.0
        if self.kind == "fixed":
            return self.seconds
        normal = random.Random(f"latency/{seed}/{turn}").gauss(0.0, 1.0)
        sigma = math.log(self.p99 / self.median) / _Z99
        return min(self.cap, self.median * math.exp(sigma * normal))
