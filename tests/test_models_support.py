"""The fused head on a support: values and gradients against a masked log-softmax, its memory bound, further ids."""

from __future__ import annotations

import math

import pytest
import torch

from estr.models.head import Head, linear_logprob_entropy, linear_polarity, linear_values
from estr.models.ragged import Ragged
from test_models_head import VARIANTS, LargestTensor, of_logits, problem

P = [math.log(x) for x in (0.5, 0.3, 0.15, 0.05)]


def ragged(*sets: list[int]) -> Ragged:
    return Ragged(torch.tensor([i for ids in sets for i in ids], dtype=torch.int64), offsets_of([len(s) for s in sets]))


def offsets_of(sizes: list[int]) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(sizes, dtype=torch.int64).cumsum(0)])


def random_support(target: torch.Tensor, vocabulary: int, seed: int = 0) -> Ragged:
    """A few ids around every target; every third row has the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for i, y in enumerate(target.tolist()):
        mask = torch.rand(vocabulary, generator=generator) < 0.4
        mask[y] = True
        sets.append([] if i % 3 == 2 else mask.nonzero()[:, 0].tolist())
    return ragged(*sets)


def plain(hidden, weight, target, support, others, bias=None, temperature=1.0, scale=1.0, softcap=None):
    """The same by a masked log-softmax of [N, V]; the gradient of what is masked is 0."""
    logits = hidden @ weight.t()
    logits = (logits if bias is None else logits + bias) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    outside = support.outside(torch.arange(len(target)), weight.shape[0])
    log_p = (logits / temperature).masked_fill(outside, -math.inf).log_softmax(-1)
    product = torch.where(outside, 0.0, log_p.exp() * torch.where(outside, 0.0, log_p))
    return log_p.gather(1, target[:, None])[:, 0], -product.sum(-1), log_p.gather(1, others)


def test_fault_A3_the_head_normalizes_over_the_kept_tokens() -> None:
    """p = [.5, .3, .15, .05], two kept: log π = log .625, H = .662; a row without a set has the whole vocabulary."""
    logprob, entropy = of_logits([P] * 4, [0, 1, 0, 3], support=ragged([0, 1], [1, 0], [], [3]))
    assert logprob.tolist() == pytest.approx([math.log(0.625), math.log(0.375), math.log(0.5), 0.0], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.6616, 0.6616, 1.1421, 0.0], abs=1e-4)


def test_a_target_outside_its_support_is_impossible() -> None:
    logprob, _ = of_logits([P], [2], support=ragged([0, 1]))
    assert logprob.tolist() == [-math.inf]


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_values_and_gradients_equal_a_masked_log_softmax(options: dict, chunk: int) -> None:
    options = dict(options)
    hidden, weight, target, bias = problem(bias=options.pop("bias", False))
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    support = random_support(target, weight.shape[0])
    generator = torch.Generator().manual_seed(5)
    others = torch.randint(0, weight.shape[0], (len(target), 4), generator=generator)
    got = linear_values(hidden, weight, target, bias=bias, chunk=chunk, support=support, others=others, **options)
    want = plain(hidden, weight, target, support, others, bias=bias, **options)
    zero = torch.zeros(())
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g.isfinite(), w.isfinite())
        assert torch.allclose(torch.where(g.isfinite(), g, zero), torch.where(w.isfinite(), w, zero), atol=3e-6)
    assert not want[2].isfinite().all(), "some of the further ids are outside the support"
    coefficients = [torch.randn(x.shape, generator=generator) for x in want]
    for chosen in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        gradients = []
        for values in (got, want):
            loss = sum((coefficients[i] * torch.where(values[i].isfinite(), values[i], zero)).sum() for i in chosen)
            gradients.append(torch.autograd.grad(loss, leaves, retain_graph=True))
        for a, b in zip(*gradients, strict=True):
            assert float((a - b).abs().max()) <= 2e-5 * float(b.abs().max())


def test_gradcheck_in_float64() -> None:
    hidden, weight, target, _ = problem(6, 3, 5, dtype=torch.float64)
    support = ragged(*[sorted({int(y), (int(y) + 2) % 5, 4}) for y in target[:4]], [], [int(target[5])])
    others = torch.stack([target, target], 1)

    def function(h, w):
        return linear_values(h, w, target, softcap=2.0, temperature=0.7, chunk=2, support=support, others=others)

    assert torch.autograd.gradcheck(function, (hidden, weight))


def test_without_a_support_nothing_changes_bit_for_bit() -> None:
    hidden, weight, target, _ = problem(60, 8, 40)
    whole = ragged(*[[]] * 60)
    for options in ({}, {"temperature": 0.6, "softcap": 2.0}):
        results = []
        for support in (None, whole):
            logprob, entropy = linear_logprob_entropy(hidden, weight, target, support=support, **options)
            results.append((logprob, entropy, *torch.autograd.grad((logprob * entropy).sum(), (hidden, weight))))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_full_support_is_the_whole_vocabulary() -> None:
    hidden, weight, target, _ = problem()
    everything = ragged(*[list(range(11))] * len(target))
    for a, b in zip(
        linear_logprob_entropy(hidden, weight, target, support=everything),
        linear_logprob_entropy(hidden, weight, target),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-6)


def test_one_kept_token_was_no_choice() -> None:
    hidden, weight, target, _ = problem()
    logprob, entropy = linear_logprob_entropy(hidden, weight, target, support=ragged(*[[int(y)] for y in target]))
    assert float(logprob.detach().abs().max()) == 0
    assert float(entropy.detach().abs().max()) == 0
    (logprob.sum() + entropy.sum()).backward()
    assert float(weight.grad.abs().max()) == 0


@pytest.mark.parametrize("grad", [False, True])
def test_no_tensor_of_tokens_times_vocabulary_exists(grad: bool) -> None:
    rows, width, vocabulary, chunk = 512, 8, 1000, 16
    hidden, weight, target, _ = problem(rows, width, vocabulary)
    support = ragged(*[[int(y), (int(y) + 1) % vocabulary] for y in target])
    with LargestTensor() as largest, torch.set_grad_enabled(grad):
        values = linear_values(hidden, weight, target, chunk=chunk, support=support, others=target[:, None])
        if grad:
            sum(x.sum() for x in values).backward()
    assert chunk * vocabulary <= largest.elements <= 2 * chunk * vocabulary


def test_no_rows_give_a_graph_and_zero_gradients() -> None:
    hidden, weight, target, _ = problem(0)
    values = linear_values(hidden, weight, target, support=ragged(), others=torch.zeros(0, 3, dtype=torch.int64))
    assert values.other_logprob is not None
    assert values.other_logprob.shape == (0, 3)
    sum(x.sum() for x in values).backward()
    assert float(weight.grad.abs().sum()) == 0


def test_polarity_on_a_support() -> None:
    """Σ p² (log p + H) of two equally likely tokens is 2 · ¼ · (log ½ + log 2) = 0; of [.625, .375] by hand."""
    head = Head(torch.tensor([P, [0.0] * 4]).t().contiguous())
    got = linear_polarity(torch.eye(2), head, support=ragged([0, 1], [0, 3]))
    H = -(0.625 * math.log(0.625) + 0.375 * math.log(0.375))
    expected = 0.625**2 * (math.log(0.625) + H) + 0.375**2 * (math.log(0.375) + H)
    assert got.tolist() == pytest.approx([expected, 0.0], abs=1e-6)


def test_wrong_shapes_are_refused() -> None:
    hidden, weight, target, _ = problem()
    with pytest.raises(ValueError, match=r"offsets \[24\]"):
        linear_logprob_entropy(hidden, weight, target, support=ragged([0]))
    with pytest.raises(ValueError, match=r"others must be \[23, K\]"):
        linear_values(hidden, weight, target, others=target)
