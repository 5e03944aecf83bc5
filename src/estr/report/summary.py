"""The facts at the head of the page, and a table of every metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from estr.report.data import Run
from estr.report.series import duration, finite_points, number, percent, score
from estr.report.staleness import late_multi_version_share


@dataclass(frozen=True)
class Fact:
    """A line of the summary: its name, one value a run, and what it means where that is not plain."""

    name: str
    values: Sequence[str]
    note: str = ""


def summary(runs: Sequence[Run]) -> list[Fact]:
    """Facts with one value a run."""
    return [
        Fact("task", [str(run.setting("task", "name") or "–") for run in runs]),
        Fact("model", [str(run.setting("model", "path") or "–") for run in runs]),
        Fact("recipe", [_recipe(run) for run in runs]),
        Fact("mode", [_mode(run) for run in runs]),
        Fact("seed", [_plain(run.setting("run", "seed")) for run in runs]),
        Fact("optimizer steps", [_steps(run) for run in runs]),
        Fact("held-out reward, first", [_held_out(run, 0) for run in runs]),
        Fact("held-out reward, final", [_held_out(run, -1) for run in runs], _decoding(runs)),
        Fact("held-out reward, best", [_best(run) for run in runs]),
        Fact("training reward, last tenth", [score(_recent_reward(run)) for run in runs]),
        Fact("tokens trained", [number(run.metrics.total("tokens/action")) for run in runs], "action tokens"),
        Fact("tokens dropped", [_dropped(run) for run in runs], "by the recipe's gate"),
        Fact(
            "spanning two or more versions", [_spanning(run) for run in runs], "of trajectories trained after step 10"
        ),
        Fact("duration", [duration(run_seconds(run)) for run in runs]),
    ]


def run_seconds(run: Run) -> float | None:
    """Wall-clock length of a run: the later of its last metric and its last span."""
    seconds = [value for value in (run.metrics.last("wall_time"), run.timeline.seconds or None) if value is not None]
    return max(seconds) if seconds else None


def dropped_tokens(run: Run) -> tuple[float, float] | None:
    """(tokens dropped by the gate, action tokens) over the steps that logged both; None where none did."""
    tokens, share = finite_points(run.metrics["tokens/action"], run.metrics["gate/masked_fraction"])
    return (float(tokens @ share), float(tokens.sum())) if len(tokens) and tokens.sum() > 0 else None


def metric_table(run: Run) -> list[tuple[str, str, str, str, str]]:
    """Name, first, last, lowest and highest value of every metric of a run."""
    rows = []
    for key in sorted(run.metrics.columns):
        values = run.metrics[key][np.isfinite(run.metrics[key])]
        if len(values) and key != "step":
            cells = (values[0], values[-1], values.min(), values.max())
            first, last, low, high = (number(float(cell), 4) for cell in cells)
            rows.append((key, first, last, low, high))
    return rows


def finished(run: Run) -> bool | None:
    """Whether every planned step was taken; None where the plan is not known."""
    planned, taken = run.setting("run", "steps"), run.metrics.last("step")
    return None if not isinstance(planned, int) else (taken or 0) >= planned


def _recipe(run: Run) -> str:
    advantage = run.setting("objective", "advantage")
    return f"{run.recipe or '–'} · {advantage} advantage" if advantage else run.recipe or "–"


def _mode(run: Run) -> str:
    mode = str(run.setting("schedule", "mode") or "–")
    if mode == "async" and run.setting("schedule", "max_staleness") is not None:
        return f"async, staleness ≤ {run.setting('schedule', 'max_staleness')}"
    if mode == "lockstep":
        return f"lockstep, inter {run.setting('schedule', 'inter', 0)}, intra {run.setting('schedule', 'intra', 0)}"
    return mode


def _steps(run: Run) -> str:
    taken, planned = int(run.metrics.last("step") or 0), run.setting("run", "steps")
    return f"{taken:,} of {planned:,} (unfinished)" if finished(run) is False else f"{taken:,}"


def _held_out(run: Run, index: int) -> str:
    found = run.evaluations
    return f"{score(float(found.reward[index]))} at step {found.step[index]:,.0f}" if len(found) else "no evaluation"


def _best(run: Run) -> str:
    found = run.evaluations
    return _held_out(run, int(np.argmax(found.reward))) if len(found) else "–"


def _decoding(runs: Sequence[Run]) -> str:
    """How held-out problems were decoded, where all runs did it alike."""
    ways = {run.evaluations.decoding for run in runs}
    return ways.pop() if len(ways) == 1 else ""


def _recent_reward(run: Run) -> float | None:
    values = run.metrics["reward/mean"][np.isfinite(run.metrics["reward/mean"])]
    return float(values[-max(1, len(values) // 10) :].mean()) if len(values) else None


def _dropped(run: Run) -> str:
    found = dropped_tokens(run)
    return f"{percent(found[0] / found[1])} ({found[0]:,.0f})" if found else "–"


def _spanning(run: Run) -> str:
    share, count = late_multi_version_share(run)
    if share is None:
        return "–"
    part = run.rollouts.groups_read < run.rollouts.groups_total
    return f"{percent(share)} of {count:,}{' read' if part else ''}"


def _plain(value: object) -> str:
    return "–" if value is None else str(value)
