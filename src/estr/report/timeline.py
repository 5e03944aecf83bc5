"""The timeline: one lane an actor, a window of some seconds and the whole run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from estr.report.data import KINDS, Floats, Run, Timeline
from estr.report.panel import Entry, Panel, drawn, empty
from estr.report.series import duration, percent
from estr.report.svg import THEMED, Ink, new_figure, style_axes

COLORS = {
    "generate": "s1",
    "train": "s2",
    "publish": "s5",
    "sync": "s5",
    "evaluate": "s3",
    "checkpoint": "s6",
    "wait": "quiet",
    "idle": "quiet",
    "other": "s8",
}
WORDS = {
    "generate": "engine generates",
    "train": "learner trains",
    "publish": "weights published",
    "sync": "weights taken in",
    "evaluate": "evaluation",
    "checkpoint": "checkpoint",
    "wait": "waiting or idle",
    "other": "other",
}
LANE = 0.78
MOST_SLICES = 240
DRAWN_SPANS = 1500
WINDOW_SPANS = 600


def timeline_panels(runs: Sequence[Run], ink: Ink = THEMED) -> list[Panel]:
    """Two panels a run: some seconds from the middle, and everything."""
    panels: list[Panel] = []
    for index, run in enumerate(runs):
        suffix = f" — {run.label}" if len(runs) > 1 else ""
        panels.extend(_run_panels(run, index, suffix, ink))
    return panels


def draw_window(axes: Axes, timeline: Timeline, ink: Ink) -> tuple[float, float]:
    """Spans of a few training steps from the middle of the run; returns the window in seconds."""
    low, high = middle_window(timeline)
    actors = timeline.actors
    for lane, actor in enumerate(reversed(actors)):
        for kind in KINDS:
            _bars(axes, *_clipped(*timeline.of(actor, kind), low, high), lane, ink[COLORS[kind]], kind)
    for start, _ in zip(*_clipped(*_every(timeline, "publish"), low, high), strict=True):
        axes.axvline(start, color=ink[COLORS["publish"]], linewidth=0.8)
    _lanes(axes, actors, ink, (low, high), "seconds since the start of the run")
    _version_labels(axes, timeline, ink, low, high)
    return low, high


def draw_whole(axes: Axes, timeline: Timeline, ink: Ink) -> bool:
    """The whole run: its spans as they are where those can be told apart (True), else the share of each slice."""
    unit = 60.0 if timeline.seconds > 300 else 1.0
    actors = timeline.actors
    exact = len(timeline) <= DRAWN_SPANS
    for lane, actor in enumerate(reversed(actors)):
        if exact:
            for kind in KINDS:
                start, end = timeline.of(actor, kind)
                _bars(axes, start / unit, end / unit, lane, ink[COLORS[kind]], kind)
        else:
            _stack(axes, timeline, actor, lane, unit, ink)
    limits = (timeline.begin / unit, timeline.seconds / unit)
    _lanes(axes, actors, ink, limits, f"{'minutes' if unit == 60 else 'seconds'} since the start of the run")
    return exact


def busy_share(start: Floats, end: Floats, edges: Floats) -> Floats:
    """Share of each slice [B] between ``edges`` [B + 1] that the spans (seconds) cover, at most 1."""
    if not len(start):
        return np.zeros(len(edges) - 1)
    points = np.concatenate([start, end])
    signs = np.concatenate([np.ones(len(start)), -np.ones(len(end))])
    order = np.argsort(points, kind="stable")
    points, active = points[order], np.cumsum(signs[order])
    covered = np.concatenate([[0.0], np.cumsum(np.minimum(active[:-1], 1) * np.diff(points))])
    cumulative = np.interp(edges, points, covered, left=0.0, right=covered[-1])
    return np.diff(cumulative) / np.diff(edges)


def overlap_share(timeline: Timeline) -> float | None:
    """Share of the learner's training time in which at least one engine generated; None where no training or no
    generating was recorded (a kill loses the last second of the timeline)."""
    start, end = timeline.of("learner", "train")
    if not len(start) or (end - start).sum() <= 0:
        return None
    engines = [timeline.of(actor, "generate") for actor in timeline.actors if actor != "learner"]
    if not any(len(begin) for begin, _ in engines):
        return None
    generating = _union(np.concatenate([e[0] for e in engines]), np.concatenate([e[1] for e in engines]))
    common = sum(_covered(*generating, low, high) for low, high in zip(start, end, strict=True))
    return float(common / (end - start).sum())


def middle_window(timeline: Timeline) -> tuple[float, float]:
    """About four training steps (seconds) near the middle of the run: the place with the most training and the least
    evaluation and checkpointing, of equals the nearest to the middle."""
    begin, finish = timeline.begin, timeline.seconds
    start, _ = timeline.of("learner", "train")
    period = float(np.median(np.diff(np.sort(start)))) if len(start) > 2 else (finish - begin) / 4
    length = min(max(4.2 * period, 0.5), _uncrowded(timeline), max(finish - begin, 1e-3))
    middle = (float(np.median(start)) if len(start) else (begin + finish) / 2) - length / 2
    shifts = sorted(np.arange(-12, 12.5, 0.5), key=abs)
    places = [min(max(middle + shift * length, begin), max(finish - length, begin)) for shift in shifts]
    low = max(places, key=lambda place: _interest(timeline, place, place + length))
    return low, low + length


def _interest(timeline: Timeline, low: float, high: float) -> float:
    """Share of a window with training, less that with evaluation and checkpoints; in steps of a tenth, so that small
    differences do not draw the window away from the middle."""
    trained = _overlap(*timeline.of("learner", "train"), low, high)
    paused = sum(_overlap(*_every(timeline, kind), low, high) for kind in ("evaluate", "checkpoint"))
    return round(10 * (trained - paused) / max(high - low, 1e-9))


def _overlap(start: Floats, end: Floats, low: float, high: float) -> float:
    return float(np.maximum(np.minimum(end, high) - np.maximum(start, low), 0).sum())


def _run_panels(run: Run, index: int, suffix: str, ink: Ink) -> list[Panel]:
    title = f"Timeline{suffix}"
    timeline = run.timeline
    if not len(timeline) or timeline.seconds <= 0:
        return [
            empty(f"timeline-{index}", title, "No timeline: the run directory has no timeline.jsonl with spans yet.")
        ]
    window = _figure(timeline)
    low, high = draw_window(window.add_subplot(), timeline, ink)
    whole = _figure(timeline)
    exact = draw_whole(whole.add_subplot(), timeline, ink)
    legend = _legend(timeline)
    return [
        drawn(
            f"timeline-window-{index}",
            f"{duration(high - low)} from the middle{suffix}",
            f"{_overlap_sentence(timeline)} Numbers are versions of the weights.",
            window,
            legend,
            wide=True,
        ),
        drawn(
            f"timeline-whole-{index}",
            f"The whole run, {duration(timeline.seconds)}{suffix}",
            f"{'' if exact else 'Height is the share of each slice of time; '}"
            f"{'g' if not exact else 'G'}rey is waiting, blank is idle or was not recorded.",
            whole,
            legend,
            wide=True,
        ),
    ]


def _overlap_sentence(timeline: Timeline) -> str:
    share = overlap_share(timeline)
    if share is None:
        return "Lanes under each other show who works at the same time."
    if share < 0.02:
        return "Engines and learner take turns: nothing was generated while the learner trained."
    return f"Engines generated during {percent(share)} of the learner's training time; red lines are new weights."


def _figure(timeline: Timeline) -> Figure:
    return new_figure(900, 62 + 34 * max(len(timeline.actors), 2))


def _legend(timeline: Timeline) -> list[Entry]:
    kinds = {"wait" if kind == "idle" else kind for kind in timeline.kind.tolist()}
    words = dict(WORDS)
    if {"publish", "sync"} <= kinds:
        kinds.discard("sync")
        words["publish"] = "weights published or taken in"
    return [Entry(COLORS[kind], text, "bar") for kind, text in words.items() if kind in kinds]


def _lanes(axes: Axes, actors: Sequence[str], ink: Ink, limits: tuple[float, float], x_label: str) -> None:
    style_axes(axes, ink, x_label, "")
    axes.set_title("")
    axes.grid(visible=False)
    axes.set_yticks(range(len(actors)), list(reversed(actors)))
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set_ylim(-0.55, len(actors) - 0.45)
    axes.set_xlim(*limits)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _bars(axes: Axes, start: Floats, end: Floats, lane: int, color: str, kind: str) -> None:
    if not len(start):
        return
    height = LANE if kind not in ("idle", "wait") else LANE * 0.28
    spans = list(zip(start, end - start, strict=True))
    axes.broken_barh(spans, (lane - height / 2, height), facecolors=color, linewidth=0)


def _stack(axes: Axes, timeline: Timeline, actor: str, lane: int, unit: float, ink: Ink) -> None:
    """One lane as a stack of shares; a slice holds several training steps, or it would beat against their rhythm."""
    steps = len(timeline.of("learner", "train")[0])
    edges = np.linspace(timeline.begin, timeline.seconds, int(np.clip(steps // 4, 24, MOST_SLICES)) + 1)
    level = np.full(len(edges) - 1, lane - LANE / 2)
    for kind in KINDS:
        share = busy_share(*timeline.of(actor, kind), edges) * LANE
        _steps(axes, edges / unit, level, share, ink[COLORS[kind]])
        level = level + share


def _steps(axes: Axes, edges: Floats, level: Floats, share: Floats, color: str) -> None:
    if share.max(initial=0.0) > 0:
        axes.stairs(level + share, edges, baseline=level, fill=True, color=color, linewidth=0)


def _version_labels(axes: Axes, timeline: Timeline, ink: Ink, low: float, high: float) -> None:
    chosen = (timeline.actor == "learner") & (timeline.kind == "train")
    chosen &= (timeline.start < high) & (timeline.end > low) & np.isfinite(timeline.version)
    lane = list(reversed(timeline.actors)).index("learner") if "learner" in timeline.actors else 0
    for start, end, version in zip(*(a[chosen] for a in (timeline.start, timeline.end, timeline.version)), strict=True):
        left, right = max(start, low), min(end, high)
        if right - left > 0.04 * (high - low):
            axes.text(
                (left + right) / 2, lane, f"v{version:.0f}", ha="center", va="center", color=ink["paper"], fontsize=9
            )


def _clipped(start: Floats, end: Floats, low: float, high: float) -> tuple[Floats, Floats]:
    inside = (start < high) & (end >= low)
    return np.maximum(start[inside], low), np.minimum(end[inside], high)


def _every(timeline: Timeline, kind: str) -> tuple[Floats, Floats]:
    chosen = timeline.kind == kind
    return timeline.start[chosen], timeline.end[chosen]


def _uncrowded(timeline: Timeline) -> float:
    """The longest window (seconds) that holds no more spans than a drawing can show."""
    return max(WINDOW_SPANS * (timeline.seconds - timeline.begin) / max(len(timeline), 1), 1e-3)


def _union(start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Spans merged where they touch, sorted."""
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    fresh = np.append(True, start[1:] > reach[:-1])
    last = np.append(np.flatnonzero(fresh)[1:] - 1, len(start) - 1)
    return start[fresh], reach[last]


def _covered(start: Floats, end: Floats, low: float, high: float) -> float:
    first, last = np.searchsorted(end, low, "right"), np.searchsorted(start, high, "left")
    return float(np.maximum(np.minimum(end[first:last], high) - np.maximum(start[first:last], low), 0).sum())
