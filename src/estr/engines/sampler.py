"""Token, log μ and H from one distribution, computed once, in float32."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LEAST = -1e4  # nats; even a log-probability of -inf has to be multiplied by its probability, 0


class Sampled(NamedTuple):
    token: Tensor  # int64 [n]
    logprob: Tensor  # float32 [n], log μ of the token
    entropy: Tensor  # float32 [n], H of μ in nats, over exactly its support
    support: tuple[Tensor, Tensor] | None = None  # ids int32 [M] and their number by row int64 [n], 0: all of them
    topk: tuple[Tensor, Tensor] | None = None  # ids int32 [n, K] and log μ float32 [n, K], most likely first


def sample(logits: Tensor, temperature: float, uniform: Tensor) -> Sampled:
    """Sample one token a row by inverting the cumulative distribution.

    ``logits``: float32 [n, V] before temperature; ``uniform``: float64 [n] in [0, 1), one number a row, so that a row's
    token depends on its own random stream and not on its neighbours. At ``temperature`` 0 the most likely token is
    taken; μ is then a point mass: log μ = 0, H = 0. Logits are scaled, then normalized, and H is that of the same
    distribution. A token of probability 0 is never drawn.
    """
    if temperature == 0:
        token = logits.argmax(-1)
        zero = torch.zeros(len(token), dtype=torch.float32, device=token.device)
        return Sampled(token, zero, zero.clone())
    logprob = torch.log_softmax(logits.float() / temperature, dim=-1)
    probability = logprob.exp()
    token = invert(probability, uniform)
    picked = logprob.gather(-1, token[:, None])[:, 0]
    return Sampled(token, picked, entropy_of(probability, logprob))


def entropy_of(probability: Tensor, logprob: Tensor) -> Tensor:
    """Entropy [n] in nats of distributions [n, V]; what has probability 0 adds nothing."""
    return -torch.linalg.vecdot(probability, logprob.clamp(min=_LEAST))


def invert(probability: Tensor, uniform: Tensor) -> Tensor:
    """The token [n] at which the cumulative sum of ``probability`` [n, V] passes ``uniform`` [n] of its total."""
    cumulative = probability.double().cumsum(-1)
    threshold = uniform * cumulative[:, -1]
    last = probability.shape[-1] - 1
    return torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0].clamp_(max=last)


def uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """``count`` numbers in [0, 1) that depend on ``seed`` alone (Philox, counter-based)."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)
