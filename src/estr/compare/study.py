"""The study file: a run's configuration with one more section, [compare]."""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import ConfigDict, Field, ValidationError

from estr.config.sections import Config, Section
from estr.config.toml import read_toml
from estr.errors import UsageError, nearest

DEFAULT_RECIPES = ("grpo", "estr", "icepop", "kpop", "tis")
MATCHES = ("masked_fraction",)
_HEADER = re.compile(r"^\s*\[")
_OWN_HEADER = re.compile(r"^\s*\[+\s*compare\s*[.\]]")


class Variant(Section):
    """One of the compared: a recipe with hyperparameters (beside these keys) and other settings of its own."""

    model_config = ConfigDict(extra="allow", validate_assignment=True)

    recipe: str = Field("", description="Recipe, or module:name of your own; empty: the variant's name.")
    threshold: str = Field("", description="Hyperparameter that --match moves, for recipes it does not know.")
    set: dict[str, Any] = Field(default_factory=dict, description="Other settings, as in set.schedule.inter = 0.")

    def hyperparameters(self) -> dict[str, Any]:
        """The recipe's own keys; a list is a grid."""
        return dict(self.model_extra or {})


class TuneSection(Section):
    budget: int = Field(6, ge=1, description="Runs that each recipe may spend on its grid with --tune.")
    seeds: list[int] = Field(default_factory=list, description="Their seeds; empty: 1000, 1001, …")
    by: Literal["auc", "final"] = Field("auc", description="What is maximized: area under the curve or final reward.")


class MatchSection(Section):
    target: float = Field(0.0, ge=0, lt=1, description="Masked fraction to match; 0: that of `reference`, unmatched.")
    pilot: str = Field("", description="Variant whose run is the first pilot; empty: the baseline.")
    reference: str = Field("estr", description="Variant whose masked fraction in the pilot is the target.")
    seed: int = Field(2000, ge=0, description="Seed of the pilot runs, which are not reported.")
    rounds: int = Field(
        2, ge=1, description="1: from one pilot of the baseline; more: then from pilots of each recipe."
    )


class CompareSection(Section):
    config: str = Field("", description="Configuration of a run, beside this file; empty: this file's own sections.")
    output: str = Field("", description="Directory of the study; empty: runs/<name of this file>.")
    recipes: list[str] = Field(default_factory=list, description="Variants or recipes; empty: all variants, or five.")
    seeds: list[int] = Field(default=[0, 1, 2, 3, 4], description="Seeds that are reported.")
    baseline: str = Field("", description="What differences are taken against; empty: the first.")
    workers: int = Field(0, ge=0, description="Runs at once, one thread each; 0: one per core.")
    final: int = Field(1, ge=1, description="Last evaluations whose mean is the final reward.")
    keep_checkpoints: bool = Field(True, description="false: a finished run's checkpoints and spool are removed.")
    set: dict[str, Any] = Field(default_factory=dict, description="Settings of every run, over the configuration.")
    variants: dict[str, Variant] = Field(default_factory=dict, description="Recipes with grids or settings.")
    sweep: dict[str, Any] = Field(default_factory=dict, description="Axes: sweep.schedule.inter = [0, 4, 16].")
    tune: TuneSection = Field(default_factory=TuneSection)
    match: MatchSection = Field(default_factory=MatchSection)


_PARTS: dict[str, type[Section]] = {"tune": TuneSection, "match": MatchSection}


@dataclass(frozen=True)
class StudyFile:
    """A study as it was written: where it stands, its [compare] section, and the configuration beneath it."""

    path: Path
    section: CompareSection
    base: Path  # a configuration file without [compare]
    base_text: str  # its text
    sets: tuple[str, ...] = ()  # section.key=value, over both

    @property
    def name(self) -> str:
        return self.path.stem


def read_study(
    path: str | os.PathLike[str],
    recipes: Iterable[str] | None = None,
    seeds: Iterable[int] | None = None,
    sets: Iterable[str] = (),
) -> StudyFile:
    """Read a study, or an ordinary configuration, which is a study with every setting of [compare] at its default.

    ``recipes`` and ``seeds`` replace those of the file; ``sets`` (as of ``--set``) hold for every run.

    Raises:
        UsageError: the file cannot be read, or [compare] holds something unknown or invalid.
    """
    content, text = read_toml(path)
    source = Path(path)
    section = _validated(content.get("compare", {}), os.fspath(path))
    if recipes is not None:
        section.recipes = list(recipes)
    if seeds is not None:
        section.seeds = list(seeds)
    _check(section, os.fspath(path))
    if not section.config:
        return StudyFile(source, section, source, without_section(text, content), tuple(sets))
    beside = [name for name in content if name != "compare"]
    if beside:
        raise UsageError(
            f"{path}: compare.config names the configuration, so [{beside[0]}] belongs there or in [compare.set]"
        )
    base = source.parent / section.config
    return StudyFile(source, section, base, read_toml(base)[1], tuple(sets))


def without_section(text: str, content: Mapping[str, Any]) -> str:
    """A study's text as a run's configuration: [compare] is blanked, so that the lines keep their numbers."""
    lines, inside = [], False
    for line in text.splitlines():
        if _HEADER.match(line):
            inside = bool(_OWN_HEADER.match(line))
        lines.append("" if inside else line)
    blanked = "\n".join(lines) + "\n"
    rest = {name: value for name, value in content.items() if name != "compare"}
    try:
        if tomllib.loads(blanked) == rest:
            return blanked
    except tomllib.TOMLDecodeError:
        pass
    return tomli_w.dumps(rest)


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def set_argument(key: str, value: Any) -> str:
    """``--set``'s form of a setting."""
    text = tomli_w.dumps({"value": value}, multiline_strings=False).partition("=")[2].strip()
    return f"{key}={' '.join(text.split()) if isinstance(value, list) else text}"


def _validated(content: Any, path: str) -> CompareSection:
    if not isinstance(content, dict):
        raise UsageError(f"{path}: compare must be a section: write [compare] on a line of its own")
    try:
        return CompareSection.model_validate(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        keys = [str(part) for part in problem["loc"]]
        name = ".".join(["compare", *keys])
        if problem["type"] == "extra_forbidden":
            part: type[Section] = _PARTS.get(keys[0], CompareSection) if len(keys) > 1 else CompareSection
            known = part.model_fields
            raise UsageError(f"{path}: {name} is not a known key{nearest(keys[-1], known)}") from None
        raise UsageError(f"{path}: {name} is not valid: {problem['msg'].lower()}, got {problem['input']!r}") from None


def _check(section: CompareSection, path: str) -> None:
    if not section.seeds:
        raise UsageError(f"{path}: compare.seeds is empty; give at least one seed")
    for name, values in (("seeds", section.seeds), ("tune.seeds", section.tune.seeds)):
        if any(seed < 0 for seed in values):
            raise UsageError(f"{path}: compare.{name} must be whole numbers from 0 on, got {values}")
        if len(set(values)) < len(values):
            raise UsageError(f"{path}: compare.{name} names a seed twice: {values}")
    shared = set(section.seeds) & {*section.tune.seeds, section.match.seed}
    if shared:
        raise UsageError(
            f"{path}: seed {min(shared)} is reported and used for tuning or matching too; they must not share seeds"
        )
    if len(set(section.recipes)) < len(section.recipes):
        raise UsageError(f"{path}: compare.recipes names one twice: {', '.join(section.recipes)}")
    for key, values in flatten(section.sweep).items():
        if not isinstance(values, list) or not values:
            raise UsageError(f"{path}: compare.sweep.{key} must be a list of values, got {values!r}")
    _check_sets(section, path)


def _check_sets(section: CompareSection, path: str) -> None:
    tables = {"compare.set": section.set}
    tables |= {f"compare.variants.{name}.set": variant.set for name, variant in section.variants.items()}
    for where, table in tables.items():
        for key in flatten(table):
            if key.partition(".")[0] not in Config.model_fields or "." not in key:
                hint = nearest(key.partition(".")[0], Config.model_fields)
                raise UsageError(f"{path}: {where}.{key} is not a setting: write section.key{hint}")
            if key == "run.seed":
                raise UsageError(f"{path}: {where}.{key} is decided by compare.seeds")


def as_number(value: Any) -> float | None:
    """A value's place on a numeric axis; None where it has none."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if numeric else None
