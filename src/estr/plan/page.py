"""The plan's page: one self-contained HTML file in the style of the report."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from estr.plan.calibrate import Calibration
from estr.plan.outcome import Outcome
from estr.plan.panels import lag_panels, scale_panels, split_panel, staleness_panel
from estr.plan.sweep import Sweep
from estr.plan.table import HEAD, parameters, recommendations, row
from estr.report.panel import Section, Table
from estr.report.series import number, percent
from estr.report.svg import DARK, FONT, LIGHT, css_variables
from estr.storage.files import disk_errors, write_atomic


def write_page(sweep: Sweep, calibration: Calibration | None, source: str, output: Path) -> Path:
    """Write the page to ``output`` and return its path. Raises RunError where the disk refuses."""
    html = render(sweep, calibration, source)
    with disk_errors("write the page", output):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, html.encode("utf-8", errors="replace"))
    return output


def render(sweep: Sweep, calibration: Calibration | None, source: str) -> str:
    """The whole page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    style = _resource("estr.report", "report.css") + _resource("estr.plan", "page.css")
    return environment.from_string(_resource("estr.plan", "page.html")).render(
        title=Path(source).name or source,
        origin="Calibrated by a run" if calibration is not None else "From parameters; nothing here was measured",
        answers=recommendations(sweep),
        facts=_facts(sweep.own),
        compared=_compared(sweep.own, calibration),
        sections=_sections(sweep),
        outcomes=Table(HEAD, [row(outcome) for outcome in [sweep.own, sweep.sync, *sweep.points]]),
        parameters=Table(("parameter", "value"), parameters(sweep.plan)),
        light=Markup(css_variables(LIGHT)),
        dark=Markup(css_variables(DARK)),
        font=Markup(FONT),
        style=Markup(style),
    )


def _facts(own: Outcome) -> list[tuple[str, str]]:
    return [
        ("GPUs or processes", f"{own.gpus:,}"),
        ("engines", f"{own.engines:,} with {own.slots} slots"),
        ("learner ranks", f"{own.learner_ranks:,}"),
        ("max_staleness", "sync" if own.mode == "sync" else str(own.max_staleness)),
        ("seconds a step", number(own.seconds_per_step)),
        ("trained action tokens a second", number(round(own.trained_tokens_per_second))),
        ("engines idle", percent(own.engine_idle_fraction)),
        ("learner idle", percent(own.learner_idle_fraction)),
        ("over sync", "–" if own.speedup is None else f"{own.speedup:.2f} times"),
    ]


def _compared(own: Outcome, calibration: Calibration | None) -> Table | None:
    """The plan as given against what the run measured."""
    if calibration is None:
        return None
    measured = calibration.measured
    words: Sequence[tuple[str, str]] = (
        ("seconds_per_step", "seconds a step"),
        ("trained_tokens_per_second", "trained action tokens a second"),
        ("engine_idle_fraction", "engines idle, share of time"),
        ("learner_idle_fraction", "learner idle, share of time"),
        ("inter_mean", "mean Δ inter, optimizer steps"),
        ("intra_mean", "mean Δ intra, optimizer steps"),
    )
    return Table(
        ("", "simulated", "measured in the run"),
        [(text, number(getattr(own, key)), number(getattr(measured, key))) for key, text in words],
    )


def _sections(sweep: Sweep) -> list[Section]:
    scale = scale_panels(sweep)
    return [
        *([Section("scale", "How it scales", scale)] if scale else []),
        Section("choices", "Engines, learner and staleness", [split_panel(sweep), staleness_panel(sweep)]),
        Section("staleness", "Staleness of the plan as given", lag_panels(sweep)),
    ]


def _resource(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
