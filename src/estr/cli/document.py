"""Writes docs/methods.md and docs/configuration.md from the code: ``python -m estr.cli.document [DIR] [--check]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from estr.cli.catalogue import Entry, Family, catalogue
from estr.cli.keys import keys, kind, more_about, toml_value
from estr.objectives.table import clipping, corrections, entropy, reweighting, verl

CHAPTERS: tuple[ModuleType, ...] = (clipping, corrections, reweighting, entropy, verl)

HEAD = """\
# Methods

Generated from the tables in `src/estr/`; do not edit. After a change run `python -m estr.cli.document`.

An objective is gates (which tokens take part) × weights (how much they count) × one surrogate (the only part with a
gradient) × one reduction. Each part reads one or more edges: **B** = q/μ, **U** = π/q, **E** = π/μ, where μ sampled the
token, q is the learner at the start of the rollout batch and π the learner now; without q, q ≡ μ and E = U. δ = log E,
H is the entropy of μ, A the advantage, `ppo(r, A)` = -min(r·A, clip(r, 1-clip_low, 1+clip_high)·A), D_B the Kullback-
Leibler divergence of the sampled token against all others, k1, k2, k3 = -x, x²/2, exp(x)-1-x of a log-ratio x.

Every recipe also has `denominator`: "all" divides by all action tokens (or sequences), dropped ones included, "kept"
by those that a gate left. Log-ratios are clamped to ±20 before exp in the loss; beyond it a ratio is a constant.
Tokens with a NaN or infinite needed value are dropped and counted; they stay in the denominator "all".

Around an objective stand the other families; any of them go with any recipe, except where `estr train` says why not.
The options of a method stand in a table beside the key that chooses it: `[objective.advantage_options]`,
`[objective.reweighting_options]`, `[objective.regularizer_options]`, `[objective.selection_options]`, and by name in
`[objective.shaping_options.NAME]` and `[learner.controller_options.NAME]`. `estr recipes NAME` prints any of them.

```toml
[objective]
recipe = "tis_sequence"
advantage = "opob"
reweighting = "stare"
shaping = ["overlong"]
selection = "dapo"
[objective.shaping_options.overlong]
max_length = 256
buffer = 64
[learner]
controllers = ["vcpo", "gac"]
[learner.controller_options.vcpo]
base_ess_ratio = 0.55
```

*Place* says what a method attaches (operator), by which ratios (edge; none: it reads no ratio), and over what it
decides (scope). *Confidence* says what it was written from.
"""


CONFIGURATION = """\
# Configuration

Generated from `src/estr/config/sections.py`; do not edit. After a change run `python -m estr.cli.document`.
`estr config`, `estr config SECTION` and `estr config SECTION.KEY` print the same.

A configuration is a TOML file of the sections below. Every key has a default, so an empty file is one. `--set
section.key=value` wins over the file, an unknown key is an error that names the nearest, and `estr train CONFIG.toml
--dry-run` prints the whole resolved configuration. The run directory keeps it as `config.toml`.
"""


def pages() -> dict[str, str]:
    """File names and contents of everything that is generated."""
    return {"methods.md": render(), "configuration.md": render_configuration()}


def render_configuration() -> str:
    """The page of keys."""
    sections = [CONFIGURATION]
    table = keys()
    for section in dict.fromkeys(key.section for key in table):
        lines = [f"## [{section}]", "", *([more_about(section), ""] if more_about(section) else [])]
        lines += [_row(["key", "default", "allowed", "meaning"]), "|---|---|---|---|"]
        for key in table:
            if key.section == section:
                lines.append(_row([f"`{key.name}`", f"`{toml_value(key.default)}`", kind(key), key.description]))
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


def render() -> str:
    """The page of methods."""
    objectives, *others = catalogue()
    by_name = {entry.name: entry for entry in objectives.entries}
    sections = [HEAD, *(_overview(family) for family in (objectives, *others))]
    for chapter in CHAPTERS:
        title, _, rest = (chapter.__doc__ or "").partition("\n")
        sections.append(f"## {title.rstrip('.')}\n{rest}".rstrip() + "\n")
        sections += [_section(by_name[recipe.name]) for recipe in chapter.RECIPES]
    for family in others:
        sections.append(f"## {family.title} in full\n")
        sections += [_section(entry) for entry in family.entries]
    return "\n".join(sections)


def _overview(family: Family) -> str:
    lines = [f"## {family.title}", "", family.about, ""]
    lines += ["| method | in one line | place | confidence |", "|---|---|---|---|"]
    for entry in family.entries:
        lines.append(_row([f"`{entry.name}`", entry.description, _places(entry), entry.confidence]))
    return "\n".join(lines) + "\n"


def _places(entry: Entry) -> str:
    return "; ".join(dict.fromkeys(map(str, entry.places)))


def _section(entry: Entry) -> str:
    lines = [f"### {entry.name}", "", entry.description, "", f"    {entry.formula}", ""]
    lines += ["| operator | edge | scope | |", "|---|---|---|---|"]
    lines += [_row([place.operator, "+".join(place.edge), place.scope, place.name]) for place in entry.places]
    if entry.reduction:
        lines.append(_row(["reduction", "", "", entry.reduction]))
    lines.append("")
    if entry.hyperparameters:
        lines += _hyperparameters(entry)
    lines.append(f"Source: {entry.source}. Confidence: {entry.confidence}.")
    lines += [f"Needs: {', '.join(f'`{name}`' for name in entry.needs)}."] if entry.needs else []
    lines += ["", f"Chosen by `{entry.choose}`."] if entry.family != "objective" else []
    lines += ["", entry.note] if entry.note else []
    return "\n".join(lines).rstrip() + "\n"


def _hyperparameters(entry: Entry) -> list[str]:
    titles = ["hyperparameter", "default", *(["allowed"] if entry.allowed else [])]
    lines = [_row(titles), "|" + "---|" * len(titles)]
    for name, default in entry.hyperparameters.items():
        allowed = [entry.allowed[name]] if entry.allowed else []
        lines.append(_row([f"`{name}`", f"`{default}`", *allowed]))
    return [*lines, ""]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(arguments: list[str] | None = None) -> int:
    """Writes the pages, or with --check says whether they are up to date (exit status 1 where one is not)."""
    parser = argparse.ArgumentParser(prog="python -m estr.cli.document", description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("docs"))
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args(arguments)
    status = 0
    for name, page in pages().items():
        path = options.directory / name
        if not options.check:
            path.write_text(page, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != page:
            print(f"{path} is out of date; run: python -m estr.cli.document", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
