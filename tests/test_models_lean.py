"""The written-out forward pass of Llama-shaped decoders against the library's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from estr.engines.local import EngineSettings, LocalEngine
from estr.models.forward import base_model, prepare_model
from estr.models.lean import LeanDecoder

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
FAMILIES = [
    (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
    (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=None)),
    (
        LlamaForCausalLM,
        LlamaConfig(
            **SIZES,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ),
]


def lean_of(kind: type, config: object) -> LeanDecoder | None:
    torch.manual_seed(0)
    model = kind(config)
    prepare_model(model)
    return LeanDecoder.of(base_model(model).get_decoder(), 128)


def generate(kind: type, config: object, *, lean: bool) -> tuple[list[list[int]], np.ndarray]:
    torch.manual_seed(0)
    model = kind(config)
    engine = LocalEngine(model, EngineSettings(slots=4, parked=4, max_context=100, end_ids=(0, 1)))
    assert engine._model.lean is not None
    if not lean:
        engine._model.lean = None
    engine.set_weights(0, {name: p.detach() for name, p in model.named_parameters()})
    for i in range(9):
        engine.start(f"k{i}", list(range(3 + i, 6 + 3 * i)), seed=i, limit=20)
    tokens, logprobs = {}, {}
    while engine.busy:
        for turn in engine.step():
            segment = engine.release(turn.key)
            tokens[turn.key], logprobs[turn.key] = segment.tokens.tolist(), segment.logprob[segment.action]
    return [tokens[f"k{i}"] for i in range(9)], np.concatenate([logprobs[f"k{i}"] for i in range(9)])


@pytest.mark.parametrize(("kind", "config"), FAMILIES, ids=lambda x: getattr(x, "__name__", ""))
def test_the_lean_pass_generates_what_the_library_does(kind: type, config: object) -> None:
    lean, library = generate(kind, config, lean=True), generate(kind, config, lean=False)
    assert lean[0] == library[0]
    np.testing.assert_allclose(lean[1], library[1], atol=2e-5)


def test_unknown_parts_are_left_to_the_library() -> None:
    assert lean_of(GemmaForCausalLM, GemmaConfig(**SIZES, head_dim=16)) is None
    assert lean_of(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=8)) is None
    windowed = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert lean_of(Qwen2ForCausalLM, windowed) is None
    assert lean_of(Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, hidden_act="gelu")) is None
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    assert lean_of(LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=dynamic)) is None


def test_a_model_that_computes_something_else_is_left_to_the_library() -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
    prepare_model(model)
    model.model.layers[1].self_attn.scaling *= 2
    assert LeanDecoder.of(model.model, 128) is None


def test_a_wrapped_linear_is_left_to_the_library() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
    prepare_model(model)
    model.model.layers[0].mlp.up_proj.__class__ = Doubled
    assert LeanDecoder.of(model.model, 128) is None
