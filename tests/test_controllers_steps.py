"""Step controllers: worked values of VCPO, GAC and RQ-TTSA, and what they must not break."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.controllers import controller, controllers, effective_sample_size, global_norm, sequence_log_weight
from estr.controllers.base import inner_products

torch.set_num_threads(1)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("weights", "ess", "ratio", "options", "scale"),
    [
        ([1, 1, 1, 1], 4, 1, {}, 1),
        ([4, 0.5, 0.5, 0.25], 1.664151, 0.416038, {}, 0.645010),
        ([4, 0.5, 0.5, 0.25], 1.664151, 0.416038, {"scaling": "linear"}, 0.416038),
        ([4, 0.5, 0.5, 0.25], 1.664151, 0.416038, {"base_ess_ratio": 0.55}, 0.869731),
        ([8, 0.1, 0.1, 0.1], 1.075902, 0.268975, {}, 0.518628),
        ([2, 1, 1, 0], 2.666667, 0.666667, {}, 0.816497),
    ],
)
def test_vcpo_worked_values(weights, ess, ratio, options, scale):
    statistics = effective_sample_size(f64(*weights).log())
    assert statistics["ess"] == pytest.approx(ess, abs=1e-6)
    assert statistics["ess_ratio"] == pytest.approx(ratio, abs=1e-6)
    assert controller("vcpo", **options).scale_learning_rate(statistics) == pytest.approx(scale, abs=1e-6)


def test_sequence_weights_are_products_over_tokens_of_their_own_sequence():
    logprob, behavior = f64(-1, -2, -3, float("nan")), f64(-1.5, -2, -4, -1)
    got = sequence_log_weight(logprob, behavior, torch.tensor([0, 0, 2, 2]), sequences=3)
    assert got.tolist() == pytest.approx([0.5, 0, 1])


def test_effective_sample_size_of_extreme_weights_is_finite():
    assert effective_sample_size(f64(3000, 0, 0))["ess"] == pytest.approx(1)
    assert effective_sample_size(f64(-3000, -3000))["ess"] == 0
    assert effective_sample_size(f64(0, float("nan")))["ess_ratio"] == pytest.approx(1)
    assert effective_sample_size(f64()) == {"ess": 0.0, "ess_ratio": 0.0}
    with pytest.raises(ValueError, match="ess_ratio"):
        controller("vcpo").scale_learning_rate({})


@settings(max_examples=50, deadline=None)
@given(log_weight=st.lists(st.floats(-3, 3), min_size=1, max_size=20))
def test_effective_sample_size_lies_between_one_and_the_number(log_weight):
    ess = effective_sample_size(torch.tensor(log_weight, dtype=torch.float64), eps=0.0)["ess"]
    assert 1 - 1e-9 <= ess <= len(log_weight) + 1e-9


def after(gradient, previous=(1.0, 0.0), **options):
    rule = controller("gac", **options)
    first, second = f64(*previous), f64(*gradient)
    rule.transform([first])
    metrics = rule.transform([second])
    assert first.tolist() == list(previous)
    return second.tolist(), metrics, rule


@pytest.mark.parametrize(
    ("gradient", "cosine", "expected"),
    [
        ([1, 1], 0.707107, [0.282843, 1]),
        ([0.1, 1], 0.099504, [0.1, 1]),
        ([-1, 1], -0.707107, [-1, 1]),
        ([3, 0.5], 0.986394, [0, 0.5]),
    ],
)
def test_gac_worked_values(gradient, cosine, expected):
    got, metrics, rule = after(gradient)
    assert metrics["gac/cosine"] == pytest.approx(cosine, abs=1e-6)
    assert got == pytest.approx(expected, abs=1e-6)
    assert not rule.skip


def test_gac_exact_mode_lands_on_the_lower_threshold():
    got, _, _ = after([1, 1], mode="exact")
    assert got == pytest.approx([0.204124, 1], abs=1e-6)
    assert got[0] / math.hypot(*got) == pytest.approx(0.2)


def test_gac_alternatives():
    got, metrics, rule = after([3, 0.5], above="skip")
    assert got == [3, 0.5]
    assert rule.skip
    assert metrics["gac/skip"] == 1
    rule.transform([f64(0, 1)])
    assert not rule.skip
    assert after([-1, 1], cosine="absolute")[0] == pytest.approx([-0.282843, 1], abs=1e-6)
    applied, raw = controller("gac", reference="applied"), controller("gac")
    for rule in (applied, raw):
        rule.transform([f64(1, 0)])
        rule.transform([f64(3, 0.5)])
    assert applied.transform([f64(1, 0)]).get("gac/cosine") == pytest.approx(0)
    assert raw.transform([f64(1, 0)])["gac/cosine"] == pytest.approx(0.986394, abs=1e-6)


def test_gac_is_global_over_tensors_and_over_shards():
    parts = [torch.tensor([[1.0]]), torch.tensor([1.0])]
    rule = controller("gac")
    rule.transform([torch.tensor([[1.0]]), torch.tensor([0.0])])
    rule.transform(parts)
    assert [p.item() for p in parts] == pytest.approx([0.282843, 1], abs=1e-6)

    shard = controller("gac")
    shard.transform([torch.tensor([1.0])], all_reduce=lambda x: x)
    sums = iter([2.0, 1.0, 1.0])
    mine = torch.tensor([1.0])
    shard.transform([mine], all_reduce=lambda x: torch.tensor([next(sums)]))
    assert mine.item() == pytest.approx(0.282843, abs=1e-6)


def test_gac_passes_zero_and_non_finite_gradients_and_keeps_its_reference():
    rule = controller("gac")
    rule.transform([f64(1, 0)])
    bad = f64(float("nan"), 1)
    assert rule.transform([bad]) == {}
    assert rule.transform([f64(0, 0)]) == {}
    same = f64(5, 0)
    rule.transform([same])
    assert same.tolist() == [5, 0]
    with pytest.raises(ValueError, match="other shapes"):
        rule.transform([f64(1, 0, 0)])


def test_gac_state_goes_through_json_and_tensors():
    first, second = controller("gac"), controller("gac")
    first.transform([torch.tensor([1.0, 0.0]), torch.tensor([2.0])])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.load_state_tensors(first.state_tensors())
    a = [torch.tensor([1.0, 1.0]), torch.tensor([1.0])]
    b = [t.clone() for t in a]
    assert first.transform(a) == second.transform(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    with pytest.raises(ValueError, match="previous"):
        second.load_state_tensors({"weights": torch.zeros(1)})
    with pytest.raises(ValueError, match="keeps no tensors"):
        controller("rq").load_state_tensors({"weights": torch.zeros(1)})


@settings(max_examples=50, deadline=None)
@given(
    p=st.lists(st.floats(-2, 2), min_size=3, max_size=3),
    g=st.lists(st.floats(-2, 2), min_size=3, max_size=3),
    mode=st.sampled_from(["projection", "exact"]),
)
def test_gac_never_touches_the_orthogonal_part_nor_lengthens_the_gradient(p, g, mode):
    previous, before = torch.tensor(p, dtype=torch.float64), torch.tensor(g, dtype=torch.float64)
    rule, changed = controller("gac", mode=mode), before.clone()
    rule.transform([previous])
    rule.transform([changed])
    norm2 = float(previous.square().sum())
    assert float(changed.norm()) <= float(before.norm()) + 1e-6
    if norm2 > 1e-6:
        removed = before - changed
        residue = removed - (removed @ previous) / norm2 * previous
        assert float(residue.norm()) < 1e-5


def test_rq_worked_vector():
    rule = controller("rq", quantile=0.8, min_history=5)
    for norm in (1, 1.2, 0.8, 1.1, 0.9):
        gradient = f64(norm)
        assert "controller/threshold" not in rule.transform([gradient])
        assert gradient.item() == norm
    assert rule.threshold(0.5) == pytest.approx(1.12)
    scales = []
    for norm in (0.5, 1.1, 50):
        copy = controller("rq", quantile=0.8, min_history=5)
        copy.load_state_dict(json.loads(json.dumps(rule.state_dict())))
        scales.append(copy.transform([f64(norm)])["controller/scale"])
    assert scales == pytest.approx([1, 1, 0.0224], abs=1e-7)
    gradient = f64(3, 4)
    rule.transform([gradient])
    assert gradient.tolist() == pytest.approx([0.672, 0.896], abs=1e-6)
    assert rule.history[-1] == pytest.approx(5)


def test_rq_alternatives_window_and_timescale():
    clipped = controller("rq", quantile=1.0, min_history=1, store="clipped")
    clipped.transform([f64(1)])
    clipped.transform([f64(9)])
    assert clipped.history == pytest.approx([1, 1])
    current = controller("rq", quantile=1.0, min_history=1, include_current=True)
    assert current.threshold(7.0) == 7.0
    short = controller("rq", window=2, min_history=2)
    for norm in (1, 2, 3):
        short.transform([f64(norm)])
    assert short.history[-1] == 3
    assert len(short.history) == 2
    slow = controller("rq", decay=0.6)
    factors = []
    for _ in range(3):
        slow.transform([f64(1)])
        factors.append(slow.scale_learning_rate({}))
    assert factors == pytest.approx([1, 2**-0.6, 3**-0.6])


def test_rq_ignores_a_norm_that_is_not_finite():
    rule = controller("rq", min_history=1)
    assert rule.transform([f64(float("inf"))]) == {}
    assert rule.history == []


def test_fixed_norm_agrees_with_torch():
    ours = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])]
    parameters = [torch.nn.Parameter(t.clone()) for t in ours]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 2.0)
    metrics = controller("fixed_norm", max_norm=2.0).transform(ours)
    assert metrics["controller/norm"] == pytest.approx(float(norm))
    for mine, parameter in zip(ours, parameters, strict=True):
        torch.testing.assert_close(mine, parameter.grad)
    never = [torch.tensor([3.0, 4.0])]
    assert controller("fixed_norm", max_norm=0).transform(never)["controller/scale"] == 1
    assert never[0].tolist() == [3, 4]


def test_low_precision_gradients_are_measured_in_float32():
    gradients = [torch.full((70000,), 1.0, dtype=torch.float16)]
    assert global_norm(gradients) == pytest.approx(70000**0.5)
    assert inner_products([], []) == 0.0


def test_table_and_refusals():
    assert set(controllers()) == {"vcpo", "gac", "rq", "fixed_norm"}
    assert controllers()["gac"].confidence == "reading of the abstract"
    with pytest.raises(ValueError, match="did you mean 'vcpo'"):
        controller("vpco")
    with pytest.raises(ValueError, match="did you mean 'quantile'"):
        controller("rq", quantle=0.5)
    with pytest.raises(ValueError, match="high"):
        controller("gac", low=0.5, high=0.2)
    with pytest.raises(ValueError, match="min_history"):
        controller("rq", window=5, min_history=6)
    with pytest.raises(ValueError, match="below 1"):
        controller("gac", low=1.0, high=1.0, mode="exact")
