"""What the K most likely tokens say about the entropy of a distribution: an interval that contains it.

Let p_1 ≥ … ≥ p_k be known and r = 1 − Σ p_i be the mass of all other tokens, none of which is more likely than p_k.
The entropy is least when that mass sits in as few tokens as possible (⌊r / p_k⌋ of them as likely as p_k, and one for
what is left) and greatest when it is spread evenly over all other tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

ROUNDING = 2e-6  # how far a sum of probabilities may be off that were computed in float32


def entropy_interval(topk_logprob: ArrayLike, vocabulary: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Lower and upper end [n] of the entropy in nats of n distributions, from their most likely tokens.

    ``topk_logprob``: [n, k] log-probabilities, most likely first, of the distribution itself: after temperature and
    every other transform; -inf where a token cannot be drawn. ``vocabulary``: how many tokens can be drawn at most.
    The interval is widened by what float32 can have rounded, less than 1e-4 nats; a row with NaN gives NaN.

    Raises:
        ValueError: the shape is not [n, k] with k at least 1, or a row is not sorted.
    """
    logprob = np.asarray(topk_logprob, np.float64)
    if logprob.ndim != 2 or logprob.shape[1] == 0:
        raise ValueError(f"topk_logprob must be [n, k] with k at least 1, got {list(logprob.shape)}")
    logprob = logprob[:, : max(1, vocabulary)]
    with np.errstate(invalid="ignore"):
        rising = logprob[:, 1:] > logprob[:, :-1] + ROUNDING  # false where one is NaN
    if rising.any():
        raise ValueError("topk_logprob must be sorted, the most likely token first")
    probability = np.exp(logprob)
    known = _surprise(probability).sum(1)
    rest, least = 1 - probability.sum(1), probability[:, -1]
    others = np.full(len(logprob), max(0, vocabulary - logprob.shape[1]))
    others[least == 0] = 0
    slack = ROUNDING * (2 + 2 * np.log(max(2, vocabulary)) - np.log(ROUNDING))
    low = known + _packed(np.clip(rest - ROUNDING, 0, None), least) - slack
    high = known + _spread(np.clip(rest + ROUNDING, 0, None), others) + slack
    return np.maximum(low, np.minimum(0.0, high)).astype(np.float32), high.astype(np.float32)


def _surprise(probability: Floats) -> Floats:
    """-p log p, 0 at p = 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(probability == 0, 0.0, -probability * np.log(probability))


def _packed(mass: Floats, most: Floats) -> Floats:
    """The least entropy that ``mass`` [n] adds, no token being likelier than ``most`` [n]."""
    full = np.floor(mass / np.where(most > 0, most, np.inf))
    return full * _surprise(most) + _surprise(np.clip(mass - full * most, 0, None))


def _spread(mass: Floats, tokens: NDArray[np.int64]) -> Floats:
    """The greatest entropy that ``mass`` [n] adds on so many ``tokens`` [n]."""
    return np.where(tokens > 0, tokens * _surprise(mass / np.maximum(tokens, 1)), 0.0)
