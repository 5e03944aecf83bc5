"""The attention implementation ``"estr"`` of transformers: packed training, slot decoding and plain causal rows.

Importing this module registers it; a model uses it after ``attn_implementation="estr"``. Three cases:

* ``cu_seq_lens_q`` and ``max_length_q`` are given (the keyword arguments of the library's flash attention): the row
  ``[1, T]`` holds several sequences end to end. They are laid out as ``[S, L]`` blocks of similar length for the
  attention only, so no sequence sees another and no ``[T, T]`` mask exists. A mask is ignored in this case.
* a four-dimensional mask ``[B, 1, Q, K]`` is given (bool, or float to be added): masked attention, grouped heads
  without copying keys and values.
* neither: causal attention; with fewer queries than keys the queries are the last positions.

Sliding windows, soft-capped scores and attention sinks are honored in all three. With a mask, a sliding window needs
the index of a key to be its position up to a constant per row, and the last allowed key of a query to be the query
itself, as in every causal cache without holes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from estr.errors import UsageError

NAME = "estr"
_QUERY_BLOCK = 256  # queries scored at once where a mask or a score matrix has to exist
_BUCKET_FILL = 0.7  # a sequence shorter than this share of a block's longest starts a new block


@dataclass(frozen=True)
class Score:
    """How scores become weights: scale, sliding window, soft cap, sink logits ``[H]``, dropout."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0

    @property
    def fused(self) -> bool:
        """Whether PyTorch's fused kernels compute it."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True)
class PackedLayout:
    """Where the T tokens of a packed row stand in blocks ``[count, length]`` of sequences of similar length.

    ``index`` ``[P]`` names the token each block position reads (padding repeats a token that is never read back) and
    ``inverse`` ``[T]`` the block position of each token; both are None where the blocks are the row itself. Where
    sequences share tokens, ``again`` holds the further places where a token is read: tokens ``[E]`` and their block
    positions ``[E]``.
    """

    blocks: tuple[tuple[int, int], ...]
    index: Tensor | None
    inverse: Tensor | None
    again: tuple[Tensor, Tensor] | None = None

    def sharing(self, read: Tensor, tokens: int) -> PackedLayout:
        """The layout where position v of the sequences end to end reads token ``read[v]`` of ``tokens``."""
        places = torch.arange(len(read), device=read.device)
        inverse = places if self.inverse is None else self.inverse
        first = torch.full((tokens,), len(read), device=read.device).scatter_reduce_(0, read, places, "amin")
        again = places[first[read] != places]
        index = read if self.index is None else read[self.index]
        return PackedLayout(self.blocks, index, inverse[first], (read[again], inverse[again]))


def packed_layout(cu_seqlens: Tensor) -> PackedLayout:
    """The layout of sequences whose boundaries are ``cu_seqlens`` ``[S + 1]``; deterministic, longest first."""
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    present = [i for i, length in enumerate(lengths) if length > 0]
    if present and all(lengths[i] == lengths[present[0]] for i in present):
        return PackedLayout(((len(present), lengths[present[0]]),), None, None)
    order = sorted(present, key=lambda i: -lengths[i])
    blocks: list[list[int]] = []
    for i in order:
        if not blocks or lengths[i] < _BUCKET_FILL * lengths[blocks[-1][0]]:
            blocks.append([])
        blocks[-1].append(i)
    return _index_blocks(blocks, bounds, lengths, cu_seqlens.device)


def _index_blocks(blocks: list[list[int]], bounds: list[int], lengths: list[int], device: torch.device) -> PackedLayout:
    index, inverse, offset = [], np.empty(bounds[-1], np.int64), 0
    for block in blocks:
        columns = np.arange(lengths[block[0]])
        for i in block:
            index.append(bounds[i] + np.minimum(columns, lengths[i] - 1))
            inverse[bounds[i] : bounds[i + 1]] = offset + columns[: lengths[i]]
            offset += len(columns)
    shape = tuple((len(block), lengths[block[0]]) for block in blocks)
    flat = np.concatenate(index) if index else np.empty(0, np.int64)
    return PackedLayout(shape, torch.from_numpy(flat).to(device), torch.from_numpy(inverse).to(device))


class _ToBlocks(torch.autograd.Function):
    """``x[index]`` whose gradient is read back at ``inverse`` and ``again``: padding has no gradient to add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, *again: Tensor) -> Tensor:
        ctx.save_for_backward(inverse, *again)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inverse, *again = ctx.saved_tensors
        total = grad.index_select(0, inverse)
        if again:
            tokens, places = again
            total.index_add_(0, tokens, grad.index_select(0, places))
        return total, *[None] * (2 + len(again))


class _FromBlocks(torch.autograd.Function):
    """``y[inverse]`` whose gradient is zero at padding positions."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.positions = y.shape[0]
        return y.index_select(0, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        spread = grad.new_zeros(ctx.positions, *grad.shape[1:])
        return spread.index_copy_(0, inverse, grad), None


def packed_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, score: Score) -> Tensor:
    """Causal attention inside each sequence of a packed row: ``[1, H, T, D]`` -> ``[1, T, H, D]``."""
    rows = [_to_blocks(x.transpose(1, 2)[0], layout) for x in (query, key, value)]
    sizes = [count * length for count, length in layout.blocks]
    parts = zip(layout.blocks, *(x.split(sizes) for x in rows), strict=True)
    outputs = []
    for (count, length), q, k, v in parts:
        q, k, v = (x.reshape(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        outputs.append(causal_attention(q, k, v, score).transpose(1, 2).flatten(0, 1))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (flat if layout.inverse is None else _FromBlocks.apply(flat, layout.inverse))[None]


def _to_blocks(x: Tensor, layout: PackedLayout) -> Tensor:
    if layout.index is None:
        return x
    return _ToBlocks.apply(x, layout.index, layout.inverse, *(layout.again or ()))


def causal_attention(query: Tensor, key: Tensor, value: Tensor, score: Score) -> Tensor:
    """Causal attention ``[B, H, Q, D]`` x ``[B, Hkv, K, D]`` -> ``[B, H, Q, D]``; queries are the last Q positions."""
    queries, keys = query.shape[2], key.shape[2]
    windowed = score.window is not None and score.window < keys
    if score.fused and not windowed and queries in (1, keys):
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=score.dropout, scale=score.scale, is_causal=queries > 1, enable_gqa=True
        )
    blocks = [
        _query_block(query, key, value, score, start, min(start + _QUERY_BLOCK, queries))
        for start in range(0, queries, _QUERY_BLOCK)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def _query_block(query: Tensor, key: Tensor, value: Tensor, score: Score, start: int, end: int) -> Tensor:
    """Queries ``start:end`` against the keys they may see, so that a window costs its width and not the row."""
    past = key.shape[2] - query.shape[2]
    first = 0 if score.window is None else max(0, past + start - score.window + 1)
    last = past + end
    positions = torch.arange(past + start, last, device=query.device)[:, None]
    columns = torch.arange(first, last, device=query.device)[None]
    allowed = columns <= positions
    if score.window is not None:
        allowed &= positions - columns < score.window
    return masked_attention(query[:, :, start:end], key[:, :, first:last], value[:, :, first:last], allowed, score)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, score: Score) -> Tensor:
    """Attention under ``mask`` (bool ``[Q, K]``, ``[B, 1, Q, K]`` or ``[B, H, Q, K]``, or float to be added)."""
    batch, heads, queries, width = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(batch, key.shape[1], groups * queries, width)
        mask = _group_mask(mask, key.shape[1], groups)
    if score.fused:
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=score.dropout, scale=score.scale
        )
    else:
        output = _scored_attention(query, key, value, mask, score)
    return output.reshape(batch, heads, queries, value.shape[-1])


def _group_mask(mask: Tensor, key_heads: int, groups: int) -> Tensor:
    """The mask of queries whose heads of one group stand below each other: ``[..., groups * Q, K]``."""
    if mask.ndim == 4 and mask.shape[1] > 1:
        return mask.reshape(mask.shape[0], key_heads, -1, mask.shape[-1])
    if mask.shape[-2] == 1:
        return mask
    return mask.repeat(*[1] * (mask.ndim - 2), groups, 1)


def _scored_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, score: Score) -> Tensor:
    """Explicit scores in float32, for soft caps and sinks that no fused kernel of PyTorch knows."""
    scale = query.shape[-1] ** -0.5 if score.scale is None else score.scale
    scores = query @ key.transpose(-1, -2) * scale
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if score.softcap is not None:
        scores = score.softcap * torch.tanh(scores / score.softcap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1) if score.sinks is None else _softmax_with_sinks(scores, score.sinks)
    return F.dropout(weights, score.dropout).to(value.dtype) @ value


def _softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Softmax of ``[B, Hkv, G * Q, K]`` where each head has one more logit, whose weight is thrown away."""
    per_head = sinks.to(scores.dtype).reshape(scores.shape[1], -1)
    rows = per_head.repeat_interleave(scores.shape[2] // per_head.shape[1], dim=1)[..., None]
    return (scores - torch.logaddexp(scores.logsumexp(-1, keepdim=True), rows)).exp()


def _windowed(mask: Tensor, window: int | None) -> Tensor:
    """``mask`` without the keys that lie ``window`` or more before the last allowed key of each query."""
    keys = mask.shape[-1]
    if window is None or window >= keys:
        return mask
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    columns = torch.arange(keys, device=mask.device)
    last = torch.where(allowed, columns, -1).amax(-1, keepdim=True)
    near = last - columns < window
    return mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, torch.finfo(mask.dtype).min)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    packed: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: ``[B, H, Q, D]`` -> (``[B, Q, H, D]``, None)."""
    if position_bias is not None or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UsageError(
            f"{type(module).__name__} wants attention that is not causal or has a position bias, which the attention "
            "implementation 'estr' does not compute; use a causal language model with rotary positions"
        )
    query, key = query.to(value.dtype), key.to(value.dtype)
    score = Score(scaling, sliding_window, softcap, s_aux, dropout)
    if cu_seq_lens_q is not None:
        return packed_attention(query, key, value, packed or packed_layout(cu_seq_lens_q), score), None
    if attention_mask is not None and attention_mask.shape[-1] == 1 < key.shape[2]:
        raise UsageError(f"{type(module).__name__} is not told where packed sequences begin; use another model")
    if attention_mask is None:
        output = causal_attention(query, key, value, score)
    else:
        output = masked_attention(query, key, value, _windowed(attention_mask, sliding_window), score)
    return output.transpose(1, 2).contiguous(), None


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **kwargs: Any
) -> Tensor | None:
    """The mask transformers builds for this implementation; None where :func:`attention_forward` needs none."""
    skip = allow_is_causal_skip and q_length == kv_length
    return sdpa_mask(batch_size, q_length, kv_length, allow_is_causal_skip=skip, **kwargs)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
