"""The metrics every recipe reports, and how those of micro-batches are put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from estr.objectives.context import CLAMP, Context

NAMES = (
    "loss",
    "mismatch/kl",
    "mismatch/ratio_deviation",
    "mismatch/delta_abs",
    "gate/masked_fraction",
    "gate/undecided_fraction",
    "clip/fraction",
    "tokens/action",
    "tokens/invalid",
)
SUMS = ("loss", "tokens/action", "tokens/invalid")
VALID_MEANS = ("mismatch/kl", "mismatch/ratio_deviation", "mismatch/delta_abs")


@torch.no_grad()
def measure(context: Context, keep: Tensor, loss: Tensor) -> Tensor:
    """The values of ``NAMES`` in order, float64, on the batch's device (no transfer to the host).

    ``mismatch/*`` are means over valid tokens of δ = log π - log μ: k3 estimate of KL(μ||π), |E - 1|, |δ|.
    ``gate/masked_fraction`` is the share of action tokens with ``keep`` False, ``clip/fraction`` the share that is kept
    and on which a clip was binding, ``gate/undecided_fraction`` the share without a certain verdict.
    """
    delta = context.delta("E")
    bounded = delta.clamp(-CLAMP, CLAMP)
    change = bounded.expm1()
    deviation = change.abs().sum()
    invalid = context.tokens - context.valid.sum()
    zero = delta.new_zeros(())
    sums = (
        loss.detach(),
        change.sub_(bounded).sum(),
        deviation,
        delta.abs().sum(),
        context.tokens - keep.sum(),
        zero if context.undecided is None else context.undecided.sum(),
        zero if context.clipped is None else (context.clipped & keep).sum(),
        zero + context.tokens,
        invalid,
    )
    values = torch.stack([value.to(torch.float64) for value in sums])
    values[1:4] /= (context.tokens - invalid).clamp(min=1)
    values[4:7] /= max(context.tokens, 1)
    return values.nan_to_num()


def merge_metrics(parts: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Metrics of a whole optimizer batch from those of its micro-batches, each given with its number of action tokens.

    ``loss`` and counts (``tokens/*``) are added; ``mismatch/*`` are weighted by valid tokens, everything else by action
    tokens. Adding losses is right where every call got the whole batch's ``token_count`` and ``sequence_count``.
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics, _ in parts for name in metrics):
        weighted = [(metrics[name], _tokens(name, metrics, tokens)) for metrics, tokens in parts if name in metrics]
        if name in SUMS:
            merged[name] = sum(value for value, _ in weighted)
        else:
            merged[name] = sum(value * weight for value, weight in weighted) / max(sum(w for _, w in weighted), 1)
    return merged


def _tokens(name: str, metrics: Mapping[str, float], tokens: int) -> float:
    return tokens - metrics.get("tokens/invalid", 0) if name in VALID_MEANS else tokens
