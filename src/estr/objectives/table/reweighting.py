"""Score-function methods: the ratio is a detached weight on -A log π."""

from __future__ import annotations

from estr.objectives import gates, surrogates, topk, weights
from estr.objectives.composition import Composition, Recipe
from estr.objectives.hyperparameters import bound, choice, flag, integer, number
from estr.objectives.table.common import anchor, clip, ppo

RECIPES = (
    Recipe(
        name="cispo",
        description="Clips the weight instead of the update: no token ever loses its gradient.",
        formula="-clip(U, 1-clip_low, 1+clip_high)·A·log π",
        source="arXiv 2506.13585; verl, TRL, SkyRL, slime, NeMo-RL, ms-swift",
        confidence="official code",
        parameters={**clip(), **anchor("U", "E")},
        compose=lambda h: Composition(
            weights=(weights.clipped_ratio(h.edge, max(1 - h.clip_low, 0.0), 1 + h.clip_high),),
            surrogate=surrogates.policy_gradient(),
        ),
        note="clip_high is a distance from 1, as in verl; TRL and ms-swift name the cap itself: their epsilon_high=5 "
        "is clip_high=4 with clip_low=1.",
    ),
    Recipe(
        name="aipo",
        description="Policy gradient with weight min(π/μ, cap), no clip.",
        formula="-min(E, cap)·A·log π",
        source="LlamaRL, arXiv 2505.24034",
        confidence="from memory",
        parameters={"cap": bound(2.0)},
        compose=lambda h: Composition(weights=(weights.ratio("E", cap=h.cap),), surrogate=surrogates.policy_gradient()),
        note="The formula was not retrieved; caps between 2 and 10 are commonly quoted.",
    ),
    Recipe(
        name="topr",
        description="Tapered off-policy REINFORCE: weight 1 for good samples, min(ratio, 1) for bad ones.",
        formula="A>0: -A·log π; else -clip(E, 0, 1)·A·log π",
        source="arXiv 2503.14286 eq. 8; ROLL agentic_actor_pg_worker.py",
        confidence="official code",
        parameters={
            "scope": choice("token", "sequence"),
            "sign": choice("advantage", "reward"),
            "positive_weight": number(1.0, 0, finite=True),
            "negative_weight": number(1.0, 0, finite=True),
            **anchor("E", "U"),
        },
        compose=lambda h: Composition(
            weights=(weights.tapered(h.edge, h.scope, h.positive_weight, h.negative_weight, h.sign),),
            surrogate=surrogates.policy_gradient(),
        ),
        note="ROLL takes token ratios, the paper the trajectory's (scope=sequence). The sources look at the sign of "
        "the reward; sign=advantage needs no reward and agrees where rewards are 0 or 1.",
    ),
    Recipe(
        name="vespo",
        description="Weight W^k·exp(lambda(1-W)) of the whole sequence's ratio W.",
        formula="-W^k·exp(lambda(1-W))·A·log π, W = prod_t U",
        source="arXiv 2602.10693; FloyedShen/VESPO, TRL get_gamma_weights",
        confidence="official code",
        parameters={
            "k_positive": number(2.0, 0, finite=True),
            "lambda_positive": number(3.0, 0, finite=True),
            "k_negative": number(3.0, 0, finite=True),
            "lambda_negative": number(2.0, 0, finite=True),
            "token_cap": number(None, 0, open_low=True),
        },
        compose=lambda h: Composition(
            weights=(
                weights.gamma_kernel(h.k_positive, h.lambda_positive, h.k_negative, h.lambda_negative, h.token_cap),
            ),
            surrogate=surrogates.policy_gradient(),
        ),
        note="With token_cap the weights min(q/μ, token_cap) enter W, as the code does; it then needs q. A = 0 counts "
        "as positive. The code's docstring gives other defaults than the code.",
    ),
    Recipe(
        name="dppo_tv",
        description="Drops tokens whose probability moved too far outward; weight min(π/μ, cap).",
        formula="-1[outward |π-μ| ≤ low/high]·min(E, cap)·A·log π",
        source="arXiv 2602.04879; verl dppo_tv, sail-sg/Stable-RL, SkyRL, prime-rl",
        confidence="official code",
        parameters={"low": number(0.15, 0), "high": number(0.15, 0), "cap": bound(20.0)},
        compose=lambda h: Composition(
            gates=(gates.total_variation(h.low, h.high),),
            weights=(weights.ratio("E", cap=h.cap),),
            surrogate=surrogates.policy_gradient(),
        ),
        note="A = 0 takes the negative branch. Dropped tokens stay in the denominator.",
    ),
    Recipe(
        name="dppo_kl",
        description="Drops tokens whose binary KL grew too large and would grow further; weight min(π/μ, cap).",
        formula="-1[not (outward and D_B(μ,π) > delta)]·min(E, cap)·A·log π",
        source="arXiv 2602.04879; verl dppo_kl, sail-sg/Stable-RL, SkyRL",
        confidence="official code",
        parameters={"delta": number(0.05, 0), "cap": bound(20.0)},
        compose=lambda h: Composition(
            gates=(gates.outward_binary_kl(h.delta),),
            weights=(weights.ratio("E", cap=h.cap),),
            surrogate=surrogates.policy_gradient(),
        ),
    ),
    Recipe(
        name="pdm",
        description="Predictive divergence masks: drops a token when its update would raise an already large KL(μ||π).",
        formula="-1[not (KL_topK(μ||π) > delta and predicted to rise)]·min(E, cap)·A·log π",
        source="arXiv 2607.10848",
        confidence="notes on the paper",
        parameters={
            "delta": number(0.15, 0),
            "cap": bound(20.0),
            "tail": choice("aggregated", "uniform", "none"),
            "vocabulary": integer(0, 0),
        },
        compose=lambda h: Composition(
            gates=(topk.predictive_divergence(h.delta, h.tail, h.vocabulary),),
            weights=(weights.ratio("E", cap=h.cap),),
            surrogate=surrogates.policy_gradient(),
        ),
        note="How the tail outside the top-K enters is our derivation; the surrogate is DPPO's.",
    ),
    Recipe(
        name="score_centering",
        description="Policy gradient minus its expectation under the sampler, over the sampler's top-k tokens.",
        formula="-A·(w(E)·log π - sum_v sg(μ_v·w(π_v/μ_v) - alpha·π_v)·log π_v)",
        source="arXiv 2609.20807; torchtitan, miles, vime, verl PR 8010",
        confidence="framework code",
        parameters={
            "weight": choice("truncate", "none", "band"),
            "cap": number(2.0, 0, open_low=True),
            "low": number(0.5, 0),
            "high": number(5.0, 0),
        },
        compose=lambda h: Composition(topk.score_centered(h.weight, h.cap, h.low, h.high)),
        note="A sampled token outside the top-k keeps its own probabilities in the first term (our reading).",
    ),
    Recipe(
        name="trm",
        description="Trust region masking: drops the whole sequence when its largest token divergence exceeds delta.",
        formula="1[max_t k(B) ≤ delta]·ppo(U, A)",
        source="arXiv 2512.23075; verl PR 4544",
        confidence="notes on the paper",
        parameters={
            "delta": number(1.0, 0),
            "estimator": choice("k2", "k3"),
            "statistic": choice("max", "mean"),
            **anchor("B", "E"),
            **clip(),
        },
        compose=lambda h: Composition(
            gates=(gates.divergence(h.edge, h.estimator, h.statistic, -float("inf"), h.delta),), surrogate=ppo("U", h)
        ),
        denominator="kept",
        note="The paper's delta is not known to us. Divergences are estimated from the sampled token, as verl does.",
    ),
    Recipe(
        name="opsm",
        description="Off-policy sequence masking: drops negative-advantage sequences that drifted from μ.",
        formula="1[A ≥ 0 or mean_t(log μ - log π) ≤ delta]·ppo(U, A)",
        source="DeepSeek-V3.2, arXiv 2512.02556 eq. 9; TRL get_off_policy_mask, slime, miles",
        confidence="framework code",
        parameters={"delta": number(0.5, optional=True), **clip()},
        compose=lambda h: Composition(gates=(gates.negative_sequence(h.delta),), surrogate=ppo("U", h)),
        note="delta is none by default in TRL (.5 suggested), 1e-4 in slime and miles. ms-swift shrinks the "
        "denominator (denominator=kept).",
    ),
    Recipe(
        name="dar",
        description="Dual regularization: supervised learning weighted by exp(A/beta) and a pull to the reference.",
        formula="-min((ref/μ)^alpha·exp(A/beta), w_clip)·log π(y), mean over sequences y",
        source="arXiv 2602.11523",
        confidence="notes on the paper",
        parameters={
            "alpha": number(0.1, 0, 1),
            "beta": number(0.05, 0, open_low=True),
            "w_clip": number(20.0, 0, open_low=True),
            "adv_norm": flag(False),
        },
        compose=lambda h: Composition(
            weights=(weights.dual_regularized(h.alpha, h.beta, h.w_clip, h.adv_norm),),
            surrogate=surrogates.likelihood(),
            reduction="sequence-sum",
        ),
        note="With advantages of unit variance and beta=.05 most weights are w_clip or 0; clip/fraction shows it.",
    ),
)
