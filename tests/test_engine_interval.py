"""The interval that a few log-probabilities leave for the entropy, against distributions whose entropy is known."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.engines.interval import entropy_interval


def f(*probabilities):
    return sum(-p * math.log(p) for p in probabilities)


def exact(logits):
    """Entropy in float64 of float32 logits [n, V]."""
    logprob = torch.log_softmax(logits.double(), -1)
    return torch.special.entr(logprob.exp()).sum(-1).numpy()


def most_likely(logits, k):
    """What an engine returns: float32 log-probabilities, [n, k]."""
    return torch.log_softmax(logits, -1).topk(min(k, logits.shape[-1])).values.numpy()


@st.composite
def distributions(draw):
    """Logits [1, V] of many shapes: flat, peaked, heavy-tailed, with ties and with tokens that cannot be drawn."""
    vocabulary = draw(st.integers(2, 4000))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(1, vocabulary, generator=generator) * draw(st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]))
    if draw(st.booleans()):
        logits = logits - draw(st.floats(0.2, 5.0)) * torch.arange(1, vocabulary + 1).log()
    if draw(st.booleans()):
        logits = logits.bfloat16().float()
    if draw(st.booleans()):
        logits[:, draw(st.integers(1, vocabulary)) :] = -math.inf
    return logits


@settings(max_examples=300, deadline=None)
@given(distributions(), st.integers(1, 200))
def test_the_interval_contains_the_exact_entropy(logits, k):
    low, high = entropy_interval(most_likely(logits, k), logits.shape[-1])
    assert low.dtype == high.dtype == np.float32
    assert low[0] <= exact(logits)[0] <= high[0]


@settings(max_examples=100, deadline=None)
@given(distributions())
def test_the_whole_vocabulary_leaves_less_than_a_ten_thousandth(logits):
    low, high = entropy_interval(most_likely(logits, 4000), logits.shape[-1])
    assert high[0] - low[0] < 3e-4


@settings(max_examples=100, deadline=None)
@given(distributions(), st.integers(1, 100), st.integers(1, 100))
def test_more_log_probabilities_never_widen_it(logits, k, more):
    narrow = entropy_interval(most_likely(logits, k + more), logits.shape[-1])
    wide = entropy_interval(most_likely(logits, k), logits.shape[-1])
    assert wide[0][0] - 3e-4 <= narrow[0][0]
    assert narrow[1][0] <= wide[1][0] + 3e-4


def test_both_ends_by_hand():
    """Two of four probabilities known; the other 0.2 is one token at least and two at most."""
    low, high = entropy_interval(np.log([[0.5, 0.3]]), 4)
    assert low[0] == pytest.approx(f(0.5, 0.3, 0.2), abs=1e-4)
    assert high[0] == pytest.approx(f(0.5, 0.3, 0.1, 0.1), abs=1e-4)


def test_no_token_of_the_rest_is_likelier_than_the_last_known_one():
    """0.7 of the mass is unknown: three tokens of 0.2 and one of 0.1."""
    low, high = entropy_interval(np.log([[0.1 + 0.1, 0.1]]), 9)
    assert low[0] == pytest.approx(f(0.2, *[0.1] * 8), abs=1e-4)
    low, high = entropy_interval(np.log([[0.3]]), 100)
    assert low[0] == pytest.approx(f(0.3, 0.3, 0.3, 0.1), abs=1e-4)
    assert high[0] == pytest.approx(f(0.3) + 99 * f(0.7 / 99), abs=1e-4)


def test_a_token_that_cannot_be_drawn_closes_the_interval():
    """Truncated sampling: whatever comes after -inf has no mass, however large the vocabulary."""
    low, high = entropy_interval([[math.log(0.75), math.log(0.25), -math.inf]], 150_000)
    assert low[0] == pytest.approx(f(0.75, 0.25), abs=1e-4)
    assert high[0] == pytest.approx(f(0.75, 0.25), abs=1e-4)


def test_nothing_known_gives_nothing():
    low, high = entropy_interval([[-0.1, math.nan], [-0.5, -1.0]], 10)
    assert np.isnan([low[0], high[0]]).all()
    assert np.isfinite([low[1], high[1]]).all()


@pytest.mark.parametrize("bad", [[-0.1, -2.0], [[]], [[-2.0, -0.1]]])
def test_other_shapes_and_orders_are_refused(bad):
    with pytest.raises(ValueError, match="topk_logprob must be"):
        entropy_interval(bad, 10)
