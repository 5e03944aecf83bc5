"""Entropy bins, the power-law fit, staleness and keep-masks: closed forms first, then properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr import recipes
from estr.diagnostics import (
    DEFAULTS,
    delta_by_entropy,
    delta_score,
    estr_keep,
    fit_power_law,
    icepop_keep,
    integer_histogram,
    keep_mask,
    keep_masks,
    kpop_keep,
    multi_version_share,
    ppo_keep,
    trajectory_staleness,
)

# the shared fixture F8 of the method sheet
MU = np.log([0.90, 0.50, 0.01, 0.20, 0.95, 0.30, 0.002, 0.60])
Q = np.log([0.90, 0.45, 0.012, 0.25, 0.97, 0.28, 0.02, 0.50])
PI = np.log([0.90, 0.55, 0.02, 0.60, 0.99, 0.10, 0.03, 0.45])
H = np.array([0.33, 0.70, 0.06, 1.20, 0.20, 1.50, 0.02, 0.68])
A = np.array([1.0, 1.0, 1.0, 1.0, -0.5, -0.5, -0.5, -0.5])


def test_bins_with_given_edges_have_the_means_of_their_tokens():
    bins = delta_by_entropy([1.0, -3.0, 2.0, 5.0], [0.1, 0.3, 1.0, 2.0], [0.0, 0.5, 2.0])
    assert bins.count.tolist() == [2, 2]  # the last edge is inclusive
    np.testing.assert_allclose(bins.entropy, [0.2, 1.5])
    np.testing.assert_allclose(bins.delta_abs, [2.0, 3.5])
    np.testing.assert_allclose(bins.delta_squared, [5.0, 14.5])


def test_bins_leave_out_what_is_not_finite_and_outside():
    bins = delta_by_entropy([1.0, np.nan, np.inf, 7.0], [0.1, 0.1, 0.1, 9.0], [0.0, 1.0, 2.0])
    assert bins.count.tolist() == [1, 0]
    assert np.isnan(bins.delta_squared[1])


def test_quantile_bins_hold_equal_counts_and_merge_where_entropy_ties():
    bins = delta_by_entropy(np.ones(100), np.arange(100.0), 4)
    assert bins.count.tolist() == [25, 25, 25, 25]
    tied = delta_by_entropy(np.ones(100), np.zeros(100), 4)
    assert tied.count.tolist() == [100]
    assert delta_by_entropy([], [], 4).count.sum() == 0


@pytest.mark.parametrize("edges", [[1.0], [0.0, 0.0], [1.0, 0.0]])
def test_edges_must_increase(edges):
    with pytest.raises(ValueError, match="increasing"):
        delta_by_entropy([1.0], [1.0], edges)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match=r"\(2,\) and \(1,\)"):
        delta_by_entropy([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("exponent", "coefficient"), [(1.0, 0.25), (2.0, 3.0), (0.5, 1e-3)])
def test_an_exact_power_law_is_found(exponent, coefficient):
    entropy = np.repeat(np.geomspace(1e-3, 3.0, 12), 10)
    delta = np.sqrt(coefficient * entropy**exponent)
    fit = fit_power_law(delta, entropy, 12)
    assert fit is not None
    assert fit.exponent == pytest.approx(exponent, abs=1e-6)
    assert fit.coefficient == pytest.approx(coefficient, rel=1e-6)
    assert fit.r2 == pytest.approx(1.0)
    if exponent == 1.0:
        assert fit.slope == pytest.approx(coefficient)


def test_linear_slope_is_least_squares_through_the_origin():
    # (δ², H) = (1, 1), (4, 2), (9, 3): slope = (1 + 8 + 27) / 14
    fit = fit_power_law([1.0, 2.0, -3.0], [1.0, 2.0, 3.0], [0.5, 1.5, 2.5, 3.5], minimum_count=1)
    assert fit is not None
    assert fit.slope == pytest.approx(36 / 14)
    assert fit.exponent == pytest.approx(2.0)


def test_no_fit_without_three_bins():
    assert fit_power_law([1.0, 1.0], [0.5, 1.0]) is None
    assert fit_power_law(np.zeros(100), np.linspace(0.1, 1, 100)) is None
    assert fit_power_law([], []) is None


def test_a_noisy_linear_law_has_exponent_near_one_and_shuffled_entropy_near_zero():
    rng = np.random.default_rng(0)
    entropy = rng.exponential(0.5, 50_000)
    delta = rng.normal(0, np.sqrt(0.1 * entropy))
    fit = fit_power_law(delta, entropy)
    assert fit is not None
    assert fit.exponent == pytest.approx(1.0, abs=0.03)
    assert fit.slope == pytest.approx(0.1, rel=0.05)
    shuffled = fit_power_law(delta, rng.permutation(entropy))
    assert shuffled is not None
    assert abs(shuffled.exponent) < 0.1


def test_staleness_of_three_trajectories():
    result = trajectory_staleness([3, 3, 5, 4, 7, 7], [0, 0, 0, 1, 3, 3], [6, 4, 9, -1])
    np.testing.assert_array_equal(result.intra, [2, 0, np.nan, 0])
    np.testing.assert_array_equal(result.inter, [1, 0, np.nan, np.nan])
    assert result.spans.tolist() == [True, False, False, False]


def test_staleness_refuses_disorder():
    with pytest.raises(ValueError, match="non-decreasing"):
        trajectory_staleness([1, 2], [1, 0], [3, 3])
    with pytest.raises(ValueError, match="alike"):
        trajectory_staleness([1, 2], [0], [3])


def test_share_of_trajectories_that_span_versions_counts_only_late_trained_ones():
    spans = [True, True, False, False, True]
    assert multi_version_share(spans, [10, 11, 12, 13, np.nan]) == (pytest.approx(1 / 3), 3)
    assert multi_version_share(spans, [1, 2, 3, 4, 5]) == (None, 0)


def test_integer_histogram():
    assert integer_histogram([2, 0, 2, np.nan]) == {0: 1, 2: 2}


def test_estr_scores_and_masks_of_f8():
    expected = [0, 0.0128, 6.8636, 0.9975, 0.0081, 0.7993, 244.4512, 0.1199]
    np.testing.assert_allclose(delta_score(PI - MU, H), expected, atol=5e-5)
    assert estr_keep(PI - MU, H).astype(int).tolist() == [1, 1, 0, 1, 1, 1, 0, 1]
    assert estr_keep(PI - MU, H, tau=0.5).astype(int).tolist() == [1, 1, 0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("mu", "pi", "entropy", "tau", "keep"),
    [(0.5, 0.55, 0, 1, True), (0.5, 0.56, 0, 1, False), (0.9, 0.7, 0.325, 1, True), (0.9, 0.7, 0.325, 0.1, False)],
)
def test_single_estr_verdicts(mu, pi, entropy, tau, keep):
    assert estr_keep([np.log(pi / mu)], [entropy], tau).tolist() == [keep]


def test_icepop_band_is_inclusive():
    assert icepop_keep(np.log([0.49, 0.5, 1, 5, 5.01])).tolist() == [False, True, True, True, False]
    assert icepop_keep(Q - MU).astype(int).tolist() == [1, 1, 1, 1, 1, 1, 0, 1]


def test_kpop_vectors():
    q, mu = np.log([0.9, 0.5, 0.99, 0.5]), np.log([0.2, 0.1, 0.6, 0.4])
    assert kpop_keep(q, mu, 2.0).tolist() == [True, True, True, True]
    assert kpop_keep(q, mu, 0.75).tolist() == [False, True, False, True]
    assert kpop_keep(q, mu, 0.5).tolist() == [False, False, False, True]
    assert kpop_keep(Q, MU, 0.1).all()
    assert kpop_keep(PI, MU, 0.1).astype(int).tolist() == [1, 1, 1, 0, 1, 0, 1, 1]


def test_ppo_clip_stops_only_moves_that_lead_out():
    assert ppo_keep(PI - MU, A, 0.2, 0.2).astype(int).tolist() == [1, 1, 0, 0, 1, 0, 1, 0]
    assert ppo_keep(np.log([0.79, 0.81, 1.19, 1.21])).tolist() == [False, True, True, False]


def test_icepop_and_kpop_use_q_and_fall_back_to_pi():
    proximal = np.where(np.arange(8) == 6, np.nan, Q)
    assert keep_mask("icepop", PI, MU, H, Q).astype(int).tolist() == [1, 1, 1, 1, 1, 1, 0, 1]
    assert keep_mask("icepop", PI, MU, H).astype(int).tolist() == [1, 1, 1, 1, 1, 0, 0, 1]
    assert keep_mask("icepop", PI, MU, H, proximal).astype(int).tolist() == [1, 1, 1, 1, 1, 1, 0, 1]
    assert keep_mask("kpop", PI, MU, H, phi=0.1).astype(int).tolist() == [1, 1, 1, 0, 1, 0, 1, 1]


def test_all_masks_have_a_name_and_drop_what_is_invalid():
    pi = np.array([np.nan, -np.inf, -1.0, -1.0])
    mu = np.array([-1.0, -1.0, -np.inf, -1.0])
    masks = keep_masks(pi, mu, np.ones(4), advantage=np.ones(4))
    assert set(masks) == set(DEFAULTS)
    for name, mask in masks.items():
        assert mask.tolist() == [False, False, False, True], name


def test_unknown_gate():
    with pytest.raises(ValueError, match="'vespo'"):
        keep_mask("vespo", PI, MU, H)


def test_defaults_are_those_of_the_recipes():
    table = recipes()
    for name, defaults in DEFAULTS.items():
        known = table[name].hyperparameters
        assert {key: known[key] for key in defaults} == defaults, name


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-20, 20), min_size=1, max_size=20), st.floats(0, 5), st.floats(0.01, 4))
def test_estr_with_one_entropy_is_a_fixed_threshold(delta, entropy, tau):
    kept = estr_keep(delta, np.full(len(delta), entropy), tau)
    square = np.asarray(delta) ** 2
    limit = tau * (entropy + 0.01)
    clear = np.abs(square - limit) > 1e-9 * limit
    np.testing.assert_array_equal(kept[clear], (square <= limit)[clear])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 5)), min_size=1, max_size=60), st.integers(1, 9))
def test_every_finite_token_is_in_one_quantile_bin(pairs, bins):
    delta, entropy = np.array(pairs).T
    table = delta_by_entropy(delta, entropy, bins)
    assert table.count.sum() == len(delta)
    filled = table.count > 0
    assert (table.count[filled] @ table.delta_squared[filled]) == pytest.approx((delta**2).sum())


@pytest.mark.filterwarnings("error")
def test_a_fit_over_nearly_equal_entropies_warns_of_nothing():
    entropy = np.repeat(1e-3 * (1 + 1e-9 * np.arange(4)), 10)
    delta = np.repeat([1e-9, 1e-3, 1.0, 1e3], 10)
    fit = fit_power_law(delta, entropy, bins=4)
    assert fit is not None
    assert fit.exponent > 1e6
