"""The drawings of a plan's page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from estr.plan.outcome import Outcome
from estr.plan.sweep import Sweep
from estr.plan.table import best_by_staleness
from estr.report.panel import Entry, Panel, drawn, empty
from estr.report.series import number, percent
from estr.report.svg import SERIES, THEMED, even_ticks, log_axis, new_figure, style_axes

INK = THEMED
_LINES = len(SERIES)


def scale_panels(sweep: Sweep) -> list[Panel]:
    """Throughput and speed-up over the number of GPUs (or of engines, where GPUs were not swept)."""
    if sweep.plan.sweep.gpus:
        points, x_of, x_label = best_by_staleness(sweep), lambda point: point.gpus, "GPUs"
    else:
        points, x_of, x_label = sweep.points, lambda point: point.engines, "engines"
    if len({x_of(point) for point in points}) < 2:
        return []
    fastest = max(points, key=lambda point: point.trained_tokens_per_second)
    return [
        _lines(
            "throughput",
            "Throughput",
            f"Where lines lie on each other, more staleness buys nothing; the fastest point has engines: "
            f"{fastest.engines:,}, learner ranks: {fastest.learner_ranks:,}, max_staleness: {fastest.max_staleness}.",
            "trained action tokens per second",
            points,
            x_of,
            x_label,
            lambda point: point.trained_tokens_per_second,
            logarithmic=bool(sweep.plan.sweep.gpus),
            sync={gpus: out.trained_tokens_per_second for gpus, out in sweep.synchronous.items()}
            if sweep.plan.sweep.gpus
            else {},
        ),
        _lines(
            "speedup",
            "Speed-up over synchronous training",
            "Above 1 asynchronous training is faster than synchronous training on as many GPUs, all of which generate "
            "and then all train, at no cost for the change.",
            "times the synchronous throughput",
            points,
            x_of,
            x_label,
            lambda point: point.speedup or 0.0,
            logarithmic=False,
            sync={},
        ),
    ]


def staleness_panel(sweep: Sweep) -> Panel:
    """Throughput over max_staleness, a line a number of GPUs (or engines)."""
    name, title = "bound", "What a larger max_staleness buys"
    points = best_by_staleness(sweep) if sweep.plan.sweep.gpus else sweep.points
    key: Callable[[Outcome], int] = (lambda p: p.gpus) if sweep.plan.sweep.gpus else (lambda p: p.engines)
    word = "GPUs" if sweep.plan.sweep.gpus else "engines"
    names = sorted({key(point) for point in points})
    if len({point.max_staleness for point in points}) < 2:
        return empty(name, title, "Only one max_staleness was tried.")
    figure = new_figure()
    axes = figure.add_subplot()
    style_axes(axes, INK, "max_staleness (optimizer steps)", "share of the best throughput")
    shown = (
        names if len(names) <= _LINES else [names[round(i * (len(names) - 1) / (_LINES - 1))] for i in range(_LINES)]
    )
    for index, value in enumerate(shown):
        bounds = sorted({point.max_staleness for point in points if key(point) == value})
        best = [
            max(p.tokens_per_gpu_second for p in points if key(p) == value and p.max_staleness == bound)
            for bound in bounds
        ]
        axes.plot(bounds, np.array(best) / max(best), "o-", color=INK.series(index), linewidth=1.6, markersize=3.5)
    _percent(axes)
    axes.set_ylim(0, 1.04)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    worth = sweep.plan.sweep.worth
    sentence = (
        f"A line that is flat has enough staleness; the recommended bound is the smallest within {percent(worth)} of 1."
    )
    entries = [Entry(SERIES[index], f"{word}: {value:,}") for index, value in enumerate(shown)]
    return drawn(name, title, sentence, figure, entries)


def split_panel(sweep: Sweep) -> Panel:
    """Idle fractions over the share of GPUs that the learner has."""
    name, title = "idle", "Who waits"
    largest = max(sweep.by_gpus())
    points = sweep.by_gpus()[largest]
    bound = sweep.best()[-1].max_staleness
    chosen = sorted((p for p in points if p.max_staleness == bound), key=_ratio)
    if len({_ratio(point) for point in chosen}) < 2:
        return empty(name, title, "Only one number of engines for each learner rank was tried.")
    figure = new_figure()
    axes = figure.add_subplot()
    style_axes(axes, INK, "engines for each learner rank", "share of time idle")
    x = [_ratio(point) for point in chosen]
    axes.plot(x, [p.engine_idle_fraction for p in chosen], "o-", color=INK["s1"], linewidth=1.6, markersize=3.5)
    axes.plot(x, [p.learner_idle_fraction for p in chosen], "o-", color=INK["s2"], linewidth=1.6, markersize=3.5)
    _percent(axes)
    axes.set_ylim(0, 1.04)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    where = f"{largest:,} GPUs and " if largest else ""
    sentence = (
        f"Left of where the lines cross there are too few engines, right of it too many; {where}max_staleness {bound}."
    )
    return drawn(name, title, sentence, figure, [Entry("s1", "engines"), Entry("s2", "learner")])


def lag_panels(sweep: Sweep) -> list[Panel]:
    """Staleness of the plan as given."""
    own = sweep.own
    return [
        _histogram(
            "inter",
            "Staleness at training",
            "Δ inter = version trained − last version (optimizer steps)",
            own.inter,
            f"Everything right of 0 waited while the learner took further steps: mean {number(own.inter_mean)}; with "
            f"Δ intra never more than max_staleness, {own.max_staleness}.",
        ),
        _histogram(
            "intra",
            "Staleness inside a trajectory",
            "Δ intra = last − first version (optimizer steps)",
            own.intra,
            f"Everything right of 0 was sampled across a weight update that arrived in flight: mean "
            f"{number(own.intra_mean)}.",
        ),
    ]


def _ratio(point: Outcome) -> float:
    return point.engines / point.learner_ranks


def _lines(
    name: str,
    title: str,
    sentence: str,
    y_label: str,
    points: Sequence[Outcome],
    x_of: Callable[[Outcome], int],
    x_label: str,
    y_of: Callable[[Outcome], float],
    *,
    logarithmic: bool,
    sync: dict[int, float],
) -> Panel:
    figure = new_figure()
    axes = figure.add_subplot()
    style_axes(axes, INK, x_label, y_label)
    entries = []
    for index, bound in enumerate(sorted({point.max_staleness for point in points})):
        best: dict[int, float] = {}
        for point in points:
            if point.max_staleness == bound:
                best[x_of(point)] = max(best.get(x_of(point), 0.0), y_of(point))
        x = sorted(best)
        axes.plot(x, [best[value] for value in x], "o-", color=INK.series(index), linewidth=1.6, markersize=3.5)
        entries.append(Entry(SERIES[index % _LINES], f"max_staleness {bound}"))
    shown = {gpus: value for gpus, value in sync.items() if gpus in {x_of(point) for point in points}}
    if shown:
        axes.plot(list(shown), list(shown.values()), "--", color=INK["s8"], linewidth=1.4)
        entries.append(Entry("s8", "synchronous", "dashed"))
    ticks = sorted({x_of(point) for point in points})
    if ticks[-1] / ticks[0] > 3:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // 7)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if logarithmic:
        values = [y_of(point) for point in points]
        log_axis(axes, "y", np.log10(max(values) / max(min(values), 1e-9)))
    else:
        even_ticks(axes)
        axes.set_ylim(0, 1.06 * max(y_of(point) for point in points))
    return drawn(name, title, sentence, figure, entries)


def _histogram(name: str, title: str, x_label: str, shares: dict[int, float], sentence: str) -> Panel:
    if not shares:
        return empty(name, title, "Nothing was trained.")
    figure = new_figure()
    axes = figure.add_subplot()
    style_axes(axes, INK, x_label, "share of trained trajectories")
    axes.bar(list(shares), list(shares.values()), 0.82, color=INK["s1"])
    _percent(axes)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_xlim(min(min(shares) - 0.6, -0.6), max(max(shares) + 0.6, 3.6))
    return drawn(name, title, sentence, figure)


def _percent(axes: Axes) -> None:
    even_ticks(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
