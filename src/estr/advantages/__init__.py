"""Advantage estimators by name: rewards of a batch and group ids in, one advantage per trajectory out."""

from __future__ import annotations

from typing import Any

from estr.advantages import group as _group
from estr.advantages import whitened as _whitened
from estr.advantages.base import AdvantageEstimator, estimators
from estr.advantages.returns import discounted_returns, place_at_end
from estr.registry import Method

__all__ = ["AdvantageEstimator", "Method", "advantage", "advantages", "discounted_returns", "place_at_end"]

_REGISTERED = (_group, _whitened)


def advantage(name: str, **options: Any) -> AdvantageEstimator:
    """The estimator ``name`` with ``options``; call it with (reward [S], group [S]) for advantages [S].

    Raises ``ValueError`` naming the nearest known one where the name or an option is unknown.
    """
    return estimators.make(name, options)


def advantages() -> dict[str, Method]:
    """All advantage estimators by name: description, formula, source, confidence, hyperparameters with defaults."""
    return estimators.table()
