"""What one finished run says: its curves, and one number for each thing that is compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from estr.compare.statistics import Floats, area_under_curve, collapse_start
from estr.report.data import Metrics, read_evaluations, read_metrics
from estr.report.series import finite_points


@dataclass(frozen=True)
class Measure:
    """A number per run: its key in compare.json, its name for people, and the unit."""

    key: str
    name: str
    unit: str


FINAL = Measure("final", "final reward", "held-out")
AUC = Measure("auc", "area under the curve", "mean held-out reward over the steps")
MEASURES = (
    FINAL,
    AUC,
    Measure("best", "best reward", "held-out"),
    Measure("collapsed", "collapsed", "share of seeds"),
    Measure("masked_fraction", "dropped", "share of action tokens"),
    Measure("clip_fraction", "clipped", "share of action tokens"),
    Measure("kl", "KL(μ‖π)", "nats per token"),
    Measure("ratio_deviation", "|E − 1|", "mean per token"),
    Measure("delta_abs", "|δ|", "mean per token"),
    Measure("kl_end", "KL(μ‖π), last fifth", "nats per token"),
    Measure("ratio_deviation_end", "|E − 1|, last fifth", "mean per token"),
    Measure("entropy_end", "entropy, last fifth", "nats per token"),
)
_PER_TOKEN = {
    "masked_fraction": "gate/masked_fraction",
    "clip_fraction": "clip/fraction",
    "kl": "mismatch/kl",
    "ratio_deviation": "mismatch/ratio_deviation",
    "delta_abs": "mismatch/delta_abs",
    "entropy": "policy/entropy",
}
_AT_END = ("kl", "ratio_deviation", "entropy")
CURVES = tuple(_PER_TOKEN.values())


@dataclass(frozen=True)
class RunResult:
    """A run's held-out curve ([K] steps and rewards), its metrics by step, and its numbers."""

    eval_step: Floats
    eval_reward: Floats
    metrics: Metrics
    values: Mapping[str, float]
    collapse_step: float | None
    steps: int
    seconds: float
    notes: list[str] = field(default_factory=list)


def read_result(path: Path, *, final: int = 1, diverged: bool = False) -> RunResult:
    """Read a run directory. A run that diverged counts as collapsed at its last step.

    ``final`` is the number of last evaluations whose mean is the final reward. Per-token metrics are means over all
    steps, weighted by their tokens; those of the end are over the last fifth of the steps.
    """
    notes: list[str] = []
    metrics = read_metrics(path / "metrics.jsonl", notes)
    found = read_evaluations(path / "evaluations.jsonl", metrics, notes)
    start = collapse_start(found.reward)
    step = float(found.step[start]) if start is not None else None
    if diverged and step is None:
        step = metrics.last("step") or 0.0
    values = _rewards(found.step, found.reward, final) | _per_token(metrics)
    values["collapsed"] = float(step is not None)
    seconds = metrics.last("wall_time") or math.nan
    return RunResult(found.step, found.reward, metrics, values, step, int(metrics.last("step") or 0), seconds, notes)


def _rewards(step: Floats, reward: Floats, final: int) -> dict[str, float]:
    if not len(reward):
        return dict.fromkeys(("final", "auc", "best"), math.nan)
    return {
        "final": float(reward[-final:].mean()),
        "auc": area_under_curve(step, reward),
        "best": float(reward.max()),
    }


def _per_token(metrics: Metrics) -> dict[str, float]:
    found = {}
    end = metrics["step"] > 0.8 * (metrics.last("step") or 0.0)
    for key, name in _PER_TOKEN.items():
        found[key] = _weighted(metrics[name], metrics["tokens/action"])
        if key in _AT_END:
            found[f"{key}_end"] = _weighted(metrics[name][end], metrics["tokens/action"][end])
    return found


def _weighted(values: Floats, weights: Floats) -> float:
    """Mean over tokens; over steps where no tokens are logged."""
    kept, counts = finite_points(values, np.where(np.isfinite(weights), weights, 1.0))
    return float(kept @ counts / counts.sum()) if counts.sum() > 0 else math.nan
