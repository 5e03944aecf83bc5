"""Statistics of a comparison: closed forms, textbook examples, properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estr.compare.statistics import (
    area_under_curve,
    collapse_start,
    holm,
    mean_interval,
    paired_differences,
    t_quantile,
    t_test,
)


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.7062047), (2, 4.30265273), (4, 2.77644511), (9, 2.26215716)])
def test_quantiles_of_student_t_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(expected, rel=1e-7)


def test_interval_of_five_seeds_by_hand() -> None:
    found = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.7764451 * math.sqrt(2.5 / 5)
    assert found.mean == 3.0
    assert found.low == pytest.approx(3 - half)
    assert found.high == pytest.approx(3 + half)
    assert found.count == 5


def test_one_seed_has_a_mean_and_no_interval() -> None:
    found = mean_interval([0.4])
    assert (found.mean, found.low, found.high) == (0.4, None, None)
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([math.nan])


def test_p_value_with_one_degree_of_freedom_is_that_of_cauchy() -> None:
    # t = mean / (s / sqrt 2) = 3 for the differences 1 and 2; P(|T| > 3) = 1 - 2 atan(3) / pi
    assert t_test([1.0, 2.0]) == pytest.approx(1 - 2 * math.atan(3) / math.pi)


def test_p_value_without_spread() -> None:
    assert t_test([0.0, 0.0, 0.0]) == 1.0
    assert t_test([0.1, 0.1, 0.1]) == 0.0
    assert t_test([0.1]) is None


def test_holm_adjusts_a_textbook_example() -> None:
    # in order: 0.005·4 = 0.02, 0.01·3 = 0.03, 0.03·2 = 0.06, 0.04·1 raised to the 0.06 before it
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.lists(st.floats(-1, 1), min_size=2, max_size=6), min_size=1, max_size=6))
def test_corrected_interval_excludes_zero_where_the_adjusted_p_value_is_small(families: list[list[float]]) -> None:
    for found in paired_differences(families):
        assert found.p is not None
        assert found.p_holm is not None
        assert found.p_holm >= found.p
        if abs(found.p_holm - 0.05) > 1e-6:
            assert found.decided == (found.p_holm < 0.05)


def test_one_recipe_is_not_corrected_and_too_few_pairs_are_left_out() -> None:
    alone = paired_differences([[0.1, 0.2, 0.3]])[0]
    assert alone.p_holm == alone.p
    beside, single = paired_differences([[0.1, 0.2, 0.3], [0.5]])
    assert beside.p_holm == alone.p
    assert (single.mean, single.p, single.low) == (0.5, None, None)


def test_missing_pairs_are_left_out() -> None:
    assert paired_differences([[0.1, math.nan, 0.3]])[0].count == 2


def test_area_is_the_mean_height_over_steps() -> None:
    assert area_under_curve([0, 10], [0.0, 1.0]) == 0.5
    assert area_under_curve([0, 10, 40], [0.0, 1.0, 1.0]) == pytest.approx((5 + 30) / 40)
    assert area_under_curve([5], [0.3]) == 0.3
    assert math.isnan(area_under_curve([], []))


@pytest.mark.parametrize(
    ("curve", "start"),
    [
        ([0.2, 0.8, 0.3, 0.1], 2),
        ([0.2, 0.8, 0.3, 0.5, 0.1], 4),  # it came back before it fell for good
        ([0.2, 0.8, 0.3, 0.4], None),  # half is not below half
        ([0.1, 0.3, 0.8], None),  # low before its best is no collapse
        ([0.8, 0.39], 1),
        ([0.0, 0.0], None),
        ([], None),
    ],
)
def test_collapse_is_below_half_of_the_best_to_the_end(curve: list[float], start: int | None) -> None:
    assert collapse_start(np.array(curve)) == start
