"""Hyperparameters that many recipes share."""

from __future__ import annotations

from estr.objectives.hyperparameters import Parameter, bound, number


def clip(low: float = 0.2, high: float = 0.2) -> dict[str, Parameter]:
    """PPO's clip, as distances from 1."""
    return {"clip_low": number(low, 0), "clip_high": number(high, 0)}


def dual_clip(value: float | None) -> dict[str, Parameter]:
    """Dual clip c: the loss of a negative advantage never exceeds -c A; None switches it off."""
    return {"dual_clip": bound(value, 1)}
