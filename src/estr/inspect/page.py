"""The inspection page: one self-contained HTML file in the style of the report."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from estr.inspect.checks import CANNOT_TELL
from estr.inspect.inspection import Example, Inspection
from estr.inspect.panels import (
    fit_panel,
    gate_table,
    lag_panel,
    parts_panel,
    quantile_table,
    recipe_panel,
    staleness_panels,
    switch_panels,
)
from estr.inspect.summary import pair_words, visible
from estr.report.panel import Section
from estr.report.series import number, percent
from estr.report.svg import DARK, FONT, LIGHT, css_variables
from estr.storage.files import disk_errors, write_atomic

PAIRS = 6  # kinds of disagreement shown with text


@dataclass(frozen=True)
class Pair:
    """A kind of disagreement with tokens in their text."""

    words: str
    examples: list[Example]


def write_page(inspection: Inspection, output: Path) -> Path:
    """Write the page to ``output`` and return its path. Raises RunError where the disk refuses."""
    html = render(inspection)
    with disk_errors("write the page", output):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, html.encode("utf-8", errors="replace"))
    return output


def render(inspection: Inspection) -> str:
    """The whole page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = number
    environment.filters["visible"] = visible
    findings = inspection.findings
    return environment.from_string(_resource("estr.inspect", "page.html")).render(
        title=Path(inspection.dump.source).name or inspection.dump.source,
        facts=_facts(inspection),
        faults=[finding for finding in findings if finding.code != CANNOT_TELL],
        untold=[finding for finding in findings if finding.code == CANNOT_TELL],
        notes=[*inspection.dump.notes, *inspection.verdicts.notes],
        quantiles=quantile_table(inspection.delta.quantiles) if inspection.delta.tokens else None,
        sections=_sections(inspection),
        gates=gate_table(inspection),
        pairs=_pairs(inspection),
        light=Markup(css_variables(LIGHT)),
        dark=Markup(css_variables(DARK)),
        font=Markup(FONT),
        style=Markup(_resource("estr.report", "report.css") + _resource("estr.inspect", "page.css")),
    )


def _facts(inspection: Inspection) -> list[tuple[str, str]]:
    dump, delta = inspection.dump, inspection.delta
    return [
        ("columns", dump.preset),
        ("action tokens", f"{dump.token_count:,}"),
        ("trajectories", f"{dump.trajectories:,}"),
        ("seen by the learner", f"{delta.tokens:,} tokens"),
        ("entropy", dump.entropy_kind),
        ("mean δ", number(delta.mean)),
        ("standard deviation of δ", number(delta.std)),
        ("mean |δ|", number(delta.absolute)),
        ("version switches", f"{inspection.switches.count:,} inside trajectories"),
        ("ESTR would drop", percent(inspection.verdicts.masked.get("estr"))),
    ]


def _sections(inspection: Inspection) -> list[Section]:
    return [
        Section("growth", "Entropy and δ", [fit_panel(inspection), parts_panel(inspection), lag_panel(inspection)]),
        Section("staleness", "Staleness", [*staleness_panels(inspection), *switch_panels(inspection)]),
        Section("recipes", "Recipes", [recipe_panel(inspection)]),
    ]


def _pairs(inspection: Inspection) -> list[Pair]:
    return [
        Pair(pair_words(pair), [inspection.example(token) for token in pair.examples])
        for pair in inspection.verdicts.disagreements[:PAIRS]
    ]


def _resource(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
