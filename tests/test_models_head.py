"""The fused head: closed-form values, gradients, faults of the temperature and entropy kind, and its memory bound."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig, Qwen3Config

from estr.advantages import polarity_correction
from estr.errors import UsageError
from estr.models.forward import base_model, check_head, head_of, packed_hidden, prepare_model
from estr.models.head import Head, linear_logprob_entropy, linear_polarity


def of_logits(logits, target, **options):
    """The head applied to given logits: hidden rows are unit vectors, the weight holds the logits."""
    logits = torch.tensor(logits)
    return linear_logprob_entropy(torch.eye(len(logits)), logits.t().contiguous(), torch.tensor(target), **options)


def plain(hidden, weight, target, bias=None, temperature=1.0, scale=1.0, softcap=None):
    logits = hidden @ weight.t()
    logits = (logits if bias is None else logits + bias) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


VARIANTS = [
    {},
    {"temperature": 0.6},
    {"bias": True},
    {"scale": 0.25, "temperature": 1.3},
    {"softcap": 2.0},
    {"softcap": 1.5, "scale": 0.7, "temperature": 0.5, "bias": True},
]


def problem(rows=23, width=6, vocabulary=11, bias=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype).requires_grad_()
    target = torch.randint(0, vocabulary, (rows,), generator=generator)
    offset = torch.randn(vocabulary, generator=generator, dtype=dtype).requires_grad_() if bias else None
    return hidden, weight, target, offset


def test_closed_form() -> None:
    logprob, entropy = of_logits([[0.0, 0.0, 0.0, 0.0], [math.log(3.0), 0.0, -1e4, -1e4]], [2, 0])
    assert logprob.tolist() == pytest.approx([-math.log(4), math.log(0.75)], abs=1e-6)
    assert entropy.tolist() == pytest.approx([math.log(4), 0.5623351], abs=1e-6)


def test_fault_A1_logits_are_scaled_before_they_are_normalized() -> None:
    logprob, _ = of_logits([[2.0, 0.0]], [0], temperature=0.5)
    assert float(logprob) == pytest.approx(-0.01815, abs=1e-5)


def test_fault_A10_entropy_and_logprob_belong_to_one_position() -> None:
    """Four positions of known entropy; the actions at 2 and 3 are predicted by positions 1 and 2."""
    spread = [[0.0, -x, -x, -x] for x in (9.0, 3.0, 1.0, 0.0)]
    _, entropy = of_logits(spread, [0, 0, 0, 0])
    predict = torch.tensor([2, 3]) - 1
    logprob, chosen = of_logits([spread[int(i)] for i in predict], [0, 1])
    assert torch.equal(chosen, entropy[predict])
    z = math.log(1 + 3 * math.exp(-1.0))
    assert logprob.tolist() == pytest.approx([-math.log(1 + 3 * math.exp(-3.0)), -1.0 - z], abs=1e-6)


def test_fault_A13_entropy_is_of_the_whole_distribution() -> None:
    _, entropy = of_logits([[math.log(0.9), math.log(0.1)]], [1])
    assert float(entropy) == pytest.approx(0.325, abs=5e-4)
    _, uniform = of_logits([[0.0] * 1000], [7])
    assert float(uniform) == pytest.approx(6.908, abs=5e-4)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 0.365), (0.5, 0.090), (2.0, 0.582)])
def test_fault_A15_entropy_is_after_temperature(temperature: float, expected: float) -> None:
    _, entropy = of_logits([[2.0, 0.0]], [0], temperature=temperature)
    assert float(entropy) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_values_and_gradients_equal_the_plain_path(options: dict, chunk: int) -> None:
    options = dict(options)
    hidden, weight, target, bias = problem(bias=options.pop("bias", False))
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    coefficients = torch.randn(2, len(target), generator=torch.Generator().manual_seed(5))
    got = linear_logprob_entropy(hidden, weight, target, bias=bias, chunk=chunk, **options)
    want = plain(hidden, weight, target, bias=bias, **options)
    for g, w in zip(got, want, strict=True):
        assert torch.allclose(g, w, atol=2e-6)
    for part in (slice(0, 1), slice(1, 2), slice(0, 2)):
        loss = sum((c * x).sum() for c, x in zip(coefficients[part], got[part], strict=True))
        other = sum((c * x).sum() for c, x in zip(coefficients[part], want[part], strict=True))
        for a, b in zip(
            torch.autograd.grad(loss, leaves, retain_graph=True),
            torch.autograd.grad(other, leaves, retain_graph=True),
            strict=True,
        ):
            assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())


@pytest.mark.parametrize("options", VARIANTS)
def test_gradcheck_in_float64(options: dict) -> None:
    options = dict(options)
    hidden, weight, target, bias = problem(5, 3, 4, options.pop("bias", False), torch.float64)
    leaves = [x for x in (hidden, weight, bias) if x is not None]

    def function(*values):
        return linear_logprob_entropy(values[0], values[1], target, bias=(*values, None)[2], chunk=2, **options)

    assert torch.autograd.gradcheck(function, leaves)


def test_float32_under_autocast_and_with_bfloat16_weights() -> None:
    hidden, weight, target, _ = problem(40, 16, 50)
    exact = linear_logprob_entropy(hidden, weight, target)
    with torch.autocast("cpu", torch.bfloat16):
        cast = linear_logprob_entropy(hidden, weight, target)
    assert all(torch.equal(a, b) for a, b in zip(exact, cast, strict=True))
    low_hidden, low_weight = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()
    logprob, entropy = linear_logprob_entropy(low_hidden, low_weight, target)
    assert logprob.dtype == entropy.dtype == torch.float32
    (logprob.sum() + entropy.sum()).backward()
    assert low_hidden.grad.dtype == low_weight.grad.dtype == torch.bfloat16
    expected = plain(low_hidden.detach().float(), low_weight.detach().float(), target)
    assert torch.allclose(logprob, expected[0], atol=1e-5)


def test_nearly_certain_and_far_logits_stay_finite() -> None:
    logprob, entropy = of_logits([[1e4, -1e4, 0.0], [3e38, 0.0, -3e38]], [1, 0])
    assert logprob.tolist() == [-2e4, 0.0]
    assert entropy.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_polarity_equals_the_whole_distribution(temperature: float) -> None:
    hidden, weight, _, bias = problem(bias=True)
    head = Head(weight, bias, scale=0.5, softcap=3.0)
    log_p = (3.0 * torch.tanh((hidden @ weight.t() + bias) * 0.5 / 3.0) / temperature).log_softmax(-1)
    expected = polarity_correction(log_p)
    assert torch.allclose(linear_polarity(hidden, head, temperature, chunk=7), expected, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(out)[0]:
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.mark.parametrize("grad", [False, True])
def test_no_tensor_of_tokens_times_vocabulary_exists(grad: bool) -> None:
    rows, width, vocabulary, chunk = 512, 8, 1000, 16
    hidden, weight, target, _ = problem(rows, width, vocabulary)
    with LargestTensor() as largest, torch.set_grad_enabled(grad):
        logprob, entropy = linear_logprob_entropy(hidden, weight, target, chunk=chunk)
        if grad:
            (logprob.sum() + entropy.sum()).backward()
    assert chunk * vocabulary <= largest.elements <= 2 * chunk * vocabulary


def test_the_default_chunk_bounds_the_logits() -> None:
    rows, vocabulary = 4096, 2048
    hidden, weight, target, _ = problem(rows, 2, vocabulary)
    with LargestTensor() as largest:
        linear_logprob_entropy(hidden, weight, target)
    assert largest.elements <= 2**22 < rows * vocabulary


def test_no_rows_give_a_graph_and_zero_gradients() -> None:
    hidden, weight, target, _ = problem(0)
    logprob, entropy = linear_logprob_entropy(hidden, weight, target)
    (logprob.sum() + entropy.sum()).backward()
    assert float(weight.grad.abs().sum()) == 0
    assert hidden.grad.shape == (0, 6)


def test_a_dropped_token_has_no_gradient_even_where_it_overflows() -> None:
    hidden, weight, target, _ = problem()
    broken = hidden.detach().clone()
    broken[3] = torch.nan
    broken.requires_grad_()
    logprob, entropy = linear_logprob_entropy(broken, weight, target, chunk=7)
    assert torch.isnan(logprob[3])
    zero = torch.zeros(())
    keep = torch.arange(len(target)) != 3
    (torch.where(keep, logprob, zero).sum() + torch.where(keep, entropy, zero).sum()).backward()
    got = weight.grad.clone()
    weight.grad = None
    others = linear_logprob_entropy(hidden[keep], weight, target[keep])
    (others[0].sum() + others[1].sum()).backward()
    assert torch.allclose(got, weight.grad, atol=1e-5)
    assert float(broken.grad[3].abs().sum()) == 0


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, target, _ = problem()
    linear_logprob_entropy(hidden, weight.detach(), target)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_wrong_shapes_and_temperature_are_refused() -> None:
    hidden, weight, target, _ = problem()
    with pytest.raises(ValueError, match="target"):
        linear_logprob_entropy(hidden, weight, target[:, None])
    with pytest.raises(ValueError, match="temperature"):
        linear_logprob_entropy(hidden, weight, target, temperature=0.0)


SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=False),
    "gemma2": lambda: Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=3.0),
    "cohere": lambda: CohereConfig(**SMALL, logit_scale=0.25),
    "granite": lambda: GraniteConfig(**SMALL, logits_scaling=4.0),
}


def build(name: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    prepare_model(model)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_head_of_agrees_with_the_models_logits(name: str) -> None:
    model = build(name)
    check_head(model)
    tokens = torch.arange(3, 20)
    hidden = packed_hidden(model, tokens, torch.tensor([0, 17]))
    logprob, entropy = head_of(model).logprob_entropy(hidden[:-1], tokens[1:], temperature=0.8)
    log_p = (model(tokens[None]).logits[0, :-1] / 0.8).log_softmax(-1)
    assert torch.allclose(logprob, log_p.gather(1, tokens[1:, None])[:, 0], atol=1e-4)
    assert torch.allclose(entropy, -(log_p.exp() * log_p).sum(-1), atol=1e-4)
    assert torch.allclose(head_of(model).logits(hidden), model(tokens[None]).logits[0], atol=1e-4)


def test_a_head_that_does_something_unknown_is_refused() -> None:
    model = build("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.5)
    with pytest.raises(UsageError, match="cannot be trained here: its logits"):
        check_head(model)


def test_layers_that_mix_packed_sequences_are_refused() -> None:
    model = build("llama")

    def leak(module, args, output):
        return output + output.cumsum(1)

    model.get_decoder().norm.register_forward_hook(leak)
    with pytest.raises(UsageError, match="one packed sequence see another"):
        check_head(model)


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    tokens, bounds = torch.arange(3, 23), torch.tensor([0, 11, 20])
    gradients = []
    for checkpointing in (False, True):
        model = build("qwen3")
        prepare_model(model, gradient_checkpointing=checkpointing)
        layer = base_model(model).model.layers[0]
        assert layer.training is checkpointing
        assert not layer.self_attn.training
        calls = []
        layer.input_layernorm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        hidden = packed_hidden(model, tokens, bounds)
        head_of(model).logprob_entropy(hidden[:-1], tokens[1:])[0].sum().backward()
        assert len(calls) == 1 + checkpointing
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))
