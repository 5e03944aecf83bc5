"""Detached masks: which tokens take part."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from estr.objectives.composition import Gate
from estr.objectives.context import Context, binary_kl, clamped_exp


def entropy_scaled(tau: float, eps: float, undecided: str) -> Gate:
    """δ² / (H + eps) <= tau on the direct edge (ESTR, arXiv 2607.22186).

    Where H is an interval, a token that passes with the lower end is kept for certain and one that fails with the upper
    end is dropped for certain; the rest are undecided and treated as ``undecided`` says.
    """

    def apply(context: Context) -> Tensor:
        squared = context.delta("E").square()
        keep = squared / (_entropy(context, "behavior_entropy") + eps) <= tau
        if context.batch.behavior_entropy_upper is None:
            return keep
        possible = squared / (_entropy(context, "behavior_entropy_upper") + eps) <= tau
        open_case = possible & ~keep & context.valid
        context.note_undecided(open_case)
        if undecided == "error" and bool(open_case.any()):
            raise ValueError(
                f"{int(open_case.sum())} tokens are undecided: their entropy interval contains the threshold; "
                'set undecided to "keep" or "drop", or give exact entropies'
            )
        return keep | open_case if undecided == "keep" else keep

    needs = frozenset({"behavior_entropy"})
    return Gate("δ²/(H+ε) ≤ τ", "E", "token", apply, needs, frozenset({"behavior_entropy_upper"}))


def band(edge: str, low: float | None, high: float | None, scope: str = "token") -> Gate:
    """low <= ratio <= high, both ends included; None leaves an end open.

    ``scope`` "sequence" takes the product over the sequence, "geometric" the geometric mean.
    """
    low, high = low or 0.0, math.inf if high is None else high
    if low > high:
        raise ValueError(f"low ({low:g}) must not exceed high ({high:g})")

    def apply(context: Context) -> Tensor:
        ratio = clamped_exp(context.scoped(context.delta(edge), scope))
        return (ratio >= low) & (ratio <= high)

    return Gate(f"{low:g} ≤ ratio ≤ {high:g}", edge, "token" if scope == "token" else "sequence", apply)


def binary_divergence(phi: float) -> Gate:
    """max(D_B(q, μ), D_B(μ, q)) <= phi: both directions of the Bernoulli KL of the sampled token (KPop)."""

    def apply(context: Context) -> Tensor:
        q, mu = context.log_q, context.log_mu
        return torch.maximum(binary_kl(q, mu), binary_kl(mu, q)) <= phi

    return Gate("max binary KL ≤ φ", "B", "token", apply)


def _entropy(context: Context, name: str) -> Tensor:
    # rounding can leave an entropy slightly below zero, where the score would change its sign
    value: Tensor = getattr(context.batch, name)
    return value.clamp(min=0)
