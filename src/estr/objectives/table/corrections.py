"""Corrections of the train-inference mismatch on the behavior edge, with PPO on the update edge."""

from __future__ import annotations

import math
from types import SimpleNamespace

from torch import Tensor

from estr.objectives import gates, surrogates, weights
from estr.objectives.composition import Composition, Recipe
from estr.objectives.context import Context
from estr.objectives.hyperparameters import bound, choice, flag, number
from estr.objectives.table.common import clip, dual_clip, ppo


def _decoupled(h: SimpleNamespace) -> Composition:
    mask = (gates.band("B", None, h.cap),) if h.action == "mask" else ()
    cap = h.cap if h.action == "clamp" else None
    return Composition(gates=mask, weights=(weights.ratio("B", cap=cap),), surrogate=ppo("U", h))


def _mis(h: SimpleNamespace) -> Composition:
    lower = 1 / h.upper if h.lower is None else h.lower
    if lower > h.upper:
        raise ValueError(f"lower ({lower:g}) must not exceed upper ({h.upper:g})")
    low = lower if h.mode == "clip" else 0.0
    cap = None if h.mode == "mask" else h.upper
    gate = (gates.band("B", lower, h.upper, h.level),) if h.mode == "mask" else ()
    veto = () if h.veto is None else (gates.veto("B", h.veto),)
    weight = weights.ratio("B", low, cap, h.level)
    if h.batch_normalize:
        bottom, top = (lower, h.upper) if h.mode == "mask" else (0.0, math.inf)
        weight = weights.normalized(weight, bottom, top, "token" if h.level == "token" else "sequence")
    return Composition(gates=gate + veto, weights=(weight,), surrogate=ppo("U", h))


def _seq_mask_tis(h: SimpleNamespace) -> Composition:
    gate = gates.band("B", h.low, h.high, "geometric")
    return Composition(gates=(gate,), weights=(weights.ratio("B"),), surrogate=ppo("U", h))


def interpolated_proximal(context: Context) -> Tensor:
    """log q~ = alpha log μ + (1 - alpha) log π with alpha = 1/staleness, 1 for fresh tokens: [N] (A-3PO)."""
    target = context.batch.target_version
    assert target is not None
    staleness = (target - context.given("version")).clamp(min=1)
    alpha = 1 / staleness.to(context.dtype)
    return alpha * context.log_mu + (1 - alpha) * context.log_pi


def _a3po(h: SimpleNamespace) -> Composition:
    return Composition(
        weights=(weights.ratio("B"),),
        surrogate=ppo("U", h),
        proximal=interpolated_proximal,
        proximal_needs=frozenset({"version", "target_version"}),
    )


RECIPES = (
    Recipe(
        name="icepop",
        description="Tokens whose q/μ leaves a band are dropped, the others weighted by it.",
        formula="1[low ≤ B ≤ high]·B·ppo(U, A)",
        source="arXiv 2510.18855; verl decoupled_token_icepop, AReaL, NeMo-RL, OpenRLHF",
        confidence="framework code",
        parameters={"low": bound(0.5), "high": bound(5.0), **clip(), **dual_clip(None)},
        compose=lambda h: Composition(
            gates=(gates.band("B", h.low, h.high),), weights=(weights.ratio("B"),), surrogate=ppo("U", h)
        ),
        note="low=None or high=None gives the one-sided variants (slime and miles: low=0, high=2). The paper averages "
        "over responses, the frameworks over tokens.",
    ),
    Recipe(
        name="kpop",
        description="Tokens whose binary KL between q and μ exceeds phi in either direction are dropped.",
        formula="1[max(D_B(q,μ), D_B(μ,q)) ≤ phi]·B·ppo(U, A)",
        source="ringtech.notion.site/kpop; AReaL metric binary_kl",
        confidence="framework code",
        parameters={"phi": number(2.0, 0), "weight": flag(True), **clip(), **dual_clip(None)},
        compose=lambda h: Composition(
            gates=(gates.binary_divergence(h.phi),),
            weights=(weights.ratio("B"),) if h.weight else (),
            surrogate=ppo("U", h),
        ),
        note="The report states a pure indicator, AReaL also multiplies by q/μ; weight=False gives the former.",
    ),
    Recipe(
        name="tis",
        description="Truncated importance sampling: weight min(q/μ, cap) per token.",
        formula="min(B, cap)·ppo(U, A)",
        source="fengyao.notion.site/off-policy-rl; verl, slime, SkyRL",
        confidence="official code",
        parameters={"cap": bound(2.0), **clip(), **dual_clip(None)},
        compose=lambda h: Composition(weights=(weights.ratio("B", cap=h.cap),), surrogate=ppo("U", h)),
    ),
    Recipe(
        name="tis_sequence",
        description="Truncated importance sampling with the product of q/μ over the sequence.",
        formula="min(prod_t B, cap)·ppo(U, A)",
        source="verl, SkyRL (cap 5), VCPO (cap 8)",
        confidence="framework code",
        parameters={"cap": bound(2.0), "aggregate": choice("product", "geometric"), **clip(), **dual_clip(None)},
        compose=lambda h: Composition(
            weights=(weights.ratio("B", cap=h.cap, scope="sequence" if h.aggregate == "product" else "geometric"),),
            surrogate=ppo("U", h),
        ),
        note='"Sequence" is the product in verl, TRL, SkyRL and VCPO, the geometric mean in ms-swift and AReaL.',
    ),
    Recipe(
        name="mis",
        description="Masked (or truncated, or clipped) importance sampling per token, sequence or geometric mean.",
        formula="1[lower ≤ B ≤ upper]·1[no B < veto in the sequence]·B/mean(B)·ppo(U, A)",
        source="slime and miles, train_infer_mismatch_helper/mis.py",
        confidence="framework code",
        parameters={
            "level": choice("token", "sequence", "geometric"),
            "mode": choice("mask", "truncate", "clip"),
            "lower": bound(0.5),
            "upper": number(2.0, 0, open_low=True),
            "veto": number(1e-4, 0, optional=True),
            "batch_normalize": flag(True),
            **clip(),
            **dual_clip(None),
        },
        compose=_mis,
        note="lower=None is 1/upper. With mode=mask the mean of the weights is taken over tokens inside the band.",
    ),
    Recipe(
        name="seq_mask_tis",
        description="Drops sequences whose geometric mean q/μ leaves a narrow band; token weights q/μ elsewhere.",
        formula="1[low ≤ exp(mean_t log B) ≤ high]·B·ppo(U, A)",
        source="NeMo-RL and OpenRLHF, seq-mask-tis",
        confidence="framework code",
        parameters={"low": bound(0.999), "high": bound(1.002), **clip(), **dual_clip(None)},
        compose=_seq_mask_tis,
        note="NeMo-RL divides by valid sequences; denominator=kept comes close to it.",
    ),
    Recipe(
        name="decoupled_ppo",
        description="Decoupled PPO: weight q/μ, clip on π/q.",
        formula="B·ppo(U, A)",
        source="arXiv 2110.00641, arXiv 2505.24298; AReaL ppo_actor_loss_fn",
        confidence="official code",
        parameters={"cap": bound(None), "action": choice("clamp", "mask"), **clip(), **dual_clip(None)},
        compose=_decoupled,
        note="Without cap the weight is unbounded; action says what happens beyond it: the weight is clamped or the "
        "token dropped.",
    ),
    Recipe(
        name="a3po",
        description="Decoupled PPO with q interpolated between μ and π by each token's staleness; no extra pass.",
        formula="B~·ppo(U~, A), log q~ = log μ/d + (1-1/d)·log π",
        source="arXiv 2512.06547; AReaL compute_prox_logp_approximations",
        confidence="official code",
        parameters={**clip(), **dual_clip(None)},
        compose=_a3po,
    ),
    Recipe(
        name="ppo_ewma",
        description="Decoupled PPO whose proximal policy is an exponential average of the weights; E bounded by 100.",
        formula="q/max(μ, π/100)·ppo(U, A), q the averaged model",
        source="arXiv 2110.00641; openai/ppo-ewma",
        confidence="official code",
        parameters={"limit": number(100.0, 1), "beta": number(0.889, 0, 1), **clip()},
        compose=lambda h: Composition(
            weights=(weights.bounded_behavior(h.limit),), surrogate=ppo("U", h), average=h.beta
        ),
        note="The averaged model's log-probabilities, recomputed for each minibatch, come in as proximal_logprob; a "
        "run keeps that average, debiased, with decay beta. The code leaves beta open, the paper's is .889.",
    ),
    Recipe(
        name="skyrl_rollout_is",
        description="Policy gradient weighted by π/μ inside an open band around 1, nothing outside it.",
        formula="-1[1-clip_low < E < 1+clip_high]·E·A·log π",
        source="GLM-5, arXiv 2602.15763 sec. 4.1.2; SkyRL rollout_is",
        confidence="framework code",
        parameters={**clip()},
        compose=lambda h: Composition(
            gates=(gates.open_band("E", 1 - h.clip_low, 1 + h.clip_high),),
            weights=(weights.ratio("E"),),
            surrogate=surrogates.policy_gradient(),
        ),
    ),
)
