"""Controllers: rules on the optimizer step, and entropy regularizers with a controlled coefficient, by name.

``controller(name, **options)`` gives a step controller (learning rate, gradient), ``regularizer(name, **options)`` an
entropy regularizer; ``controllers()`` and ``regularizers()`` list them. ``fit_entropy_law`` fits R = b - a e^H.
"""

from __future__ import annotations

from typing import Any

from estr.controllers import aer as _aer
from estr.controllers import clipping as _clipping
from estr.controllers import gac as _gac
from estr.controllers import tecrl as _tecrl
from estr.controllers.base import StepController, global_norm
from estr.controllers.base import steps as _steps
from estr.controllers.entropy_law import EntropyLaw, fit_entropy_law
from estr.controllers.regularizer import EntropyRegularizer, entropy_term
from estr.controllers.regularizer import regularizers as _regularizers
from estr.controllers.tecrl import entropy_budget
from estr.controllers.vcpo import effective_sample_size, sequence_log_weight
from estr.registry import Method

__all__ = [
    "EntropyLaw",
    "EntropyRegularizer",
    "Method",
    "StepController",
    "controller",
    "controllers",
    "effective_sample_size",
    "entropy_budget",
    "entropy_term",
    "fit_entropy_law",
    "global_norm",
    "regularizer",
    "regularizers",
    "sequence_log_weight",
]

_REGISTERED = (_aer, _clipping, _gac, _tecrl)


def controller(name: str, **options: Any) -> StepController:
    """The step controller ``name``. Raises ``ValueError`` naming the nearest known one for unknown names or options."""
    return _steps.make(name, options)


def controllers() -> dict[str, Method]:
    """All step controllers by name: description, formula, source, confidence, hyperparameters with defaults."""
    return _steps.table()


def regularizer(name: str, **options: Any) -> EntropyRegularizer:
    """The entropy regularizer ``name``. Raises ``ValueError`` as ``controller`` does."""
    return _regularizers.make(name, options)


def regularizers() -> dict[str, Method]:
    """All entropy regularizers by name, as ``controllers``."""
    return _regularizers.table()
