"""The [objective] section of a file: which of its hyperparameters take effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from estr.config.calibration import apply_calibration
from estr.config.methods import resolve_methods
from estr.config.names import nearest_key
from estr.config.sections import ObjectiveConfig
from estr.errors import UsageError, nearest, plain, shown
from estr.own_code import is_own

if TYPE_CHECKING:
    from estr.objectives import Objective

_FIXED = set(ObjectiveConfig.model_fields)
_PPO = ("ppo", "ppo_clip", "clip", "vanilla")
_DEFAULT_RECIPE = str(ObjectiveConfig.model_fields["recipe"].default)


@dataclass
class _Part:
    """One source of the section (the file, or all ``--set``): fixed keys, flat hyperparameters, [objective.NAME]."""

    fixed: dict[str, Any] = field(default_factory=dict)
    flat: dict[str, Any] = field(default_factory=dict)
    named: dict[str, dict[str, Any]] = field(default_factory=dict)


def resolve_objective(
    file: Mapping[str, Any], sets: Mapping[str, Any], *, stored: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """The effective section, hyperparameters flat and complete, and notices of what was left out.

    Args:
        file: the section as the file has it.
        sets: the section as the command line has it, which wins.
        stored: the file is that of a run; a recipe of the user's own is complete in it and taken as it is.

    Raises:
        UsageError: an unknown recipe, method, option or value; the sentence names the key and the nearest known one.
    """
    if stored and not sets and is_own(file.get("recipe")):
        methods = resolve_methods("objective", file, {}, stored=True)
        return {**file, **methods.values}, methods.notices
    known = _known_recipes(file, sets)
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
    build_objective(recipe, hyperparameters)
    notices += _without_effect(recipe, written_recipe, [written, given])
    methods = resolve_methods("objective", written.fixed, given.fixed, stored=stored)
    present = {key: value for key, value in hyperparameters.items() if value is not None}  # TOML has no null
    return {**fixed, **methods.values, **present}, notices + methods.notices


def _known_recipes(*sections: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Hyperparameters with defaults of the built-in recipes and of those of the user's own that ``sections`` name."""
    from estr.objectives import find_recipe, recipes  # torch is loaded only when a configuration is read

    known = {name: dict(recipe.hyperparameters) for name, recipe in recipes().items()}
    for section in sections:
        for key, name in [("recipe", str(section.get("recipe"))), *((name, name) for name in section)]:
            if is_own(name) and name not in known:
                try:
                    known[name] = dict(find_recipe(name).hyperparameters)
                except ValueError as error:
                    raise UsageError(f"objective.{key}: {error}") from error
                for taken in sorted(_FIXED & known[name].keys()):
                    raise UsageError(
                        f"objective.{key}: {name!r} has a hyperparameter {taken!r}, which is a key of [objective] "
                        "already; give it another name"
                    )
    return known


def _table_of(key: str, known: Mapping[str, Any]) -> str | None:
    """The recipe whose hyperparameters stand in [objective.``key``]: that name, or the end of one of the user's own."""
    if key in known:
        return key
    return next((name for name in known if is_own(name) and name.partition(":")[2] == key), None)


def _split(section: Mapping[str, Any], known: Mapping[str, Any]) -> _Part:
    part = _Part()
    for key, value in section.items():
        if key in _FIXED:
            part.fixed[key] = value
        elif not isinstance(value, dict):
            part.flat[key] = value
        elif (recipe := _table_of(key, known)) is not None:
            part.named[recipe] = value
        else:
            hint = nearest(key, [*known, *(name for name in _FIXED if name.endswith("_options"))])
            raise UsageError(f"objective.{plain(key)} is a table, but there is no recipe of that name{hint}")
    return part


def _merge_file(recipe: str, part: _Part) -> dict[str, Any]:
    named = part.named.get(recipe, {})
    for key in sorted(part.flat.keys() & named.keys()):
        raise UsageError(f"objective.{key} and objective.{recipe}.{key} are the same setting; keep one of them")
    return {**part.flat, **named}


def _check_recipe(recipe: Any, known: Mapping[str, Any]) -> None:
    if not isinstance(recipe, str) or recipe not in known:
        if str(recipe).lower().replace("-", "_") in _PPO:
            raise UsageError(f"objective.recipe: there is no recipe {recipe!r}; PPO's clip on π/μ is 'grpo'")
        raise UsageError(f"objective.recipe: there is no recipe {shown(recipe)}{nearest(str(recipe), known)}")


def _check_names(recipe: str, values: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> None:
    for key in values:
        if key not in known[recipe]:
            hint = nearest_key("objective", key, known[recipe])
            raise UsageError(f"objective.{plain(key)}: the recipe {recipe!r} has no such hyperparameter{hint}")


def _left_out(old: Any, new: str, written: _Part) -> list[str]:
    names = [*written.flat, *(f"{old}.{key}" for key in written.named.get(old, {}))]
    if not names:
        return []
    return [f"objective.recipe is now {new}: the file's {', '.join(names)} of {old} left out"]


def _without_effect(recipe: str, written: Any, parts: list[_Part]) -> list[str]:
    """Tables of recipes that are not trained; those of the file's own recipe are told by `_left_out`."""
    named = [(name, values) for part in parts for name, values in part.named.items()]
    return [
        f"[objective.{name}] ({', '.join(values)}) has no effect: objective.recipe is {recipe}"
        for name, values in named
        if values and name not in (recipe, written)
    ]


def build_objective(recipe: str, hyperparameters: Mapping[str, Any]) -> Objective:
    """The objective; UsageError, starting with the key, where a value is refused or a recipe of one's own fails."""
    from estr.objectives import objective

    try:
        return objective(recipe, **hyperparameters)
    except (ValueError, TypeError) as error:
        name = recipe.partition(":")[2] or recipe
        sentence = str(error)
        key = sentence.removeprefix(f"{name}.") if sentence.startswith(f"{name}.") else f"recipe: {sentence}"
        raise UsageError(f"objective.{key}") from error
    except Exception as error:
        if not is_own(recipe):
            raise
        raise UsageError(f"objective.recipe: {recipe!r} raised {type(error).__name__}: {error}") from error
