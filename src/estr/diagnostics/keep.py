"""Which stored tokens a recipe's gate would keep, in plain numpy; all results are bool [N], invalid tokens False."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]

PROBABILITY_FLOOR = 1e-6
DEFAULTS: dict[str, dict[str, float]] = {
    "estr": {"tau": 1.0, "eps": 0.01},
    "icepop": {"low": 0.5, "high": 5.0},
    "kpop": {"phi": 2.0},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2},
}
"""Gates this module knows and the hyperparameters they read, with the recipes' defaults."""


def delta_score(delta: ArrayLike, entropy: ArrayLike, eps: float = 0.01) -> Floats:
    """S = δ² / (H + eps), float64 [N] (arXiv 2607.22186); H in nats."""
    return np.asarray(delta, np.float64) ** 2 / (np.asarray(entropy, np.float64) + eps)


def estr_keep(delta: ArrayLike, entropy: ArrayLike, tau: float = 1.0, eps: float = 0.01) -> Mask:
    """ESTR: keep where δ² / (H + eps) ≤ tau on the direct edge E = π/μ (arXiv 2607.22186)."""
    score = delta_score(delta, entropy, eps)
    return np.isfinite(score) & (score <= tau)


def icepop_keep(log_ratio: ArrayLike, low: float = 0.5, high: float = 5.0) -> Mask:
    """IcePop: keep where low ≤ q/μ ≤ high, ``log_ratio`` [N] = log q − log μ (arXiv 2510.18855)."""
    x = np.asarray(log_ratio, np.float64)
    return np.isfinite(x) & (x >= np.log(low)) & (x <= np.log(high))


def kpop_keep(logprob: ArrayLike, behavior_logprob: ArrayLike, phi: float = 2.0) -> Mask:
    """KPop: keep where the larger of the two binary KL divergences between q and μ is at most phi.

    Both arguments are log-probabilities [N] of the sampled token; probabilities are clamped to [1e-6, 1 − 1e-6].
    """
    a, b = np.asarray(logprob, np.float64), np.asarray(behavior_logprob, np.float64)
    valid = np.isfinite(a) & np.isfinite(b)
    p, r = (_probability(np.where(valid, x, 0.0)) for x in (a, b))
    return valid & (np.maximum(_binary_kl(p, r), _binary_kl(r, p)) <= phi)


def ppo_keep(
    delta: ArrayLike, advantage: ArrayLike | None = None, clip_low: float = 0.2, clip_high: float = 0.2
) -> Mask:
    """PPO clip: keep where the clip leaves a gradient.

    ``delta`` [N] is the log-ratio that is clipped and ``advantage`` [N] its advantage: a token is stopped where A > 0
    and E > 1 + clip_high, or A < 0 and E < 1 − clip_low. Without advantages: where E is inside both bounds.
    """
    x = np.asarray(delta, np.float64)
    with np.errstate(divide="ignore"):
        low, high = np.log(max(1.0 - clip_low, 0.0)), np.log1p(clip_high)
    if advantage is None:
        return np.isfinite(x) & (x >= low) & (x <= high)
    a = np.asarray(advantage, np.float64)
    return np.isfinite(x) & ~((a > 0) & (x > high)) & ~((a < 0) & (x < low))


def keep_masks(
    logprob: ArrayLike,
    behavior_logprob: ArrayLike,
    entropy: ArrayLike,
    proximal_logprob: ArrayLike | None = None,
    advantage: ArrayLike | None = None,
) -> dict[str, Mask]:
    """Masks of every gate in ``DEFAULTS`` at its defaults, recipe name → bool [N].

    ``logprob`` is log π as the learner saw it, ``behavior_logprob`` log μ, ``entropy`` H in nats. IcePop and KPop gate
    q/μ; where ``proximal_logprob`` (log q) is missing or NaN, log π stands in for it.
    """
    return {name: keep_mask(name, logprob, behavior_logprob, entropy, proximal_logprob, advantage) for name in DEFAULTS}


def keep_mask(
    recipe: str,
    logprob: ArrayLike,
    behavior_logprob: ArrayLike,
    entropy: ArrayLike,
    proximal_logprob: ArrayLike | None = None,
    advantage: ArrayLike | None = None,
    **hyperparameters: float,
) -> Mask:
    """The mask of one gate of ``DEFAULTS``; arguments as in ``keep_masks``. Raises ValueError for other recipes."""
    if recipe not in DEFAULTS:
        raise ValueError(f"no stored-token gate is known for recipe {recipe!r}; known are {', '.join(DEFAULTS)}")
    settings = {**DEFAULTS[recipe], **hyperparameters}
    pi, mu = np.asarray(logprob, np.float64), np.asarray(behavior_logprob, np.float64)
    delta = _difference(pi, mu)
    if recipe == "estr":
        return estr_keep(delta, entropy, **settings)
    if recipe == "grpo":
        return ppo_keep(delta, advantage, **settings)
    q = pi
    if proximal_logprob is not None:
        stored = np.asarray(proximal_logprob, np.float64)
        q = np.where(np.isnan(stored), pi, stored)
    if recipe == "icepop":
        return icepop_keep(_difference(q, mu), **settings)
    return kpop_keep(q, mu, **settings)


def _difference(a: Floats, b: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        return a - b


def _probability(logprob: Floats) -> Floats:
    return np.clip(np.exp(np.minimum(logprob, 0.0)), PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)


def _binary_kl(p: Floats, r: Floats) -> Floats:
    return p * np.log(p / r) + (1.0 - p) * (np.log1p(-p) - np.log1p(-r))
