"""Reward shaping and selection: worked values of ERR+, DAPO and AEPO."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.shaping import selection, selections, shaping, shapings

torch.set_num_threads(1)
NAN = float("nan")


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("beyond", ["linear", "flat"])
def test_overlong_worked_values(beyond):
    rule = shaping("overlong", beyond=beyond)
    length = torch.tensor([0, 16384, 16385, 18432, 20480])
    got = rule.shape(torch.zeros(5), length=length)
    assert got.tolist() == [0, 0, -0.000244140625, -0.5, -1]
    assert rule.shape(f64(1), length=torch.tensor([24576])).item() == (-1 if beyond == "linear" else 0)


def test_overlong_keeps_nan_rewards_and_scales():
    got = shaping("overlong", max_length=10, buffer=5, factor=2.0).shape(f64(NAN, 1), length=torch.tensor([1, 10]))
    assert got.isnan().tolist() == [True, False]
    assert got[1] == -1


ERR_ENTROPY = f64(1, 0.4, 0.395, 0.9, 0.1, 0.5)
ERR_SEQUENCE = torch.zeros(6, dtype=torch.int64)


def test_err_phase_one_worked_vector_6a():
    fields = {"sequence": ERR_SEQUENCE, "entropy": ERR_ENTROPY}
    rule = shaping("err")
    assert rule.relief(1, **fields).item() == pytest.approx(0.7091797124702559)
    assert rule.shape(f64(1), **fields).item() == pytest.approx(1.2127539137410768)
    assert rule.shape(f64(0), **fields).item() == 0
    released = shaping("err", gate_on_correct=False)
    assert released.shape(f64(0), **fields).item() == pytest.approx(0.21275391374107677)


def test_err_counts_thinking_tokens_alone_and_inside_sequences():
    sequence = torch.tensor([0] * 6 + [1, 2, 2])
    entropy = torch.cat([ERR_ENTROPY, f64(9, 5, 1)])
    thinking = torch.tensor([True] * 6 + [True, True, False])
    got = shaping("err").relief(4, sequence=sequence, entropy=entropy, thinking=thinking)
    assert got.tolist() == pytest.approx([0.7091797124702559, 0, 0, 0])
    apart = shaping("err").relief(2, sequence=torch.tensor([0, 0, 1, 1]), entropy=f64(4, 5, 1, 2))
    assert apart.tolist() == [0, 0]


def test_err_bounds_the_score_and_skips_unknown_entropies():
    fields = {"sequence": ERR_SEQUENCE, "entropy": f64(9, 0, 9, 0, 9, 0)}
    rule = shaping("err")
    assert rule.shape(f64(1), **fields).item() == 1.5
    assert rule.shape(f64(-3), **fields).item() == -0.5
    assert rule.shape(f64(NAN), **fields).isnan().all()
    partly = rule.relief(1, sequence=ERR_SEQUENCE, entropy=f64(1, NAN, 0.395, 0.9, 0.1, 0.5))
    assert partly.item() == pytest.approx(0.79 / torch.log(torch.tensor(7.0)).item(), abs=1e-6)
    assert rule.invalid == 1
    assert rule.relief(0, sequence=ERR_SEQUENCE[:0], entropy=f64()).tolist() == []


def test_err_phase_two_worked_vector_6b():
    rule = shaping("err", phase=2)
    length, group = torch.tensor([100, 200, 300, 600]), torch.zeros(4, dtype=torch.int64)
    efficiency = rule.efficiency(f64(1, 1, 0, 0), length=length, group=group)
    assert efficiency.tolist() == pytest.approx([0.48883048, 0.26107457, 0, -0.66503277], abs=1e-7)
    got = rule.shape(f64(1, 1, 0, 0), length=length, group=group)
    assert got.tolist() == pytest.approx([1.14664915, 1.07832237, 0, -0.19950983], abs=1e-7)


def test_err_phase_two_groups_of_one_and_of_equal_lengths():
    rule = shaping("err", phase=2)
    got = rule.efficiency(f64(1, 1, 1), length=torch.tensor([3072, 7, 7]), group=torch.tensor([0, 1, 1]))
    assert got.tolist() == pytest.approx([torch.tanh(torch.tensor(-0.5)).item(), 0, 0], abs=1e-6)


def test_shapings_name_what_they_need():
    assert set(shapings()) == {"err", "overlong"}
    assert shaping("err").needs == ("sequence", "entropy", "thinking")
    assert shaping("err", phase=2).needs == ("length", "group")
    with pytest.raises(ValueError, match="did you mean 'overlong'"):
        shaping("overlon")
    with pytest.raises(ValueError, match="phase"):
        shaping("err", phase=3)
    with pytest.raises(ValueError, match="buffer"):
        shaping("overlong", max_length=10, buffer=11)


def test_dynamic_sampling_keeps_groups_whose_rewards_differ():
    keep = selection("dapo").keep
    reward, group = f64(1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0), torch.arange(3).repeat_interleave(4)
    assert keep(reward, group).tolist() == [False] * 4 + [True] * 4 + [False] * 4
    assert keep(f64(0.1, 0.1, 0.1), torch.tensor([0, 0, 0])).tolist() == [False] * 3
    assert keep(f64(1, NAN, 0, NAN, 1), torch.tensor([0, 0, 0, 1, 2])).tolist() == [True, True, True, False, True]
    assert selection("dapo", keep_singletons=False).keep(f64(1), torch.tensor([0])).tolist() == [False]


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(0, 3)), min_size=1, max_size=16))
def test_dynamic_sampling_never_splits_a_group(rows):
    reward, group = torch.tensor([r for r, _ in rows]), torch.tensor([g for _, g in rows])
    keep = selection("dapo").keep(reward, group)
    for number in group.unique():
        member = group == number
        expected = int(member.sum()) == 1 or reward[member].unique().numel() > 1
        assert keep[member].tolist() == [expected] * int(member.sum())


def test_aepo_worked_vector():
    rule = selection("aepo")
    extra = f64(1.2, -0.4, 0.03, 0.9, 0)
    rule.observe(0.3)
    assert rule.temperature == 1.2
    assert rule.select(extra).indices.tolist() == [0, 3]
    assert rule.select(extra).advantage == 1.0
    rule.observe(0.6)
    assert rule.temperature == 0.8
    assert rule.select(extra).indices.tolist() == [0]


def test_aepo_limits_boundary_and_state():
    rule = selection("aepo", max_selected=2)
    assert rule.temperature == 1.2
    assert rule.select(torch.ones(9)).indices.tolist() == [0, 1]
    assert rule.select(torch.zeros(9)).indices.tolist() == []
    assert rule.extra_prompts(33) == 8
    rule.observe(0.5)
    assert rule.temperature == 1.2
    strict = selection("aepo", strict=True)
    strict.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert strict.temperature == 0.8
    strict.observe(NAN)
    assert strict.entropy == 0.5
    assert set(selections()) == {"dapo", "aepo"}
    with pytest.raises(ValueError, match="did you mean 'threshold'"):
        selection("aepo", treshold=1)
