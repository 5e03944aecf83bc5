"""estr: asynchronous reinforcement learning for language models, with entropy-scaled trust regions.

Attributes are loaded on first use, so that ``import estr`` alone imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from estr.advantages import advantage as advantage
    from estr.batch import TokenBatch as TokenBatch
    from estr.objectives import objective as objective
    from estr.objectives import recipes as recipes

__version__ = "0.1.0"

_HOME = {
    "TokenBatch": "estr.batch",
    "objective": "estr.objectives",
    "recipes": "estr.objectives",
    "advantage": "estr.advantages",
}

__all__ = ["TokenBatch", "advantage", "objective", "recipes"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'estr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
