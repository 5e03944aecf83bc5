"""Variants of ESTR that the study tries: which half of the idea does the work, and what would do it better.

S = δ²/(H+eps) with δ = log π/μ and H the entropy of the distribution that sampled. A token is *inside* when S ≤ tau. An
update leads *outward* when A·δ > 0, away from μ, and *inward* when A·δ < 0. Train one with
``recipe = "variants:direction_aware"``, from this folder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from estr.objectives import Composition, Gate, Recipe, Surrogate, Weight, gates, register, surrogates
from estr.objectives.context import Context
from estr.objectives.hyperparameters import number
from estr.objectives.surrogates import clipped_loss

ENTROPY = frozenset({"behavior_entropy"})
REGION = {"tau": number(1.0, 0), "eps": number(0.01, 0)}
CLIP = {"clip_low": number(0.2, 0, 1), "clip_high": number(0.28, 0)}


def inside(context: Context, tau: float, eps: float) -> Tensor:
    """δ² ≤ tau·(H+eps), bool [N]."""
    return context.delta("E").detach().square() <= tau * (context.given("behavior_entropy") + eps)


def inward(context: Context) -> Tensor:
    """A·δ < 0, bool [N]: the update brings π back to μ."""
    return context.advantage * context.delta("E").detach() < 0


def outward_gate(tau: float, eps: float) -> Gate:
    """Stops only what leaves the region: keeps S ≤ tau or A·δ < 0."""
    return Gate("S ≤ tau or inward", "E", "token", lambda context: inside(context, tau, eps) | inward(context), ENTROPY)


def capped_inward(context: Context, loss: Tensor, where: Tensor, cap: float | Tensor) -> Tensor:
    """``loss`` [N], but -sg(min(E, cap))·A·log π ``where`` an inward token stands: the pull back, of bounded weight."""
    weight = torch.minimum(context.ratio("E").detach(), torch.as_tensor(cap, dtype=loss.dtype, device=loss.device))
    return torch.where(where & inward(context), -weight * context.advantage * context.log_pi, loss)


def ppo_with_cap(cap: float, clip_low: float, clip_high: float) -> Surrogate:
    """PPO's clip on E for what leads outward; inward tokens whose E exceeds ``cap`` weigh ``cap``."""

    def apply(context: Context) -> Tensor:
        ratio = context.ratio("E")
        loss = clipped_loss(context, ratio, 1 - clip_low, 1 + clip_high)
        return capped_inward(context, loss, ratio.detach() > cap, cap)

    return Surrogate("PPO clip, inward weight capped", "E", "token", apply)


def direction_aware_surrogate(tau: float, eps: float, clip_low: float, clip_high: float) -> Surrogate:
    """PPO's clip inside the region; outside it an inward token weighs min(E, 1 + clip_high)."""

    def apply(context: Context) -> Tensor:
        loss = clipped_loss(context, context.ratio("E"), 1 - clip_low, 1 + clip_high)
        return capped_inward(context, loss, ~inside(context, tau, eps), 1 + clip_high)

    return Surrogate("PPO clip, outside it inward weight capped", "E", "token", apply, ENTROPY)


def entropy_clip(tau: float, eps: float) -> Surrogate:
    """Clip and cap at exp(±√(tau·(H+eps))): the region as bounds of the ratio in place of a gate."""

    def apply(context: Context) -> Tensor:
        width = (tau * (context.given("behavior_entropy") + eps)).clamp(min=0).sqrt()
        ratio, upper = context.ratio("E"), width.exp()
        loss = clipped_loss(context, ratio, (-width).exp(), upper)
        return capped_inward(context, loss, ratio.detach() > upper, upper)

    return Surrogate("clip and cap by entropy", "E", "token", apply, ENTROPY)


def soft_weight(tau: float, eps: float) -> Weight:
    """min(1, tau/S): a token beyond the region fades as 1/δ² and is not dropped."""

    def apply(context: Context) -> Tensor:
        scaled = context.delta("E").square() / (context.given("behavior_entropy") + eps).clamp(min=1e-8)
        return (tau / scaled.clamp(min=1e-12)).clamp(max=1)

    return Weight("min(1, tau/S)", "E", "token", apply, ENTROPY, factor="")


def budget_gate(tau: float, eps: float) -> Gate:
    """Keeps a sequence whose Σδ² ≤ tau·Σ(H+eps): a sequence spends its entropy where it likes."""

    def apply(context: Context) -> Tensor:
        spent = context.delta("E").square() - tau * (context.given("behavior_entropy") + eps)
        return context.scoped(spent, "sequence") <= 0

    return Gate("Σδ² ≤ tau·Σ(H+eps)", "E", "sequence", apply, ENTROPY)


def _variant(name: str, description: str, formula: str, parameters: dict, compose) -> None:  # type: ignore[no-untyped-def,type-arg]
    register(
        Recipe(
            name=name,
            description=description,
            formula=formula,
            source="ours, an experiment of the study",
            confidence="experiment",
            parameters=parameters,
            compose=compose,
        )
    )


_variant(
    "direction_aware",
    "ESTR that stops only outward moves; an inward token outside the region weighs at most 1 + clip_high.",
    "1[S ≤ tau or Aδ < 0]·(ppo(E, A) inside, -sg(min(E, 1+clip_high))·A·log π outside)",
    REGION | CLIP,
    lambda h: Composition(
        direction_aware_surrogate(h.tau, h.eps, h.clip_low, h.clip_high), gates=(outward_gate(h.tau, h.eps),)
    ),
)
_variant(
    "outward_gate",
    "The gate of direction_aware alone: inward tokens keep their unbounded weight.",
    "1[S ≤ tau or Aδ < 0]·ppo(E, A)",
    REGION | CLIP,
    lambda h: Composition(surrogates.ppo("E", h.clip_low, h.clip_high), gates=(outward_gate(h.tau, h.eps),)),
)
_variant(
    "inward_cap",
    "The cap of direction_aware alone: no gate, no entropy; PPO whose inward tokens weigh at most cap.",
    "ppo(E, A) where E ≤ cap or Aδ ≥ 0, else -cap·A·log π",
    {"cap": number(1.28, 0), **CLIP},
    lambda h: Composition(ppo_with_cap(h.cap, h.clip_low, h.clip_high)),
)
_variant(
    "entropy_clip",
    "Clip and inward cap at exp(±√(tau·(H+eps))) in place of a gate.",
    "ppo(E, A; exp(±√(tau·(H+eps)))), inward weight capped at the upper bound",
    {"tau": number(0.15, 0), "eps": number(0.01, 0)},
    lambda h: Composition(entropy_clip(h.tau, h.eps)),
)
_variant(
    "entropy_weight",
    "ESTR that fades tokens beyond the region instead of dropping them.",
    "min(1, tau/S)·ppo(E, A)",
    REGION | CLIP,
    lambda h: Composition(surrogates.ppo("E", h.clip_low, h.clip_high), weights=(soft_weight(h.tau, h.eps),)),
)
_variant(
    "entropy_budget",
    "ESTR's budget for a whole sequence instead of each token.",
    "1[Σδ² ≤ tau·Σ(H+eps)]·ppo(E, A)",
    REGION | CLIP,
    lambda h: Composition(surrogates.ppo("E", h.clip_low, h.clip_high), gates=(budget_gate(h.tau, h.eps),)),
)
_variant(
    "estr_capped",
    "ESTR, symmetric gate, whose inward tokens weigh at most cap.",
    "1[S ≤ tau]·(ppo(E, A) where E ≤ cap or Aδ ≥ 0, else -cap·A·log π)",
    {**REGION, "cap": number(1.28, 0), **CLIP},
    lambda h: Composition(
        ppo_with_cap(h.cap, h.clip_low, h.clip_high), gates=(gates.entropy_scaled(h.tau, h.eps, "keep"),)
    ),
)
