"""Plain policy gradient, PPO's clip, and trust regions on the direct edge."""

from __future__ import annotations

from estr.objectives import gates, surrogates
from estr.objectives.composition import Composition, Recipe
from estr.objectives.hyperparameters import choice, number
from estr.objectives.table.common import clip, dual_clip

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
        confidence="official code",
        parameters={**clip(), **dual_clip(None)},
        compose=lambda h: Composition(surrogates.ppo("E", h.clip_low, h.clip_high, h.dual_clip)),
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
            "eps": number(0.01, 0, open_low=True),
            **clip(0.2, 0.28),
            "undecided": choice("keep", "drop", "error"),
        },
        compose=lambda h: Composition(
            gates=(gates.entropy_scaled(h.tau, h.eps, h.undecided),),
            surrogate=surrogates.ppo("E", h.clip_low, h.clip_high),
        ),
        note="The formula is sure; tau and the clip are not stated in the sources at hand, sweep tau.",
    ),
)
