"""From a study to the runs it consists of: variants × grid, points of the sweep, seeds."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from estr.compare.study import DEFAULT_RECIPES, StudyFile, Variant, as_number, flatten, set_argument
from estr.config import Config
from estr.config.load import load_config
from estr.config.validate import validate_config
from estr.errors import UsageError, nearest
from estr.objectives import recipes

Settings = Mapping[str, Any]
ONE_THREAD: Settings = {"runtime.learner_threads": 1, "runtime.engine_threads": 1}
_LISTS = {"objective.shaping", "learner.controllers", "run.trackers"}
"""Settings that are lists themselves: only a list of lists is a grid there."""


@dataclass(frozen=True)
class Entry:
    """One line of the comparison: a variant with one choice of its grid."""

    label: str
    variant: str
    recipe: str
    settings: Settings = field(hash=False)  # dotted key → value, over the configuration
    choice: Settings = field(default_factory=dict, hash=False)  # what the grid varies, as it is chosen here


@dataclass(frozen=True)
class Point:
    """Where on which axis of the sweep runs stand; the one point of a study without a sweep has no axis."""

    axis: str = ""
    label: str = ""
    value: float | None = None  # None where the axis is not numeric
    settings: Settings = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class PlannedRun:
    """One run directory: its name, and its whole configuration."""

    name: str
    config: Config = field(hash=False, compare=False)


@dataclass(frozen=True)
class Cell:
    """What one run stands for; several cells may share a run where their configurations are equal."""

    entry: Entry
    point: Point
    seed: int
    run: PlannedRun


class Plan:
    """Loads configurations for entries, points and seeds, and gives equal ones the same run."""

    def __init__(self, study: StudyFile) -> None:
        self.study = study
        self._by_content: dict[str, PlannedRun] = {}
        self._names: set[str] = set()
        self.notices: list[str] = []

    @property
    def runs(self) -> list[PlannedRun]:
        """Every run planned so far, in order."""
        return list(self._by_content.values())

    def cells(
        self, entries: Iterable[Entry], points: Iterable[Point], seeds: Sequence[int], prefix: str = ""
    ) -> list[Cell]:
        """Cells in the order in which they are run: seed by seed, so that early results have all recipes.

        Raises:
            UsageError: a setting is wrong; the sentence names the study, the variant and the key.
        """
        entries, points = list(entries), list(points)
        return [
            Cell(entry, point, seed, self._run(entry, point, seed, prefix))
            for seed in seeds
            for point in points
            for entry in entries
        ]

    def config(self, entry: Entry, seed: int, point: Point = Point()) -> Config:
        """The whole configuration of one cell."""
        study = self.study
        sets = _arguments({**ONE_THREAD, **flatten(study.section.set)}) + list(study.sets)
        # what a variant sets itself stays its own at every point of a sweep
        sets += _arguments({**point.settings, **entry.settings, "run.seed": seed, "run.output": ""})
        config, notices = self._load(sets, entry)
        self.notices += [notice for notice in notices if "left out" not in notice and notice not in self.notices]
        return config

    def _run(self, entry: Entry, point: Point, seed: int, prefix: str) -> PlannedRun:
        config = self.config(entry, seed, point)
        content = identity(config)
        if content not in self._by_content:
            where = f"@{point.axis}={point.label}" if point.axis else ""
            self._by_content[content] = PlannedRun(self._name(f"{prefix}{entry.label}{where}-s{seed}"), config)
        return self._by_content[content]

    def _load(self, sets: list[str], entry: Entry) -> tuple[Config, list[str]]:
        study = self.study
        sys.path.append(os.path.abspath(study.path.parent))  # a recipe of the user's own lies beside the study
        with tempfile.TemporaryDirectory(prefix="estr-compare-") as folder:
            base = Path(folder) / study.base.name
            base.write_text(study.base_text, encoding="utf-8")
            try:
                config, notices = load_config(base, sets)
                return config, [*notices, *validate_config(config)]
            except UsageError as error:
                told = str(error).replace(os.fspath(base), os.fspath(study.base))
                raise UsageError(told.replace("--set ", f"{study.path}, {entry.variant}: ")) from None
            finally:
                sys.path.pop()

    def _name(self, wanted: str) -> str:
        name = base = slug(wanted)
        number = 2
        while name in self._names:
            name, number = f"{base}-{number}", number + 1
        self._names.add(name)
        return name


def _arguments(settings: Settings) -> list[str]:
    return [set_argument(key, value) for key, value in settings.items()]


def identity(config: Config) -> str:
    """What makes two runs the same run: the configuration without where it is written."""
    return config.model_dump_json(exclude={"run": {"output", "module_directories"}})


def entries_of(study: StudyFile) -> list[Entry]:
    """Every variant with every choice of its grid.

    Raises:
        UsageError: an unknown recipe or variant, or a baseline that is not compared.
    """
    names = chosen_names(study)
    found = [entry for name in names for entry in grid(name, variant_of(study, name))]
    baseline_of(study, found)
    return found


def chosen_names(study: StudyFile) -> list[str]:
    section = study.section
    names = section.recipes or list(section.variants) or list(DEFAULT_RECIPES)
    for name in names:
        recipe = variant_of(study, name).recipe or name
        if ":" not in recipe and recipe not in recipes():
            known = [*section.variants, *recipes()]
            raise UsageError(f"{study.path}: there is no recipe or variant {recipe!r}{nearest(recipe, known)}")
    return names


def variant_of(study: StudyFile, name: str) -> Variant:
    return study.section.variants.get(name) or Variant.model_validate({})


def grid(name: str, variant: Variant) -> list[Entry]:
    """A variant's entries: one for each combination of the values that its lists hold."""
    recipe = variant.recipe or name
    settings: dict[str, Any] = {f"objective.{key}": value for key, value in variant.hyperparameters().items()}
    settings |= flatten(variant.set)
    axes = {key: values for key, values in settings.items() if _is_grid(key, values)}
    fixed = {"objective.recipe": recipe} | {key: value for key, value in settings.items() if key not in axes}
    found = []
    for values in product(*axes.values()):
        choice = dict(zip(axes, values, strict=True))
        words = " ".join(f"{key.rpartition('.')[2]}={_short(value)}" for key, value in choice.items())
        found.append(Entry(f"{name} {words}".strip(), name, recipe, fixed | choice, choice))
    return found


def baseline_of(study: StudyFile, entries: Sequence[Entry]) -> Entry:
    """The entry against which differences are taken: by label, or by variant where that has one entry."""
    wanted = study.section.baseline
    if not wanted:
        return entries[0]
    for entry in entries:
        if wanted in (entry.label, entry.variant):
            return entry
    hint = nearest(wanted, [entry.label for entry in entries])
    raise UsageError(f"{study.path}: the baseline {wanted!r} is not among what is compared{hint}")


def points_of(study: StudyFile) -> list[Point]:
    """Points of all axes of the sweep, one axis at a time; one nameless point where there is none.

    An axis is a setting and its values; a value that is a table is a set of settings with a ``label``.
    """
    points = []
    for axis, values in flatten(study.section.sweep).items():
        points += [_point(study, axis, value) for value in values]
    return points or [Point()]


def slug(text: str) -> str:
    """``text`` as the name of a directory."""
    return re.sub(r"[^\w.=+@-]+", "-", text, flags=re.ASCII).strip("-.")[:120] or "run"


def _point(study: StudyFile, axis: str, value: Any) -> Point:
    if not isinstance(value, dict):
        return Point(axis, _short(value), as_number(value), {axis: value})
    settings = {key: item for key, item in value.items() if key not in ("label", "value")}
    label, number = value.get("label"), value.get("value")
    if not isinstance(label, str) or not settings:
        raise UsageError(f'{study.path}: a table in compare.sweep.{axis} needs label = "…" and at least one setting')
    return Point(axis, label, as_number(number), flatten(settings))


def _is_grid(key: str, values: Any) -> bool:
    if not isinstance(values, list):
        return False
    return key not in _LISTS or (bool(values) and all(isinstance(value, list) for value in values))


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)
