"""Properties that hold for any batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr import TokenBatch, objective, recipes
from objective_fixtures import close, everything, token

FAST = settings(max_examples=40, deadline=None)
deltas = st.lists(st.floats(-3, 3), min_size=1, max_size=12)
entropies = st.floats(0, 4)


def drifted(delta, entropy, advantage=1.0):
    delta = torch.tensor(delta, dtype=torch.float64)
    n = len(delta)
    return TokenBatch(
        (delta - 4).requires_grad_(),
        torch.full_like(delta, -4),
        torch.full((n,), advantage, dtype=torch.float64),
        torch.arange(n),
        behavior_entropy=torch.as_tensor(entropy, dtype=torch.float64).expand(n),
    )


@FAST
@given(deltas, entropies, st.floats(0.01, 3))
def test_estr_with_one_entropy_is_a_fixed_threshold(delta, entropy, tau):
    batch = drifted(delta, entropy)
    keep = objective("estr", tau=tau)(batch).keep
    size = (batch.logprob.detach() - batch.behavior_logprob).abs()
    threshold = math.sqrt(tau * (entropy + 0.01))
    clear = (size - threshold).abs() > 1e-9
    assert (keep == (size <= threshold))[clear].all()


@FAST
@given(deltas, entropies, st.floats(0, 3), st.floats(0, 3))
def test_a_larger_tau_never_drops_more(delta, entropy, a, b):
    batch = drifted(delta, entropy)
    small, large = (objective("estr", tau=tau)(batch).keep for tau in sorted((a, b)))
    assert (large | ~small).all()


@FAST
@given(deltas, entropies, st.floats(0.01, 3))
def test_the_gate_is_symmetric_in_delta(delta, entropy, tau):
    o = objective("estr", tau=tau)
    exact = [round(d * 1024) / 1024 for d in delta]  # so that both signs are represented alike
    assert o(drifted(exact, entropy)).keep.tolist() == o(drifted([-d for d in exact], entropy)).keep.tolist()


@FAST
@given(deltas, st.lists(entropies, min_size=12, max_size=12), st.floats(-2, 2))
def test_estr_equals_grpo_on_kept_tokens(delta, entropy, advantage):
    batch = drifted(delta, entropy[: len(delta)], advantage)
    out = objective("estr", clip_high=0.2)(batch)
    plain = objective("grpo")(batch)
    close(out.token_loss, torch.where(out.keep, plain.token_loss, 0.0).detach(), 12)


# gates and weights on the behavior edge, bounds that do not move with π
FIXED_OUTSIDE = ["reinforce", "grpo", "etr", "gspo", "sapo", "espo", "icepop", "kpop", "tis", "tis_sequence", "mis"]
FIXED_OUTSIDE += ["decoupled_ppo", "seq_mask_tis", "verl/decoupled_token_is", "verl/decoupled_seq_is_rs"]


@pytest.mark.parametrize("name", FIXED_OUTSIDE)
def test_gradients_agree_with_finite_differences(name):
    batch = everything(4, seed=4, spread=0.3)
    o = objective(name)
    point, step = batch.logprob.detach(), 1e-6
    statistics = o.statistics(batch)
    (gradient,) = torch.autograd.grad(o(batch, statistics=statistics).token_loss.sum(), batch.logprob)

    def value(i, change):
        moved = point.clone()
        moved[i] += change
        batch.logprob = moved
        return o(batch, statistics=statistics).token_loss.sum().item()

    numbers = [(value(i, step) - value(i, -step)) / (2 * step) for i in range(len(point))]
    torch.testing.assert_close(gradient, torch.tensor(numbers, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def on_policy(seed):
    """A batch with μ = q = π = reference and equal entropies."""
    batch = everything(8, seed=seed)
    pi = batch.logprob.detach()
    for name in ("behavior_logprob", "proximal_logprob", "reference_logprob"):
        setattr(batch, name, pi)
    batch.proximal_entropy = batch.entropy.detach()
    batch.behavior_topk_logprob = batch.topk_logprob.detach()
    return batch


SELECTIVE = ("clip_cov", "high_entropy", "dar")  # not corrections: they choose or re-weight tokens by design


@pytest.mark.parametrize("name", [name for name in recipes() if name not in SELECTIVE])
@pytest.mark.parametrize("seed", [1, 2])
def test_on_policy_every_correction_is_the_policy_gradient(name, seed):
    batch = on_policy(seed)
    out = objective(name)(batch)
    assert out.keep.all()
    close(out.weight, torch.ones(batch.tokens), 9)
    own, head = torch.autograd.grad(out.token_loss.sum(), (batch.logprob, batch.topk_logprob), allow_unused=True)
    close(-own, batch.advantage, 9)
    if head is not None:
        close(head, torch.zeros_like(head), 9)


@pytest.mark.parametrize("name", ["grpo", "estr", "tis", "icepop", "gspo", "sapo"])
def test_on_policy_losses_have_their_stated_normalizer(name):
    batch = on_policy(3)
    (gradient,) = torch.autograd.grad(objective(name)(batch).loss, batch.logprob)
    if name in ("gspo", "sapo"):
        lengths = torch.bincount(batch.sequence, minlength=batch.sequence_count)[batch.sequence]
        close(-gradient, batch.advantage / lengths / batch.sequence_count, 9)
    else:
        close(-gradient, batch.advantage / batch.tokens, 9)


DETACHED = ["estr", "icepop", "kpop", "dppo_tv", "dppo_kl", "opsm", "trm", "mis", "m2po", "skyrl_rollout_is", "cispo"]
DETACHED += ["aipo", "vespo", "topr", "decoupled_ppo", "a3po", "ppo_ewma"]


@pytest.mark.parametrize("name", DETACHED)
def test_no_gradient_flows_through_gate_or_weight(name):
    """The gradient is weight times that of the surrogate with the weight held fixed."""
    batch = everything(8, seed=11, spread=0.6)
    o = objective(name)
    out = o(batch)
    (gradient,) = torch.autograd.grad(out.token_loss.sum(), batch.logprob, retain_graph=True)
    assert out.weight.grad_fn is None
    surrogate = torch.where(out.keep, out.token_loss / out.weight.where(out.keep, torch.ones_like(out.weight)), 0.0)
    (bare,) = torch.autograd.grad(surrogate.sum(), batch.logprob)
    close(gradient, out.weight * bare, 9)
    if name in ("cispo", "aipo", "vespo", "topr", "dppo_tv", "dppo_kl", "skyrl_rollout_is"):
        close(gradient, -out.weight * batch.advantage, 9)


@FAST
@given(st.integers(0, 10_000), st.sampled_from(sorted(recipes())), st.floats(0, 4))
def test_losses_and_metrics_are_finite_whatever_comes_in(seed, name, spread):
    batch = everything(6, seed=seed, spread=spread)
    g = torch.Generator().manual_seed(seed)
    for field in (
        "behavior_logprob",
        "proximal_logprob",
        "behavior_entropy",
        "advantage",
        "entropy",
        "reference_logprob",
    ):
        bad = torch.rand(batch.tokens, generator=g) < 0.15
        value = torch.tensor([math.nan, math.inf, -math.inf])[seed % 3]
        setattr(batch, field, torch.where(bad, value.double(), getattr(batch, field)))
    out = objective(name)(batch, generator=g)
    (gradient,) = torch.autograd.grad(out.loss, batch.logprob)
    assert out.loss.isfinite()
    assert gradient.isfinite().all()
    assert out.weight.isfinite().all()
    assert all(math.isfinite(value) for value in out.metrics.values())
    if name != "erc":
        assert (out.token_loss[~out.keep] == 0).all()


@FAST
@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.floats(-2, 2))
def test_sat_is_contained_in_ppo(mu, pi, advantage):
    batch = token([mu, 0.5], [pi, 0.5], [advantage, 1.0])
    sat = objective("sat", alpha=0.3)(batch).token_loss
    plain = objective("grpo")(batch).token_loss
    assert (sat >= plain - 1e-12).all()  # the surrogate, minus the loss, is nowhere larger


@FAST
@given(st.integers(0, 10_000))
def test_order_of_sequences_does_not_matter(seed):
    batch = everything(6, seed=seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = TokenBatch.concatenate([batch.slice(i, i + 1) for i in order])
    for name in ("estr", "sat", "m2po", "gspo", "espo", "etr", "high_entropy", "kl_cov", "mis", "dar"):
        a, b = objective(name)(batch).loss.item(), objective(name)(shuffled).loss.item()
        assert a == pytest.approx(b, rel=1e-9, abs=1e-12), name
