"""The drawings of a study: curves, differences, seeds, sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from estr.compare.plan import Entry as Compared
from estr.compare.plan import Point
from estr.compare.results import Measure
from estr.compare.statistics import Difference, Floats, Interval, mean_interval
from estr.compare.study import as_number
from estr.compare.summary import Comparison, Row
from estr.compare.words import difference_words, p_words
from estr.report.panel import Entry, Panel, Table, drawn, empty, run_entry
from estr.report.series import smooth, smoothing_window
from estr.report.svg import THEMED, even_ticks, log_axis, new_figure, style_axes

INK = THEMED
LEGENDS = 12  # entries named in a legend
AXES: dict[str, tuple[str, str]] = {
    "schedule.inter": ("imposed Δ inter", "optimizer steps"),
    "schedule.intra": ("imposed Δ intra", "optimizer steps"),
    "rollout.dtype": ("engine precision", ""),
    "learner.learning_rate": ("learning rate", ""),
    "rollout.max_new_tokens": ("tokens a turn may have", "tokens"),
}
"""Names and units of axes that a sweep is often about; others are called by their setting."""


@dataclass(frozen=True)
class Chart:
    """A metric over steps: its key in metrics.jsonl, names, unit, and the sentence that says what to see."""

    key: str
    title: str
    unit: str
    guide: str
    scale: str = "linear"  # "linear" | "log" | "share"


CHARTS = (
    Chart(
        "mismatch/kl",
        "Divergence from the behavior policy",
        "KL(μ‖π), k3 estimate, nats per token",
        "A line that climbs is a learner that leaves its data behind",
        "log",
    ),
    Chart(
        "mismatch/ratio_deviation",
        "Mean |E − 1|",
        "mean per action token",
        "How far the ratios of trained tokens lie from 1",
        "log",
    ),
    Chart(
        "gate/masked_fraction",
        "Dropped tokens",
        "share of action tokens",
        "What the gate drops teaches nothing; recipes without a gate lie at 0",
        "share",
    ),
    Chart(
        "policy/entropy",
        "Policy entropy",
        "nats per action token",
        "A slide to 0 is a policy that stops exploring, a climb with falling reward one that comes apart",
    ),
    Chart(
        "reward/mean",
        "Training reward",
        "mean of the batch",
        "Noisier than held-out reward, and of the stale policy that sampled",
    ),
)


def reward_panel(comparison: Comparison, point: Point, name: str) -> Panel:
    """Held-out reward over steps: mean over seeds with its interval."""
    title = "Held-out reward"
    figure = new_figure(470, 270)
    axes = figure.add_subplot()
    style_axes(axes, INK, "optimizer step", "held-out reward, mean over seeds")
    for row in comparison.at(point):
        step, values = _stacked([(run.eval_step, run.eval_reward) for run in row.runs.values()])
        _band(axes, comparison, row, step, values)
    if not axes.lines:
        return empty(name, title, "No run has a held-out evaluation.")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    _steps(axes)
    even_ticks(axes)
    collapsed = [_collapsed(row) for row in comparison.at(point)]
    told = "; ".join(word for word in collapsed if word)
    fate = f" Collapsed: {told}." if told else " No run collapsed."
    sentence = (
        "Lines are means over seeds, bands their 95 % intervals (Student t): look at where lines end and bands part."
    )
    return drawn(name, title, sentence + fate, figure, _legend(comparison, point), wide=True)


def metric_panels(comparison: Comparison, point: Point, prefix: str) -> list[Panel]:
    """Metrics of training over steps, smoothed, mean over seeds."""
    return [_metric_panel(comparison, point, chart, f"{prefix}-{index}") for index, chart in enumerate(CHARTS)]


def difference_panel(comparison: Comparison, point: Point, measure: Measure, name: str) -> Panel:
    """Paired differences against the baseline with corrected intervals, as a forest."""
    title = f"{measure.name.capitalize()}: difference from {comparison.baseline.label}"
    rows = [row for row in comparison.at(point) if measure.key in row.differences]
    if not rows:
        return empty(name, title, "There is no second recipe with the seeds of the baseline to take differences from.")
    figure = new_figure(470, 64 + 22 * len(rows))
    axes = figure.add_subplot()
    style_axes(axes, INK, f"paired difference of {measure.name} over the same seeds", "")
    axes.grid(visible=False)
    axes.axvline(0, color=INK["muted"], linewidth=1.0)
    for place, row in enumerate(rows):
        _forest_line(axes, row.differences[measure.key], len(rows) - 1 - place, _color(comparison, row))
    axes.set_yticks(range(len(rows)), [row.entry.label for row in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.3g}".replace("-", "−")))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    decided = [
        f"{r.entry.label} ({'better' if r.differences[measure.key].mean > 0 else 'worse'})"
        for r in rows
        if r.differences[measure.key].decided
    ]
    verdict = (
        f"Told apart from {comparison.baseline.label}: {', '.join(decided)}."
        if decided
        else "None is told apart from the baseline."
    )
    sentence = (
        f"Intervals at 95 % after Holm’s correction over these {len(rows)}; one that leaves out 0 is decided. {verdict}"
    )
    table = Table(
        ("recipe", "difference", "p (Holm)", "pairs"),
        [
            (row.entry.label, difference_words(found), p_words(found) or "–", str(found.count))
            for row, found in ((row, row.differences[measure.key]) for row in rows)
        ],
    )
    return drawn(name, title, sentence, figure, wide=True, table=table)


def seeds_panel(comparison: Comparison, point: Point, name: str) -> Panel:
    """Every seed's final reward beside the mean and its interval."""
    title = "Final reward, seed by seed"
    rows = [row for row in comparison.at(point) if "final" in row.measures]
    if not rows:
        return empty(name, title, "No run has a held-out evaluation.")
    figure = new_figure(470, 64 + 22 * len(rows))
    axes = figure.add_subplot()
    style_axes(axes, INK, "final held-out reward", "")
    axes.grid(visible=False)
    for place, row in enumerate(rows):
        y, found = len(rows) - 1 - place, row.measures["final"]
        values = [run.values["final"] for run in row.runs.values()]
        axes.plot(values, [y] * len(values), "o", color=_color(comparison, row), markersize=4.5, alpha=0.55)
        _whisker(axes, found, y, INK["ink"])
    axes.set_yticks(range(len(rows)), [row.entry.label for row in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    sentence = "Each dot is a run; the mark in front of them is the mean with its 95 % interval, not corrected."
    return drawn(name, title, sentence, figure, wide=True)


def sweep_panel(comparison: Comparison, axis: str, measure: Measure, guide: str, name: str) -> Panel:
    """A measure against one axis of the sweep, a line per entry."""
    points = [point for point in comparison.points if point.axis == axis]
    lines = [
        (
            comparison.entries.index(entry),
            entry.label,
            [comparison.row(entry, p).measures.get(measure.key) for p in points],
        )
        for entry in comparison.entries
    ]
    places = _Places([point.value for point in points], [point.label for point in points])
    return _against(lines, places, axis, measure, guide, name)


def grid_panels(
    comparison: Comparison, point: Point, measures: Sequence[tuple[Measure, str]], prefix: str
) -> list[Panel]:
    """A measure against a hyperparameter, for each variant whose grid has at least three numbers of it."""
    panels: list[Panel] = []
    for variant in dict.fromkeys(entry.variant for entry in comparison.entries):
        entries = [entry for entry in comparison.entries if entry.variant == variant]
        for key in dict.fromkeys(key for entry in entries for key in entry.choice):
            numbers = sorted({x for entry in entries if (x := as_number(entry.choice.get(key))) is not None})
            if len(numbers) >= 3:
                for measure, guide in measures:
                    name = f"{prefix}-{len(panels)}"
                    panels.append(
                        _grid_panel(comparison, point, entries, (variant, key, numbers), measure, guide, name)
                    )
    return panels


def _grid_panel(
    comparison: Comparison,
    point: Point,
    entries: Sequence[Compared],
    what: tuple[str, str, list[float]],
    measure: Measure,
    guide: str,
    name: str,
) -> Panel:
    variant, key, numbers = what
    short = key.removeprefix("objective.")
    groups: dict[str, dict[float, Interval | None]] = {}
    for entry in entries:
        rest = " ".join(f"{k.rpartition('.')[2]} {v}" for k, v in entry.choice.items() if k != key)
        at = as_number(entry.choice.get(key))
        if at is not None:
            groups.setdefault(rest or variant, {})[at] = comparison.row(entry, point).measures.get(measure.key)
    lines = [(index, label, [found.get(x) for x in numbers]) for index, (label, found) in enumerate(groups.items())]
    return _against(
        lines, _Places(list(numbers), [f"{x:g}" for x in numbers]), f"{short} of {variant}", measure, guide, name
    )


@dataclass
class _Places:
    """Where values stand on the axis: at their numbers, on a logarithm where they span a decade, or evenly."""

    values: Sequence[float | None]
    labels: Sequence[str]

    @property
    def numeric(self) -> bool:
        return all(value is not None for value in self.values)

    @property
    def logarithmic(self) -> bool:
        numbers = [value for value in self.values if value is not None]
        return self.numeric and min(numbers) > 0 and max(numbers) / min(numbers) >= 8

    @property
    def x(self) -> Floats:
        if self.numeric:
            return np.array(self.values, np.float64)
        return np.arange(len(self.values), dtype=np.float64)

    def label(self, axes: Axes) -> None:
        if self.logarithmic:
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xticks(self.x, self.labels)


Line = tuple[int, str, list[Interval | None]]


def _against(lines: Sequence[Line], places: _Places, axis: str, measure: Measure, guide: str, name: str) -> Panel:
    words, unit = AXES.get(axis, (axis, ""))
    title = f"{measure.name[:1].upper()}{measure.name[1:]} against {words}"
    figure = new_figure(470, 270)
    axes = figure.add_subplot()
    style_axes(axes, INK, f"{words} ({unit})" if unit else words, f"{measure.name} ({measure.unit})")
    shift = _shifts(places, len(lines))
    for order, (index, _, found) in enumerate(lines):
        kept = [i for i, one in enumerate(found) if one is not None]
        ends = [one for one in found if one is not None]
        if not kept:
            continue
        x, color = places.x[kept], INK.series(index)
        x = x * shift[order] if places.logarithmic else x + shift[order]
        axes.plot(
            x, [one.mean for one in ends], "o", linestyle=INK.dash(index), color=color, linewidth=1.6, markersize=4
        )
        for at, one in zip(x, ends, strict=True):
            if one.ends is not None and measure.key != "collapsed":
                axes.plot([at, at], one.ends, color=color, linewidth=1.0, alpha=0.7)
    if not axes.lines:
        return empty(name, title, "Nothing to draw yet: no run of this sweep has ended.")
    places.label(axes)
    _height(axes, measure)
    legend = [run_entry(index, label) for index, label, _ in lines][:LEGENDS]
    return drawn(name, title, f"{guide}; bars are 95 % intervals over seeds.", figure, legend)


def _height(axes: Axes, measure: Measure) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(*((-0.04, 1.04) if measure.key == "collapsed" else (min(0.0, low), max(high, 0.02))))
    even_ticks(axes)
    if "share" in measure.unit:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def _shifts(places: _Places, count: int) -> list[float]:
    """Small offsets, so that the intervals of several lines do not cover each other."""
    order = [index - (count - 1) / 2 for index in range(count)]
    if places.logarithmic:
        return [1.02**place for place in order]
    gaps = np.diff(np.unique(places.x))
    return [0.03 * float(gaps.min() if len(gaps) else 1.0) * place for place in order]


def _metric_panel(comparison: Comparison, point: Point, chart: Chart, name: str) -> Panel:
    figure = new_figure()
    axes = figure.add_subplot()
    style_axes(axes, INK, "optimizer step", chart.unit)
    for row in comparison.at(point):
        curves = [
            (run.metrics["step"], run.metrics[chart.key]) for run in row.runs.values() if run.metrics.has(chart.key)
        ]
        step, values = _stacked(curves)
        if not len(step):
            continue
        mean = smooth(np.asarray(np.nanmean(values, 0)), smoothing_window(len(step)))
        index = comparison.entries.index(row.entry)
        if chart.scale == "log":
            mean = np.where(mean > 0, mean, np.nan)
        axes.plot(step, mean, color=INK.series(index), linestyle=INK.dash(index), linewidth=1.5)
    if not axes.lines:
        return empty(name, chart.title, f"No run has logged {chart.key}.")
    _scale(axes, chart)
    _steps(axes)
    return drawn(name, chart.title, f"{chart.guide}; means over seeds, smoothed.", figure, _legend(comparison, point))


def _scale(axes: Axes, chart: Chart) -> None:
    values = np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in axes.lines])
    positive = values[np.isfinite(values) & (values > 0)]
    if chart.scale == "log" and len(positive) and positive.max() / positive.min() > 3:
        log_axis(axes, "y", np.log10(positive.max() / positive.min()))
        return
    even_ticks(axes)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if chart.scale == "share":
        axes.set_ylim(0, max(0.01, axes.get_ylim()[1]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def _stacked(curves: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Curves of several seeds on their common steps: steps [K] and values [seeds, K], NaN where one has none."""
    if not curves:
        return np.zeros(0), np.zeros((0, 0))
    steps = np.unique(np.concatenate([step for step, _ in curves]))
    values = np.full((len(curves), len(steps)), np.nan)
    for index, (step, value) in enumerate(curves):
        values[index, np.searchsorted(steps, step)] = value
    known = np.isfinite(values).any(0)
    return steps[known], values[:, known]


def _band(axes: Axes, comparison: Comparison, row: Row, step: Floats, values: Floats) -> None:
    if not len(step):
        return
    index = comparison.entries.index(row.entry)
    color = INK.series(index)
    found = [mean_interval(column) for column in values.T]
    axes.plot(step, [one.mean for one in found], color=color, linestyle=INK.dash(index), linewidth=1.8)
    banded = np.array([(at, *one.ends) for at, one in zip(step, found, strict=True) if one.ends is not None])
    if len(banded) > 1:
        axes.fill_between(banded[:, 0], banded[:, 1], banded[:, 2], color=color, alpha=0.12, linewidth=0)


def _forest_line(axes: Axes, found: Difference, y: int, color: str) -> None:
    if found.ends is not None:
        axes.plot(found.ends, [y, y], color=color, linewidth=1.6)
    axes.plot([found.mean], [y], "o", color=color, markersize=6 if found.decided else 4.5)


def _whisker(axes: Axes, found: Interval, y: int, color: str) -> None:
    if found.ends is not None:
        axes.plot(found.ends, [y, y], color=color, linewidth=1.2)
    axes.plot([found.mean], [y], "|", color=color, markersize=11, markeredgewidth=2)


def _collapsed(row: Row) -> str:
    count = sum(run.values["collapsed"] > 0 for run in row.runs.values())
    return f"{row.entry.label} {count} of {len(row.runs)}" if count else ""


def _color(comparison: Comparison, row: Row) -> str:
    return INK.series(comparison.entries.index(row.entry))


def _legend(comparison: Comparison, point: Point) -> list[Entry]:
    rows = [row for row in comparison.at(point) if row.runs]
    return [run_entry(comparison.entries.index(row.entry), row.entry.label) for row in rows][:LEGENDS]


def _steps(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
