"""Entropy control inside the loss."""

from __future__ import annotations

from types import SimpleNamespace

from estr.objectives import covariance, gates, surrogates
from estr.objectives.composition import Composition, Recipe
from estr.objectives.hyperparameters import choice, number
from estr.objectives.table.common import clip, dual_clip, ppo


def _erc(h: SimpleNamespace) -> Composition:
    slope = h.base == "gppo"
    surrogate = surrogates.ppo("U", h.clip_low, h.clip_high, h.dual_clip, slope)
    return Composition(gates=(gates.entropy_ratio(h.low, h.high),), surrogate=surrogate)


RECIPES = (
    Recipe(
        name="clip_cov",
        description="Drops a few random tokens of high covariance between advantage and log π.",
        formula="1[not drawn]·ppo(U, A)",
        source="arXiv 2505.22617; PRIME-RL/Entropy-Mechanism-of-RL, verl clip_cov",
        confidence="official code",
        parameters={"ratio": number(2e-4, 0, 1), "low": number(1.0), "high": number(5.0), **clip(1.0, 1.0)},
        compose=lambda h: Composition(
            gates=(covariance.clip_covariance(h.ratio, h.low, h.high, h.clip_low, h.clip_high),), surrogate=ppo("U", h)
        ),
        note="The bounds are exclusive, as in the code. The code draws within each micro-batch; with statistics the "
        "draw is over the optimizer batch.",
    ),
    Recipe(
        name="kl_cov",
        description="Penalizes |log π - log q| on the tokens of highest covariance between advantage and log π.",
        formula="-U·A + 1[top ratio of covariance]·coef·|log U|",
        source="arXiv 2505.22617; PRIME-RL/Entropy-Mechanism-of-RL, verl kl_cov",
        confidence="official code",
        parameters={"ratio": number(2e-3, 0, 1), "coef": number(1.0, 0, finite=True)},
        compose=lambda h: Composition(covariance.kl_covariance(h.ratio, h.coef)),
        note="2e-3 is the 7B setting, 2e-4 that of 32B. Tokens that tie at the threshold share the penalty.",
    ),
    Recipe(
        name="erc",
        description="Entropy-ratio clipping: no gradient where the entropy of π left a band around the old one.",
        formula="ppo(U, A), detached unless low < H/H_old < high",
        source="arXiv 2512.05591; Kwai-Klear/ERC",
        confidence="official code",
        parameters={
            "low": number(0.95, 0),
            "high": number(1.05, 0),
            "base": choice("grpo", "gppo"),
            **clip(0.2, 0.28),
            **dual_clip(10.0),
        },
        compose=_erc,
        note="low and high as in the scripts (.8 and 1.2 in the yaml). Dropped tokens keep their value in the sum.",
    ),
    Recipe(
        name="high_entropy",
        description="Trains only the rho tokens of highest entropy (80/20).",
        formula="1[H ≥ quantile(H, 1-rho)]·ppo(U, A)",
        source="arXiv 2506.01939; TRL top_entropy_quantile, ms-swift",
        confidence="framework code",
        parameters={"rho": number(0.2, 0, 1), **clip(0.2, 0.28)},
        compose=lambda h: Composition(gates=(gates.high_entropy(h.rho),), surrogate=ppo("U", h)),
        note="H is that of π. TRL takes the quantile over all ranks, ms-swift over the local batch.",
    ),
)
