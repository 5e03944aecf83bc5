"""Corrections of the train-inference mismatch on the behavior edge, with PPO on the update edge."""

from __future__ import annotations

from estr.objectives import gates, surrogates, weights
from estr.objectives.composition import Composition, Recipe
from estr.objectives.hyperparameters import bound, flag, number
from estr.objectives.table.common import clip, dual_clip

RECIPES = (
    Recipe(
        name="icepop",
        description="Tokens whose q/μ leaves a band are dropped, the others weighted by it.",
        formula="1[low ≤ B ≤ high]·B·ppo(U, A)",
        source="arXiv 2510.18855; verl decoupled_token_icepop, AReaL, NeMo-RL, OpenRLHF",
        confidence="framework code",
        parameters={"low": bound(0.5), "high": bound(5.0), **clip(), **dual_clip(None)},
        compose=lambda h: Composition(
            gates=(gates.band("B", h.low, h.high),),
            weights=(weights.ratio("B"),),
            surrogate=surrogates.ppo("U", h.clip_low, h.clip_high, h.dual_clip),
        ),
        note="low=None or high=None gives the one-sided variants (slime and miles: low=0, high=2).",
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
            surrogate=surrogates.ppo("U", h.clip_low, h.clip_high, h.dual_clip),
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
        compose=lambda h: Composition(
            weights=(weights.ratio("B", h.cap),),
            surrogate=surrogates.ppo("U", h.clip_low, h.clip_high, h.dual_clip),
        ),
    ),
    Recipe(
        name="decoupled_ppo",
        description="Decoupled PPO: weight q/μ, clip on π/q.",
        formula="B·ppo(U, A)",
        source="arXiv 2110.00641, arXiv 2505.24298; AReaL ppo_actor_loss_fn",
        confidence="official code",
        parameters={"cap": bound(None), **clip(), **dual_clip(None)},
        compose=lambda h: Composition(
            weights=(weights.ratio("B", h.cap),),
            surrogate=surrogates.ppo("U", h.clip_low, h.clip_high, h.dual_clip),
        ),
        note="cap truncates the weight; without it the weight is unbounded.",
    ),
)
