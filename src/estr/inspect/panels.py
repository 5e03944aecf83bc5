"""The drawings of the inspection page."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from estr.diagnostics import DEFAULTS, PowerLawFit, integer_histogram
from estr.inspect.dump import Floats, Ints
from estr.inspect.inspection import Inspection
from estr.inspect.summary import SPREAD, shares, spread
from estr.inspect.switches import Change
from estr.report.panel import Entry, Panel, Table, drawn, empty
from estr.report.scatter import boundary
from estr.report.series import number, percent
from estr.report.svg import THEMED, even_ticks, log_axis, new_figure, style_axes
from estr.report.verdict import GATE_NAMES

WIDEST = 32  # the last bar of a histogram collects what is staler
INK = THEMED


def fit_panel(inspection: Inspection) -> Panel:
    """√E[δ²] in bins of H with the thresholds of four gates."""
    name, title, fit = "fit", "How δ grows with entropy", inspection.fit
    if fit is None:
        return empty(name, title, "No fit: fewer than three bins of entropy hold tokens with both δ and H.")
    figure = new_figure(470, 340)
    axes = figure.add_subplot()
    style_axes(axes, INK, "H, entropy of the position (nats)", "√E[δ²], δ = log π − log μ")
    log_axis(axes, "x", decades=1)
    log_axis(axes, "y")
    h, root = _bins(fit)
    grid = np.geomspace(h.min() * 0.7, h.max() * 1.4, 120)
    lags = _lags(inspection)
    for index, (_, one) in enumerate(lags):
        x, y = _bins(one)
        axes.plot(x, y, color=INK["s1"], alpha=0.25 + 0.5 * index / 3, linewidth=1.2)
    law = np.sqrt(fit.coefficient * grid**fit.exponent)
    axes.plot(grid, law, color=INK["ink"], linewidth=1.4)
    axes.plot(h, root, "o", color=INK["ink"], markersize=4.5)
    _thresholds(axes, grid)
    entries = [
        Entry("ink", "all tokens, in bins of H", "dot"),
        Entry("ink", f"E[δ²] = {number(fit.coefficient)}·H^{number(fit.exponent)}"),
        Entry("s2", "ESTR boundary √(τ(H+ε)), defaults"),
        Entry("s3", "PPO clip", "dashed"),
        Entry("s4", "IcePop", "dotted"),
    ]
    if lags:
        words = ", ".join(str(lag) for lag, _ in lags)
        entries.insert(2, Entry("s1", f"lag {words} alone (steps), stronger: staler", "thin"))
    return drawn(name, title, _fit_sentence(fit), figure, entries, wide=True, table=_lag_table(inspection))


def parts_panel(inspection: Inspection) -> Panel:
    """One bar cut into noise, inter, intra and the rest."""
    name, title, parts = "parts", "What δ² is made of", inspection.decomposition
    named = {"engine noise": parts.noise, "inter-trajectory": parts.inter, "intra-trajectory": parts.intra}
    if parts.noise is None or not parts.total:
        return empty(name, title, parts.note or "There is no δ to take apart.")
    values = {word: value or 0.0 for word, value in named.items()} | {"unexplained": parts.unexplained or 0.0}
    figure = new_figure(376, 150)
    axes = figure.add_subplot()
    style_axes(axes, INK, "mean δ²", "")
    axes.grid(visible=False)
    left, right = 0.0, 0.0
    for index, value in enumerate(values.values()):
        role = ("s8", "s1", "s2", "quiet")[index]
        start = left if value >= 0 else right
        axes.barh(0, value, left=start, color=INK[role], height=0.6)
        left, right = (left + value, right) if value >= 0 else (left, right + value)
    axes.set_yticks([])
    axes.set_ylim(-0.5, 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    roles = zip(("s8", "s1", "s2", "quiet"), values.items(), strict=True)
    entries = [Entry(role, f"{word} {percent(value / parts.total)}", "bar") for role, (word, value) in roles]
    zero = (
        f" Where engine and learner held the same weights ({parts.zero_lag_tokens:,} tokens) it is "
        f"{number(parts.zero_lag)}."
        if parts.zero_lag is not None
        else ""
    )
    return drawn(name, title, f"{shares(inspection).capitalize()}.{zero}", figure, entries)


def lag_panel(inspection: Inspection) -> Panel:
    """Mean δ² by lag."""
    name, title, lags = "lags", "δ² by staleness", inspection.by_lag
    if len(lags) < 2:
        return empty(name, title, "Fewer than two lags have enough tokens; versions and target versions tell lags.")
    figure = new_figure()
    axes = figure.add_subplot()
    style_axes(axes, INK, "lag = version trained − version sampled (optimizer steps)", "mean δ²")
    axes.plot(
        [one.lag for one in lags], [one.squared for one in lags], "o-", color=INK["s1"], linewidth=1.8, markersize=4
    )
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    even_ticks(axes)
    at_zero = next((one for one in lags if one.lag == 0), None)
    left = f"at lag 0 it is {number(at_zero.squared)}, which is noise; " if at_zero is not None else ""
    sentence = f"What δ² has at lag 0 is engine noise, what it gains with lag is staleness: {left}"
    return drawn(name, title, f"{sentence}at lag {lags[-1].lag} it is {number(lags[-1].squared)}.", figure)


def staleness_panels(inspection: Inspection) -> list[Panel]:
    """Histograms of Δ_intra and Δ_inter over trajectories."""
    return [
        _histogram(
            "staleness-intra",
            "Staleness inside a trajectory",
            "Δ intra = last − first version (optimizer steps)",
            inspection.staleness.intra,
            "Everything right of 0 was sampled across a weight update that arrived in flight",
        ),
        _histogram(
            "staleness-inter",
            "Staleness at training",
            "Δ inter = version trained − last version (optimizer steps)",
            inspection.staleness.inter,
            "Everything right of 0 waited while the learner took further steps",
        ),
    ]


def switch_panels(inspection: Inspection) -> list[Panel]:
    """|δ| and H around the moments at which new weights arrived."""
    switches = inspection.switches
    if not switches.count:
        return [empty("switches", "Around version switches", "No trajectory holds tokens of two versions.")]
    return [
        _around(
            "switch-delta",
            "|δ| around a version switch",
            "mean |δ|",
            switches.offsets,
            switches.delta_abs,
            switches.delta_elsewhere,
            switches.delta_change,
            switches.count,
        ),
        _around(
            "switch-entropy",
            "H around a version switch",
            "mean H (nats)",
            switches.offsets,
            switches.entropy,
            switches.entropy_elsewhere,
            switches.entropy_change,
            switches.count,
        ),
    ]


def recipe_panel(inspection: Inspection) -> Panel:
    """Masked fractions as bars, recipes that drop nothing left to the sentence."""
    name, title, masked = "recipes", "What recipes would drop", inspection.verdicts.masked
    if not masked:
        return empty(name, title, "No learner's log-probability is stored, so no recipe's mask can be computed.")
    ranked = sorted(((n, share) for n, share in masked.items() if share > 0), key=lambda entry: entry[1])
    silent = sorted(n for n, share in masked.items() if share == 0)
    quiet = f" These drop nothing: {', '.join(silent)}." if silent else ""
    if not ranked:
        return empty(name, title, f"At their defaults no recipe drops a token.{quiet}")
    figure = new_figure(640, 60 + 17 * len(ranked))
    axes = figure.add_subplot()
    style_axes(axes, INK, "share of tokens dropped at the recipe's defaults (%)", "")
    axes.grid(visible=False)
    colors = [INK["s2"] if recipe == "estr" else INK["s1"] for recipe, _ in ranked]
    shares_ = np.array([100 * share for _, share in ranked])
    axes.barh(np.arange(len(ranked)), shares_, color=colors, height=0.7)
    axes.set_yticks(np.arange(len(ranked)), [recipe for recipe, _ in ranked])
    for at, share in enumerate(shares_):
        axes.text(
            share + 0.8, at, percent(share / 100).removesuffix("\u00a0%"), va="center", fontsize=9, color=INK["muted"]
        )
    axes.set_xlim(0, max(shares_.max() * 1.12, 1.0))
    axes.set_ylim(-0.6, len(ranked) - 0.4)
    sentence = (
        f"Of {inspection.verdicts.tokens:,} tokens that the learner saw; recipes that clip instead of dropping count "
        f"as dropping nothing.{quiet}"
    )
    return drawn(name, title, sentence, figure, wide=True)


def gate_table(inspection: Inspection) -> Table | None:
    """Who keeps what another stops: rows keep, columns stop."""
    gates = inspection.verdicts.gates
    if not gates:
        return None
    share = {(pair.kept_by, pair.dropped_by): pair.share for pair in inspection.verdicts.disagreements}
    head = ("kept by", "stops itself", *(f"stopped by {GATE_NAMES[name]}" for name in gates))
    rows = [
        (
            GATE_NAMES[kept],
            percent(gates[kept]),
            *("·" if kept == dropped else percent(share.get((kept, dropped), 0.0)) for dropped in gates),
        )
        for kept in gates
    ]
    return Table(head, rows)


def _bins(fit: PowerLawFit) -> tuple[Floats, Floats]:
    usable = (fit.bins.count > 0) & (fit.bins.entropy > 0) & (fit.bins.delta_squared > 0)
    return fit.bins.entropy[usable], np.sqrt(fit.bins.delta_squared[usable])


def _lags(inspection: Inspection) -> list[tuple[int, PowerLawFit]]:
    """The smallest, the middle and the largest lag that have a fit."""
    fitted = [(one.lag, one.fit) for one in inspection.by_lag if one.fit is not None]
    return fitted if len(fitted) <= 3 else [fitted[0], fitted[len(fitted) // 2], fitted[-1]]


def _thresholds(axes: Axes, grid: Floats) -> None:
    low, high = axes.get_ylim()
    axes.plot(grid, boundary(grid, **DEFAULTS["estr"]), color=INK["s2"], linewidth=2.0)
    clip, band = DEFAULTS["grpo"], DEFAULTS["icepop"]
    for value in {abs(np.log1p(-clip["clip_low"])), np.log1p(clip["clip_high"])}:
        axes.axhline(value, color=INK["s3"], linewidth=1.2, linestyle=(0, (5, 3)))
    for value in {abs(np.log(band["low"])), abs(np.log(band["high"]))}:
        axes.axhline(value, color=INK["s4"], linewidth=1.2, linestyle=(0, (1.5, 2.5)))
    axes.set_ylim(low * 0.8, max(high, 3.0))


def _fit_sentence(fit: PowerLawFit) -> str:
    if spread(fit) < SPREAD:
        return "The entropies are too alike to say how δ grows with H; thresholds of four gates are drawn beside them."
    return (
        f"E[δ²] grows as H to the power {number(fit.exponent, 2)} (in proportion it would be 1; R² "
        f"{number(fit.r2, 2)}). Points above a threshold belong to entropies at which that gate stops most tokens."
    )


def _lag_table(inspection: Inspection) -> Table | None:
    if not inspection.by_lag:
        return None
    rows = [
        (
            f"{one.lag}",
            f"{one.tokens:,}",
            number(one.squared),
            number(one.fit.exponent if one.fit else None),
            number(one.fit.slope if one.fit else None),
            number(one.fit.r2 if one.fit else None),
        )
        for one in inspection.by_lag
    ]
    return Table(("lag", "tokens", "mean δ²", "exponent", "slope", "R²"), rows)


def _histogram(name: str, title: str, x_label: str, values: Floats, guide: str) -> Panel:
    known = values[np.isfinite(values)]
    if not len(known):
        return empty(name, title, "Not known: this needs the version of each token and of the learner that trained it.")
    figure = new_figure()
    axes = figure.add_subplot()
    style_axes(axes, INK, x_label, "share of trajectories (%)")
    counts = integer_histogram(np.minimum(known, WIDEST))
    axes.bar(list(counts), 100 * np.array(list(counts.values())) / len(known), 0.8, color=INK["s1"])
    even_ticks(axes)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"≥ {WIDEST}" if x == WIDEST else f"{x:.0f}"))
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -0.6), max(high, 3.6))
    sentence = (
        f"{guide}: {percent(float((known > 0).mean()))} of {len(known):,} trajectories, mean "
        f"{number(float(known.mean()))}, most {number(float(known.max()))}."
    )
    return drawn(name, title, sentence, figure)


def _around(
    name: str,
    title: str,
    y_label: str,
    offsets: Ints,
    values: Floats,
    elsewhere: float | None,
    change: Change,
    count: int,
) -> Panel:
    if not np.isfinite(values).any():
        return empty(name, title, "Not stored for the tokens around version switches.")
    figure = new_figure()
    axes = figure.add_subplot()
    style_axes(axes, INK, "tokens from the first one under new weights", y_label)
    axes.axvline(-0.5, color=INK["s5"], linewidth=1.2)
    if elsewhere is not None:
        axes.axhline(elsewhere, color=INK["s8"], linewidth=1.0, linestyle=(0, (4, 3)))
    axes.plot(offsets, values, "o-", color=INK["s1"], linewidth=1.8, markersize=4)
    axes.set_ylim(0.7 * float(np.nanmin(values)), 1.15 * float(np.nanmax(values)))
    even_ticks(axes)
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    entries = [
        Entry("s1", "mean over switches"),
        Entry("s8", "mean over all tokens", "dashed"),
        Entry("s5", "new weights arrive"),
    ]
    if change.mean is None or change.error is None:
        verdict = "too few switches to compare before and after"
    else:
        sure = abs(change.mean) > 2 * change.error
        verdict = (
            f"after minus before is {change.mean:+.3g} ± {change.error:.2g}"
            f"{'' if sure else ', which is not told from nothing'}"
        )
    return drawn(name, title, f"Over {count:,} switches, {verdict}.", figure, entries)


def quantile_table(quantiles: Mapping[str, float]) -> Table:
    """Quantiles of δ as one row."""
    return Table(
        ("quantile", *(f"{100 * float(q):g} %" for q in quantiles)),
        [("δ", *(f"{value:+.3f}" for value in quantiles.values()))],
    )
