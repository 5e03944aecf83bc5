"""Entropy regularizers AER and TECRL, and the law R = b - a e^H: worked values and properties."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.controllers import entropy_budget, entropy_term, fit_entropy_law, regularizer, regularizers

torch.set_num_threads(1)
NAN = float("nan")


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def groups_of_accuracy(accuracies, size=8):
    reward = torch.cat([(torch.arange(size) < round(a * size)).double() for a in accuracies])
    return reward, torch.arange(len(accuracies)).repeat_interleave(size)


ONE_TOKEN = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("difficulty", "expected"),
    [("relative", [0.01, 0.0075, 0.005, 0, 0, 0]), ("absolute", [0.005, 0.00375, 0.0025, 0, 0, 0])],
)
def test_aer_worked_vector_2a(difficulty, expected):
    rule = regularizer("aer", difficulty=difficulty, initial_entropy=0.8)
    assert rule.target_entropy == pytest.approx(0.32)
    reward, group = groups_of_accuracy([0, 0.125, 0.25, 0.5, 0.75, 1])
    assert rule.coefficient(reward, group)[::8].tolist() == pytest.approx(expected)


def test_aer_worked_vector_2b():
    rule = regularizer("aer", initial_entropy=0.8)
    alphas = [rule.observe(f64(h), ONE_TOKEN)["aer/alpha"] for h in (0.30, 0.25, 0.40, 0.90)]
    assert alphas == pytest.approx([0.0101, 0.01045, 0.01005, 0.00715])


def test_aer_entropy_term_of_vector_2b():
    """lam = [.0075, 0], mean entropies [.5, .2]: the term is -.001875."""
    rule = regularizer("aer", initial_entropy=0.8)
    reward, group = f64(*[1.0] * 1, *[0.0] * 7, *[1.0] * 8), torch.arange(2).repeat_interleave(8)
    sequence = torch.cat([torch.tensor([0, 1, 1]), torch.tensor([8, 8])])
    entropy = f64(0.2, 0.5, 0.8, 0.1, 0.3).requires_grad_()
    term = entropy_term(rule.token_weight(sequence=sequence, reward=reward, group=group), entropy)
    assert term.item() == pytest.approx(-0.001875)
    term.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.00125, -0.00125, -0.00125, 0, 0])


def test_aer_by_token_and_the_step_controller():
    rule = regularizer("aer", aggregate="token", initial_entropy=1.0, controller="step")
    reward, group, sequence = f64(0, 1), torch.tensor([0, 1]), torch.tensor([0, 0, 0, 1])
    weight = rule.token_weight(sequence=sequence, reward=reward, group=group)
    assert weight.tolist() == pytest.approx([0.0025, 0.0025, 0.0025, 0])
    assert rule.observe(f64(0.1), ONE_TOKEN)["aer/alpha"] == pytest.approx(0.015)
    assert rule.observe(f64(0.9), ONE_TOKEN)["aer/alpha"] == pytest.approx(0.01)
    assert rule.coefficient(reward, group).tolist() == [0, 0]
    for _ in range(3):
        rule.observe(f64(0.9), ONE_TOKEN)
    assert rule.alpha == 0


def test_aer_anchors_at_the_first_observation_and_survives_json():
    rule, other = regularizer("aer"), regularizer("aer")
    assert rule.target_entropy is None
    assert "aer/target_entropy" not in rule.observe(f64(NAN), ONE_TOKEN)
    rule.observe(f64(0.6, NAN, 1.0), torch.tensor([0, 0, 0]))
    assert rule.target_entropy == pytest.approx(0.32)
    other.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert other.observe(f64(0.1), ONE_TOKEN) == rule.observe(f64(0.1), ONE_TOKEN)


def test_aer_averages_over_the_prompts_that_have_tokens():
    weight = regularizer("aer").token_weight(
        sequence=torch.tensor([0, 0, 2]), reward=f64(0, 0, 0), group=torch.tensor([0, 1, 2])
    )
    assert weight.tolist() == pytest.approx([0.0025, 0.0025, 0.005])


def test_aer_leaves_invalid_rewards_out():
    rule = regularizer("aer")
    got = rule.coefficient(f64(NAN, 0, 1, 1, NAN), torch.tensor([0, 0, 0, 1, 2]))
    assert got.tolist() == [0, 0, 0, 0, 0]
    assert regularizer("aer", rho=1.0).coefficient(f64(NAN, 0, 1), torch.tensor([0, 0, 0])).tolist() == [0.005] * 3


@pytest.mark.parametrize("name", ["aer", "tecrl"])
@pytest.mark.parametrize("cut", [0, 2, 5])
def test_entropy_terms_add_over_micro_batches(name, cut):
    rule = regularizer(name)
    sequence, entropy = torch.tensor([0, 0, 1, 1, 1, 2]), torch.rand(6, generator=torch.Generator().manual_seed(1))
    weight = rule.token_weight(sequence=sequence, reward=f64(0, 1, 0), group=torch.tensor([0, 0, 1]))
    whole = entropy_term(weight, entropy)
    parts = entropy_term(weight[:cut], entropy[:cut]) + entropy_term(weight[cut:], entropy[cut:])
    torch.testing.assert_close(parts, whole)
    assert whole < 0


def test_entropy_term_drops_entropies_that_are_not_finite():
    entropy = torch.tensor([0.5, NAN, float("inf")], requires_grad=True)
    term = entropy_term(torch.ones(3), entropy)
    term.backward()
    assert term.item() == -0.5
    assert entropy.grad.tolist() == [-1, 0, 0]
    empty = torch.zeros(0, requires_grad=True)
    entropy_term(torch.zeros(0), empty).backward()
    assert empty.grad is not None


TECRL_SEQUENCE = torch.tensor([0, 0, 0, 1, 1, 1])
TECRL_ENTROPY = f64(0.9, 0.3, 0.6, 0.2, 0.1, 0)


def test_tecrl_worked_vector_8b():
    rule = regularizer("tecrl", gamma=0.9, initial_alpha=0.05, budget=1.0, learning_rate=0.1)
    to_go = rule.entropy_to_go(TECRL_ENTROPY, TECRL_SEQUENCE)
    assert to_go.tolist() == pytest.approx([1.656, 0.84, 0.6, 0.29, 0.1, 0])
    future = rule.future(TECRL_ENTROPY, TECRL_SEQUENCE)
    assert future.tolist() == pytest.approx([0.756, 0.54, 0, 0.09, 0, 0])
    metrics = rule.observe(TECRL_ENTROPY, TECRL_SEQUENCE)
    assert metrics["tecrl/trajectory_entropy"] == pytest.approx(0.973)
    assert rule.log_alpha == pytest.approx(-2.993032273553991, abs=1e-12)
    assert metrics["tecrl/alpha"] == pytest.approx(0.05013518241413578, abs=1e-12)


def test_tecrl_budget_of_vector_8a():
    assert entropy_budget(-6, 0.99, math.inf) == pytest.approx(-600)
    assert entropy_budget(-6, 0.99, math.inf, rho=20) == pytest.approx(-12000)
    assert entropy_budget(0.3, 1.0, 10) == pytest.approx(3)
    rule = regularizer("tecrl", gamma=0.5, target_entropy=1.0)
    metrics = rule.observe(f64(0, 0, 0), torch.tensor([0, 2, 2]))
    assert metrics["tecrl/budget"] == pytest.approx(1.25)


def test_tecrl_price_rises_below_budget_and_falls_above():
    rule = regularizer("tecrl", budget=1.0)
    assert rule.observe(f64(0.5), ONE_TOKEN)["tecrl/alpha"] > 0.01
    assert rule.observe(f64(5.0), ONE_TOKEN)["tecrl/alpha"] < 0.01
    bounded = regularizer("tecrl", budget=1e9, max_alpha=0.5)
    assert bounded.observe(f64(0.5), ONE_TOKEN)["tecrl/alpha"] == pytest.approx(0.5)
    assert bounded.observe(f64(), torch.tensor([], dtype=torch.int64)) == {"tecrl/alpha": bounded.alpha}


def test_tecrl_advantage_baselines():
    fields = {"entropy": TECRL_ENTROPY, "sequence": TECRL_SEQUENCE, "group": torch.tensor([3, 7])}
    base = f64(1, 1, 1, -1, -1, -1)
    none = regularizer("tecrl", gamma=0.9, initial_alpha=0.05, baseline="none").advantage(base, **fields)
    assert (none - base).tolist() == pytest.approx([0.0378, 0.027, 0, 0.0045, 0, 0])
    batch = regularizer("tecrl", gamma=0.9, initial_alpha=0.05).advantage(base, **fields)
    assert float((batch - base).sum()) == pytest.approx(0, abs=1e-12)
    group = regularizer("tecrl", gamma=0.9, initial_alpha=0.05, baseline="group").advantage(base, **fields)
    assert float((group - base)[:3].sum()) == pytest.approx(0, abs=1e-12)
    assert torch.equal(regularizer("aer").advantage(base, **fields), base)


@settings(max_examples=40, deadline=None)
@given(entropy=st.lists(st.floats(0, 3), min_size=1, max_size=12), gamma=st.floats(0, 1))
def test_tecrl_entropy_to_go_obeys_its_recursion(entropy, gamma):
    rule = regularizer("tecrl", gamma=gamma)
    h = torch.tensor(entropy, dtype=torch.float64)
    sequence = torch.arange(len(entropy)) // 5
    to_go = rule.entropy_to_go(h, sequence)
    later = torch.cat([to_go[1:], to_go.new_zeros(1)])
    last = torch.cat([sequence[1:] != sequence[:-1], torch.tensor([True])])
    torch.testing.assert_close(to_go, h + gamma * torch.where(last, 0.0, later))


def test_tecrl_counts_entropies_that_are_not_finite():
    rule = regularizer("tecrl", budget=1.0)
    rule.observe(f64(NAN, 0.5), torch.tensor([0, 0]))
    assert rule.invalid == 1
    assert math.isfinite(rule.alpha)


def test_entropy_law_worked_vector_1d():
    law = fit_entropy_law([1, 0.6, 0.3, 0.1], [0.29380618, 0.40134574, 0.45801694, 0.48737949])
    assert law.a == pytest.approx(0.12, abs=1e-6)
    assert law.b == pytest.approx(0.62, abs=1e-6)
    assert law.ceiling == pytest.approx(0.50, abs=1e-6)
    assert law.predict(0.6) == pytest.approx(0.40134574, abs=1e-6)
    assert law.r2 == pytest.approx(1)


def test_entropy_law_leaves_nan_out_and_refuses_what_it_cannot_fit():
    law = fit_entropy_law([1, NAN, 0.0], [0.62 - 0.12 * math.e, 3, 0.5])
    assert law.a == pytest.approx(0.12)
    with pytest.raises(ValueError, match="two checkpoints"):
        fit_entropy_law([1, 1], [0.1, 0.2])
    with pytest.raises(ValueError, match="shape"):
        fit_entropy_law([1, 2], [0.1])


def test_table_and_refusals():
    assert set(regularizers()) == {"aer", "tecrl"}
    assert regularizers()["aer"].confidence == "reading of the abstract"
    assert regularizers()["tecrl"].confidence == "adaptation"
    with pytest.raises(ValueError, match="did you mean 'tecrl'"):
        regularizer("tecr")
    with pytest.raises(ValueError, match="rho"):
        regularizer("aer", rho=0)


def test_aer_refuses_a_negative_initial_entropy():
    with pytest.raises(ValueError, match="initial_entropy"):
        regularizer("aer", initial_entropy=-1.0)
