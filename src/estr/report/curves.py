"""Panels of curves over a run: reward, entropy, mismatch, gates, optimization, throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from estr.report.data import Floats, Run
from estr.report.panel import Entry, Panel, drawn, empty, run_entry
from estr.report.series import finite_points, number, percent, score, smooth, smoothing_window, thin
from estr.report.svg import SERIES, THEMED, Ink, even_ticks, log_axis, new_figure, style_axes


@dataclass(frozen=True)
class Curve:
    """A metric as a panel shows it: key of metrics.jsonl and its name in a legend."""

    key: str
    name: str


@dataclass(frozen=True)
class Chart:
    """A panel of metrics that share an axis. Several runs: one panel a metric, a color a run."""

    name: str
    title: str
    unit: str
    curves: tuple[Curve, ...]
    guide: str  # the sentence that says what to see
    scale: str = "linear"  # "linear" | "log" | "share"
    say: Callable[[float | None], str] = number
    smoothed: bool = True


CHARTS: dict[str, tuple[Chart, ...]] = {
    "policy": (
        Chart(
            "entropy",
            "Policy entropy",
            "nats per action token",
            (Curve("policy/entropy", "entropy"),),
            "A slide towards 0 is a policy that stops exploring, a climb while reward falls one that comes apart",
        ),
    ),
    "mismatch": (
        Chart(
            "kl",
            "Divergence from the behavior policy",
            "KL(μ‖π), k3 estimate, nats per token",
            (Curve("mismatch/kl", "KL"),),
            "How far the learner is from the policy that sampled; a steady level is staleness, growth is trouble",
            "log",
        ),
        Chart(
            "ratio",
            "Ratio and log-ratio",
            "mean per action token",
            (Curve("mismatch/ratio_deviation", "|E − 1|"), Curve("mismatch/delta_abs", "|\u2060δ\u2060|")),
            "Where |E − 1| leaves |δ| behind, a few tokens carry very large ratios",
            "log",
        ),
        Chart(
            "gates",
            "Dropped and clipped tokens",
            "share of action tokens",
            (
                Curve("gate/masked_fraction", "dropped by the gate"),
                Curve("clip/fraction", "clipped"),
                Curve("gate/undecided_fraction", "undecided"),
            ),
            "Dropped tokens teach nothing; a share that keeps rising means that what drifted is never pulled back",
            "share",
            percent,
        ),
    ),
    "optimization": (
        Chart(
            "gradient",
            "Gradient norm",
            "ℓ₂ norm before clipping",
            (Curve("grad/norm", "gradient norm"),),
            "Spikes are single batches that pull hard; a slow rise often comes before a collapse",
            "log",
        ),
        Chart(
            "rate",
            "Learning rate",
            "per optimizer step",
            (Curve("learner/learning_rate", "learning rate"),),
            "The schedule as it was applied",
            smoothed=False,
        ),
    ),
    "speed": (
        Chart(
            "throughput",
            "Throughput",
            "action tokens per second",
            (
                Curve("throughput/generated_tokens_per_second", "generated"),
                Curve("throughput/trained_tokens_per_second", "trained"),
            ),
            "In a balanced run the two lie on each other; the lower one is the bottleneck",
        ),
        Chart(
            "idle",
            "Idle time",
            "share of wall-clock time",
            (Curve("time/engine_idle_fraction", "engines"), Curve("time/learner_idle_fraction", "learner")),
            "Time in which an engine had nothing to decode, and in which the learner waited for a batch",
            "share",
            percent,
        ),
    ),
    "lag": (
        Chart(
            "lag",
            "Mean staleness",
            "optimizer steps",
            (Curve("staleness/inter_mean", "Δ\u00a0inter"), Curve("staleness/intra_mean", "Δ\u00a0intra")),
            "Δ inter is the wait between the last token and training, Δ intra the updates that arrived in flight",
        ),
    ),
}


def curve_panels(runs: Sequence[Run], group: str, ink: Ink = THEMED) -> list[Panel]:
    """The panels of one group of ``CHARTS``."""
    panels: list[Panel] = []
    for chart in CHARTS[group]:
        if len(runs) == 1:
            panels.append(_single_run(chart, runs[0], ink))
        else:
            panels.extend(_many_runs(chart, curve, runs, ink) for curve in _present(chart, runs))
            if not _present(chart, runs):
                panels.append(empty(chart.name, chart.title, _absent(chart)))
    return panels


def reward_panels(runs: Sequence[Run], ink: Ink = THEMED) -> list[Panel]:
    """Training and held-out reward against optimizer steps and against wall-clock time."""
    return [
        _reward_panel(runs, "reward-step", "Reward against steps", "step", "optimizer step", ink),
        _reward_panel(runs, "reward-time", "Reward against wall-clock", "wall_time", "minutes", ink),
    ]


def draw_reward(axes: Axes, runs: Sequence[Run], x_key: str, x_label: str, ink: Ink) -> bool:
    """Reward curves of ``runs``; False where there is nothing to draw."""
    style_axes(axes, ink, x_label, "reward")
    if x_key == "step":
        _step_ticks(axes)
    any_curve = False
    for index, run in enumerate(runs):
        scale = 60.0 if x_key == "wall_time" else 1.0
        x, held_x = run.metrics[x_key], run.evaluations.seconds if x_key == "wall_time" else run.evaluations.step
        train, held_out = _reward_colors(len(runs), index, ink)
        any_curve |= _draw_training(axes, *finite_points(x / scale, run.metrics["reward/mean"]), train, len(runs) > 1)
        any_curve |= _draw_held_out(
            axes, *finite_points(held_x / scale, run.evaluations.reward), held_out, ink.dash(index)
        )
    if any_curve:
        _reward_limits(axes)
    return any_curve


def reward_sentence(run: Run) -> str:
    """What happened to the reward of one run, in numbers."""
    found = run.evaluations
    if len(found):
        best = int(np.argmax(found.reward))
        return (
            f"Held-out reward goes from {score(float(found.reward[0]))} to {score(float(found.reward[-1]))}; "
            f"its best is {score(float(found.reward[best]))} at step {number(float(found.step[best]))}."
        )
    _, train = finite_points(run.metrics["step"], run.metrics["reward/mean"])
    if not len(train):
        return ""
    tail = max(1, len(train) // 10)
    return (
        f"Training reward goes from {score(float(train[:tail].mean()))} to {score(float(train[-tail:].mean()))} "
        "(means of the first and last tenth); there was no held-out evaluation."
    )


def _reward_limits(axes: Axes) -> None:
    """From 0 (or the lowest reward) to the highest, and at least a tenth, so that flat curves look flat."""
    values = np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in axes.lines])
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.1)
    axes.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))


def _reward_panel(runs: Sequence[Run], name: str, title: str, x_key: str, x_label: str, ink: Ink) -> Panel:
    figure = new_figure()
    if not draw_reward(figure.add_subplot(), runs, x_key, x_label, ink):
        return empty(name, title, "No reward has been logged yet: the run has not finished its first step.")
    single = len(runs) == 1
    sentence = reward_sentence(runs[0]) if single and x_key == "step" else ""
    if not sentence:
        what = "the same curves over time, where waiting counts" if x_key == "wall_time" else "compare where curves end"
        sentence = f"Dots are held-out evaluations, lines the mean of training batches; {what}."
    return drawn(name, title, sentence, figure, _reward_legend(runs))


def _reward_legend(runs: Sequence[Run]) -> list[Entry]:
    held_out = any(len(run.evaluations) for run in runs)
    if len(runs) == 1:
        entries = [Entry("s1", "training batch"), Entry("s2", "held-out", "dot")]
        return entries if held_out else entries[:1]
    return _run_legend(runs)


def _reward_colors(count: int, index: int, ink: Ink) -> tuple[str, str]:
    return (ink["s1"], ink["s2"]) if count == 1 else (ink.series(index), ink.series(index))


def _draw_training(axes: Axes, x: Floats, y: Floats, color: str, faint: bool) -> bool:
    if not len(x):
        return False
    if len(x) == 1:
        axes.plot(x, y, "o", color=color, markersize=4)
        return True
    if not faint:
        axes.plot(*thin(x, y), color=color, linewidth=0.8, alpha=0.3)
    axes.plot(*thin(x, smooth(y, smoothing_window(len(y)))), color=color, linewidth=1.0 if faint else 1.8)
    return True


def _draw_held_out(axes: Axes, x: Floats, y: Floats, color: str, dash: str) -> bool:
    x, y = thin(x, y, 120)
    axes.plot(x, y, marker="o", linestyle=dash, color=color, linewidth=1.4, markersize=4.5 if len(x) < 40 else 2.5)
    return bool(len(x))


def _single_run(chart: Chart, run: Run, ink: Ink) -> Panel:
    curves = _present(chart, [run])
    if not curves:
        return empty(chart.name, chart.title, _absent(chart))
    figure = new_figure()
    axes = _axes(figure.add_subplot(), chart, ink)
    for index, curve in enumerate(curves):
        _draw(axes, chart, run, curve.key, (ink.series(index), "-"), raw=True)
    _limits(axes, chart)
    legend = [Entry(SERIES[index], curve.name) for index, curve in enumerate(curves)]
    return drawn(chart.name, chart.title, _sentence(chart, run, curves), figure, legend if len(legend) > 1 else ())


def _many_runs(chart: Chart, curve: Curve, runs: Sequence[Run], ink: Ink) -> Panel:
    figure = new_figure()
    axes = _axes(figure.add_subplot(), chart, ink)
    for index, run in enumerate(runs):
        _draw(axes, chart, run, curve.key, (ink.series(index), ink.dash(index)), raw=False)
    _limits(axes, chart)
    title = chart.title if len(chart.curves) == 1 else f"{chart.title}: {curve.name}"
    name = f"{chart.name}-{chart.curves.index(curve)}"
    return drawn(name, title, f"{chart.guide}.", figure, _run_legend(runs))


def _axes(axes: Axes, chart: Chart, ink: Ink) -> Axes:
    style_axes(axes, ink, "optimizer step", chart.unit)
    _step_ticks(axes)
    return axes


def _draw(axes: Axes, chart: Chart, run: Run, key: str, style: tuple[str, str], raw: bool) -> None:
    color, dash = style
    x, y = finite_points(run.metrics["step"], run.metrics[key])
    logarithmic = chart.scale == "log" and bool((y > 0).mean() > 0.5) if len(y) else False
    if logarithmic:
        x, y = x[y > 0], y[y > 0]
    if not len(x):
        return
    if len(x) == 1:
        axes.plot(x, y, "o", color=color, markersize=4)
        return
    if raw and chart.smoothed and len(x) > 24:
        axes.plot(*thin(x, y), color=color, linewidth=0.8, alpha=0.3)
    line = smooth(np.log(y) if logarithmic else y, smoothing_window(len(y)) if chart.smoothed else 1)
    axes.plot(*thin(x, np.exp(line) if logarithmic else line), color=color, linestyle=dash, linewidth=1.6)


def _limits(axes: Axes, chart: Chart) -> None:
    """Log axes only where values differ by more than a factor of three; others start at 0, shares read in percent."""
    low, high = axes.get_ylim()
    if chart.scale == "log" and axes.lines:
        values = np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in axes.lines])
        spread = float(values.max() / values.min()) if values.min() > 0 else 0.0
        if spread > 3:
            log_axis(axes, "y", np.log10(spread))
            return
    even_ticks(axes)
    if chart.scale == "share":
        axes.set_ylim(0, min(1.02, max(high, 0.01)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    else:
        axes.set_ylim(bottom=min(0.0, low))


def _step_ticks(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _sentence(chart: Chart, run: Run, curves: Sequence[Curve]) -> str:
    facts = []
    for curve in curves:
        values = run.metrics[curve.key][np.isfinite(run.metrics[curve.key])]
        tail = max(1, len(values) // 10)
        facts.append(f"{curve.name}\u00a0{chart.say(float(values[-tail:].mean()))}")
    return f"{chart.guide}; over the last tenth of the run: {', '.join(facts)}."


def _absent(chart: Chart) -> str:
    keys = " or ".join(curve.key for curve in chart.curves[:2])
    return f"Nothing to draw: metrics.jsonl has no {keys} yet."


def _present(chart: Chart, runs: Sequence[Run]) -> list[Curve]:
    """Curves with values; tokens without a verdict only where there ever were some."""
    found = [curve for curve in chart.curves if any(run.metrics.has(curve.key) for run in runs)]
    undecided = any((run.metrics["gate/undecided_fraction"] > 0).any() for run in runs)
    return [curve for curve in found if undecided or curve.key != "gate/undecided_fraction"]


def _run_legend(runs: Sequence[Run]) -> list[Entry]:
    return [run_entry(index, run.label) for index, run in enumerate(runs)]
