"""Putting the page together: read the runs, draw the panels, fill the template, write one file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from estr.diagnostics import DEFAULTS
from estr.report.curves import curve_panels, reward_panels
from estr.report.data import Run, read_runs
from estr.report.decode import load_decoder
from estr.report.panel import Section
from estr.report.samples import build_samples
from estr.report.scatter import scatter_panels
from estr.report.staleness import staleness_panels
from estr.report.summary import finished, metric_table, summary
from estr.report.svg import DARK, FONT, LIGHT, SERIES, css_variables
from estr.report.timeline import timeline_panels
from estr.report.verdict import GATE_NAMES, gate_settings, own_gate
from estr.storage.files import disk_errors, write_atomic

DETAILED_RUNS = 6  # runs with a timeline, a hexbin and samples of their own; curves have all
TOKEN_BUDGET = 3_000_000  # stored tokens read for one page; beyond it an even choice of row groups


def build_page(paths: Sequence[Path], output: Path) -> Path:
    """Write the page; see ``estr.report.write_report``."""
    runs = read_runs([Path(path) for path in paths], TOKEN_BUDGET)
    html = render(runs)
    output = Path(output)
    with disk_errors("write the report", output):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, html.encode("utf-8", errors="replace"))
    return output


def render(runs: Sequence[Run]) -> str:
    """The whole page as text."""
    script = _resource("report.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["island"] = json_island
    template = environment.from_string(_resource("report.html"))
    samples = [_run_samples(run) for run in runs[:DETAILED_RUNS]]
    return template.render(
        title=_title(runs),
        runs=runs,
        colors=[SERIES[index % len(SERIES)] for index in range(len(runs))],
        facts=summary(runs),
        notes=_notes(runs),
        sections=_sections(runs),
        samples=samples,
        has_samples=any(entry["items"] for entry in samples),
        metrics=[metric_table(run) for run in runs],
        gate_names=[GATE_NAMES[recipe] for recipe in DEFAULTS],
        light=Markup(css_variables(LIGHT)),
        dark=Markup(css_variables(DARK)),
        font=Markup(FONT),
        style=Markup(_resource("report.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def json_island(value: Any) -> Markup:
    """JSON for a data ``<script>`` element: no character in it can end the element or start a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _sections(runs: Sequence[Run]) -> list[Section]:
    detailed = runs[:DETAILED_RUNS]
    return [
        Section("reward", "Reward and entropy", [*reward_panels(runs), *curve_panels(runs, "policy")]),
        Section("mismatch", "Mismatch and gate", curve_panels(runs, "mismatch")),
        Section("tokens", "Which tokens to trust", scatter_panels(detailed)),
        Section("staleness", "Staleness", [*staleness_panels(runs), *curve_panels(runs, "lag")]),
        Section("timeline", "Who works when", [*timeline_panels(detailed), *curve_panels(runs, "speed")]),
        Section("optimization", "Optimization", curve_panels(runs, "optimization")),
    ]


def _run_samples(run: Run) -> dict[str, Any]:
    gate = own_gate(run)
    estr = gate_settings(run, "estr")
    return {
        "label": run.label,
        "items": build_samples(run),
        "gate": gate,
        "estr": estr,
        "decoded": load_decoder(run) is not None,
    }


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = []
    if len(runs) > DETAILED_RUNS:
        notes.append(
            f"Curves show all {len(runs)} runs; tokens, timelines and samples those of the first {DETAILED_RUNS}."
        )
    for run in runs:
        prefix = f"{run.label}: " if len(runs) > 1 else ""
        if finished(run) is False:
            notes.append(f"{prefix}Not all steps have been taken; this page shows what there is so far.")
        read, total = run.rollouts.groups_read, run.rollouts.groups_total
        if read < total:
            notes.append(
                f"{prefix}Stored tokens were read from {read:,} of {total:,} blocks of rollouts, evenly spaced."
            )
        notes.extend(prefix + note for note in run.notes)
    return notes


def _title(runs: Sequence[Run]) -> str:
    return runs[0].label if len(runs) == 1 else f"{len(runs)} runs"


def _resource(name: str) -> str:
    return files("estr.report").joinpath(name).read_text(encoding="utf-8")
