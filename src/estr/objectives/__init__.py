"""Policy-gradient objectives for asynchronous reinforcement learning: ``objective(name, ...)`` and ``recipes()``."""

from __future__ import annotations

from estr.objectives import gates, surrogates, weights
from estr.objectives.composition import Composition, Gate, Recipe, Surrogate, Weight
from estr.objectives.context import Context
from estr.objectives.kl import kl_penalty, reference_kl
from estr.objectives.metrics import merge_metrics
from estr.objectives.objective import Objective, Output, Statistics, find_recipe, objective, recipes, register

__all__ = [
    "Composition",
    "Context",
    "Gate",
    "Objective",
    "Output",
    "Recipe",
    "Statistics",
    "Surrogate",
    "Weight",
    "find_recipe",
    "gates",
    "kl_penalty",
    "merge_metrics",
    "objective",
    "recipes",
    "reference_kl",
    "register",
    "surrogates",
    "weights",
]
