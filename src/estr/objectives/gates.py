"""Detached masks: which tokens take part."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from estr.objectives.composition import Gate
from estr.objectives.context import Context, binary_kl, k_estimate, quantile

TINY = 1e-8  # keeps a quotient of entropies finite (ERC)


def entropy_scaled(tau: float, eps: float, undecided: str) -> Gate:
    """δ² / (H + eps) <= tau on the direct edge (ESTR, arXiv 2607.22186).

    Where H is an interval, a token that passes with the lower end is kept for certain and one that fails with the upper
    end is dropped for certain; the rest are undecided and treated as ``undecided`` says.
    """

    def passes(squared: Tensor, entropy: Tensor) -> Tensor:
        # multiplied out: an entropy that rounding left slightly negative cannot turn the sign
        scale = entropy + eps
        return squared <= (scale if tau == 1 else scale.mul_(tau))

    def apply(context: Context) -> Tensor:
        squared, batch = context.delta("E").square(), context.batch
        keep = passes(squared, context.given("behavior_entropy"))
        if batch.behavior_entropy_upper is None:
            return keep
        possible = passes(squared, context.given("behavior_entropy_upper"))
        open_case = possible & ~keep & context.valid
        context.note_undecided(open_case)
        if undecided == "error" and bool(open_case.any()):
            raise ValueError(
                f"{int(open_case.sum())} tokens are undecided: their entropy interval contains the threshold; "
                'set undecided to "keep" or "drop", or give exact entropies'
            )
        return keep | open_case if undecided == "keep" else keep

    needs = frozenset({"behavior_entropy"})
    return Gate("δ²/(H+eps) ≤ tau", "E", "token", apply, needs, frozenset({"behavior_entropy_upper"}))


def band(edge: str, low: float | None, high: float | None, scope: str = "token") -> Gate:
    """low <= ratio <= high, both ends included; None leaves an end open.

    ``scope`` "sequence" takes the product over the sequence, "geometric" the geometric mean.
    """
    low, high = low or 0.0, math.inf if high is None else high
    if low > high:
        raise ValueError(f"low ({low:g}) must not exceed high ({high:g})")

    bottom, top = _log(low), _log(high)

    def apply(context: Context) -> Tensor:
        log_ratio = context.scoped(context.delta(edge), scope)
        return (log_ratio >= bottom) & (log_ratio <= top)

    return Gate(f"{low:g} ≤ {_name(scope)} ≤ {high:g}", edge, "token" if scope == "token" else "sequence", apply)


def open_band(edge: str, low: float, high: float) -> Gate:
    """low < ratio < high, both ends excluded."""
    if low > high:
        raise ValueError(f"the lower end ({low:g}) must not exceed the upper ({high:g})")

    bottom, top = _log(low), _log(high)

    def apply(context: Context) -> Tensor:
        return (context.delta(edge) > bottom) & (context.delta(edge) < top)

    return Gate(f"{low:g} < ratio < {high:g}", edge, "token", apply)


def veto(edge: str, threshold: float) -> Gate:
    """Drops a sequence in which any token's ratio is below ``threshold``."""
    limit = _log(threshold)

    def apply(context: Context) -> Tensor:
        return ~context.sequence_any(context.delta(edge) < limit)

    return Gate(f"no token ratio < {threshold:g}", edge, "sequence", apply)


def binary_divergence(phi: float) -> Gate:
    """max(D_B(q, μ), D_B(μ, q)) <= phi: both directions of the Bernoulli KL of the sampled token (KPop)."""

    def apply(context: Context) -> Tensor:
        q, mu = context.log_q, context.log_mu
        return torch.maximum(binary_kl(q, mu), binary_kl(mu, q)) <= phi

    return Gate("max binary KL ≤ phi", "B", "token", apply)


def divergence(edge: str, estimator: str, statistic: str, low: float, high: float) -> Gate:
    """low <= statistic of k1, k2 or k3 <= high (verl rollout correction, trust region masking).

    ``statistic``: "token" looks at each token; "sum", "mean", "max" at the whole sequence. The log-ratio is clamped to
    ±20 first. k1 = -x, so that a band on it is the reciprocal band of the ratio.
    """

    def apply(context: Context) -> Tensor:
        value = k_estimate(context.delta(edge), estimator)
        if statistic == "max":
            value = context.sequence_max(value)[context.sequence]
        elif statistic == "sum":
            value = context.scoped(context.safe(value), "sequence")
        elif statistic == "mean":
            value = context.scoped(value, "geometric")
        return (value >= low) & (value <= high)

    name = estimator if statistic == "token" else f"{statistic} {estimator}"
    lower = "" if low == -math.inf else f"{low:g} ≤ "
    return Gate(f"{lower}{name} ≤ {high:g}", edge, "token" if statistic == "token" else "sequence", apply)


def total_variation(low: float, high: float) -> Gate:
    """Drops π - μ > high for a positive advantage, μ - π > low otherwise (DPPO-TV, arXiv 2602.04879)."""

    def apply(context: Context) -> Tensor:
        change = context.log_pi.exp() - context.log_mu.exp()
        return ~torch.where(context.advantage > 0, change > high, -change > low)

    return Gate("outward |π - μ| within bounds", "E", "token", apply)


def outward_binary_kl(delta: float) -> Gate:
    """Drops D_B(μ, π) > delta where the update leads further away from μ (DPPO-KL, arXiv 2602.04879)."""

    def apply(context: Context) -> Tensor:
        pi, mu = context.log_pi, context.log_mu
        outward = torch.where(context.advantage > 0, pi > mu, pi < mu)
        return ~(outward & (binary_kl(mu, pi) > delta))

    return Gate("outward binary KL ≤ delta", "E", "token", apply)


def negative_sequence(delta: float | None) -> Gate:
    """Keeps A >= 0, and otherwise sequences whose mean log μ - log π is at most ``delta`` (OPSM, arXiv 2512.02556)."""

    def apply(context: Context) -> Tensor:
        drift = -context.scoped(context.delta("E"), "geometric")
        return (context.advantage >= 0) | (drift <= (math.inf if delta is None else delta))

    return Gate("A ≥ 0 or mean(-δ) ≤ delta", "E", "sequence", apply)


def high_entropy(rho: float) -> Gate:
    """Entropy of π at or above the (1 - rho) quantile over valid tokens (80/20, arXiv 2506.01939)."""

    def measure(context: Context) -> Tensor:
        return quantile(context.given("entropy").detach()[context.valid], 1 - rho)

    def apply(context: Context, threshold: Tensor) -> Tensor:
        return context.given("entropy") >= threshold

    return Gate("H in the top rho", "", "token", apply, frozenset({"entropy"}), measure=measure)


def entropy_ratio(low: float, high: float) -> Gate:
    """low < H / H_old < high; what lies outside keeps its value without gradient (ERC, arXiv 2512.05591).

    H is the entropy of π, H_old that of q (of μ where q's is not given).
    """
    if low > high:
        raise ValueError(f"low ({low:g}) must not exceed high ({high:g})")

    def apply(context: Context) -> Tensor:
        quotient = (context.field("entropy") + TINY) / (context.anchor_entropy() + TINY)
        return (quotient > low) & (quotient < high)

    uses = frozenset({"proximal_entropy", "behavior_entropy"})
    return Gate(f"{low:g} < H/H_old < {high:g}", "U", "token", apply, frozenset({"entropy"}), uses, keeps_value=True)


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _name(scope: str) -> str:
    return {"token": "ratio", "sequence": "product of ratios", "geometric": "geometric mean ratio"}[scope]
