"""From a TOML file and ``--set`` arguments to a resolved configuration, and back to TOML."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from estr.config.methods import resolve_methods
from estr.config.names import nearest_key, other_name
from estr.config.objective_section import resolve_objective
from estr.config.own import settle_modules
from estr.config.sections import Config, Section, bounds_in_words
from estr.config.toml import line_of, parse_set, read_toml
from estr.config.toml import shown as argument_shown
from estr.errors import UsageError, nearest, plain, shown

SECTIONS: dict[str, type[Section]] = {name: field.annotation for name, field in Config.model_fields.items()}  # type: ignore[misc]
_RESOLVED = "# The whole resolved configuration of a run, written by estr.\n"
_LEADING_KEY = re.compile(r"[\w.-]*[\w-]")
_SCHEDULE_KEYS = {"sync": (), "async": ("max_staleness",), "lockstep": ("inter", "intra", "intra_every")}


class LoadedConfig(NamedTuple):
    """A resolved configuration, and sentences about what was left out or has no effect."""

    config: Config
    notices: list[str]


def load_config(path: str | os.PathLike[str] | None, sets: Sequence[str] = (), *, stored: bool = False) -> LoadedConfig:
    """Read ``path`` (None: defaults only), apply ``sets`` in order, check every key and value.

    ``[objective]`` comes out with the effective hyperparameters of its recipe, complete and flat. With ``stored`` the
    file is that of a run: modules of the user's own are not looked for in its directory, and methods of theirs that
    the file names are taken with the options it has, without importing them.

    Raises:
        UsageError: the file, line or ``--set`` and the key are named, with the nearest valid name.
    """
    file, text = read_toml(path) if path is not None else ({}, "")
    source = _Source(os.fspath(path) if path is not None else "", text, file, _collect(sets))
    _check_sections(file, source)
    merged = {name: _merge(file.get(name, {}), source.sets.get(name, {})) for name in SECTIONS}
    home = Path(path).parent if path is not None else None
    merged["run"] = settle_modules(merged["run"], (file, source.sets), home, home if stored else None)
    try:
        merged["objective"], notices = resolve_objective(*source.section("objective"), stored=stored)
        methods = resolve_methods("learner", *source.section("learner"), stored=stored)
        merged["learner"] |= methods.values
        notices += methods.notices
    except UsageError as error:
        raise UsageError(source.locate(str(error))) from error
    try:
        config = Config.model_validate(merged, strict=True)
    except ValidationError as error:
        raise UsageError(_sentence(error, source)) from None
    given = source.sets.get("schedule", {}) if text.startswith(_RESOLVED) else merged["schedule"]
    return LoadedConfig(config, notices + unused_schedule_keys(config.schedule.mode, given))


def dump_config(config: Config) -> str:
    """The whole configuration as TOML; ``load_config`` reads an equal one back.

    Raises:
        UsageError: a value that TOML cannot hold.
    """
    values = config.model_dump()
    try:
        text = tomli_w.dumps(values)
        text.encode("utf-8")
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"the configuration holds a value that TOML cannot: {error}") from error
    return _RESOLVED + text


def unused_schedule_keys(mode: str, given: Mapping[str, Any]) -> list[str]:
    """One line that names the schedule keys that were given and that ``mode`` does not use, or nothing."""
    specific = {key for keys in _SCHEDULE_KEYS.values() for key in keys}
    unused = [key for key in given if key in specific and key not in _SCHEDULE_KEYS[mode]]
    return [f"schedule.mode is {mode}: {', '.join(sorted(unused))} not used"] if unused else []


class _Source:
    """Where values came from, to say so in errors."""

    def __init__(self, name: str, text: str, file: dict[str, Any], sets: dict[str, Any]) -> None:
        self.name = name
        self.text = text
        self.file = file
        self.sets = sets

    def section(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What file and ``--set`` have of a section."""
        return self.file.get(name, {}), self.sets.get(name, {})

    def where(self, *candidates: tuple[str, ...]) -> str:
        """The place of the first of these keys that was given: ``"file.toml, line 3: "``, ``"--set "`` or nothing."""
        if any(_has(self.sets, keys) for keys in candidates):
            return "--set "
        lines = (line_of(self.text, keys) for keys in candidates)
        line = next((number for number in lines if number is not None), None)
        if line is not None:
            return f"{self.name}, line {line}: "
        return f"{self.name}: " if self.name else ""

    def locate(self, sentence: str) -> str:
        """``sentence``, which starts with a key, with the place of that key."""
        path = tuple(_LEADING_KEY.match(sentence)[0].split("."))  # type: ignore[index]
        tables = [*_tables(self.file.get(path[0])), *_tables(self.sets.get(path[0]))]
        return self.where(path, *((path[0], table, path[-1]) for table in tables)) + sentence


def _has(values: Any, keys: tuple[str, ...]) -> bool:
    for key in keys:
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True


def _tables(section: Any) -> list[str]:
    return [key for key, value in section.items() if isinstance(value, dict)] if isinstance(section, dict) else []


def _collect(sets: Sequence[str]) -> dict[str, Any]:
    collected: dict[str, Any] = {}
    for argument in sets:
        keys, value = parse_set(argument)
        section = SECTIONS.get(keys[0])
        if section is None:
            raise UsageError(f"--set {argument_shown(argument)}: {_no_section(keys[0])}")
        known = section.model_fields.get(keys[1])
        if known is not None and known.annotation is str:
            keys, value = parse_set(argument, text_key=True)
        _place(collected, keys, value, argument)
    return collected


def _place(target: dict[str, Any], keys: tuple[str, ...], value: Any, argument: str) -> None:
    for key in keys[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise UsageError(f"--set {argument_shown(argument)}: {key} is a value already, not a table")
    target[keys[-1]] = value


def _merge(file: Any, sets: Any) -> Any:
    """``sets`` over ``file``, table by table."""
    if not isinstance(file, dict) or not isinstance(sets, dict):
        return sets
    merged = dict(file)
    for key, value in sets.items():
        merged[key] = _merge(file[key], value) if isinstance(file.get(key), dict) else value
    return merged


def _check_sections(file: dict[str, Any], source: _Source) -> None:
    for name, section in file.items():
        if name not in SECTIONS:
            kind = "section" if isinstance(section, dict) else "key outside the sections"
            raise UsageError(source.where((name,)) + _no_section(name, kind))
        if not isinstance(section, dict):
            raise UsageError(f"{source.where((name,))}{name} must be a section: write [{name}] on a line of its own")


def _sentence(error: ValidationError, source: _Source) -> str:
    problems = error.errors(include_url=False)
    first = problems[0]
    keys = tuple(str(part) for part in first["loc"])
    named = keys[:2] if len(keys) > 1 else keys
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{source.where(named)}{'.'.join(map(plain, keys))} {_what(first, keys)}{more}"


def _what(problem: ErrorDetails, keys: tuple[str, ...]) -> str:
    kind, context, value = problem["type"], problem.get("ctx", {}), problem["input"]
    if kind == "extra_forbidden":
        return f"is not a known key{nearest_key(keys[0], keys[-1])}"
    if kind == "literal_error":
        hint = nearest(value, _choices(context)) if isinstance(value, str) else ""
        allowed = "" if hint.startswith("; known") else hint
        return f"must be {context['expected']}, got {_show(value)}{allowed}"
    wanted = _WANTED.get(kind)
    if kind in _BEYOND:
        wanted = bounds_in_words(SECTIONS[keys[0]].model_fields[keys[1]])
    if wanted is None:
        return f"is not valid: {problem['msg']}, got {_show(value)}"
    return f"must be {wanted}, got {_show(value)}"


_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "list_type": "a list in brackets",
    "dict_type": "a table",
    "model_type": "a section",
}
_BEYOND = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}


def _no_section(name: str, kind: str = "section") -> str:
    hint = other_name(name) if kind != "section" else None
    return f"there is no {kind} {shown(name)}{f'; did you mean {hint}?' if hint else nearest(name, SECTIONS)}"


def _choices(context: Mapping[str, Any]) -> list[str]:
    return [part for part in str(context.get("expected", "")).split("'") if part.strip(" ,or")]


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else shown(value)
