"""Options of a task: a table that is checked when a task is made and printed by ``estr tasks``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from estr.errors import UsageError, nearest, shown

FIXED = ("name", "path", "tool_timeout")
"""Keys of [task] that are no options, which a misspelt key may be meant for."""


@dataclass(frozen=True)
class Option:
    """One option: ``check`` returns the accepted value or raises ValueError with what is expected."""

    default: Any
    description: str
    check: Callable[[Any], Any]


def resolve(task: str, options: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option with its value. Raises `UsageError` naming an unknown key or a value that is not accepted."""
    for key in given:
        if key not in options:
            raise UsageError(f"task {task!r} has no option {shown(key)}{nearest(key, [*options, *FIXED])}")
    values = {}
    for key, option in options.items():
        try:
            values[key] = option.check(given.get(key, option.default))
        except (ValueError, TypeError) as error:
            raise UsageError(f"task.{key} of task {task!r} must be {error}, not {shown(given[key])}") from None
    return values


def whole(low: int) -> Callable[[Any], int]:
    """A whole number of at least ``low``."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"a whole number of at least {low}")
        return value

    return check


def number(low: float, high: float = math.inf) -> Callable[[Any], float]:
    """A finite number in [low, high]."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"a number in [{low:g}, {high:g}]" if high < math.inf else f"a number of at least {low:g}")
        try:
            accepted = float(value)
        except OverflowError:  # a whole number beyond every float
            accepted = math.inf
        if not math.isfinite(accepted):
            raise ValueError("a finite number")
        return accepted

    return check


def choice(*known: str) -> Callable[[Any], str]:
    """One of the texts ``known``."""

    def check(value: Any) -> str:
        if value not in known:
            raise ValueError(f"one of {', '.join(known)}")
        return str(value)

    return check


def flag(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def subset(*known: int) -> Callable[[Any], tuple[int, ...]]:
    """One of ``known``, or a list of some of them without repeats; sorted."""

    def check(value: Any) -> tuple[int, ...]:
        values = [value] if isinstance(value, int) else list(value) if isinstance(value, list | tuple) else []
        good = all(isinstance(v, int) and not isinstance(v, bool) and v in known for v in values)
        if not values or not good or len(set(values)) != len(values):
            raise ValueError(f"a list of some of {', '.join(map(str, known))}")
        return tuple(sorted(values))

    return check
