"""Keys that name a method of a family (advantage, re-weighting, controllers, …) and the tables with its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from estr.errors import UsageError, nearest, plain, shown
from estr.own_code import is_own
from estr.registry import Method, Registry

NONE = "none"
_EMPTY: dict[str, Any] = {}


@dataclass(frozen=True)
class Family:
    """``section.key`` names one method (or, with ``several``, a list of them applied in order).

    Its options stand in ``section.key_options``, or with ``several`` in ``section.key_options.NAME``. A key that may be
    "none" has ``optional``.
    """

    section: str
    key: str
    registry: Registry[Any]
    several: bool = False
    optional: bool = True
    default: str = NONE

    @property
    def kind(self) -> str:
        """The word errors use."""
        return self.registry.kind

    def table(self) -> dict[str, Method]:
        """The methods that are built in, or registered so far."""
        return self.registry.table()

    @property
    def options(self) -> str:
        """Key of the table of options."""
        singular = self.key.removesuffix("s") if self.several else self.key
        return f"{singular}_options"

    @property
    def path(self) -> str:
        return f"{self.section}.{self.key}"


def families() -> tuple[Family, ...]:
    """All families that a configuration can choose from, beside the recipes."""
    from estr.advantages.base import estimators  # torch is loaded only when a configuration is read
    from estr.advantages.reweighting import rules
    from estr.controllers.base import steps
    from estr.controllers.regularizer import regularizers
    from estr.shaping.base import shapings
    from estr.shaping.selection import selections

    return (
        Family("objective", "advantage", estimators, optional=False, default="grpo"),
        Family("objective", "reweighting", rules),
        Family("objective", "regularizer", regularizers),
        Family("objective", "shaping", shapings, several=True),
        Family("objective", "selection", selections),
        Family("learner", "controllers", steps, several=True),
    )


@dataclass
class Resolved:
    """A section with its methods' options complete, and sentences about what was left out."""

    values: dict[str, Any]
    notices: list[str] = field(default_factory=list)


def resolve_methods(
    section: str, file: Mapping[str, Any], sets: Mapping[str, Any], *, stored: bool = False
) -> Resolved:
    """The keys of ``section`` that belong to families, from the file and, winning over it, from ``--set``.

    ``stored``: the file is that of a run; options of the user's own methods are complete in it and taken as they are.

    Raises:
        UsageError: an unknown method, option or value; the sentence starts with the key and names the nearest.
    """
    resolved = Resolved({})
    for family in families():
        if family.section != section:
            continue
        if stored and _untouched(family, file, sets):
            resolved.values |= {key: file[key] for key in (family.key, family.options) if key in file}
        else:
            (_resolve_several if family.several else _resolve_one)(family, file, sets, resolved)
    return resolved


def _untouched(family: Family, file: Mapping[str, Any], sets: Mapping[str, Any]) -> bool:
    """Whether the file names a method of the user's own and ``--set`` leaves it and its options alone."""
    names = file.get(family.key, family.default)
    own = any(map(is_own, names if isinstance(names, list) else [names]))
    return own and family.key not in sets and family.options not in sets


def _resolve_one(family: Family, file: Mapping[str, Any], sets: Mapping[str, Any], resolved: Resolved) -> None:
    written = file.get(family.key, family.default)
    name = sets.get(family.key, written)
    tables = [source.get(family.options, _EMPTY) for source in (file, sets)]
    resolved.values[family.key], resolved.values[family.options] = name, tables[1] or tables[0]
    if not isinstance(name, str) or not all(isinstance(table, dict) for table in tables):
        return  # said when the section's types are checked
    _check_known(family, name)
    given = dict(tables[0])
    if name != written and given:
        resolved.notices.append(f"{family.path} is now {name}: the file's {', '.join(given)} of {written} left out")
        given = {}
    resolved.values[family.options] = _complete(
        family, name, {**given, **tables[1]}, f"{family.section}.{family.options}"
    )


def _resolve_several(family: Family, file: Mapping[str, Any], sets: Mapping[str, Any], resolved: Resolved) -> None:
    names = sets.get(family.key, file.get(family.key, []))
    names = [names] if isinstance(names, str) else names
    tables = [source.get(family.options, _EMPTY) for source in (file, sets)]
    resolved.values[family.key], resolved.values[family.options] = names, tables[1] or tables[0]
    inner = [options for table in tables if isinstance(table, dict) for options in table.values()]
    if not _texts(names) or not all(isinstance(table, dict) for table in [*tables, *inner]):
        return  # said when the section's types are checked
    if len(set(names)) < len(names):
        raise UsageError(f"{family.path} names a {family.kind} twice; each keeps its own state and options once")
    given = {name: {**tables[0].get(name, {}), **tables[1].get(name, {})} for name in (*tables[0], *tables[1])}
    for name in names:
        _check_known(family, name)
    complete = {}
    for name in dict.fromkeys([*names, *given]):
        path = f"{family.section}.{family.options}.{name}"
        _find(family, name, path)
        options = _complete(family, name, given.get(name, {}), path)
        if name in names:
            complete[name] = options
        else:
            resolved.notices.append(f"{path} has no effect: {family.path} does not name {name}")
    resolved.values[family.options] = complete


def _texts(names: Any) -> bool:
    return isinstance(names, Sequence) and all(isinstance(name, str) for name in names)


def _check_known(family: Family, name: str) -> None:
    if name == NONE and family.optional and not family.several:
        return
    _find(family, name, family.path)


def _find(family: Family, name: str, path: str) -> Method:
    """The method ``name``; the error for one that is not there starts with ``path``."""
    known = family.table()
    if name not in known and not is_own(name):
        names = [*known, NONE] if family.optional and not family.several else known
        raise UsageError(f"{path}: there is no {family.kind} {shown(name)}{nearest(name, names)}")
    try:
        return family.registry.find(name)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def _complete(family: Family, name: str, given: Mapping[str, Any], path: str) -> dict[str, Any]:
    """``given`` over the defaults of ``name``, without those that are None, which TOML cannot say."""
    if name == NONE:
        for option in given:
            raise UsageError(f"{path}.{plain(option)} has nothing to act on: {family.path} is {NONE!r}")
        return {}
    defaults = _find(family, name, family.path).hyperparameters
    for option in given:
        if option not in defaults:
            hint = nearest(option, defaults)
            raise UsageError(f"{path}.{plain(option)}: the {family.kind} {name!r} has no such option{hint}")
    try:
        family.registry.make(name, dict(given))
    except (ValueError, TypeError) as error:
        first = str(error).partition(" ")[0]
        raise UsageError(f"{path}.{error}" if first in defaults else f"{family.path}: {name}: {error}") from error
    return {option: value for option, value in {**defaults, **given}.items() if value is not None}
