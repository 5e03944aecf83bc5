"""The forward pass of Llama-shaped decoders over a slot cache, without the library's module calls.

A decode step of a small model is mostly overhead: a few hundred module calls around microseconds of arithmetic. For
the families below the same arithmetic is written out once, over the model's own parameters. :meth:`LeanDecoder.of`
compares it with the library's forward pass and gives None where they do not agree, or where a model has anything that
is not known here; the library's own code is used then.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from estr.models.attention import Score, masked_attention

FAMILIES = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}
_STATIC_ROPE = {"default", "linear", "llama3"}  # angles that do not depend on how long the sequence is
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PROBE = 7  # tokens of the comparison with the library


class KeyValues(Protocol):
    """What attention needs of a cache: write a layer's new keys and values, read those of the rows of this pass."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]: ...


Linear = tuple[nn.Parameter, nn.Parameter | None]
"""Weight and bias."""


@dataclass(frozen=True)
class _Layer:
    """The parameters of one layer; the objects stay, what they hold is exchanged with every version."""

    norm: nn.Parameter
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None
    mlp_norm: nn.Parameter
    gate: Linear
    up: Linear
    down: Linear


class LeanDecoder:
    """Hidden states of tokens at given positions, over keys and values that a cache keeps; float32 weights."""

    def __init__(self, decoder: nn.Module, length: int) -> None:
        config: Any = decoder.config
        self._embedding: nn.Embedding = decoder.embed_tokens  # type: ignore[assignment]
        self._norm: nn.Parameter = decoder.norm.weight  # type: ignore[union-attr, assignment]
        self._eps: float = config.rms_norm_eps
        self._width: int = decoder.layers[0].self_attn.head_dim  # type: ignore[index, union-attr]
        self._score = Score(scale=self._width**-0.5)
        self._layers = [_layer_of(layer) for layer in decoder.layers]  # type: ignore[union-attr]
        self._cos, self._sin = _angles(decoder, length)

    @classmethod
    def of(cls, decoder: nn.Module, length: int) -> LeanDecoder | None:
        """The lean form of a transformers decoder for rows of up to ``length`` tokens, or None where its own forward
        pass has to be used."""
        if not _is_known(decoder):
            return None
        lean = cls(decoder, max(length, _PROBE))
        return lean if lean._agrees_with(decoder) else None

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: KeyValues) -> Tensor:
        """``tokens``, ``positions`` int64 [n, Q]; ``mask`` float [n, 1, Q, K], added to scores; hidden [n, Q, D]."""
        rows, queries = tokens.shape
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]  # [n, 1, Q, head_dim]
        x = self._embedding(tokens)
        for index, layer in enumerate(self._layers):
            h = self._normed(x, layer.norm)
            q = self._turned(self._heads(F.linear(h, *layer.q), layer.q_norm), cos, sin)
            k = self._turned(self._heads(F.linear(h, *layer.k), layer.k_norm), cos, sin)
            keys, values = cache.update(k, self._heads(F.linear(h, *layer.v), None), index)
            mixed = masked_attention(q, keys, values, mask, self._score)
            x = F.linear(mixed.transpose(1, 2).reshape(rows, queries, -1), *layer.o).add_(x)
            h = self._normed(x, layer.mlp_norm)
            gated = F.silu(F.linear(h, *layer.gate), inplace=True).mul_(F.linear(h, *layer.up))
            x = F.linear(gated, *layer.down).add_(x)
        return self._normed(x, self._norm)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def _heads(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """[n, Q, H · head_dim] → [n, H, Q, head_dim], normalized where the family does that."""
        heads = x.view(*x.shape[:2], -1, self._width)
        return (heads if norm is None else self._normed(heads, norm)).transpose(1, 2)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary positions; ``sin`` has the sign of the half that is moved."""
        return torch.addcmul(x * cos, x.roll(self._width // 2, -1), sin)

    @torch.no_grad()
    def _agrees_with(self, decoder: nn.Module) -> bool:
        device = self._norm.device
        vocabulary = self._embedding.weight.shape[0]
        tokens = (torch.arange(_PROBE, device=device) * 11 + 1)[None] % vocabulary
        positions = torch.arange(_PROBE, device=device)[None]
        mask = torch.full((_PROBE, _PROBE), float("-inf"), device=device).triu(1)[None, None]
        got = self(tokens, positions, mask, _NoCache())
        expected = decoder(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        return torch.allclose(got, expected, rtol=1e-4, atol=1e-4)


class _NoCache:
    """Keys and values of this pass alone."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def _is_known(decoder: nn.Module) -> bool:
    """Whether every part of the model is one that is written out here."""
    config: Any = getattr(decoder, "config", None)
    if type(decoder).__name__ not in FAMILIES or not type(decoder).__module__.startswith("transformers.models."):
        return False
    if any(parameter.dtype != torch.float32 for parameter in decoder.parameters()):
        return False
    if any(module._forward_hooks or module._forward_pre_hooks for module in decoder.modules()):
        return False
    linears = [m for name, m in decoder.named_modules() if name.rpartition(".")[2] in _LINEARS]
    if len(linears) != len(_LINEARS) * config.num_hidden_layers or any(type(m) is not nn.Linear for m in linears):
        return False
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    kinds = set(getattr(config, "layer_types", None) or {"full_attention"})
    windowed = getattr(config, "sliding_window", None) and type(decoder).__name__ == "MistralModel"
    return rope in _STATIC_ROPE and kinds == {"full_attention"} and config.hidden_act == "silu" and not windowed


def _layer_of(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return _Layer(
        norm=layer.input_layernorm.weight,
        q=_linear(attention.q_proj),
        k=_linear(attention.k_proj),
        v=_linear(attention.v_proj),
        o=_linear(attention.o_proj),
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


def _linear(module: nn.Linear) -> Linear:
    return module._parameters["weight"], module._parameters["bias"]  # type: ignore[return-value]


@torch.no_grad()
def _angles(decoder: nn.Module, length: int) -> tuple[Tensor, Tensor]:
    """cos and signed sin ``[length, head_dim]`` of every position, from the model's own rotary embedding."""
    embedding: Any = copy.copy(decoder.rotary_emb)
    like: Tensor = decoder.norm.weight  # type: ignore[union-attr, assignment]
    cos, sin = embedding(like[None, None], torch.arange(length, device=like.device)[None])
    half = cos.shape[-1] // 2
    return cos[0].contiguous(), torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
