"""Pictures of the results page, as SVG files that follow the reader's light or dark preference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from estr.report.svg import THEMED, even_ticks, log_axis, new_figure, standalone_svg, style_axes

Row = dict[str, Any]


def law(data: Row) -> Figure:
    """δ² against H in both logarithms, one line per engine precision and staleness, and the slope of the law."""
    figure, axes = _axes("entropy H of the sampling distribution (nats)", "mean δ² (nats²)")
    log_axis(axes, "x")
    log_axis(axes, "y")
    for index, row in enumerate(data["rows"]):
        bins = [np.array(run["bins"]) for run in row["runs"] if run["bins"]]
        points = np.concatenate(bins)
        points = points[(points > 0).all(1)]
        points = points[points[:, 0].argsort()]
        groups = np.array_split(points, 20)
        means = np.array([np.exp(np.log(group).mean(0)) for group in groups if len(group)])
        label = f"{row['dtype']}, {'stale' if row['entry'] == 'stale' else 'fresh'}"
        _line(axes, index, means[:, 0], means[:, 1], label)
    low, high = axes.get_xlim()
    bottom = axes.get_ylim()[0]
    x = np.array([max(low, 1e-3), high])
    axes.plot(x, 30 * bottom * x / x[0], color=THEMED["muted"], linewidth=1, linestyle="--", label="slope 1, the law")
    _legend(axes)
    return figure


def switches(data: Row) -> Figure:
    """|δ| at each offset from the first token under new weights."""
    figure, axes = _axes("tokens after the new weights arrived", "mean |δ| (nats)")
    for index, row in enumerate(row for row in data["rows"] if row["entry"] == "stale"):
        curves = np.array([run["around"]["delta_abs"] for run in row["runs"]], np.float64)
        _line(axes, index, np.array(row["runs"][0]["around"]["offsets"]), np.nanmean(curves, 0), row["dtype"])
    axes.axvline(-0.5, color=THEMED["rule"], linewidth=1)
    even_ticks(axes)
    _legend(axes)
    return figure


def curves(study: Row) -> Figure:
    """Held-out reward against optimizer steps: mean over the seeds."""
    figure, axes = _axes("optimizer step", "held-out reward, mean over seeds")
    for index, row in enumerate(study["rows"]):
        found = [run["curve"] for run in row["runs"] if run["curve"]["step"]]
        longest = max(found, key=lambda curve: len(curve["step"]), default=None)
        if longest is None:
            continue
        rewards = [curve["reward"] for curve in found if len(curve["reward"]) == len(longest["reward"])]
        _line(axes, index, np.array(longest["step"]), np.mean(rewards, 0), row["entry"])
    axes.set_ylim(0, 1)
    _legend(axes)
    return figure


def sweep(study: Row, axis: str, key: str = "final", label: str = "final held-out reward") -> Figure:
    """A measure against one axis, with intervals."""
    figure, axes = _axes(axis, label)
    rows = [row for row in study["rows"] if row["axis"] == axis]
    points = list(dict.fromkeys(row["point"] for row in rows))
    for index, entry in enumerate(dict.fromkeys(row["entry"] for row in rows)):
        found = {row["point"]: row["measures"].get(key) for row in rows if row["entry"] == entry}
        known = [(at + 0.04 * index, found[point]) for at, point in enumerate(points) if found.get(point)]
        _line(axes, index, np.array([at for at, _ in known]), np.array([one["mean"] for _, one in known]), entry)
        for at, one in known:
            if one["low"] is not None:
                axes.plot([at, at], [one["low"], one["high"]], color=THEMED.series(index), linewidth=1, alpha=0.7)
    axes.set_xticks(range(len(points)), points)
    axes.set_ylim(0, 1)
    _legend(axes)
    return figure


def settings(study: Row) -> Figure:
    """Final reward of each entry, a dot and its interval."""
    figure, axes = _axes("final held-out reward", "")
    for at, row in enumerate(reversed(study["rows"])):
        found = row["measures"].get("final")
        if found:
            axes.plot(found["mean"], at, "o", color=THEMED.series(0), markersize=4)
            if found["low"] is not None:
                axes.plot([found["low"], found["high"]], [at, at], color=THEMED.series(0), linewidth=1.2)
    axes.set_yticks(range(len(study["rows"])), [row["entry"] for row in reversed(study["rows"])])
    axes.set_xlim(0, 1)
    return figure


def wallclock(data: Row) -> Figure:
    """Held-out reward against seconds of training, a line per run."""
    figure, axes = _axes("seconds of training (logarithmic)", "held-out reward")
    log_axis(axes, "x", decades=2)
    named: set[str] = set()
    for run in data["runs"]:
        index = ("sync", "async").index(run["mode"])
        _line(axes, index, run["seconds"], run["rewards"], None if run["mode"] in named else run["mode"])
        named.add(run["mode"])
    axes.axhline(data["reward"], color=THEMED["muted"], linewidth=1, linestyle="--")
    axes.set_ylim(0, 1)
    _legend(axes)
    return figure


def write(figure: Figure, name: str, folder: Path) -> Path:
    """Write one picture."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.svg"
    path.write_text(standalone_svg(figure, name))
    return path


def _axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = new_figure(560, 300)
    axes = figure.add_subplot()
    style_axes(axes, THEMED, x_label, y_label)
    return figure, axes


def _line(
    axes: Axes, index: int, x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray, label: str | None
) -> None:
    axes.plot(
        x,
        y,
        "o",
        linestyle=THEMED.dash(index),
        color=THEMED.series(index),
        linewidth=1.5,
        markersize=3,
        label=label or "_",
    )


def _legend(axes: Axes) -> None:
    legend = axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for text in legend.get_texts():
        text.set_color(THEMED["muted"])
