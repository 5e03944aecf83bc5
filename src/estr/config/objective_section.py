"""The [objective] section of a file: which of its hyperparameters take effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from estr.config.calibration import apply_calibration
from estr.config.methods import resolve_methods
from estr.config.sections import ObjectiveConfig
from estr.errors import UsageError, nearest

_FIXED = set(ObjectiveConfig.model_fields)
_DEFAULT_RECIPE = str(ObjectiveConfig.model_fields["recipe"].default)


@dataclass
class _Part:
    """One source of the section (the file, or all ``--set``): fixed keys, flat hyperparameters, [objective.NAME]."""

    fixed: dict[str, Any] = field(default_factory=dict)
    flat: dict[str, Any] = field(default_factory=dict)
    named: dict[str, dict[str, Any]] = field(default_factory=dict)


def resolve_objective(file: Mapping[str, Any], sets: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The effective section, hyperparameters flat and complete, and notices of what was left out.

    Args:
        file: the section as the file has it.
        sets: the section as the command line has it, which wins.

    Raises:
        UsageError: an unknown recipe, method, option or value; the sentence names the key and the nearest known one.
    """
    known = _known_recipes()
    written, given = _split(file, known), _split(sets, known)
    fixed = {**written.fixed, **given.fixed}
    recipe = fixed.get("recipe", _DEFAULT_RECIPE)
    written_recipe = written.fixed.get("recipe", _DEFAULT_RECIPE)
    _check_recipe(recipe, known)
    if isinstance(written_recipe, str) and written_recipe in known:
        _check_names(written_recipe, written.flat, known)
    for part in (written, given):
        for name, values in part.named.items():
            _check_names(name, values, known)
    notices = []
    hyperparameters = dict(known[recipe])
    if recipe == written_recipe:
        hyperparameters |= _merge_file(recipe, written)
    else:
        hyperparameters |= written.named.get(recipe, {})
        notices = _left_out(written_recipe, recipe, written)
    chosen = _merge_file(recipe, given)
    _check_names(recipe, chosen, known)
    hyperparameters |= chosen
    by_hand = (_merge_file(recipe, written) if recipe == written_recipe else {}).keys() | chosen.keys()
    notices += apply_calibration(fixed.get("calibration"), hyperparameters, set(by_hand))
    _check_values(recipe, hyperparameters)
    methods = resolve_methods("objective", written.fixed, given.fixed)
    present = {key: value for key, value in hyperparameters.items() if value is not None}  # TOML has no null
    return {**fixed, **methods.values, **present}, notices + methods.notices


def _known_recipes() -> dict[str, dict[str, Any]]:
    from estr.objectives import recipes  # torch is loaded only when a configuration is read

    return {name: dict(recipe.hyperparameters) for name, recipe in recipes().items()}


def _split(section: Mapping[str, Any], known: Mapping[str, Any]) -> _Part:
    part = _Part()
    for key, value in section.items():
        if key in _FIXED:
            part.fixed[key] = value
        elif not isinstance(value, dict):
            part.flat[key] = value
        elif key in known:
            part.named[key] = value
        else:
            hint = nearest(key, [*known, *(name for name in _FIXED if name.endswith("_options"))])
            raise UsageError(f"objective.{key} is a table, but there is no recipe of that name{hint}")
    return part


def _merge_file(recipe: str, part: _Part) -> dict[str, Any]:
    named = part.named.get(recipe, {})
    for key in sorted(part.flat.keys() & named.keys()):
        raise UsageError(f"objective.{key} and objective.{recipe}.{key} are the same setting; keep one of them")
    return {**part.flat, **named}


def _check_recipe(recipe: Any, known: Mapping[str, Any]) -> None:
    if not isinstance(recipe, str) or recipe not in known:
        raise UsageError(f"objective.recipe: there is no recipe {recipe!r}{nearest(str(recipe), known)}")


def _check_names(recipe: str, values: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> None:
    for key in values:
        if key not in known[recipe]:
            hint = nearest(key, [*known[recipe], *_FIXED])
            raise UsageError(f"objective.{key}: the recipe {recipe!r} has no such hyperparameter{hint}")


def _left_out(old: Any, new: str, written: _Part) -> list[str]:
    names = [*written.flat, *(f"{old}.{key}" for key in written.named.get(old, {}))]
    if not names:
        return []
    return [f"objective.recipe is now {new}: the file's {', '.join(names)} of {old} left out"]


def _check_values(recipe: str, hyperparameters: Mapping[str, Any]) -> None:
    from estr.objectives import objective

    try:
        objective(recipe, **hyperparameters)
    except (ValueError, TypeError) as error:
        raise UsageError(f"objective.{str(error).removeprefix(f'{recipe}.')}") from error
