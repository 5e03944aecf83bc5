"""Advantages: rewards of a batch and group ids in, one advantage per trajectory (or token) out.

``advantage(name, **options)`` gives an estimator, ``reweighting(name, **options)`` a rule that changes the advantages
of single tokens; ``advantages()`` and ``reweightings()`` list them with formula, source and confidence.
"""

from __future__ import annotations

from typing import Any

from estr.advantages import group as _group
from estr.advantages import gtpo as _gtpo
from estr.advantages import maxrl as _maxrl
from estr.advantages import opob as _opob
from estr.advantages import papo as _papo
from estr.advantages import stare as _stare
from estr.advantages import whitened as _whitened
from estr.advantages.base import AdvantageEstimator, estimators
from estr.advantages.papo import entropy_response, polarity_correction
from estr.advantages.returns import discounted_returns, place_at_end
from estr.advantages.reweighting import Reweighting, rules
from estr.registry import Method

__all__ = [
    "AdvantageEstimator",
    "Method",
    "Reweighting",
    "advantage",
    "advantages",
    "discounted_returns",
    "entropy_response",
    "place_at_end",
    "polarity_correction",
    "reweighting",
    "reweightings",
]

_REGISTERED = (_group, _whitened, _maxrl, _opob, _stare, _papo, _gtpo)


def advantage(name: str, **options: Any) -> AdvantageEstimator:
    """The estimator ``name`` with ``options``; call it with (reward [S], group [S]) for advantages [S].

    Raises ``ValueError`` naming the nearest known one where the name or an option is unknown.
    """
    return estimators.make(name, options)


def advantages() -> dict[str, Method]:
    """All advantage estimators by name: description, formula, source, confidence, hyperparameters with defaults."""
    return estimators.table()


def reweighting(name: str, **options: Any) -> Reweighting:
    """The token re-weighting ``name`` with ``options``. Raises ``ValueError`` as ``advantage`` does."""
    return rules.make(name, options)


def reweightings() -> dict[str, Method]:
    """All token re-weightings by name, as ``advantages``."""
    return rules.table()
