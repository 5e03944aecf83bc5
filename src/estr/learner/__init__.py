"""The learner: packing, scoring, one optimizer step, and the class that strings them together.

Names are loaded on first use, so that ``estr.learner.results`` can be imported without torch's optimizer stack.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from estr.learner.extensions import Extensions as Extensions
    from estr.learner.learner import Learner as Learner
    from estr.learner.packing import MicroBatch as MicroBatch
    from estr.learner.packing import pack as pack
    from estr.learner.packing import unpack as unpack
    from estr.learner.results import StepResult as StepResult
    from estr.learner.results import TrainedTrajectory as TrainedTrajectory
    from estr.learner.schedules import learning_rate as learning_rate
    from estr.learner.scoring import score as score

_HOME = {
    "Extensions": "extensions",
    "Learner": "learner",
    "MicroBatch": "packing",
    "StepResult": "results",
    "TrainedTrajectory": "results",
    "learning_rate": "schedules",
    "pack": "packing",
    "score": "scoring",
    "unpack": "packing",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"estr.learner.{_HOME[name]}"), name)
    raise AttributeError(f"module 'estr.learner' has no attribute {name!r}")
