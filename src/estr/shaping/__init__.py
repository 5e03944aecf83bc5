"""Reward shaping and selection of trajectories, by name.

``shaping(name, **options).shape(reward, **fields)`` changes rewards before advantages are estimated;
``selection(name, **options)`` gives a rule that decides which trajectories train.
"""

from __future__ import annotations

from typing import Any

from estr.registry import Method
from estr.shaping import err as _err
from estr.shaping import overlong as _overlong
from estr.shaping.base import RewardShaping
from estr.shaping.base import shapings as _shapings
from estr.shaping.selection import ArbitraryEntropy, DynamicSampling, Replacement
from estr.shaping.selection import selections as _selections

__all__ = [
    "ArbitraryEntropy",
    "DynamicSampling",
    "Method",
    "Replacement",
    "RewardShaping",
    "selection",
    "selections",
    "shaping",
    "shapings",
]

_REGISTERED = (_err, _overlong)


def shaping(name: str, **options: Any) -> RewardShaping:
    """The reward shaping ``name``. Raises ``ValueError`` naming the nearest known one for unknown names or options."""
    return _shapings.make(name, options)


def shapings() -> dict[str, Method]:
    """All reward shapings by name: description, formula, source, confidence, hyperparameters with defaults."""
    return _shapings.table()


def selection(name: str, **options: Any) -> DynamicSampling | ArbitraryEntropy:
    """The selection rule ``name``. Raises ``ValueError`` as ``shaping`` does."""
    return _selections.make(name, options)


def selections() -> dict[str, Method]:
    """All selection rules by name, as ``shapings``."""
    return _selections.table()
