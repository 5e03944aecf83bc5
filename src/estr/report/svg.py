"""Matplotlib figures as inline SVG whose colors are CSS variables, so that one drawing serves light and dark pages."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

LIGHT: dict[str, str] = {
    "paper": "#fdfcf9",
    "ink": "#22211f",
    "muted": "#6a6762",
    "rule": "#dedad2",
    "panel": "#f6f4ee",
    "s1": "#2b62a3",
    "s2": "#c2571a",
    "s3": "#2e8062",
    "s4": "#80559f",
    "s5": "#a8324a",
    "s6": "#8a7419",
    "s7": "#267f93",
    "s8": "#6b6b6b",
    "quiet": "#d3cec3",
}
DARK: dict[str, str] = {
    "paper": "#171819",
    "ink": "#e6e3dc",
    "muted": "#a09c94",
    "rule": "#37393b",
    "panel": "#1f2123",
    "s1": "#78aee8",
    "s2": "#ef9257",
    "s3": "#68c39f",
    "s4": "#bd97dc",
    "s5": "#ec7d90",
    "s6": "#d0b850",
    "s7": "#62c0d6",
    "s8": "#a8a8a8",
    "quiet": "#46494d",
}
SENTINELS: dict[str, str] = {role: f"#0101{index:02x}" for index, role in enumerate(LIGHT, start=16)}
"""Stand-in colors: what a chart is drawn in before each becomes ``var(--role)``."""

SERIES = ("s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8")
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"

RC = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.0,
    "axes.linewidth": 0.8,
    "axes.unicode_minus": True,
    "path.simplify": True,
    "path.simplify_threshold": 0.4,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Ink:
    """The colors a chart draws with: ``ink["s1"]``; sentinels by default, real ones for a bitmap."""

    colors: Mapping[str, str]

    def __getitem__(self, role: str) -> str:
        return self.colors[role]

    def series(self, index: int) -> str:
        return self.colors[SERIES[index % len(SERIES)]]

    @staticmethod
    def dash(index: int) -> str:
        """Line style of a series: where colors repeat, dashes tell them apart."""
        return ("-", "--", ":")[index // len(SERIES) % 3]


THEMED = Ink(SENTINELS)


def new_figure(width: float = 376, height: float = 224) -> Figure:
    """An empty figure of ``width`` × ``height`` SVG units (points)."""
    with matplotlib.rc_context(RC):
        return Figure(figsize=(width / 72, height / 72), layout="constrained", facecolor="none")


def style_axes(axes: Axes, ink: Ink, x_label: str, y_label: str) -> None:
    """Quiet axes: a baseline, light horizontal rules, the y label with its unit set above in a line of text."""
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(ink["rule"])
    axes.tick_params(colors=ink["muted"], which="both", length=0, labelsize=9.5)
    axes.tick_params(axis="x", length=3, color=ink["rule"])
    axes.grid(axis="y", color=ink["rule"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(x_label, color=ink["muted"], fontsize=9.5)
    axes.set_title(y_label, loc="left", color=ink["muted"], fontsize=9.5)


def log_axis(axes: Axes, which: str, decades: float = 9.0) -> None:
    """A logarithmic axis with plain tick labels: 0.01, 1, 10⁻⁵; with 2s and 5s where it spans few ``decades``."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2 else (1.0, 2.0, 5.0), numticks=7))
    axis.set_major_formatter(FuncFormatter(lambda value, _: power_label(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def even_ticks(axes: Axes) -> None:
    """At most five round y ticks without leading zeros of small numbers: 0.2, 2·10⁻⁴."""
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_label(value)))


def tick_label(value: float) -> str:
    """A tick's number, as short as it can be."""
    if value == 0 or abs(value) >= 1e-3:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}·10{superscript(int(exponent))}"


def superscript(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def power_label(value: float) -> str:
    """0.001 ≤ value ≤ 1000 as it is, other powers of ten with an exponent."""
    if value <= 0:
        return ""
    if 1e-3 <= value <= 1e3:
        return f"{value:g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    power = "10" + superscript(int(exponent))
    return power if mantissa == "1" else f"{mantissa}·{power}"


def inline_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an ``<svg>`` element with CSS variables for colors; ``name`` keeps its ids apart from others'."""
    text = _raw_svg(figure, name)
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'xlink:href="#', f'href="#{name}-', text)
    text = _compact(_themed(re.sub(r"url\(#", f"url(#{name}-", text)))
    box = re.search(r'viewBox="[^"]*"', text)
    opening = f'<svg {box.group() if box else ""} role="img" {_label(description)}>'
    return re.sub(r"<svg [^>]*>", lambda _: opening, text, count=1)


def standalone_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG file that follows the reader's light or dark preference by itself."""
    text = _themed(_raw_svg(figure, name))
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    style = f":root{{{css_variables(LIGHT)}--chart-font:{FONT}}}" + (
        f"@media (prefers-color-scheme: dark){{:root{{{css_variables(DARK)}}}}}"
        "*{stroke-linejoin:round;stroke-linecap:butt}"
    )
    return _compact(re.sub(r"<style.*?</style>", lambda _: f"<style>{style}</style>", text, count=1, flags=re.DOTALL))


def css_variables(theme: Mapping[str, str]) -> str:
    return "".join(f"--{role}:{color};" for role, color in theme.items())


def _raw_svg(figure: Figure, name: str) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({**RC, "svg.hashsalt": name}):
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=metadata, transparent=True)
    return buffer.getvalue()


def _themed(text: str) -> str:
    for role, sentinel in SENTINELS.items():
        text = text.replace(sentinel, f"var(--{role})")
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font: \1 var(--chart-font)", text)
    return re.sub(r"font-family: [^;\"]*", "font-family: var(--chart-font)", text)


def _compact(text: str) -> str:
    text = re.sub(r'\b(?:d|x|y|transform|points)="[^"]*"', _rounded, text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    return re.sub(r"\n(?=[LMCQz\"])", " ", text)


def _rounded(attribute: re.Match[str]) -> str:
    """Coordinates to two decimals; text, which may be a tick's number, is left alone."""
    return re.sub(r"(\d+\.\d\d)\d+", r"\1", attribute.group())


def _label(description: str) -> str:
    escaped = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'aria-label="{escaped}"'
