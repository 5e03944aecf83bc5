"""The attention implementation "estr" against the library's own, on tiny configurations of several architectures."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from estr.errors import UsageError
from estr.models import attention
from estr.models.forward import can_share_prompts, packed_hidden, prepare_model

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SMALL),
    "llama": lambda: LlamaConfig(**SMALL),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=5),
    "gemma2": lambda: Gemma2Config(
        **SMALL, sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=5.0, query_pre_attn_scalar=6
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SMALL, sliding_window=5, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=6
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SMALL,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=2,
        num_experts_per_tok=2,
    ),
}


def build(name: str, implementation: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def pair(name: str):
    """The same weights with the library's eager attention and with "estr"."""
    reference = build(name, "eager")
    model = build(name, "eager")
    model.load_state_dict(reference.state_dict())
    prepare_model(model)
    return reference, model


def rows(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 61, (n,), generator=generator) for n in lengths]


def bounds(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([0, *[len(p) for p in parts]]).cumsum(0)


@pytest.mark.parametrize("name", CONFIGS)
def test_plain_causal_rows_equal_eager(name: str) -> None:
    reference, model = pair(name)
    tokens = torch.stack(rows(13, 13))
    assert torch.allclose(model(tokens).logits, reference(tokens).logits, atol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_equal_separate_rows_with_gradient(name: str) -> None:
    reference, model = pair(name)
    parts = rows(13, 1, 7, 12, 3)
    weight = [torch.randn(len(p), 32, generator=torch.Generator().manual_seed(len(p))) for p in parts]
    hidden = packed_hidden(model, torch.cat(parts), bounds(parts))
    expected = [reference.get_decoder()(p[None]).last_hidden_state[0] for p in parts]
    assert torch.allclose(hidden, torch.cat(expected), atol=3e-5)
    (hidden * torch.cat(weight)).sum().backward()
    sum((e * w).sum() for e, w in zip(expected, weight, strict=True)).backward()
    for (key, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        if want.grad is not None:
            assert torch.allclose(got.grad, want.grad, rtol=1e-4, atol=1e-5 * float(want.grad.abs().max()) + 1e-6), key


@pytest.mark.parametrize("name", CONFIGS)
def test_left_padding_is_masked(name: str) -> None:
    reference, model = pair(name)
    tokens, mask = torch.stack(rows(9, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    got = model(tokens, attention_mask=mask, position_ids=positions).logits
    want = reference(tokens, attention_mask=mask, position_ids=positions).logits
    assert torch.allclose(got[mask.bool()], want[mask.bool()], atol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("additive", [False, True])
def test_slot_decoding_with_a_prepared_mask(name: str, additive: bool) -> None:
    """Keys of two slots of different length in a [2, 16] layout; the mask alone says what a query may see."""
    _, model = pair(name)
    full = torch.stack(rows(12, 12))
    want = model(full).logits
    cache = torch.tensor([12, 9])
    mask = torch.arange(12)[None, None, :] <= torch.arange(12)[None, :, None]
    mask = (mask & (torch.arange(12)[None, None] < cache[:, None, None]))[:, None]
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    got = model(full, attention_mask=mask).logits
    assert torch.allclose(got[0], want[0], atol=2e-5)
    assert torch.allclose(got[1, :9], want[1, :9], atol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_generation_with_a_cache_equals_eager(name: str) -> None:
    reference, model = pair(name)
    prompt = torch.stack(rows(7, 7))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(prompt)
    mask[1, :3] = 0
    got = model.generate(prompt, attention_mask=mask, **options)
    assert torch.equal(got, reference.generate(prompt, attention_mask=mask, **options))


def test_one_query_is_grouped_and_equals_repeated_heads() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 1, 8), torch.randn(3, 2, 11, 8), torch.randn(3, 2, 11, 8)
    mask = torch.rand(3, 1, 1, 11) < 0.6
    mask[..., 0] = True
    got = attention.masked_attention(q, k, v, mask, attention.Score())
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = (q @ k.transpose(2, 3) / 8**0.5).masked_fill(~mask, float("-inf"))
    assert torch.allclose(got, scores.softmax(-1) @ v, atol=1e-6)


def test_a_query_that_may_see_nothing_is_finite() -> None:
    q = k = v = torch.randn(1, 2, 3, 8)
    mask = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    for score in (attention.Score(), attention.Score(softcap=2.0)):
        assert torch.isfinite(attention.masked_attention(q, k, v, mask, score)).all()


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_query_blocks_equal_one_matrix(
    monkeypatch: pytest.MonkeyPatch, window: int | None, softcap: float | None
) -> None:
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 4)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 11, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    got = attention.causal_attention(q, k, v, attention.Score(window=window, softcap=softcap))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = q @ k.transpose(2, 3) / 8**0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    distance = torch.arange(11)[:, None] - torch.arange(11)
    allowed = (distance >= 0) & (distance < (window or 99))
    assert torch.allclose(got, scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_begin_that_is_read_once_equals_one_read_by_each_with_gradient(name: str) -> None:
    """Two prompts, of 6 and 3 tokens, with three and two continuations."""
    _, model = pair(name)
    first, second, *tails = rows(6, 3, 2, 9, 5, 4, 4)
    whole = [torch.cat([prompt, tail]) for prompt, tail in zip([first] * 3 + [second] * 2, tails, strict=True)]
    parts, places, begins = [first, second], [], (torch.arange(6), torch.arange(6, 9))
    for index, tail in enumerate(tails):
        begin = sum(map(len, parts))
        places.append(torch.cat([begins[index > 2], torch.arange(begin, begin + len(tail))]))
        parts.append(tail)
    read = torch.cat(places)
    apart = packed_hidden(model, torch.cat(whole), bounds(whole))
    weight = torch.randn(apart.shape, generator=torch.Generator().manual_seed(2))
    (apart * weight).sum().backward()
    wanted = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    together = packed_hidden(model, torch.cat(parts), bounds(whole), read=read)[read]
    (together * weight).sum().backward()
    assert torch.allclose(together, apart, atol=1e-4)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for key, p in model.named_parameters():
        if key in wanted:
            assert float((p.grad - wanted[key]).abs().max()) <= 1e-5 * largest
    assert can_share_prompts(model)


def test_layers_that_carry_positions_beside_attention_share_no_prompts() -> None:
    _, model = pair("llama")
    assert can_share_prompts(model)
    model.model.norm.register_forward_hook(lambda module, args, output: output + output.roll(1, 1))
    assert not can_share_prompts(model)


def test_packed_layout_bounds_padding_and_skips_empty_sequences() -> None:
    lengths = torch.tensor([100, 3, 0, 90, 4, 50])
    layout = attention.packed_layout(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
    assert layout.blocks == ((2, 100), (1, 50), (2, 4))
    assert layout.index is not None
    assert layout.inverse is not None
    assert torch.equal(layout.index[layout.inverse], torch.arange(247))
    assert attention.packed_layout(torch.tensor([0, 5, 10])).index is None
    assert attention.packed_layout(torch.tensor([0])).blocks == ()


def test_no_sequence_sees_another() -> None:
    _, model = pair("qwen3")
    first, second, other = rows(6, 8, 6)
    a = packed_hidden(model, torch.cat([first, second]), torch.tensor([0, 6, 14]))
    b = packed_hidden(model, torch.cat([other, second]), torch.tensor([0, 6, 14]))
    assert torch.allclose(a[6:], b[6:], atol=1e-6)
    assert not torch.allclose(a[:6], b[:6], atol=1e-2)


def test_bfloat16_autocast_and_float64() -> None:
    _, model = pair("qwen3")
    parts = rows(9, 5)
    exact = packed_hidden(model, torch.cat(parts), bounds(parts))
    low = packed_hidden(model, torch.cat(parts), bounds(parts), autocast=torch.bfloat16)
    assert low.dtype == torch.float32
    assert 0 < float((low - exact).detach().abs().max()) < 0.2 * float(exact.detach().abs().max())
    wide = packed_hidden(model.double(), torch.cat(parts), bounds(parts))
    assert wide.dtype == torch.float64
    assert torch.allclose(wide.float(), exact, atol=1e-4)


def test_layers_that_are_not_told_of_packed_boundaries_are_refused() -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(UsageError, match="not told where packed sequences begin"):
        attention.attention_forward(torch.nn.Identity(), q, q, q, torch.ones(1, 1, 1, 1, dtype=torch.bool))


def test_a_model_with_attention_code_of_its_own_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(UsageError, match="BloomForCausalLM has attention code of its own"):
        prepare_model(model)


def test_attention_that_is_not_causal_is_refused() -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(UsageError, match="not causal"):
        attention.attention_forward(torch.nn.Identity(), q, q, q, None, is_causal=False)
