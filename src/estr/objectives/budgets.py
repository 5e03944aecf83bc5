"""Second-moment trust regions over the whole batch (M2PO, arXiv 2510.01161)."""

from __future__ import annotations

import torch
from torch import Tensor

from estr.objectives.composition import Gate, Surrogate
from estr.objectives.context import Context
from estr.objectives.surrogates import clipped_loss


def second_moment_clip(budget: float, floor_low: float, floor_high: float) -> Surrogate:
    """PPO's clip on π/μ whose width follows from a budget for the mean δ² of harmful tokens (official code).

    Harmful: A > 0 and r > 1, or A < 0 and r < 1. No clip while their mean δ² is within ``budget``.
    """

    def measure(context: Context) -> tuple[Tensor, Tensor]:
        delta, A = context.delta("E"), context.advantage
        harmful = context.valid & (((A > 0) & (delta > 0)) | ((A < 0) & (delta < 0)))
        squares = delta[harmful].square()
        if squares.numel() == 0 or bool(squares.mean() <= budget):
            return delta.new_tensor(-torch.inf), delta.new_tensor(torch.inf)
        tau = second_moment_threshold(squares, budget)
        return 1 - (-(-tau).expm1()).clamp(min=floor_low), 1 + tau.expm1().clamp(min=floor_high)

    def apply(context: Context, bounds: tuple[Tensor, Tensor]) -> Tensor:
        return clipped_loss(context, context.ratio("E"), *bounds)

    return Surrogate("PPO clip, width by budget", "E", "token", apply, measure=measure)


def second_moment_threshold(squares: Tensor, budget: float) -> Tensor:
    """The largest |δ| among the tokens such that capping all δ² at its square keeps their mean within ``budget``.

    ``squares`` [n] are δ²; 0 where even the smallest is too large.
    """
    ordered = squares.sort().values
    n = ordered.numel()
    above = torch.arange(n - 1, -1, -1, device=ordered.device)
    capped = ordered.cumsum(0) + above * ordered
    allowed = torch.where(capped <= budget * n, ordered, ordered.new_zeros(()))
    return allowed.max().sqrt()


def second_moment_gate(budget: float) -> Gate:
    """Drops the largest (log q/μ)² until the mean of the rest is below ``budget`` (AReaL). At least one token stays.

    Tokens that tie are dropped together, unless nothing smaller is left.
    """

    def measure(context: Context) -> tuple[Tensor, Tensor]:
        ordered = context.delta("B").square()[context.valid].sort().values
        if ordered.numel() == 0:
            return ordered.new_zeros(()), ordered.new_tensor(torch.inf)
        counts = torch.arange(1, ordered.numel() + 1, device=ordered.device)
        kept = int((ordered.cumsum(0) / counts < budget).sum().clamp(min=1))
        beyond = ordered[kept] if kept < ordered.numel() else ordered.new_tensor(torch.inf)
        return ordered[0], beyond

    def apply(context: Context, measured: tuple[Tensor, Tensor]) -> Tensor:
        smallest, beyond = measured
        squares = context.delta("B").square()
        return (squares < beyond) | (squares == smallest)

    return Gate("batch mean (log ratio)² < budget", "B", "token", apply, measure=measure)
