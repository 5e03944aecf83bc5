"""Writes docs/methods.md from the table of recipes: ``python -m estr.objectives.document [PATH] [--check]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

from estr.objectives.composition import Gate, Part, Recipe, Weight
from estr.objectives.objective import Objective
from estr.objectives.table import clipping, corrections, entropy, reweighting, verl

FAMILIES: tuple[ModuleType, ...] = (clipping, corrections, reweighting, entropy, verl)

HEAD = """\
# Methods

Generated from the table in `src/estr/objectives/table/`; do not edit. After a change run
`python -m estr.objectives.document`.

An objective is gates (which tokens take part) × weights (how much they count) × one surrogate (the only part with a
gradient) × one reduction. Each part reads one or more edges: **B** = q/μ, **U** = π/q, **E** = π/μ, where μ sampled the
token, q is the learner at the start of the rollout batch and π the learner now; without q, q ≡ μ and E = U. δ = log E,
H is the entropy of μ, A the advantage, `ppo(r, A)` = -min(r·A, clip(r, 1-clip_low, 1+clip_high)·A), D_B the Kullback-
Leibler divergence of the sampled token against all others, k1, k2, k3 = -x, x²/2, exp(x)-1-x of a log-ratio x.

Every recipe also has `denominator`: "all" divides by all action tokens (or sequences), dropped ones included, "kept"
by those that a gate left. Log-ratios are clamped to ±20 before exp in the loss; beyond it a ratio is a constant.
Tokens with a NaN or infinite needed value are dropped and counted; they stay in the denominator "all".
*Confidence* says what the recipe was written from.
"""


def render() -> str:
    """The whole page."""
    sections = [HEAD, _overview()]
    for family in FAMILIES:
        title, _, rest = (family.__doc__ or "").partition("\n")
        sections.append(f"## {title.rstrip('.')}\n{rest}".rstrip() + "\n")
        sections += [_section(recipe) for recipe in family.RECIPES]
    return "\n".join(sections)


def _overview() -> str:
    lines = ["| recipe | in one line | edges | needs | confidence |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        for recipe in family.RECIPES:
            built = Objective(recipe, {})
            cells = [f"`{recipe.name}`", recipe.description, _edges(built), _names(built.needs), recipe.confidence]
            lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines) + "\n"


def _section(recipe: Recipe) -> str:
    built = Objective(recipe, {})
    lines = [f"### {recipe.name}", "", recipe.description, "", f"    {recipe.formula}", ""]
    lines += ["| part | operator | edge | scope |", "|---|---|---|---|"]
    for part in built.composition.parts:
        cells = [_kind(part), part.name, "+".join(part.edge), part.scope]
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    lines += [f"| reduction | {built.composition.reduction} | | |", ""]
    lines += ["| hyperparameter | default | allowed |", "|---|---|---|"]
    for name, parameter in recipe.all_parameters.items():
        lines.append("| " + " | ".join(map(_cell, [f"`{name}`", f"`{parameter.default}`", parameter.allowed])) + " |")
    lines += ["", f"Source: {recipe.source}. Confidence: {recipe.confidence}."]
    if built.needs:
        lines.append(f"Needs: {_names(built.needs)}.")
    if recipe.note:
        lines += ["", recipe.note]
    return "\n".join(lines) + "\n"


def _kind(part: Part) -> str:
    return "gate" if isinstance(part, Gate) else "weight" if isinstance(part, Weight) else "surrogate"


def _edges(built: Objective) -> str:
    return " ".join(sorted(built.edges))


def _names(fields: frozenset[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(fields))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str] | None = None) -> int:
    """Writes the page, or with --check says whether it is up to date (exit status 1 where it is not)."""
    parser = argparse.ArgumentParser(prog="python -m estr.objectives.document", description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, default=Path("docs/methods.md"))
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args(arguments)
    page = render()
    if not options.check:
        options.path.write_text(page, encoding="utf-8")
        return 0
    if options.path.is_file() and options.path.read_text(encoding="utf-8") == page:
        return 0
    print(f"{options.path} is out of date; run: python -m estr.objectives.document", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
