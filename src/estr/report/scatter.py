"""|δ| against H of stored tokens: hexagons, the entropy-scaled boundary, and fixed thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Shape
from numpy.typing import NDArray

from estr.diagnostics import PowerLawFit, fit_power_law, keep_mask
from estr.report.data import Floats, Run
from estr.report.panel import Entry, Panel, Table, drawn, empty
from estr.report.series import number, percent
from estr.report.svg import THEMED, Ink, log_axis, new_figure, style_axes
from estr.report.verdict import GATE_NAMES, gate_settings

FLOOR_H, FLOOR_DELTA = 1e-4, 1e-5
LEVELS = 7
DRAWN_TOKENS = 400_000


@dataclass(frozen=True)
class Cloud:
    """Tokens whose δ and H are both known: [N] each, nats."""

    delta: Floats
    entropy: Floats
    stored: int  # action tokens read, known or not


def token_cloud(run: Run) -> Cloud:
    if not run.rollouts.token_count:
        return Cloud(np.zeros(0), np.zeros(0), 0)
    delta = run.rollouts.delta.astype(np.float64)
    entropy = run.rollouts.tokens["entropy"].astype(np.float64)
    known = np.isfinite(delta) & np.isfinite(entropy)
    return Cloud(delta[known], entropy[known], len(delta))


def scatter_panels(runs: Sequence[Run], ink: Ink = THEMED) -> list[Panel]:
    """One panel a run."""
    return [_panel(run, index, f" — {run.label}" if len(runs) > 1 else "", ink) for index, run in enumerate(runs)]


def draw_scatter(axes: Axes, run: Run, cloud: Cloud, fit: PowerLawFit | None, ink: Ink) -> None:
    """Hexagons of the tokens, thresholds, and the root mean square of δ by entropy bin."""
    style_axes(axes, ink, "H, entropy of the position (nats)", "|δ| = |log π − log μ|")
    log_axis(axes, "x")
    log_axis(axes, "y")
    h = np.clip(cloud.entropy, FLOOR_H, None)
    d = np.clip(np.abs(cloud.delta), FLOOR_DELTA, None)
    high_h, high_d = max(float(h.max()) * 1.3, 4.0), max(float(d.max()) * 1.5, 4.0)
    _hexagons(axes, np.log10(h), np.log10(d), (np.log10(FLOOR_H), np.log10(high_h)), ink)
    _thresholds(axes, run, high_h, ink)
    if fit is not None:
        usable = (fit.bins.count > 0) & (fit.bins.entropy > FLOOR_H) & (fit.bins.delta_squared > 0)
        x, y = fit.bins.entropy[usable], np.sqrt(fit.bins.delta_squared[usable])
        axes.plot(x, y, "o", color=ink["ink"], markersize=3.2, zorder=4)
    axes.set_xlim(FLOOR_H * 0.8, high_h)
    axes.set_ylim(max(FLOOR_DELTA * 0.8, float(np.quantile(d, 0.002)) * 0.5), high_d)


def boundary(entropy: Floats, tau: float, eps: float) -> Floats:
    """The ESTR boundary |δ| = √(τ (H + ε))."""
    return np.sqrt(tau * (entropy + eps))


def _panel(run: Run, index: int, suffix: str, ink: Ink) -> Panel:
    name, title = f"hexbin-{index}", f"Log-ratio against entropy{suffix}"
    cloud = token_cloud(run)
    if not len(cloud.delta):
        return empty(name, title, _why_empty(run, cloud))
    fit = _fit(cloud)
    figure: Figure = new_figure(470, 350)
    draw_scatter(figure.add_subplot(), run, _subsample(cloud), fit, ink)
    return drawn(name, title, _sentence(cloud, fit), figure, _legend(run, fit), wide=True, table=_table(run))


def _fit(cloud: Cloud) -> PowerLawFit | None:
    """The power law, where entropies differ enough to tell one: a factor of ten between the outer bins."""
    fit = fit_power_law(cloud.delta, cloud.entropy)
    if fit is None:
        return None
    means = fit.bins.entropy[(fit.bins.count > 0) & (fit.bins.entropy > 0)]
    return fit if means.max() > 10 * means.min() else None


def _why_empty(run: Run, cloud: Cloud) -> str:
    if not len(run.rollouts):
        return "No tokens to show: rollouts/ has no stored trajectory yet."
    if not cloud.stored:
        return "No tokens to show: the stored trajectories have no action tokens."
    return "No tokens to show: no stored token has both its entropy and the learner's log-probability yet."


def _subsample(cloud: Cloud) -> Cloud:
    if len(cloud.delta) <= DRAWN_TOKENS:
        return cloud
    chosen = np.random.default_rng(0).choice(len(cloud.delta), DRAWN_TOKENS, replace=False)
    return Cloud(cloud.delta[chosen], cloud.entropy[chosen], cloud.stored)


def _hexagons(axes: Axes, x: Floats, y: Floats, reach: tuple[float, float], ink: Ink) -> None:
    """Hexagons of one color whose opacity is the logarithm of their count: one path a level, whatever the tokens."""
    scratch = Figure().add_subplot()
    extent = (*reach, float(np.log10(FLOOR_DELTA)), max(float(y.max()), 0.6))
    cells = scratch.hexbin(x, y, gridsize=(46, 27), mincnt=1, extent=extent)
    centers, counts = np.asarray(cells.get_offsets()), np.asarray(cells.get_array(), np.float64)
    corners = np.asarray(cells.get_paths()[0].vertices, np.float64)[:6]
    level = np.floor(np.log1p(counts) / np.log1p(counts.max()) * (LEVELS - 1e-9)).astype(int)
    for step in range(LEVELS):
        chosen = centers[level == step]
        if len(chosen):
            opacity = 0.12 + 0.8 * (step + 1) / LEVELS
            axes.add_patch(PathPatch(_compound(chosen, corners), facecolor=ink["s1"], alpha=opacity, linewidth=0))


def _compound(centers: Floats, corners: NDArray[np.float64]) -> Shape:
    """All hexagons of one level as a single path, in data coordinates of log axes."""
    points = centers[:, None, :] + np.vstack([corners, corners[:1]])[None]
    codes = np.tile([Shape.MOVETO] + [Shape.LINETO] * 5 + [Shape.CLOSEPOLY], len(centers))
    return Shape(10.0 ** points.reshape(-1, 2), codes)


def _thresholds(axes: Axes, run: Run, high_h: float, ink: Ink) -> None:
    estr, clip, band = (gate_settings(run, name) for name in ("estr", "grpo", "icepop"))
    grid = np.geomspace(FLOOR_H * 0.8, high_h, 160)
    axes.plot(grid, boundary(grid, estr["tau"], estr["eps"]), color=ink["s2"], linewidth=2.2, zorder=3)
    for value in {abs(np.log1p(-clip["clip_low"])), np.log1p(clip["clip_high"])}:
        axes.axhline(value, color=ink["s3"], linewidth=1.2, linestyle=(0, (5, 3)), zorder=3)
    for value in {abs(np.log(band["low"])), abs(np.log(band["high"]))}:
        axes.axhline(value, color=ink["s4"], linewidth=1.2, linestyle=(0, (1.5, 2.5)), zorder=3)


def _legend(run: Run, fit: PowerLawFit | None) -> list[Entry]:
    estr, clip, band = (gate_settings(run, name) for name in ("estr", "grpo", "icepop"))
    entries = [
        Entry("s1", "tokens (stronger color: more, log scale)", "bar"),
        Entry("s2", f"ESTR |δ| = √(τ(H+ε)), τ {number(estr['tau'])}, ε {number(estr['eps'])}"),
        Entry("s3", f"PPO clip |log(1−{clip['clip_low']:g})|, log(1+{clip['clip_high']:g})", "dashed"),
        Entry("s4", f"IcePop |log {band['low']:g}|, log {band['high']:g}", "dotted"),
    ]
    return [*entries, Entry("ink", "√E[δ²] in bins of H", "dot")] if fit is not None else entries


def _sentence(cloud: Cloud, fit: PowerLawFit | None) -> str:
    known = f"{len(cloud.delta):,} stored tokens"
    if fit is None:
        alike = f"the entropies of these {known} are too alike to fit how δ grows with H"
        return f"What lies above the curve is what ESTR drops; {alike}."
    return (
        "What lies above the curve is what ESTR drops, fixed thresholds cut straight across: over "
        f"{known} E[δ²] grows as H to the power {number(fit.exponent, 2)} (in proportion it would be 1; "
        f"R² of the fit {number(fit.r2, 2)}). {_against_the_paper(fit.exponent)}"
    )


def _against_the_paper(exponent: float) -> str:
    """What the exponent means beside E[δ²] ∝ H of arXiv 2607.22186."""
    if 0.7 <= exponent <= 1.3:
        return "That is near the proportion which entropy-scaled thresholds rest on (arXiv 2607.22186)."
    scale = "faster" if exponent > 1 else "slower"
    side = "certain" if exponent > 1 else "uncertain"
    return (
        f"The paper (arXiv 2607.22186) has E[δ²] in proportion to H; here it grows {scale}, so one τ is looser for "
        f"{side} tokens than for others."
    )


def _table(run: Run) -> Table:
    """What each gate would drop of the stored tokens."""
    rollouts = run.rollouts
    tokens = rollouts.tokens
    seen = np.isfinite(rollouts.delta)
    rows = []
    for recipe, name in GATE_NAMES.items():
        settings = gate_settings(run, recipe)
        keep = keep_mask(
            recipe,
            tokens["learner_logprob"][seen],
            tokens["logprob"][seen],
            tokens["entropy"][seen],
            tokens["proximal_logprob"][seen],
            rollouts.advantage[seen],
            **settings,
        )
        words = ", ".join(f"{key} {value:g}" for key, value in settings.items())
        rows.append((name, words, percent(float((~keep).mean())) if len(keep) else "–"))
    return Table(("gate", "settings", "would stop"), rows)
