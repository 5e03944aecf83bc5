"""Hyperparameters of recipes: a default, the values allowed, and an error that says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from types import SimpleNamespace
from typing import Any

from estr.errors import nearest, shown


@dataclass(frozen=True)
class Parameter:
    """One hyperparameter: ``default`` and what ``check`` accepts; ``allowed`` says it in words."""

    default: Any
    allowed: str

    def check(self, value: Any) -> Any:
        """The value as the recipe uses it; raises ValueError with the reason where it is refused."""
        return value


@dataclass(frozen=True)
class Number(Parameter):
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False  # the lower end itself is refused
    optional: bool = False  # None is allowed
    integer: bool = False
    finite: bool = False  # infinity is refused

    def check(self, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"must be {self.allowed}, got {shown(value)}")
        try:
            number = float(value)
        except OverflowError:  # a whole number beyond every float
            raise ValueError(f"must be {self.allowed}, got {shown(value)}") from None
        above = number > self.low if self.open_low else number >= self.low
        shaped = (math.isfinite(number) or not self.finite) and (not self.integer or number.is_integer())
        if math.isnan(number) or not above or number > self.high or not shaped:
            raise ValueError(f"must be {self.allowed}, got {shown(value)}")
        return int(number) if self.integer else number


@dataclass(frozen=True)
class Choice(Parameter):
    values: tuple[str, ...] = ()

    def check(self, value: Any) -> str:
        if value not in self.values:
            raise ValueError(f"must be {self.allowed}, got {shown(value)}")
        return str(value)


@dataclass(frozen=True)
class Flag(Parameter):
    def check(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"must be {self.allowed}, got {shown(value)}")
        return value


def number(
    default: float | None,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    optional: bool = False,
    finite: bool = False,
) -> Parameter:
    """A number in [low, high], or (low, high] where ``open_low``; None is allowed where it is the default.

    ``finite`` refuses infinity, where it would not switch something off but make the loss infinite.
    """
    bounds = []
    if low > -math.inf:
        bounds.append(f"above {low:g}" if open_low else f"at least {low:g}")
    if high < math.inf:
        bounds.append(f"at most {high:g}")
    words = ("a finite number" if finite else "a number") + (" " + " and ".join(bounds) if bounds else "")
    optional = optional or default is None
    return Number(default, words + (" or None" if optional else ""), low, high, open_low, optional, finite=finite)


def bound(default: float | None, low: float = 0.0) -> Parameter:
    """A bound that None (or infinity) switches off."""
    return Number(default, f"a number at least {low:g} or None", low, optional=True)


def integer(default: int, low: int) -> Parameter:
    """A whole number of at least ``low``."""
    return Number(default, f"a whole number of at least {low}", low, integer=True)


def choice(default: str, *others: str) -> Parameter:
    """One of a few words."""
    values = (default, *others)
    return Choice(default, "one of " + ", ".join(map(repr, values)), values)


def flag(default: bool) -> Parameter:
    """True or False."""
    return Flag(default, "true or false")


def resolve(recipe: str, parameters: Mapping[str, Parameter], given: Mapping[str, Any]) -> SimpleNamespace:
    """Defaults with ``given`` on top, every value checked."""
    for name in given:
        if name not in parameters:
            raise ValueError(f"recipe {recipe!r} has no hyperparameter {name!r}{nearest(name, parameters)}")
    values = {}
    for name, parameter in parameters.items():
        try:
            values[name] = parameter.check(given.get(name, parameter.default))
        except ValueError as error:
            raise ValueError(f"{recipe}.{name} {error}") from None
    return SimpleNamespace(**values)
