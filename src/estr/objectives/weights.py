"""Detached factors: how much a token counts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from estr.objectives.composition import Weight
from estr.objectives.context import CLAMP, Context, clamped_exp


def ratio(edge: str, low: float = 0.0, cap: float | None = None, scope: str = "token") -> Weight:
    """clip(ratio, low, cap); ``scope`` "sequence" takes the product over the sequence, "geometric" its mean."""
    high = math.inf if cap is None else cap
    if low > high:
        raise ValueError(f"the lower bound ({low:g}) must not exceed the upper ({high:g})")

    def apply(context: Context) -> Tensor:
        return scoped_ratio(context, edge, scope).clamp(low, high)

    return Weight(_describe(low, cap), edge, "token" if scope == "token" else "sequence", apply)


def clipped_ratio(edge: str, low: float, high: float) -> Weight:
    """clip(ratio, low, high) where that clip is the method's trust region; counted in ``clip/fraction``."""
    inner = ratio(edge, low, high)

    def apply(context: Context) -> Tensor:
        value = context.ratio(edge)
        context.note_clipped((value < low) | (value > high))
        return inner.apply(context)

    return Weight(f"clip(ratio, {low:g}, {high:g})", edge, "token", apply)


def normalized(
    weight: Weight, low: float = 0.0, high: float = math.inf, per: str = "token", outside: str = "left out"
) -> Weight:
    """``weight`` divided by its mean over the optimizer batch; ``per`` "sequence" counts each sequence once.

    Tokens whose weight lies outside [low, high] are "left out" of the mean (slime), or enter it as 0 ("zero", verl).
    """

    def measure(context: Context) -> Tensor:
        value = weight.apply(context)
        inside = context.valid & (value >= low) & (value <= high)
        counts = (context.valid if outside == "zero" else inside).to(context.dtype)
        if per == "sequence":
            counts = counts / context.valid_lengths.clamp(min=1)[context.sequence]
        total = (torch.where(inside, value, value.new_zeros(())) * counts).sum()
        mean = total / counts.sum().clamp(min=torch.finfo(context.dtype).tiny)
        return torch.where(mean > 0, mean, torch.ones_like(mean))

    def apply(context: Context, mean: Tensor) -> Tensor:
        return weight.apply(context) / mean

    return Weight(f"{weight.name} / batch mean", weight.edge, weight.scope, apply, measure=measure)


def tapered(edge: str, scope: str, positive: float, negative: float, sign: str) -> Weight:
    """``positive`` where the sign is positive, else ``negative`` * clip(ratio, 0, 1) (TOPR, arXiv 2503.14286, eq. 8).

    ``sign`` "advantage" looks at the token's advantage, "reward" at the sequence's reward.
    """

    def apply(context: Context) -> Tensor:
        if sign == "reward":
            up = (context.given("reward") > 0)[context.sequence]
        else:
            up = context.advantage > 0
        value = scoped_ratio(context, edge, scope)
        context.note_clipped(~up & (value > 1))
        return torch.where(up, torch.full_like(value, positive), negative * value.clamp(max=1))

    needs = frozenset({"reward"} if sign == "reward" else ())
    return Weight("1, or min(ratio, 1) where negative", edge, "token" if scope == "token" else "sequence", apply, needs)


def gamma_kernel(
    k_positive: float, lambda_positive: float, k_negative: float, lambda_negative: float, token_cap: float | None
) -> Weight:
    """W^k exp(lambda (1 - W)) of the sequence's ratio W, peak at W = k / lambda (VESPO, arXiv 2602.10693).

    log W = sum of clamped log(π/q), plus with ``token_cap`` the sum of log min(q/μ, token_cap).
    """

    def apply(context: Context) -> Tensor:
        steps = context.delta("U").clamp(-CLAMP, CLAMP)
        if token_cap is not None:
            steps = steps + context.delta("B").clamp(-CLAMP, math.log(token_cap))
        log_w = context.scoped(context.safe(steps), "sequence").clamp(-CLAMP, CLAMP)
        positive = context.advantage >= 0
        k = torch.where(positive, log_w.new_tensor(k_positive), log_w.new_tensor(k_negative))
        rate = torch.where(positive, log_w.new_tensor(lambda_positive), log_w.new_tensor(lambda_negative))
        return (rate + k * log_w - rate * log_w.exp()).exp()

    return Weight("W^k·exp(lambda(1-W))", "U" if token_cap is None else "BU", "sequence", apply)


def bounded_behavior(limit: float) -> Weight:
    """q / max(μ, π/limit), so that the whole ratio π/μ never exceeds ``limit`` (PPO-EWMA's code)."""

    def apply(context: Context) -> Tensor:
        below = torch.maximum(context.log_mu, context.log_pi - math.log(limit))
        return clamped_exp(context.log_q - below)

    return Weight(f"q/max(μ, π/{limit:g})", "BE", "token", apply, factor="B")


def dual_regularized(alpha: float, beta: float, w_clip: float, normalize: bool) -> Weight:
    """min((π_ref(y)/μ(y))^alpha exp(A/beta), w_clip) per sequence y (DAR, arXiv 2602.11523).

    A is the sequence's mean advantage, with ``normalize`` brought to mean 0 and standard deviation 1 over the batch.
    """

    def advantages(context: Context) -> Tensor:
        return context.sequence_mean(context.advantage)

    def measure(context: Context) -> tuple[Tensor, Tensor]:
        zero, one = context.advantage.new_tensor([0.0, 1.0]).unbind()
        present = advantages(context)[context.valid_lengths > 0]
        if not normalize or present.numel() < 2:
            return zero, one
        return present.mean(), present.std() + 1e-6

    def apply(context: Context, measured: tuple[Tensor, Tensor]) -> Tensor:
        mean, std = measured
        prior = context.sequence_sum(context.field("reference_logprob") - context.log_mu)
        log_w = alpha * prior + (advantages(context) - mean) / std / beta
        context.note_clipped((log_w > math.log(w_clip))[context.sequence])
        return log_w.clamp(max=math.log(w_clip)).exp()[context.sequence]

    needs = frozenset({"reference_logprob"})
    return Weight("min((ref/μ)^alpha·exp(A/beta), w_clip)", "", "sequence", apply, needs, measure=measure)


def scoped_ratio(context: Context, edge: str, scope: str) -> Tensor:
    """The ratio [N] of an edge per token, or of the sequence ("sequence": product, "geometric": geometric mean)."""
    return context.ratio(edge) if scope == "token" else clamped_exp(context.scoped(context.delta(edge), scope))


def _describe(low: float, cap: float | None) -> str:
    if cap is None:
        return "ratio" if low == 0 else f"max(ratio, {low:g})"
    return f"min(ratio, {cap:g})" if low == 0 else f"clip(ratio, {low:g}, {cap:g})"
