"""Faults that reinforcement-learning software has shipped (FAULTS.md), as far as they concern the objectives."""

import math

import pytest
import torch

from estr import TokenBatch, objective, recipes
from estr.objectives import kl_penalty, reference_kl
from objective_fixtures import close, column, token

DIRECT = ["reinforce", "grpo", "estr", "sat", "m2po", "aipo", "dppo_tv", "dppo_kl", "cispo", "gspo", "sapo", "topr"]


def batch_of(logprob, behavior, advantage=1.0, sequence=None, **fields):
    logprob = torch.as_tensor(logprob, dtype=fields.pop("dtype", torch.float32)).requires_grad_()
    n = len(logprob)
    return TokenBatch(
        logprob,
        torch.as_tensor(behavior, dtype=torch.float32),
        torch.full((n,), float(advantage)),
        torch.zeros(n, dtype=torch.int64) if sequence is None else torch.tensor(sequence),
        behavior_entropy=torch.ones(n),
        advantage_scope="token",
        **fields,
    )


@pytest.mark.parametrize("name", DIRECT)
def test_fault_A5_missing_logprob_is_dropped_and_counted(name):
    batch = batch_of([-0.1, -0.2, -0.3], [-0.1, math.nan, -0.3])
    out = objective(name)(batch)
    assert out.keep.tolist() == [True, False, True]
    assert out.metrics["tokens/invalid"] == 1
    assert out.metrics["tokens/action"] == 3
    assert out.loss.item() == pytest.approx(out.token_loss.sum().item() / 3, rel=1e-6)
    out.loss.backward()
    assert batch.logprob.grad[1] == 0
    assert batch.logprob.grad[[0, 2]].abs().min() > 0
    if name == "grpo":  # ratio 1 on the two that are left
        assert out.loss.item() == pytest.approx(-2 / 3)


@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.parametrize("behavior", [-math.inf, -1e4])
def test_fault_A6_padding_never_reaches_the_arithmetic(name, behavior):
    logprob = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[behavior, -1.0]])
    batch = TokenBatch.from_padded(
        mask=torch.tensor([[False, True]]),
        logprob=logprob,
        behavior_logprob=old,
        advantage=torch.ones(1),
        behavior_entropy=torch.ones(1, 2),
    )
    objective(name)(batch).loss.backward()
    assert logprob.grad[0, 0] == 0
    assert logprob.grad.isfinite().all()


@pytest.mark.parametrize("name", DIRECT)
def test_fault_A6_infinite_behavior_logprob_of_an_action(name):
    batch = batch_of([-1.0, -1.0], [-math.inf, -1.0])
    out = objective(name)(batch)
    out.loss.backward()
    assert out.token_loss[0] == 0
    assert batch.logprob.grad[0] == 0
    assert batch.logprob.grad.isfinite().all()


@pytest.mark.parametrize("name", [n for n in recipes() if not n.startswith("verl/") or "bypass" in n])
@pytest.mark.parametrize("drift", [89.0, -89.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_fault_A7_huge_ratios_stay_finite(name, drift, advantage):
    batch = TokenBatch(
        torch.tensor([-2.0, -1.0], requires_grad=True),
        torch.tensor([-2.0 - drift, -1.0]),
        torch.full((2,), advantage),
        torch.tensor([0, 0]),
        behavior_entropy=torch.ones(2),
        proximal_logprob=torch.tensor([-2.0 - drift / 2, -1.0]),
        entropy=torch.ones(2, requires_grad=True),
        reference_logprob=torch.tensor([-2.0, -1.0]),
        version=torch.tensor([0, 3]),
        target_version=4,
        reward=torch.ones(1),
        group=torch.zeros(1, dtype=torch.int64),
        behavior_topk_logprob=torch.tensor([[-90.0, -0.1], [-1.0, -1.5]]),
        topk_logprob=torch.tensor([[-0.1, -90.0], [-1.0, -1.5]], requires_grad=True),
    )
    out = objective(name)(batch)
    out.loss.backward()
    assert out.loss.isfinite()
    assert out.weight.isfinite().all()
    assert batch.logprob.grad.isfinite().all()
    assert all(math.isfinite(value) for value in out.metrics.values())


def test_fault_A7_the_raw_log_ratio_is_reported():
    batch = batch_of([-2.0], [-91.0], advantage=-1)
    out = objective("grpo")(batch)
    assert out.metrics["mismatch/delta_abs"] == pytest.approx(89)
    close(out.token_loss / math.exp(20), [1.0])
    out.loss.backward()
    assert batch.logprob.grad.tolist() == [0]  # beyond the clamp the ratio is a constant
    assert out.metrics["mismatch/ratio_deviation"] == pytest.approx(math.exp(20) - 1, rel=1e-5)


def test_fault_A7_half_precision_inputs():
    batch = batch_of([-2.0], [-14.0], advantage=-1, dtype=torch.float16)
    assert objective("grpo")(batch).token_loss.item() == pytest.approx(
        math.exp(12), rel=1e-5
    )  # float16 ends at e^11.09


def test_fault_A8_the_clamp_of_gspo_has_an_effect():
    batch = batch_of([-1.0, -1.0], [-51.0, -51.0], advantage=-1)
    out = objective("gspo", clip_low=1, clip_high=1)(batch)
    close(out.token_loss / math.exp(10), [1.0, 1.0])
    close(objective("grpo")(batch).token_loss / math.exp(20), [1.0, 1.0])


def test_fault_B3_one_declared_rule_for_the_denominator():
    batch = TokenBatch(
        column(-1, -9).requires_grad_(), column(-1, -1), column(-1, -1), torch.tensor([0, 1])
    )  # the second drifted: dropped
    assert objective("opsm")(batch).loss.item() == pytest.approx(0.5)
    assert objective("opsm", denominator="kept")(batch).loss.item() == pytest.approx(1.0)


def test_fault_B4_fixed_and_surviving_denominators():
    delta = column(0.1, -1.5, 0.8, -10, 0.3)
    batch = TokenBatch(
        (delta - 11).requires_grad_(),
        torch.full_like(delta, -11),
        torch.ones(5),
        torch.zeros(5, dtype=torch.int64),
        behavior_entropy=torch.full_like(delta, 0.1),
    )
    fixed = objective("estr", clip_high=1)(batch)
    assert fixed.keep.tolist() == [True, False, False, False, True]
    assert fixed.loss.item() == pytest.approx(-0.491, abs=5e-4)
    assert objective("estr", clip_high=1, denominator="kept")(batch).loss.item() == pytest.approx(-1.228, abs=5e-4)
    assert fixed.metrics["gate/masked_fraction"] == pytest.approx(0.6)


def test_fault_B14_product_and_mean_of_a_long_sequence():
    delta = torch.full((1000,), 0.01, dtype=torch.float64)
    logprob = torch.full_like(delta, -1)
    batch = TokenBatch(
        logprob,
        logprob - delta,
        torch.ones(1),
        torch.zeros(1000, dtype=torch.int64),
        proximal_logprob=logprob,
    )
    product = objective("tis_sequence", cap=None)(batch).weight
    mean = objective("tis_sequence", cap=None, aggregate="geometric")(batch).weight
    assert product[0].item() == pytest.approx(22026, rel=1e-4)
    assert mean[0].item() == pytest.approx(1.010, abs=1e-3)
    assert objective("tis_sequence")(batch).weight.max() == 2


def test_fault_B15_token_mean_does_not_depend_on_accumulation():
    def part(n, loss):
        return batch_of([-1.0] * n, [-1.0] * n, advantage=-loss)

    o = objective("grpo")
    parts = [part(5, 1.0), part(1, 4.0)]
    assert sum(o(p, token_count=6).loss.item() for p in parts) == pytest.approx(1.5)
    assert sum(o(p).loss.item() for p in parts) / 2 == pytest.approx(2.5)  # the fault: a mean of means


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_fault_B21_the_kl_term_is_not_multiplied_by_a_ratio(estimator):
    def gradient(ratio):
        mu = column(-2, -2)
        logprob = mu + math.log(ratio) / 2
        batch = TokenBatch(
            logprob.clone().requires_grad_(),
            mu,
            column(0.0),
            torch.tensor([0, 0]),
            proximal_logprob=logprob,
            reference_logprob=logprob - 0.3,
        )
        loss = objective("tis_sequence")(batch).loss + kl_penalty(batch, coef=1.0, estimator=estimator)
        return torch.autograd.grad(loss, batch.logprob)[0]

    close(gradient(2.0), gradient(1.0), 12)
    expected = 0.3 if estimator == "k1" else 1 - math.exp(-0.3)
    close(gradient(1.0), [expected / 2] * 2, 9)


def test_fault_B21_values_of_the_kl_estimators():
    batch = token([0.5, 0.5], [0.6, 0.4], reference_logprob=column(0.5, 0.5).log())
    x = column(1.2, 0.8).log()
    close(reference_kl(batch, "k1"), x, 12)
    close(reference_kl(batch, "k3"), (-x).exp() - 1 + x, 12)
    with pytest.raises(ValueError, match="k2"):
        reference_kl(batch, "k2")
    with pytest.raises(ValueError, match="reference_logprob"):
        reference_kl(token(0.5, 0.5))
    assert kl_penalty(batch, 2.0, "k1", token_count=4).item() == pytest.approx(2 * x.sum().item() / 4)
    broken = token([0.5, 0.5], [0.6, 0.4], reference_logprob=column(-math.inf, -1))
    kl = reference_kl(broken)
    assert kl[0] == 0
    assert torch.autograd.grad(kl.sum(), broken.logprob)[0][0] == 0


def test_fault_C5_the_denominator_is_the_sampler_not_the_current_policy():
    logits = torch.tensor([0.0, 0.0], dtype=torch.float64, requires_grad=True)
    old = logits.detach().log_softmax(-1)[:1]
    moved = logits + torch.tensor([1.0, 0.0])
    batch = TokenBatch(moved.log_softmax(-1)[:1], old, column(-1.0), torch.tensor([0]))
    out = objective("grpo")(batch)
    ratio = math.exp(1) / (math.exp(1) + 1) / 0.5
    close(out.token_loss, [ratio])
    assert out.metrics["mismatch/ratio_deviation"] == pytest.approx(ratio - 1)


def test_fault_C6_weights_are_on_their_declared_edge():
    batch = TokenBatch(
        column(-0.5).requires_grad_(), column(-1.0), column(1.0), torch.tensor([0]), proximal_logprob=column(-0.8)
    )
    for name in ("tis", "decoupled_ppo", "icepop", "kpop", "verl/decoupled_token_is"):
        assert objective(name)(batch).weight.item() == pytest.approx(math.exp(0.2)), name
    assert objective("aipo")(batch).weight.item() == pytest.approx(math.exp(0.5))
    assert objective("cispo", clip_high=9)(batch).weight.item() == pytest.approx(math.exp(0.3))
