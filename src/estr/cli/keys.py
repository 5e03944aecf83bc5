"""Every key of a configuration with type, default, allowed values and description: ``estr config``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from estr.config.load import SECTIONS
from estr.config.sections import bounds_in_words
from estr.errors import UsageError, nearest

_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "table"}
_MORE = {
    "task": "A task's own options stand beside these keys; `estr tasks` lists them.",
    "objective": "The recipe's hyperparameters stand beside these keys, or in [objective.NAME]; `estr recipes NAME` "
    "lists them.",
}


@dataclass(frozen=True)
class Key:
    """One key; ``default`` is a value of TOML, ``allowed`` says in words what else it may be."""

    name: str
    section: str
    type: str
    default: Any
    allowed: str
    description: str

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"


def keys() -> list[Key]:
    """All keys, section by section in the order of the configuration."""
    names = dict(_method_names())
    found = []
    for section, fields in SECTIONS.items():
        for name, field in fields.model_fields.items():
            allowed = names.get(f"{section}.{name}") or _allowed(field)
            default = field.get_default(call_default_factory=True)
            found.append(Key(name, section, _type(field.annotation), default, allowed, field.description or ""))
    return found


def more_about(section: str) -> str:
    """A sentence on what else stands in a section; empty where nothing does."""
    return _MORE.get(section, "")


def show_keys(wanted: str | None, *, as_json: bool) -> None:
    """Print all keys, those of a section, or one; raises UsageError where there is no such."""
    chosen = _chosen(wanted)
    if as_json:
        print(json.dumps([{"key": key.path, **asdict(key)} for key in chosen]))
        return
    section = ""
    for key in chosen:
        if key.section != section:
            print(f"{'' if not section else chr(10)}[{key.section}]")
            section = key.section
        print(f"{key.name} = {toml_value(key.default)}")
        print(f"    {kind(key)}. {key.description}")
    sections = dict.fromkeys(key.section for key in chosen if wanted != key.path)
    for line in filter(None, map(more_about, sections)):
        print(f"\n{line}")


def kind(key: Key) -> str:
    """Type and allowed values in one phrase."""
    return f"{key.type}: {key.allowed}" if key.allowed and key.type != "text" else key.allowed or key.type


def toml_value(value: Any) -> str:
    """A default as a file would have it."""
    return "{}" if value == {} else json.dumps(value)


def _chosen(wanted: str | None) -> list[Key]:
    found = keys()
    if wanted is None:
        return found
    chosen = [key for key in found if wanted in (key.section, key.path)] or [key for key in found if key.name == wanted]
    if chosen:
        return chosen
    section, _, name = wanted.partition(".")
    if name and section in SECTIONS:
        here = [key.name for key in found if key.section == section]
        raise UsageError(f"there is no key {wanted!r}{nearest(name, here)}. {more_about(section)}".rstrip(" ."))
    known = [*SECTIONS, *(key.path for key in found)]
    hint = nearest(wanted, [*known, *(key.name for key in found)])
    raise UsageError(
        f"there is no section or key {wanted!r}" + (hint if hint.startswith("; did") else nearest("", SECTIONS))
    )


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return "text"
    if origin is list:
        return "list of texts"
    return _WORDS[origin or annotation]


def _allowed(field: FieldInfo) -> str:
    annotation = field.annotation
    choices = annotation if get_origin(annotation) is Literal else next(iter(get_args(annotation)), None)
    if get_origin(choices) is Literal:
        return _either(get_args(choices))
    return bounds_in_words(field)


def _method_names() -> Iterator[tuple[str, str]]:
    """Keys that name a method, and the names there are."""
    from estr.config.methods import NONE, families
    from estr.config.validate import DTYPES
    from estr.environments.registry import tasks

    yield "objective.recipe", "a name that `estr recipes` lists, or module:name of your own"
    tables: dict[str, Iterable[str]] = {"task.name": tasks()}
    for family in families():
        none = [NONE] if family.optional and not family.several else []
        tables[family.path] = [*none, *family.table()]
    for path, names in tables.items():
        yield path, f"{_either(names)}, or module:name of your own"
    yield "rollout.dtype", _either(DTYPES)


def _either(names: Iterable[Any]) -> str:
    return " | ".join(json.dumps(name) for name in names)
