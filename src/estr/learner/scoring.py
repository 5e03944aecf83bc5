"""Log-probability and entropy of action tokens under a model's current weights, with or without graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from estr.learner.packing import MicroBatch, pack, unpack
from estr.models.forward import head_of, packed_hidden
from estr.trajectory import Segment


def logprob_entropy(
    model: nn.Module, microbatch: MicroBatch, temperature: float, autocast: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """log π ``[N]`` of the action tokens and the entropy ``[N]`` of π in nats, float32, with graph.

    The head runs on the predicting positions alone. Both come from one distribution: that after ``temperature``.
    """
    hidden = packed_hidden(model, microbatch.tokens, microbatch.cu_seqlens, autocast)
    return head_of(model).logprob_entropy(hidden.index_select(0, microbatch.predict), microbatch.target, temperature)


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
