"""Log-probability and entropy of action tokens under a model's current weights, with or without graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from estr.learner.packing import MicroBatch, Unit, pack, unpack
from estr.learner.policy import Policy
from estr.models.head import HeadValues
from estr.trajectory import Segment


def logprob_entropy(
    model: nn.Module, microbatch: MicroBatch, temperature: float, autocast: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """log π ``[N]`` of the action tokens and the entropy ``[N]`` of π in nats, float32, with graph.

    The head runs on the predicting positions alone. Both come from one distribution: that after ``temperature``,
    restricted to the support the token was drawn from, where that is recorded.
    """
    found = values(model, microbatch, temperature, autocast)
    return found.logprob, found.entropy


def values(
    model: nn.Module,
    microbatch: MicroBatch,
    temperature: float,
    autocast: torch.dtype | None = None,
    topk: bool = False,
) -> HeadValues:
    """What :func:`logprob_entropy` gives, and with ``topk`` log π ``[N, K]`` of the sampler's most likely tokens."""
    return Policy(model, temperature, autocast)(microbatch, topk)


def score(
    model: nn.Module,
    segments: Sequence[Segment],
    temperature: float = 1.0,
    tokens_per_microbatch: int = 8192,
    autocast: torch.dtype | None = None,
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """(log-probability, entropy) of each segment's action tokens in order, float32 arrays, without graph."""
    units = [[segment] for segment in segments]
    microbatches = pack(units, tokens_per_microbatch)
    scored = list(score_microbatches(model, microbatches, temperature, autocast))
    logprob, entropy = unpack(units, microbatches, [a for a, _ in scored], [b for _, b in scored])
    return [(a[0], b[0]) for a, b in zip(logprob, entropy, strict=True)]


@torch.no_grad()
def score_microbatches(
    model: nn.Module, microbatches: Sequence[MicroBatch], temperature: float, autocast: torch.dtype | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """(log-probability ``[N]``, entropy ``[N]``) of each micro-batch, without graph."""
    device = next(model.parameters()).device
    for microbatch in microbatches:
        yield logprob_entropy(model, microbatch.to(device), temperature, autocast)


def score_norms(
    model: nn.Module, units: Sequence[Unit], temperature: float, autocast: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Norm of each unit's score ∇ log π, float64 ``[S]``, and log π of all action tokens in order, float32 ``[N]``.

    One backward pass per unit; the gradients stored in the parameters are left alone.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms, logprobs = [], []
    for unit in units:
        norm = 0.0
        for microbatch in pack([unit], sum(len(row.tokens) for row in unit)):
            logprob, _ = logprob_entropy(model, microbatch.to(parameters[0].device), temperature, autocast)
            gradients = torch.autograd.grad(logprob.sum(), parameters, allow_unused=True)
            norm = float(torch.nn.utils.get_total_norm([g for g in gradients if g is not None]))
            logprobs.append(logprob.detach().cpu())
        norms.append(norm)
    return torch.tensor(norms, dtype=torch.float64), torch.cat([*logprobs, torch.zeros(0)])
