"""Histograms of Δ_intra and Δ_inter over trained trajectories."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from estr.diagnostics import Staleness, integer_histogram, multi_version_share, trajectory_staleness
from estr.report.data import Floats, Run
from estr.report.panel import Panel, drawn, empty, run_entry
from estr.report.series import number, percent
from estr.report.svg import THEMED, Ink, even_ticks, new_figure, style_axes

WIDEST = 32  # the last bar collects what is staler


def run_staleness(run: Run) -> Staleness:
    """Staleness of every stored trajectory [S]."""
    rollouts = run.rollouts
    first = rollouts.first_rows()
    target = rollouts.columns["target_version"][first] if len(rollouts) else np.zeros(0)
    version = rollouts.tokens.get("version", np.zeros(0, np.int32))
    return trajectory_staleness(version, rollouts.trajectory[rollouts.row] if len(rollouts) else [], target)


def late_multi_version_share(run: Run, after_step: int = 10) -> tuple[float | None, int]:
    """Share of trajectories trained after ``after_step`` that span two or more versions, and how many those are."""
    if not len(run.rollouts):
        return None, 0
    trained = run.rollouts.columns["trained_step"][run.rollouts.first_rows()]
    return multi_version_share(run_staleness(run).spans, trained, after_step)


def staleness_panels(runs: Sequence[Run], ink: Ink = THEMED) -> list[Panel]:
    tables = [run_staleness(run) for run in runs]
    trained = [np.isfinite(table.inter) for table in tables]
    return [
        _histogram(
            "staleness-intra",
            "Staleness inside a trajectory",
            "Δ intra = last − first version (optimizer steps)",
            runs,
            [table.intra[which] for table, which in zip(tables, trained, strict=True)],
            "Everything right of 0 was sampled across a weight update in flight; longer trajectories span more",
            ink,
        ),
        _histogram(
            "staleness-inter",
            "Staleness at training",
            "Δ inter = version trained − last version (optimizer steps)",
            runs,
            [table.inter[which] for table, which in zip(tables, trained, strict=True)],
            "Everything right of 0 waited while the learner took steps; it swings with the lengths in flight",
            ink,
        ),
    ]


def _histogram(
    name: str, title: str, x_label: str, runs: Sequence[Run], values: Sequence[Floats], guide: str, ink: Ink
) -> Panel:
    if not any(len(value) for value in values):
        return empty(name, title, "Nothing to count: no trained trajectory with versions is stored in rollouts/ yet.")
    figure = new_figure()
    axes = figure.add_subplot()
    style_axes(axes, ink, x_label, "share of trained trajectories")
    width = 0.82 / len(runs)
    for index, value in enumerate(values):
        counts = integer_histogram(np.minimum(value, WIDEST))
        x = np.array(list(counts), float) - 0.41 + width * (index + 0.5)
        axes.bar(x, np.array(list(counts.values())) / max(len(value), 1), width * 0.96, color=ink.series(index))
    even_ticks(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"≥ {WIDEST}" if x == WIDEST else f"{x:.0f}"))
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -0.6), max(high, 3.6))
    legend = [run_entry(i, run.label, "bar") for i, run in enumerate(runs)] if len(runs) > 1 else []
    return drawn(name, title, _sentence(guide, runs, values), figure, legend)


def _sentence(guide: str, runs: Sequence[Run], values: Sequence[Floats]) -> str:
    if len(runs) > 1:
        return f"{guide}."
    value = values[0]
    return (
        f"{guide}: {percent(float((value > 0).mean()))} of {len(value):,} trajectories, "
        f"mean {number(float(value.mean()))}, most {number(float(value.max()))}."
    )
