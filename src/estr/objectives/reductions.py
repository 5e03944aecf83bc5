"""From token losses to one number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from estr.errors import shown
from estr.objectives.context import Context, segment_sum


@dataclass(frozen=True)
class Denominator:
    """Counts of the whole optimizer batch: all action tokens and sequences, or those a gate left ("kept")."""

    mode: str
    tokens: int | Tensor
    sequences: int | Tensor
    kept_tokens: Tensor | None = None
    kept_sequences: Tensor | None = None

    def __post_init__(self) -> None:
        for name, count in (("token_count", self.tokens), ("sequence_count", self.sequences)):
            if isinstance(count, Tensor):  # as the learner counts on a device, without waiting for it
                continue
            if not isinstance(count, Real) or not 0 <= count < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, got {shown(count)}")

    def token_total(self, keep: Tensor) -> int | Tensor:
        if self.mode == "all":
            return at_least_one(self.tokens)
        return at_least_one(keep.sum() if self.kept_tokens is None else self.kept_tokens)

    def sequence_total(self, context: Context, keep: Tensor) -> int | Tensor:
        if self.mode == "all":
            return at_least_one(self.sequences)
        if self.kept_sequences is not None:
            return at_least_one(self.kept_sequences)
        return at_least_one((context.sequence_sum(keep.to(context.dtype)) > 0).sum())


def at_least_one(count: int | Tensor) -> int | Tensor:
    """A count that can be divided by."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def reduce(kind: str, context: Context, token_loss: Tensor, keep: Tensor, denominator: Denominator) -> Tensor:
    """The scalar loss.

    "token-mean": sum over tokens / tokens. "sequence-mean": mean over sequences of each one's token mean.
    "sequence-sum": mean over sequences of each one's token sum. "segment-mean": mean over sequences of the mean over
    its segments of each one's token mean.
    """
    if kind == "token-mean":
        return token_loss.sum() / denominator.token_total(keep)
    if kind == "sequence-mean":
        counted = context.lengths if denominator.mode == "all" else context.sequence_sum(keep.to(context.dtype))
        token_loss = token_loss / counted.clamp(min=1)[context.sequence]
    elif kind == "segment-mean":
        token_loss = token_loss * _segment_share(context, keep, denominator.mode)
    return token_loss.sum() / denominator.sequence_total(context, keep)


def _segment_share(context: Context, keep: Tensor, mode: str) -> Tensor:
    """1 / (tokens of the segment * segments of its sequence) for each token, [N]."""
    assert context.segment is not None
    counted = torch.ones_like(context.advantage) if mode == "all" else keep.to(context.dtype)
    sizes = segment_sum(counted, context.segment, context.sequences * context.kinds)
    present = (sizes > 0).to(context.dtype).view(context.sequences, context.kinds).sum(-1)
    return 1 / (sizes.clamp(min=1)[context.segment] * present.clamp(min=1)[context.sequence])
