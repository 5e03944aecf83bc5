"""Advantage estimators: worked values, properties, and faults B7 and B10."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr import advantage
from estr.advantages import advantages

torch.set_num_threads(1)
NAN = float("nan")


def values(name, reward, group=None, length=None, **options):
    reward = torch.tensor(reward, dtype=torch.float64)
    group = torch.zeros(len(reward), dtype=torch.int64) if group is None else torch.tensor(group)
    return advantage(name, **options)(reward, group, length=length).tolist()


@pytest.mark.parametrize(
    ("name", "options", "reward", "expected"),
    [
        ("grpo", {}, [1, 0, 0, 1], [0.8660239, -0.8660239, -0.8660239, 0.8660239]),
        ("grpo", {"eps": 1e-4}, [1, 0, 0, 1], [0.86587543, -0.86587543, -0.86587543, 0.86587543]),
        ("grpo", {}, [1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999]),
        ("grpo", {"std": "population", "eps": 0}, [1, 0, 0, 1], [1, -1, -1, 1]),
        ("grpo", {"std": "none"}, [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("dr_grpo", {}, [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("rloo", {}, [1, 0, 0, 1], [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("rloo", {}, [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_worked_values(name, options, reward, expected):
    assert values(name, reward, **options) == pytest.approx(expected, abs=1e-7)


def test_reinforce_pp_whitens_over_tokens():
    assert values("reinforce_pp", [1, 0], [0, 1], length=torch.tensor([3, 2])) == pytest.approx(
        [0.73029673, -1.0954451], abs=1e-6
    )


def test_reinforce_pp_without_lengths_counts_every_sequence_once():
    assert values("reinforce_pp", [1, 0], [0, 1]) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-6)


def test_reinforce_pp_baseline_subtracts_the_group_mean_before_whitening():
    got = values("reinforce_pp", [1, 0, 9, 9], [0, 0, 1, 1], baseline="group")
    assert got == pytest.approx([math.sqrt(1.5), -math.sqrt(1.5), 0, 0], abs=1e-6)


def test_reinforce_pp_tokens_agree_with_the_sequence_form_when_gamma_is_one():
    reward, group = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 1])
    sequence = torch.tensor([0, 0, 0, 1, 1, 2])
    estimator = advantage("reinforce_pp")
    by_sequence = estimator(reward, group, length=torch.tensor([3, 2, 1]))
    torch.testing.assert_close(estimator.tokens(reward, group, sequence), by_sequence[sequence])


def test_reinforce_pp_discounts_by_action_token():
    estimator = advantage("reinforce_pp", gamma=0.5)
    got = estimator.tokens(torch.tensor([1.0]), torch.tensor([0]), torch.tensor([0, 0, 0])).double()
    returns = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(got, (returns - returns.mean()) / (returns.var() + 1e-8).sqrt(), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="tokens"):
        estimator(torch.tensor([1.0]), torch.tensor([0]))


def test_reinforce_pp_token_penalty_is_part_of_the_return():
    sequence, penalty = torch.tensor([0, 0]), torch.tensor([0.5, 0.25])
    got = advantage("reinforce_pp").tokens(torch.tensor([1.0]), torch.tensor([0]), sequence, penalty=penalty)
    returns = torch.tensor([0.25, 0.75])
    torch.testing.assert_close(got, (returns - 0.5) / returns.std(), atol=1e-5, rtol=0)


def test_group_estimators_broadcast_over_tokens_and_refuse_a_penalty():
    reward, group, sequence = torch.tensor([1.0, 0.0]), torch.tensor([4, 4]), torch.tensor([0, 0, 1])
    estimator = advantage("dr_grpo")
    assert estimator.tokens(reward, group, sequence).tolist() == [0.5, 0.5, -0.5]
    assert not estimator.token_level
    with pytest.raises(ValueError, match="penalty"):
        estimator.tokens(reward, group, sequence, penalty=torch.zeros(3))


def test_fault_B7_nan_reward_is_left_out_and_counted():
    estimator = advantage("grpo", eps=0.0)
    got = estimator(torch.tensor([1.0, NAN, 3.0]), torch.tensor([0, 0, 0]))
    assert got.tolist() == pytest.approx([-math.sqrt(0.5), 0, math.sqrt(0.5)])
    assert estimator.invalid == 1
    assert values("grpo", [1, NAN, 3], std="population", eps=0) == pytest.approx([-1, 0, 1])
    estimator(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]))
    assert estimator.invalid == 0


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
def test_fault_B7_singletons_and_all_invalid_groups_give_zero(name):
    assert values(name, [1.0]) == [0.0]
    assert values(name, [NAN, float("inf")]) == [0.0, 0.0]
    assert values(name, [NAN, 2.0]) == [0.0, 0.0]
    assert values(name, []) == []


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
def test_equal_rewards_give_exactly_zero(name):
    assert values(name, [0.1] * 7, length=torch.arange(1, 8)) == [0.0] * 7


def test_fault_B10_groups_are_found_by_id_in_any_order():
    generator = torch.Generator().manual_seed(0)
    reward = torch.rand(4, 8, generator=generator)
    expected = torch.stack([advantage("grpo")(row, torch.zeros(8, dtype=torch.int64)) for row in reward])
    group = torch.tensor([70, -3, 12, 5]).repeat(8)
    interleaved = advantage("grpo")(reward.T.reshape(-1), group)
    torch.testing.assert_close(interleaved.reshape(8, 4).T, expected)


def test_unknown_names_options_and_values_are_refused():
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        advantage("grop")
    with pytest.raises(ValueError, match="did you mean 'std'"):
        advantage("grpo", sdt="sample")
    with pytest.raises(ValueError, match="std must be one of"):
        advantage("grpo", std="biased")
    with pytest.raises(ValueError, match="eps"):
        advantage("grpo", eps=-1.0)
    with pytest.raises(ValueError, match="shape"):
        advantage("grpo")(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="integers"):
        advantage("grpo")(torch.zeros(3), torch.zeros(3))


def test_the_table_names_source_confidence_and_defaults():
    table = advantages()
    assert {"grpo", "dr_grpo", "rloo", "reinforce_pp"} <= set(table)
    assert table["grpo"].hyperparameters == {"std": "sample", "eps": 1e-6}
    for method in table.values():
        assert method.description
        assert method.formula
        assert method.source
        assert method.confidence


def test_results_carry_no_graph_and_are_float32_or_wider():
    reward = torch.tensor([1.0, 0.0], requires_grad=True)
    assert not advantage("grpo")(reward, torch.tensor([0, 0])).requires_grad
    assert advantage("grpo")(torch.tensor([1, 0]), torch.tensor([0, 0])).dtype == torch.float32
    assert advantage("grpo")(torch.tensor([1, 0]).bfloat16(), torch.tensor([0, 0])).dtype == torch.float32


rewards_and_groups = st.lists(
    st.tuples(st.floats(-10, 10, allow_subnormal=False).map(lambda x: round(x, 3)), st.integers(0, 3)),
    min_size=1,
    max_size=24,
)


@settings(max_examples=60, deadline=None)
@given(rows=rewards_and_groups, seed=st.integers(0, 1000), name=st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_permuting_trajectories_permutes_advantages(rows, seed, name):
    reward = torch.tensor([r for r, _ in rows], dtype=torch.float64)
    group = torch.tensor([g for _, g in rows])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    estimate = advantage(name)
    torch.testing.assert_close(estimate(reward[order], group[order]), estimate(reward, group)[order])


@settings(max_examples=60, deadline=None)
@given(rows=rewards_and_groups, name=st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_advantages_of_a_group_sum_to_zero(rows, name):
    reward = torch.tensor([r for r, _ in rows], dtype=torch.float64)
    group = torch.tensor([g for _, g in rows])
    sums = torch.zeros(4, dtype=torch.float64).index_add_(0, group, advantage(name)(reward, group))
    torch.testing.assert_close(sums, torch.zeros(4, dtype=torch.float64), atol=1e-9, rtol=0)


@settings(max_examples=60, deadline=None)
@given(rows=rewards_and_groups, scale=st.floats(0.1, 100), shift=st.floats(-5, 5))
def test_grpo_does_not_depend_on_scale_and_offset(rows, scale, shift):
    reward = torch.tensor([r for r, _ in rows], dtype=torch.float64)
    group = torch.tensor([g for _, g in rows])
    estimate = advantage("grpo", eps=0.0)
    torch.testing.assert_close(estimate(scale * reward + shift, group), estimate(reward, group), atol=1e-6, rtol=1e-6)
