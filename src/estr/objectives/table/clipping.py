"""Plain policy gradient, PPO's clip, and clips of another shape."""

from __future__ import annotations

from types import SimpleNamespace

from estr.objectives import budgets, gates, surrogates, weights
from estr.objectives.composition import Composition, Recipe
from estr.objectives.hyperparameters import choice, integer, number
from estr.objectives.table.common import anchor, clip, dual_clip, ppo


def _m2po(h: SimpleNamespace) -> Composition:
    if h.variant == "official":
        return Composition(budgets.second_moment_clip(h.budget, h.floor_low, h.floor_high))
    gate = budgets.second_moment_gate(h.budget)
    return Composition(gates=(gate,), weights=(weights.ratio("B"),), surrogate=ppo("U", h))


RECIPES = (
    Recipe(
        name="reinforce",
        description="Plain policy gradient: no ratio, no clip, no correction.",
        formula="-A·log π",
        source="Williams 1992",
        confidence="paper",
        parameters={},
        compose=lambda h: Composition(surrogates.policy_gradient()),
    ),
    Recipe(
        name="grpo",
        description="PPO's clip on π/μ, token mean over all action tokens.",
        formula="ppo(E, A)",
        source="PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300; dual clip, arXiv 1912.09729",
        confidence="paper",
        parameters={**clip(), **dual_clip(None)},
        compose=lambda h: Composition(ppo("E", h)),
        note="Token mean (as DAPO) instead of the paper's mean over responses.",
    ),
    Recipe(
        name="estr",
        description="Entropy-scaled trust region: keeps a token when δ²/(H+eps) ≤ tau, then PPO's clip on π/μ.",
        formula="1[δ²/(H+eps) ≤ tau]·ppo(E, A)",
        source="arXiv 2607.22186",
        confidence="notes on the paper",
        parameters={
            "tau": number(1.0, 0),
            "eps": number(0.01, 0),
            **clip(0.2, 0.28),
            "undecided": choice("keep", "drop", "error"),
        },
        compose=lambda h: Composition(gates=(gates.entropy_scaled(h.tau, h.eps, h.undecided),), surrogate=ppo("E", h)),
        note="The formula is sure; tau and the clip are not stated in the sources at hand: sweep tau. Where entropies "
        "are intervals, the undecided are kept by default.",
    ),
    Recipe(
        name="sat",
        description="PPO's clip on π/μ whose end on the side of the drift contracts for tokens of large |δ|.",
        formula="-min(E·A, clip(E, lo(δ), hi(δ))·A)",
        source="arXiv 2607.18722",
        confidence="notes on the paper",
        parameters={
            "alpha": number(0.9, 0, 1),
            "hill": choice("literal", "continuous"),
            "scope": choice("token", "sequence"),
            **clip(),
        },
        compose=lambda h: Composition(
            surrogates.contracted(h.alpha, h.hill, h.scope, h.clip_low, h.clip_high),
            reduction="token-mean" if h.scope == "token" else "sequence-mean",
        ),
        note="The exact Hill expression and the scope of the quantile are not known: both readings are offered, and "
        "the quantile (linear) is that of the batch, or of the statistics passed. scope=sequence is SAT-GSPO.",
    ),
    Recipe(
        name="etr",
        description="ETR (our reading): PPO's clip grows with |A| and with the group's outcome variance.",
        formula="ppo(U, A; e), e = base·(1+advantage_gain·tanh|A|)·(1+variance_gain·4p(1-p))",
        source="arXiv 2601.03723",
        confidence="reading of the abstract",
        parameters={
            "base": number(0.2, 0, finite=True),
            "advantage_gain": number(0.5, 0, finite=True),
            "variance_gain": number(0.5, 0, finite=True),
            "success": number(0.5),
        },
        compose=lambda h: Composition(surrogates.elastic(h.base, h.advantage_gain, h.variance_gain, h.success)),
        note="The abstract gives neither functions nor coefficients. A reward of at least `success` counts as success.",
    ),
    Recipe(
        name="m2po",
        description="Second-moment budget: clips (official) or drops (areal) until the batch's mean δ² fits it.",
        formula="official: ppo(E, A; lo, hi by budget); areal: 1[kept by budget]·B·ppo(U, A)",
        source="arXiv 2510.01161; Infini-AI-Lab/M2PO; AReaL",
        confidence="official code",
        parameters={
            "budget": number(0.04, 0),
            "floor_low": number(0.3, 0),
            "floor_high": number(0.5, 0),
            "variant": choice("official", "areal"),
            **clip(),
        },
        compose=_m2po,
        note="Because of the floors the budget of the official form matters only for tau above .357 (lower) or .405 "
        "(upper). Harmful is decided token by token; the code takes each sequence's first advantage. clip_low and "
        "clip_high serve the areal variant only.",
    ),
    Recipe(
        name="gspo",
        description="PPO's clip on the sequence's geometric mean ratio.",
        formula="ppo(exp(mean_t log U), A), mean over sequences of token means",
        source="arXiv 2507.18071; verl, TRL, AReaL, slime, NeMo-RL",
        confidence="official code",
        parameters={**clip(3e-4, 4e-4), **anchor("U", "E")},
        compose=lambda h: Composition(
            surrogates.gspo(h.edge, h.clip_low, h.clip_high, limit=10.0), reduction="sequence-mean"
        ),
        note="The log of the ratio is clamped at 10 from above (verl), tighter than elsewhere.",
    ),
    Recipe(
        name="sapo",
        description="A sigmoid gate around ratio 1 in place of the clip.",
        formula="-(4/tau)·sigmoid(tau·(U-1))·A",
        source="arXiv 2511.20347; verl, TRL, AReaL, ms-swift",
        confidence="official code",
        parameters={
            "tau_positive": number(1.0, 0, open_low=True, finite=True),
            "tau_negative": number(1.05, 0, open_low=True, finite=True),
            **anchor("U", "E"),
        },
        compose=lambda h: Composition(
            surrogates.soft_gate(h.edge, h.tau_positive, h.tau_negative), reduction="sequence-mean"
        ),
        note="A = 0 takes tau_negative. AReaL takes the token mean.",
    ),
    Recipe(
        name="espo",
        description="PPO's clip on geometric mean ratios of segments of similar entropy, as wide as their entropy.",
        formula="ppo(exp(mean_seg log U), A; alpha·mean_seg H/log vocabulary), mean over segments, then sequences",
        source="arXiv 2512.00499",
        confidence="notes on the paper",
        parameters={
            "alpha": number(0.5, 0, finite=True),
            "vocabulary": integer(151_936, 2),
            "low_entropy": number(0.2, 0),
            "high_entropy": number(1.0, 0),
        },
        compose=lambda h: Composition(
            surrogates.entropy_segments(h.alpha, h.vocabulary, (h.low_entropy, h.high_entropy)),
            reduction="segment-mean",
        ),
        note="alpha and the entropy ranges are not stated in the sources: three ranges, split at low_entropy and "
        "high_entropy. Set vocabulary to the model's.",
    ),
)
