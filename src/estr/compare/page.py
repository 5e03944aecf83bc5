"""The page of a study: one self-contained HTML file in the style of the report."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from estr.compare.panels import (
    difference_panel,
    grid_panels,
    metric_panels,
    reward_panel,
    seeds_panel,
    sweep_panel,
)
from estr.compare.plan import Point
from estr.compare.results import AUC, FINAL, MEASURES, Measure
from estr.compare.summary import Comparison, Row
from estr.compare.words import difference_words, interval_words, p_words
from estr.report.panel import Panel, Section
from estr.report.series import duration
from estr.report.svg import DARK, FONT, LIGHT, SERIES, css_variables
from estr.storage.files import disk_errors, write_atomic

DEFINITIONS = (
    "Final reward: {final}. Area under the curve: mean height of the held-out curve over the steps. Collapsed: "
    "held-out reward falls below half of its best and stays there to the end, or the run diverged. Dropped, clipped, "
    "KL, |E − 1| and |δ|: means over all trained tokens of a run. ± is the half width of the 95 % interval over seeds "
    "(Student t). Differences are paired over the same seeds; their intervals and p-values are corrected by Holm over "
    "the recipes, separately for each measure{points}."
)
BY_KEY = {measure.key: measure for measure in MEASURES}
SWEPT: tuple[tuple[Measure, str], ...] = (
    (FINAL, "A line that stays level is a recipe that does not mind"),
    (BY_KEY["collapsed"], "The share of seeds whose run fell below half of its best for good"),
    (BY_KEY["masked_fraction"], "What the gates drop"),
    (BY_KEY["kl_end"], "How far the learner is from its data at the end"),
)


BESIDE = (
    "auc",
    "collapsed",
    "masked_fraction",
    "clip_fraction",
    "kl",
    "kl_end",
    "ratio_deviation",
    "delta_abs",
    "entropy_end",
)
"""What the table shows beside the final reward and its difference."""


@dataclass(frozen=True)
class Line:
    """A row of the table of one point."""

    role: str
    label: str
    cells: list[str]


@dataclass(frozen=True)
class Board:
    """The table of one point."""

    title: str
    head: list[str]
    lines: list[Line]


def write_page(comparison: Comparison, output: Path) -> Path:
    """Write the page to ``output`` and return its path. Raises RunError where the disk refuses."""
    html = render(comparison)
    with disk_errors("write the page", output):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, html.encode("utf-8", errors="replace"))
    return output


def render(comparison: Comparison) -> str:
    """The whole page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_resource("estr.compare", "page.html")).render(
        title=comparison.name,
        facts=_facts(comparison),
        boards=[_board(comparison, point) for point in comparison.points],
        definitions=_definitions(comparison),
        notes=comparison.notes,
        failed=[(status.run.name, status.reason) for status in comparison.failed],
        sections=_sections(comparison),
        runs=_runs(comparison),
        light=Markup(css_variables(LIGHT)),
        dark=Markup(css_variables(DARK)),
        font=Markup(FONT),
        style=Markup(_resource("estr.report", "report.css") + _resource("estr.compare", "page.css")),
    )


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    runs = {name for row in comparison.rows for name in row.names.values()}
    seeds = sorted({seed for row in comparison.rows for seed in row.runs})
    return [
        ("compared", f"{len(comparison.entries)} recipes"),
        ("baseline", comparison.baseline.label),
        ("seeds", ", ".join(map(str, seeds)) or "–"),
        ("runs", f"{len(runs)}" + (f", {len(comparison.failed)} failed" if comparison.failed else "")),
        ("run time together", duration(comparison.seconds)),
    ]


def _definitions(comparison: Comparison) -> str:
    last = (
        "the last held-out evaluation" if comparison.final == 1 else f"mean of the last {comparison.final} evaluations"
    )
    return DEFINITIONS.format(final=last, points=" and each point of the sweep" if comparison.axes else "")


def _board(comparison: Comparison, point: Point) -> Board:
    head = ["recipe", "seeds", FINAL.name, f"minus {comparison.baseline.label}", "p (Holm)"]
    head += [BY_KEY[key].name for key in BESIDE]
    title = f"{point.axis} = {point.label}" if point.axis else ""
    return Board(title, head, [_line(comparison, row) for row in comparison.at(point)])


def _line(comparison: Comparison, row: Row) -> Line:
    found = row.differences.get(FINAL.key)
    cells = [str(len(row.runs)), interval_words(FINAL.key, row.measures.get(FINAL.key))]
    cells += [difference_words(found), p_words(found)]
    cells += [interval_words(key, row.measures.get(key)) for key in BESIDE]
    return Line(SERIES[comparison.entries.index(row.entry) % len(SERIES)], row.entry.label, cells)


def _sections(comparison: Comparison) -> list[Section]:
    sections = []
    for number, axis in enumerate(comparison.axes):
        panels = [
            sweep_panel(comparison, axis, measure, guide, f"sweep-{number}-{index}")
            for index, (measure, guide) in enumerate(SWEPT)
        ]
        sections.append(Section(f"sweep-{number}", f"Stress: {axis}", panels))
    for number, point in enumerate(comparison.points):
        panels = _point_panels(comparison, point, f"p{number}")
        title = f"{point.axis} = {point.label}" if point.axis else "Curves and differences"
        sections.append(Section(f"point-{number}", title, panels))
    return sections


def _point_panels(comparison: Comparison, point: Point, prefix: str) -> list[Panel]:
    swept = bool(point.axis)
    panels = [reward_panel(comparison, point, f"{prefix}-reward")]
    panels += [difference_panel(comparison, point, FINAL, f"{prefix}-final")]
    if not swept:
        panels += [
            difference_panel(comparison, point, AUC, f"{prefix}-auc"),
            seeds_panel(comparison, point, f"{prefix}-seeds"),
        ]
        panels += grid_panels(comparison, point, SWEPT, f"{prefix}-grid")
        panels += metric_panels(comparison, point, f"{prefix}-metric")
    return panels


def _runs(comparison: Comparison) -> list[tuple[str, ...]]:
    """Every run once: its name and its numbers."""
    found: dict[str, tuple[str, ...]] = {}
    for row in comparison.rows:
        for seed, run in row.runs.items():
            words = [f"{run.values[key]:.3f}" for key in ("final", "auc", "best")]
            fate = f"from step {run.collapse_step:g}" if run.collapse_step is not None else "no"
            name = row.names[seed]
            found[name] = (name, str(seed), str(run.steps), *words, fate, duration(run.seconds))
    return list(found.values())


def _resource(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
