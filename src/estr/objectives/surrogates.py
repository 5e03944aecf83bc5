"""The differentiable part of an objective: one loss per token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from estr.objectives.composition import Surrogate
from estr.objectives.context import CLAMP, Context, clamped_exp, quantile

Bound = float | Tensor


def clipped_loss(
    context: Context, ratio: Tensor, lower: Bound, upper: Bound, dual_clip: float | None = None, slope: bool = False
) -> Tensor:
    """PPO's -min(r A, clip(r, lower, upper) A) [N] (Schulman et al. 2017, 1707.06347, eq. 7).

    A positive advantage bounds r from above, a negative one from below. ``dual_clip`` c bounds the loss of a negative
    advantage by -c A (Ye et al. 2020, 1912.09729). Bounds are numbers or [N]. With ``slope`` a clipped token keeps the
    gradient of bound * r / sg(r) (GPPO).
    """
    A = context.advantage
    free, cap = A.new_tensor(-math.inf), A.new_tensor(math.inf if dual_clip is None else dual_clip)
    low = torch.where(A < 0, torch.as_tensor(lower, dtype=A.dtype, device=A.device), free)
    high = torch.where(A > 0, torch.as_tensor(upper, dtype=A.dtype, device=A.device), cap)
    bounded = torch.clamp(ratio, low, high)
    context.note_clipped(bounded.detach() != ratio.detach())
    if slope:
        bounded = bounded.detach() * (ratio / ratio.detach())
    return bounded * -A


def ppo(edge: str, clip_low: float, clip_high: float, dual_clip: float | None = None, slope: bool = False) -> Surrogate:
    """PPO's clipped surrogate on the token ratio of ``edge``, bounds 1 - clip_low and 1 + clip_high."""

    def apply(context: Context) -> Tensor:
        return clipped_loss(context, context.ratio(edge), 1 - clip_low, 1 + clip_high, dual_clip, slope)

    return Surrogate("PPO clip", edge, "token", apply)


def policy_gradient() -> Surrogate:
    """-A log π: the score-function surrogate; a ratio, if any, comes in as a detached weight."""
    return Surrogate("policy gradient", "", "token", lambda context: -context.advantage * context.log_pi)


def likelihood() -> Surrogate:
    """-log π: weighted supervised learning on what was sampled."""
    return Surrogate("log-likelihood", "", "token", lambda context: -context.log_pi)


def sequence_ratio(context: Context, edge: str, high: float = CLAMP) -> Tensor:
    """The geometric mean ratio of the sequence, with each token's own gradient: sg(s) π/sg(π) (GSPO-token).

    Its logarithm is clamped to [-20, ``high``].
    """
    delta = context.delta(edge)
    mean = context.scoped(delta.detach(), "geometric")
    return clamped_exp(mean + (delta - delta.detach()), high=high)


def gspo(edge: str, clip_low: float, clip_high: float, limit: float) -> Surrogate:
    """PPO's clip on the sequence's geometric mean ratio (GSPO, arXiv 2507.18071)."""

    def apply(context: Context) -> Tensor:
        return clipped_loss(context, sequence_ratio(context, edge, limit), 1 - clip_low, 1 + clip_high)

    return Surrogate("PPO clip on geometric mean", edge, "sequence", apply)


def contracted(alpha: float, hill: str, scope: str, clip_low: float, clip_high: float) -> Surrogate:
    """PPO's clip whose end on the side of the drift contracts with |δ| (SAT, arXiv 2607.18722).

    Beyond qa, the ``alpha`` quantile of |δ| over the batch, that end's distance from 1 is multiplied by
    c = qa²/(qa²+δ²) (``hill`` "literal") or 1/(1+((|δ|-qa)/qa)²) ("continuous").
    """

    def drift(context: Context) -> Tensor:
        return context.scoped(context.delta("E"), "token" if scope == "token" else "geometric").detach()

    def measure(context: Context) -> Tensor:
        return quantile(drift(context).abs()[context.valid], alpha)

    def apply(context: Context, gate: Tensor) -> Tensor:
        delta = drift(context)
        c = hill_contraction(delta.abs(), gate, hill)
        one = torch.ones_like(c)
        lower = 1 - clip_low * torch.where(delta < 0, c, one)
        upper = 1 + clip_high * torch.where(delta > 0, c, one)
        ratio = context.ratio("E") if scope == "token" else sequence_ratio(context, "E")
        return clipped_loss(context, ratio, lower, upper)

    return Surrogate("PPO clip, drift side contracted", "E", scope, apply, measure=measure)


def hill_contraction(size: Tensor, gate: Tensor, kind: str) -> Tensor:
    """c [N] in (0, 1] for |δ| = ``size`` [N] and the quantile ``gate``; 1 up to the gate and where it is 0."""
    safe = torch.where(gate > 0, gate, torch.ones_like(gate))
    excess = size / safe if kind == "literal" else (size - safe) / safe
    inside = (size <= gate) | (gate <= 0)
    return torch.where(inside, torch.ones_like(size), 1 / (1 + excess.square()))


def elastic(base: float, advantage_gain: float, variance_gain: float, success: float) -> Surrogate:
    """PPO's clip of width base (1 + ga tanh|A|) (1 + gv 4p(1-p)), p the group's success rate (ETR, our reading).

    A sequence succeeds when its reward is at least ``success``; NaN rewards are left out of the rate.
    """

    def measure(context: Context) -> tuple[Tensor, Tensor]:
        reward, group = context.given("reward"), context.given("group")
        known = ~reward.isnan()
        names, index = group[known].unique(return_inverse=True)
        wins = (reward[known] >= success).to(context.dtype)
        rate = wins.new_zeros(len(names)).index_add(0, index, wins)
        return names, rate / torch.bincount(index, minlength=len(names)).clamp(min=1)

    def apply(context: Context, rates: tuple[Tensor, Tensor]) -> Tensor:
        p = lookup(context.given("group"), *rates)[context.sequence]
        width = base * (1 + advantage_gain * context.advantage.abs().tanh()) * (1 + variance_gain * 4 * p * (1 - p))
        return clipped_loss(context, context.ratio("U"), 1 - width, 1 + width)

    return Surrogate("PPO clip, elastic", "U", "group", apply, frozenset({"reward", "group"}), measure=measure)


def lookup(keys: Tensor, names: Tensor, values: Tensor) -> Tensor:
    """``values`` of ``keys``, where ``names`` is sorted; 0 for a key that is not there."""
    if names.numel() == 0:
        return values.new_zeros(keys.shape)
    place = torch.searchsorted(names, keys).clamp(max=len(names) - 1)
    return torch.where(names[place] == keys, values[place], values.new_zeros(()))


def soft_gate(edge: str, tau_positive: float, tau_negative: float) -> Surrogate:
    """-(4/tau) sigmoid(tau (r - 1)) A, tau by the sign of A (SAPO, arXiv 2511.20347)."""

    def apply(context: Context) -> Tensor:
        A = context.advantage
        tau = torch.where(A > 0, A.new_tensor(tau_positive), A.new_tensor(tau_negative))
        return -(4 / tau) * (tau * (context.ratio(edge) - 1)).sigmoid() * A

    return Surrogate("sigmoid gate", edge, "token", apply)


def entropy_segments(clip_scale: float, vocabulary: int, ranges: tuple[float, ...]) -> Surrogate:
    """PPO's clip on the geometric mean ratio of segments of similar entropy (ESPO, arXiv 2512.00499).

    The tokens of a sequence are grouped by the entropy of q (of μ without q) into the intervals between ``ranges``;
    the clip is clip_scale / log(vocabulary) times the segment's mean entropy.
    """
    edges = sorted(ranges)

    def apply(context: Context) -> Tensor:
        entropy = context.anchor_entropy()
        kind = torch.bucketize(entropy, entropy.new_tensor(edges), right=True)
        context.split(kind, len(edges) + 1)
        delta = context.delta("U")
        mean = context.segment_mean(delta.detach())
        ratio = clamped_exp(mean + (delta - delta.detach()))
        width = clip_scale / math.log(vocabulary) * context.segment_mean(entropy)
        return clipped_loss(context, ratio, 1 - width, 1 + width)

    uses = frozenset({"proximal_entropy", "behavior_entropy"})
    return Surrogate("PPO clip on geometric mean", "U", "segment", apply, uses=uses)
