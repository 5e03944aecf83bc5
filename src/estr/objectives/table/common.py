"""Hyperparameters and compositions that many recipes share."""

from __future__ import annotations

from types import SimpleNamespace

from estr.objectives import surrogates
from estr.objectives.composition import Surrogate
from estr.objectives.hyperparameters import Parameter, bound, choice, number


def clip(low: float = 0.2, high: float = 0.2) -> dict[str, Parameter]:
    """PPO's clip, as distances from 1."""
    return {"clip_low": number(low, 0), "clip_high": number(high, 0)}


def dual_clip(value: float | None) -> dict[str, Parameter]:
    """Dual clip c: the loss of a negative advantage never exceeds -c A; None switches it off."""
    return {"dual_clip": bound(value, 1)}


def anchor(default: str, other: str) -> dict[str, Parameter]:
    """The edge a method with one ratio reads: "U" (against q) or "E" (against μ)."""
    return {"edge": choice(default, other)}


def ppo(edge: str, h: SimpleNamespace) -> Surrogate:
    """PPO's clip with the recipe's own clip_low, clip_high and dual_clip."""
    return surrogates.ppo(edge, h.clip_low, h.clip_high, getattr(h, "dual_clip", None))
