"""Token re-weightings, MaxRL, off-policy baseline and returns: worked values, properties, faults B9, B11, B13."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr import advantage
from estr.advantages import (
    discounted_returns,
    entropy_response,
    place_at_end,
    polarity_correction,
    reweighting,
    reweightings,
)
from estr.advantages.base import group_rewards

torch.set_num_threads(1)
NAN = float("nan")


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


ZEROS4 = torch.zeros(4, dtype=torch.int64)


def test_fault_B9_maxrl_defines_the_group_of_one():
    maxrl = advantage("maxrl")
    assert maxrl(f64(1), torch.tensor([0])).tolist() == [1]
    assert maxrl(f64(0), torch.tensor([0])).tolist() == [0]
    assert maxrl(f64(1, 0, 0, 0), ZEROS4).tolist() == [3, -1, -1, -1]
    assert maxrl(f64(1, 1, 0, 0, 0, 1), torch.tensor([5, 5, 2, 2, 9, 8])).tolist() == [0, 0, 0, 0, 0, 1]
    assert maxrl(f64(1, NAN, 0), torch.tensor([0, 0, 0])).tolist() == [1, 0, -1]
    with pytest.raises(ValueError, match="at least 0"):
        maxrl(f64(1, -1), torch.tensor([0, 0]))


def test_opob_worked_vector():
    fields = {"score_norm": f64(1, 1, 2, 0.5), "log_weight": f64(1, 2, 0.5, 1).log()}
    reward = f64(1, 0, 1, 0)
    plain = advantage("opob", norm_by_std=False)(reward, ZEROS4, **fields)
    assert plain.tolist() == pytest.approx([0.68, -0.32, 0.68, -0.32])
    scaled = advantage("opob")(reward, ZEROS4, **fields)
    assert scaled.tolist() == pytest.approx([1.36, -0.64, 1.36, -0.64])
    on_policy = advantage("opob", norm_by_std=False)(reward, ZEROS4, score_norm=fields["score_norm"])
    assert on_policy.tolist() == pytest.approx([0.2, -0.8, 0.2, -0.8])


def test_opob_baseline_minimizes_the_weighted_second_moment():
    weight = f64(1, 2, 0.5, 1) * f64(1, 1, 2, 0.5)
    fields = {"score_norm": f64(1, 1, 2, 0.5), "log_weight": f64(1, 2, 0.5, 1).log()}
    reward = f64(1, 0, 1, 0)
    centered = advantage("opob", norm_by_std=False)(reward, ZEROS4, **fields)
    moment = [float((weight.square() * (centered + shift).square()).sum()) for shift in (-1e-3, 0.0, 1e-3)]
    assert moment[1] < min(moment[0], moment[2])


def test_opob_aggregates_lengths_scopes_and_refusals():
    reward, group, norm = f64(1, 0, 5, 0), ZEROS4, f64(1, 1, 1, 1)
    median = advantage("opob", aggregate="median", norm_by_std=False)
    assert median(reward, group, score_norm=norm).tolist() == [1, 0, 5, 0]
    many, ids = torch.cat([torch.zeros(39), torch.full((1,), 40.0)]).double(), torch.zeros(40, dtype=torch.int64)
    ones = torch.ones(40, dtype=torch.float64)
    winsorized = advantage("opob", aggregate="winsorized_mean", norm_by_std=False)(many, ids, score_norm=ones)
    assert winsorized[0] == pytest.approx(0.0)
    by_length = advantage("opob", normalize_by_length=True, norm_by_std=False)
    got = by_length(f64(1, 0), torch.tensor([0, 0]), score_norm=f64(1, 1), length=torch.tensor([1, 2]))
    assert got.tolist() == pytest.approx([0.2, -0.8])
    across = advantage("opob", scope="minibatch")(
        f64(1, 0, 3, 1), torch.tensor([0, 0, 1, 1]), score_norm=f64(1, 0, 1, 0)
    )
    assert across.tolist() == pytest.approx([0, -2, 0, -2], abs=1e-6)
    assert advantage("opob")(f64(1, 1), torch.tensor([0, 0]), score_norm=f64(1, 3)).tolist() == [0, 0]
    huge = advantage("opob")(f64(1, 0), torch.tensor([0, 0]), score_norm=f64(1, 1), log_weight=f64(5000, 0))
    assert huge.isfinite().all()
    with pytest.raises(ValueError, match="score_norm"):
        advantage("opob")(reward, group)
    with pytest.raises(ValueError, match="length"):
        by_length(reward, group, score_norm=norm)


def test_fault_B11_returns_pass_over_tool_text():
    """m = [1, 0, 1], r = [0, 0, 1], gamma .5: the tool token is no step, so the first return is .5."""
    assert discounted_returns(f64(0, 1), torch.tensor([0, 0]), 0.5).tolist() == [0.5, 1.0]


def test_fault_B13_a_penalty_inside_the_reward_counts_action_tokens_only():
    """m = [1, 0, 0, 1], KL 1 each, gamma .9: only action tokens discount, so the first return is -1.9."""
    assert discounted_returns(f64(-1, -1), torch.tensor([0, 0]), 0.9)[0] == pytest.approx(-1.9)


def test_returns_stay_inside_their_sequence_and_empty_sequences_are_skipped():
    sequence = torch.tensor([0, 0, 2, 2, 2])
    assert discounted_returns(f64(1, 1, 1, 2, 4), sequence, 0.5).tolist() == [1.5, 1.0, 3.0, 4.0, 4.0]
    assert place_at_end(f64(7, 8, 9), sequence).tolist() == [0, 7, 0, 0, 9]
    assert discounted_returns(f64(), torch.tensor([], dtype=torch.int64), 0.5).tolist() == []
    with pytest.raises(ValueError, match="non-decreasing"):
        discounted_returns(f64(1, 1), torch.tensor([1, 0]), 1.0)


STARE_LOGPROB = f64(-0.1, -2.5, -0.3, -1, -0.05, -3, -0.2)
STARE_ADVANTAGE = f64(*[0.8] * 4, *[-0.6] * 3)


def test_stare_worked_vector_3a():
    c2 = reweighting("stare", variant="C2", fraction=0.25).reweight(STARE_ADVANTAGE, logprob=STARE_LOGPROB)
    assert (c2 / STARE_ADVANTAGE).tolist() == pytest.approx([1, 1.1, 1, 1, 1, 0.9, 1])
    o1 = reweighting("stare", fraction=0.25).reweight(STARE_ADVANTAGE, logprob=STARE_LOGPROB)
    assert (o1 / STARE_ADVANTAGE).tolist() == pytest.approx([1, 1.1, 1, 1, 1, 1, 1])
    assert -c2.mean() == pytest.approx(-0.22)
    assert -STARE_ADVANTAGE.mean() == pytest.approx(-0.20)
    assert (-c2 / 7).tolist() == pytest.approx(
        [-0.11428571, -0.12571429, -0.11428571, -0.11428571, 0.08571429, 0.07714286, 0.08571429]
    )


def test_stare_worked_vector_3b():
    rule = reweighting("stare", adaptive=True)
    seen = []
    for entropy in (0.25, 0.28, 0.35, 0.30):
        rule.observe(entropy)
        seen.append((rule.gate, round(rule.weight_positive, 9), round(rule.weight_negative, 9)))
    assert seen == [(True, 1.11, 0.89), (True, 1.12, 0.88), (False, 1.11, 0.89), (False, 1.11, 0.89)]
    rule.observe(NAN)
    assert rule.gate is False


def test_stare_gate_off_changes_no_bit_and_zero_advantages_are_never_chosen():
    rule = reweighting("stare")
    rule.observe(0.3)
    assert torch.equal(rule.reweight(STARE_ADVANTAGE, logprob=STARE_LOGPROB), STARE_ADVANTAGE)
    rule.observe(0.1)
    assert rule.weights(torch.zeros(3), logprob=torch.tensor([-9.0, -1.0, -2.0])).tolist() == [1, 1, 1]
    assert rule.weights(torch.ones(3), logprob=torch.tensor([float("-inf"), -1.0, NAN])).tolist() == [1, 1.1, 1]


@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_stare_rounds_the_number_of_chosen_tokens_up(tokens, chosen):
    weight = reweighting("stare").weights(torch.ones(tokens), logprob=-torch.arange(1.0, tokens + 1))
    assert int((weight > 1).sum()) == chosen


def test_stare_selects_inside_parts():
    rule = reweighting("stare", scope="part", fraction=0.1)
    part = torch.tensor([0, 0, 1, 1])
    weight = rule.weights(torch.ones(4), logprob=torch.tensor([-1.0, -2, -3, -4]), part=part)
    assert weight.tolist() == [1, 1.1, 1, 1.1]
    with pytest.raises(ValueError, match="part"):
        rule.weights(torch.ones(4), logprob=torch.zeros(4))


@pytest.mark.parametrize(
    ("p", "entropy", "correction", "response"),
    [
        ([0.7, 0.2, 0.1], 0.8018185525433372, 0.17080792841611867, [-0.1407926, 0.3323318, 0.32088458]),
        ([0.4, 0.3, 0.2, 0.1], 1.2798542258336674, None, [-0.10383657, 0.0188244, 0.10750557, 0.14386192]),
    ],
)
def test_papo_worked_vector_4a(p, entropy, correction, response):
    logp = f64(*p).log()
    h = -(logp.exp() * logp).sum()
    assert float(h) == pytest.approx(entropy, abs=1e-14)
    c = polarity_correction(logp)
    if correction is not None:
        assert float(c) == pytest.approx(correction, abs=1e-14)
    assert entropy_response(logp, h.expand_as(logp), c).tolist() == pytest.approx(response, abs=1e-7)


def test_papo_worked_vector_4b():
    p = f64(0.7, 0.2, 0.1)
    fields = {"logprob": p.log(), "entropy": f64(*[0.8018185525433372] * 3)}
    correction = polarity_correction(p.log()).expand(3)
    rule = reweighting("papo", reference="initial")
    rule.observe(0.4)
    assert rule.weights(torch.ones(3), **fields, correction=correction).tolist() == [1, 1, 1]
    rule.observe(0.2)
    assert rule.weights(torch.ones(3), **fields, correction=correction).tolist() == pytest.approx([0.75, 1.25, 1.25])
    rule.observe(0.5)
    assert rule.weights(torch.ones(3), **fields, correction=correction).tolist() == pytest.approx([1.125, 0.875, 0.875])
    assert rule.weights(-torch.ones(3), **fields, correction=correction).tolist() == pytest.approx(
        [0.875, 1.125, 1.125]
    )
    with pytest.raises(ValueError, match="correction"):
        rule.weights(torch.ones(3), **fields)


def test_papo_alternatives():
    proxy = reweighting("papo", response="proxy")
    assert proxy.needs == ("logprob", "entropy")
    assert reweighting("papo").needs == ("logprob", "entropy", "correction")
    trend = reweighting("papo", signal="trend")
    phases = [trend.observe(entropy)["papo/phase"] for entropy in (0.5, 0.3, 0.3, 2.0)]
    assert phases == [0.0, 1.0, 1.0, -1.0]
    magnitude = reweighting("papo", response="proxy", reference="initial", weighting="magnitude")
    magnitude.observe(0.4)
    magnitude.observe(0.2)
    p = f64(0.7, 0.2, 0.1)
    weight = magnitude.weights(torch.ones(3), logprob=p.log(), entropy=f64(*[0.80181855] * 3))
    assert weight.max() == pytest.approx(1.25) or weight.min() == pytest.approx(0.75)
    assert len({round(float(w), 6) for w in weight}) == 3
    bad = proxy.weights(torch.ones(2), logprob=f64(NAN, -1), entropy=f64(1, NAN))
    assert bad.tolist() == [1, 1]


logits = st.lists(st.floats(-8, 8), min_size=2, max_size=12)


@settings(max_examples=60, deadline=None)
@given(logits=logits)
def test_papo_expected_entropy_response_is_zero(logits):
    logp = torch.tensor(logits, dtype=torch.float64).log_softmax(-1)
    h = -(logp.exp() * logp).sum().expand_as(logp)
    expected = (logp.exp() * entropy_response(logp, h, polarity_correction(logp))).sum()
    assert abs(float(expected)) < 1e-12


@settings(max_examples=20, deadline=None)
@given(logits=logits, token=st.integers(0, 11))
def test_papo_response_is_the_derivative_of_entropy_along_a_policy_gradient_step(logits, token):
    z = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    token = token % len(logits)
    logp = z.log_softmax(-1)
    h = -(logp.exp() * logp).sum()
    step = torch.nn.functional.one_hot(torch.tensor(token), len(logits)) - logp.exp().detach()
    derivative = (torch.autograd.grad(h, z)[0] * step).sum()
    response = entropy_response(logp[token].detach(), h.detach(), polarity_correction(logp))
    assert float(response) == pytest.approx(float(derivative), abs=1e-10)


GTPO = {
    "sequence": torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
    "entropy": f64(3, 1, 1, 3, 0.5, 2, 2, 2),
    "reward": f64(1, 1, 0, 0),
    "group": ZEROS4,
}


def test_gtpo_worked_vector():
    rule = reweighting("gtpo")
    shaped, _, _ = rule.shape(**GTPO)
    assert shaped.tolist() == pytest.approx([1.15, 1.05, 1.05, 1.15, -1.16, -1.10, -1.04, -1.10], abs=1e-6)
    got = rule.reweight(torch.zeros(8, dtype=torch.float64), **GTPO)
    assert got.tolist() == pytest.approx([1, -1, -1, 1, -1.41421356, 0, 1.41421356, 0], abs=1e-5)


def test_grpo_s_worked_vector():
    shaped, _, _ = reweighting("gtpo", level="sequence").shape(**GTPO)
    assert shaped[::2].tolist() == pytest.approx([1.1, 1.1, -1.12307692, -1.07692308], abs=1e-7)
    assert torch.equal(shaped[::2], shaped[1::2])


def test_grpo_s_counts_every_sequence_once_whatever_its_length():
    fields = {
        "sequence": torch.tensor([0, 0, 0, 1]),
        "entropy": f64(1, 2, 3, 6),
        "reward": f64(1, 1),
        "group": torch.tensor([0, 0]),
    }
    shaped, _, _ = reweighting("gtpo", level="sequence").shape(**fields)
    assert shaped.tolist() == pytest.approx([1.05, 1.05, 1.05, 1.15])


def test_gtpo_counts_only_sequences_still_alive_and_keeps_groups_apart():
    fields = {
        "sequence": torch.tensor([0, 0, 1, 2]),
        "entropy": f64(3, 7, 1, 5),
        "reward": f64(1, 1, 1),
        "group": torch.tensor([0, 0, 4]),
    }
    shaped, _, _ = reweighting("gtpo").shape(**fields)
    assert shaped.tolist() == pytest.approx([1.15, 1.1, 1.05, 1.1])
    assert reweighting("gtpo").reweight(torch.zeros(4), **fields)[3] == 0


def test_gtpo_leaves_invalid_tokens_out_and_counts_them():
    fields = dict(GTPO, entropy=f64(3, 1, NAN, 3, 0.5, 2, 2, 2), reward=f64(1, 1, 0, NAN))
    rule = reweighting("gtpo")
    got = rule.reweight(torch.zeros(8), **fields)
    assert rule.invalid == 3
    assert got[[2, 6, 7]].tolist() == [0, 0, 0]
    assert got.isfinite().all()
    empty = {
        "sequence": torch.tensor([], dtype=torch.int64),
        "entropy": torch.zeros(0),
        "reward": f64(1),
        "group": ZEROS4[:1],
    }
    assert rule.reweight(torch.zeros(0), **empty).tolist() == []


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_gtpo_sets_are_normalized_apart(data):
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=6))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    entropy = torch.tensor(
        data.draw(st.lists(st.floats(0.01, 3), min_size=len(sequence), max_size=len(sequence))), dtype=torch.float64
    )
    reward = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(lengths), max_size=len(lengths)))
    )
    group = torch.zeros(len(lengths), dtype=torch.int64)
    got = reweighting("gtpo").reweight(
        torch.zeros_like(entropy), sequence=sequence, entropy=entropy, reward=reward, group=group
    )
    for outcome in (0.0, 1.0):
        chosen = got[reward[sequence] == outcome]
        assert abs(float(chosen.sum())) < 1e-6
        assert chosen.numel() == 0 or chosen.std(correction=0) < 1 + 1e-6


@settings(max_examples=40, deadline=None)
@given(first=st.lists(st.floats(-5, 5), min_size=1, max_size=8), shift=st.floats(-5, 5))
def test_variance_identity_of_a_group_merged_from_two_halves(first, shift):
    a = torch.tensor(first, dtype=torch.float64)
    b = a.flip(0).square() + shift
    merged = group_rewards(torch.cat([a, b]), torch.zeros(2 * a.numel(), dtype=torch.int64)).std(correction=0)[0] ** 2
    identity = (a.var(correction=0) + b.var(correction=0)) / 2 + (a.mean() - b.mean()) ** 2 / 4
    assert float(merged) == pytest.approx(float(identity), abs=1e-9)


def test_cuts_merged_group_vector_5b():
    reward = torch.cat([torch.ones(8), torch.tensor([1.0, 1, 1, 0, 1, 0, 1, 0])])
    group = torch.zeros(16, dtype=torch.int64)
    assert float(group_rewards(reward, group).std(correction=0)[0] ** 2) == pytest.approx(0.15234375)
    got = advantage("grpo")(reward, group)
    assert got[0] == pytest.approx(0.4651291, abs=1e-6)
    assert got[11] == pytest.approx(-2.01555944, abs=1e-6)


@pytest.mark.parametrize("name", ["stare", "papo"])
def test_controller_state_survives_json(name):
    options = {"adaptive": True} if name == "stare" else {"response": "proxy"}
    first, second = reweighting(name, **options), reweighting(name, **options)
    for entropy in (0.5, 0.2, 0.25):
        first.observe(entropy)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert first.observe(0.1) == second.observe(0.1)
    with pytest.raises(ValueError, match="consists of"):
        second.load_state_dict({"nonsense": 1})


def test_reweighting_names_shapes_and_table():
    assert set(reweightings()) == {"stare", "papo", "gtpo"}
    assert reweightings()["papo"].confidence == "reading of the abstract"
    with pytest.raises(ValueError, match="did you mean 'stare'"):
        reweighting("star")
    with pytest.raises(ValueError, match="did you mean 'kappa'"):
        reweighting("papo", kapa=0.5)
    with pytest.raises(ValueError, match="kappa"):
        reweighting("papo", kappa=1.0)
    with pytest.raises(ValueError, match="logprob must have shape"):
        reweighting("stare").weights(torch.ones(3), logprob=torch.zeros(3, 1))
    assert math.isclose(reweightings()["stare"].hyperparameters["fraction"], 0.1)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("stare", "step", -0.01),  # would move the weights away from the target
        ("stare", "positive_max", 0.5),  # adapted weights below 1 and, below 0, advantages of the wrong sign
        ("stare", "negative_min", -1.0),
        ("gtpo", "alpha1", -1.0),
        ("gtpo", "alpha2", math.nan),
    ],
)
def test_options_that_would_turn_the_rule_around_are_refused(name, option, value):
    with pytest.raises(ValueError, match=option):
        reweighting(name, **{option: value})
