"""One forward pass of the engine's model over its cache: the lean one where the model is known, else the library's."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from estr.engines.cache import SlotCache
from estr.models.forward import base_model, head_of, prepare_model
from estr.models.head import Head
from estr.models.lean import LeanDecoder


class EngineModel:
    """Decoder and head of a causal LM, and what the engine asks of them."""

    def __init__(self, model: nn.Module, *, dtype: str, max_context: int) -> None:
        prepare_model(model)
        base = base_model(model)
        self.layers: int = base.config.get_text_config().num_hidden_layers
        self.head: Head = head_of(model)
        self._decoder: Any = base.get_decoder()
        self._cache_name = _cache_name(self._decoder)
        self.lean = None if dtype == "bfloat16" else LeanDecoder.of(self._decoder, max_context)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def __call__(
        self, cache: SlotCache, rows: Tensor | int, tokens: Tensor, positions: Tensor, real: Tensor | None, width: int
    ) -> Tensor:
        """Hidden states [n, Q, D] of ``tokens`` at ``positions`` of ``rows``; padding queries (``real`` False) attend
        to column 0 and write to scratch. ``width``: columns that attention reads."""
        cache.target(rows, positions, width)
        reach = positions if real is None else torch.where(real, positions, 0)
        hidden_keys = torch.arange(width, device=tokens.device) > reach[:, :, None]
        mask = torch.zeros(hidden_keys.shape, dtype=self.head.weight.dtype, device=tokens.device)
        mask = mask.masked_fill_(hidden_keys, float("-inf"))[:, None]
        if self.lean is not None:
            return self.lean(tokens, reach, mask, cache)
        given = {self._cache_name: cache}
        output = self._decoder(input_ids=tokens, position_ids=reach, attention_mask=mask, use_cache=True, **given)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def logits_of(self, tokens: Tensor) -> Tensor:
        """Logits [len - 1, V] that predict ``tokens[1:]``, computed without the cache."""
        positions = torch.arange(len(tokens), device=tokens.device)[None]
        output = self._decoder(input_ids=tokens[None], position_ids=positions, use_cache=False)
        return self.head.logits(output.last_hidden_state[0, :-1])


def _cache_name(decoder: nn.Module) -> str:
    """What the library calls the argument: before transformers 5.20 it had another name."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"
