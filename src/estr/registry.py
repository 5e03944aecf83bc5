"""A table of methods of one kind: each a small dataclass, found by name, with its source and how sure we are of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from estr.errors import nearest, shown
from estr.own_code import file_of, import_own, is_own

T = TypeVar("T")
C = TypeVar("C", bound=type[Any])


@dataclass(frozen=True)
class Method:
    """One line of a table: what a method is, where it comes from and what it can be told.

    Its place is edge × operator × scope: the ratios it reads ("B" = q/μ, "U" = π/q, "E" = π/μ, none: ""), what it acts
    on (advantage, reward, gradient, …) and over what it decides (token, sequence, group, batch, step).
    """

    name: str
    description: str
    formula: str
    source: str
    confidence: str
    hyperparameters: dict[str, Any]
    build: type[Any]
    edge: str
    operator: str
    scope: str


class Registry(Generic[T]):
    """Methods of one kind by name; ``kind`` is the word that error messages use, ``operator`` what they act on."""

    def __init__(self, kind: str, operator: str) -> None:
        self.kind, self.operator = kind, operator
        self._methods: dict[str, Method] = {}

    def register(
        self,
        name: str,
        *,
        description: str,
        formula: str,
        source: str,
        confidence: str,
        scope: str,
        edge: str = "",
        operator: str | None = None,
    ) -> Callable[[C], C]:
        """Enter a class under ``name``; its constructor's keywords with their defaults are its hyperparameters."""
        place = {"edge": edge, "operator": operator or self.operator, "scope": scope}

        def enter(build: C) -> C:
            texts = (name, description, formula, source, confidence)
            self._methods[name] = Method(*texts, hyperparameters=_defaults(build), build=build, **place)
            return build

        return enter

    def table(self) -> dict[str, Method]:
        """All methods of this kind by name."""
        return dict(self._methods)

    def find(self, name: str) -> Method:
        """The method ``name``, or that of your own which ``module:name`` registers.

        Raises ``ValueError``, naming the nearest known one, where there is none.
        """
        if is_own(name):
            module, short = import_own(name)
            if short not in self._methods:
                raise ValueError(
                    f"module {module.__name__!r} ({file_of(module)}) registers no {self.kind} {short!r}"
                    f"{nearest(short, self._methods)}"
                )
            return self._methods[short]
        if not isinstance(name, str) or name not in self._methods:
            raise ValueError(f"unknown {self.kind} {name!r}{nearest(name, self._methods)}")
        return self._methods[name]

    def make(self, name: str, options: dict[str, Any]) -> T:
        """The method ``name`` with ``options`` in place of its defaults.

        Raises ``ValueError``, naming the nearest known one, for an unknown name or option, and for a value that the
        method refuses.
        """
        method = self.find(name)
        for option in options:
            if option not in method.hyperparameters:
                raise ValueError(
                    f"{self.kind} {name!r} has no option {option!r}{nearest(option, method.hyperparameters)}"
                )
            _check_type(option, options[option], method.hyperparameters[option])
        instance: T = method.build(**options)
        return instance


def _defaults(build: type[Any]) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(build).parameters.items()}


def _check_type(option: str, value: Any, default: Any) -> None:
    """Refuse a value of another kind than the default's; None stands for an optional number."""
    if isinstance(default, bool):
        right, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, str):
        right, wanted = isinstance(value, str), "text"
    elif isinstance(default, int):
        right, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool) and _finite(value)
        right, wanted = number or (default is None and value is None), "a finite number"
    if not right:
        raise ValueError(f"{option} must be {wanted}, not {shown(value)}")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def choose(option: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{option} must be one of {', '.join(map(repr, allowed))}, not {shown(value)}")


def within(option: str, value: Any, low: float, high: float = float("inf"), *, open_low: bool = False) -> None:
    """Raise ``ValueError`` unless ``value`` is a number in [low, high] (in (low, high] with ``open_low``)."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (low < value <= high if open_low else low <= value <= high):
        bracket = "(" if open_low else "["
        raise ValueError(f"{option} must be a number in {bracket}{low:g}, {high:g}], not {shown(value)}")
