"""The differentiable part of an objective: one loss per token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from estr.objectives.composition import Surrogate
from estr.objectives.context import Context

Bound = float | Tensor


def clipped_loss(context: Context, ratio: Tensor, lower: Bound, upper: Bound, dual_clip: float | None = None) -> Tensor:
    """PPO's -min(r A, clip(r, lower, upper) A) [N] (Schulman et al. 2017, 1707.06347, eq. 7).

    A positive advantage bounds r from above, a negative one from below. ``dual_clip`` c bounds the loss of a negative
    advantage by -c A (Ye et al. 2020, 1912.09729). Bounds are numbers or [N].
    """
    A = context.advantage
    free, cap = A.new_tensor(-math.inf), A.new_tensor(math.inf if dual_clip is None else dual_clip)
    low = torch.where(A < 0, torch.as_tensor(lower, dtype=A.dtype, device=A.device), free)
    high = torch.where(A > 0, torch.as_tensor(upper, dtype=A.dtype, device=A.device), cap)
    bounded = torch.minimum(torch.maximum(ratio, low), high)
    value = ratio.detach()
    context.note_clipped(((value < low) | (value > high)) & (A != 0))
    return -bounded * A


def ppo(edge: str, clip_low: float, clip_high: float, dual_clip: float | None = None) -> Surrogate:
    """PPO's clipped surrogate on the token ratio of ``edge``, bounds 1 - clip_low and 1 + clip_high."""

    def apply(context: Context) -> Tensor:
        return clipped_loss(context, context.ratio(edge), 1 - clip_low, 1 + clip_high, dual_clip)

    return Surrogate("PPO clip", edge, "token", apply)


def policy_gradient() -> Surrogate:
    """-A log π: the score-function surrogate; a ratio, if any, comes in as a detached weight."""
    return Surrogate("policy gradient", "", "token", lambda context: -context.advantage * context.log_pi)
