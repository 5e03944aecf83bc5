"""An entropy that is only known as an interval: from the segment through ledger, file and packing to the gate."""

import dataclasses

import numpy as np
import pytest

from estr.config import RolloutConfig
from estr.engines.vllm.reading import Reading
from estr.engines.vllm.rows import Row, SampledToken
from estr.learner import Learner, pack
from estr.storage.rollouts import Settlement, rows_from, to_table
from estr.storage.spool import decode_trajectory, encode_trajectory
from estr.trajectory import Segment
from learner_helpers import random_groups, segment, settings, tiny_model, trajectory


def bounded(row: Segment, width: float) -> Segment:
    """The same row, its entropies known from ``width`` below to ``width`` above."""
    return dataclasses.replace(row, entropy=row.entropy - width, entropy_upper=row.entropy + width)


ROW = segment([5, 6, 7, 8], [0, 1, 0, 1], [-1.0, -2.0], [0.5, 0.75], [3, 4])


def test_both_ends_are_stored_and_read_back():
    path = trajectory(bounded(ROW, 0.25))
    back = decode_trajectory(encode_trajectory(path)).segments[0]
    np.testing.assert_array_equal(back.entropy_upper, [np.nan, 0.75, np.nan, 1.0])
    np.testing.assert_array_equal(back.entropy, [np.nan, 0.25, np.nan, 0.5])
    assert decode_trajectory(encode_trajectory(trajectory(ROW))).segments[0].entropy_upper is None
    rows = rows_from(trajectory(bounded(ROW, 0.25), ROW), Settlement("finished"), RolloutConfig())
    first, second = to_table(rows).to_pylist()
    assert (first["entropy_kind"], second["entropy_kind"]) == ("bounded", "exact")
    assert first["entropy_upper"][1::2] == [0.75, 1.0]
    assert second["entropy_upper"] is None


def test_a_column_of_another_length_is_refused():
    with pytest.raises(ValueError, match="one length"):
        dataclasses.replace(ROW, entropy_upper=np.zeros(3, np.float32))


def test_exact_rows_beside_bounded_ones_are_intervals_of_one_point():
    microbatches = pack([[bounded(ROW, 0.25)], [ROW]], 3)
    assert len(microbatches) == 2
    upper = [m.behavior_entropy_upper.tolist() for m in microbatches]
    assert upper == [[0.75, 1.0], [0.5, 0.75]]
    assert pack([[ROW]], 100)[0].behavior_entropy_upper is None


@pytest.mark.parametrize(("width", "least", "most"), [(0.0, 0.0, 0.0), (0.3, 0.01, 0.99), (100.0, 0.5, 1.0)])
def test_the_gate_counts_what_the_interval_leaves_open(width, least, most):
    groups = [
        [dataclasses.replace(t, segments=[bounded(s, width) for s in t.segments]) for t in group]
        for group in random_groups()
    ]
    (result,) = Learner(tiny_model(), settings(objective={"recipe": "estr"})).train(groups)
    assert least <= result.metrics["gate/undecided_fraction"] <= most


def test_undecided_error_ends_the_run_where_a_verdict_is_open():
    from estr.errors import RunError

    groups = [
        [dataclasses.replace(t, segments=[bounded(s, 100.0) for s in t.segments]) for t in group]
        for group in random_groups()
    ]
    learner = Learner(tiny_model(), settings(objective={"recipe": "estr", "undecided": "error"}))
    with pytest.raises(RunError, match="undecided"):
        next(iter(learner.train(groups)))


# ---------------------------------------------------------------------- what comes with a token


def test_a_stamp_gives_entropy_and_version():
    got = Reading(vocabulary=100).read([7, 103], [-0.5, 1.25], version=9)
    assert (got.token, got.logprob, got.entropy, got.version) == (7, -0.5, 1.25, 3)
    assert (got.entropy_upper, got.support, got.topk) == (None, None, None)


def test_without_it_the_interval_comes_from_the_likely_tokens():
    reading = Reading(vocabulary=4, exact=False, stamped=False, entropy_topk=2)
    assert reading.logprobs == 2
    got = reading.read([2, 0, 1], np.log([0.1, 0.5, 0.3]).tolist(), version=9)
    low, high = -(0.5 * np.log(0.5) + 0.3 * np.log(0.3)) - np.array([0.2 * np.log(0.2), 0.2 * np.log(0.1)])
    assert (got.entropy, got.entropy_upper) == pytest.approx((low, high), abs=1e-4)
    assert (got.token, got.version) == (2, 9)


def test_truncated_sampling_records_what_was_kept():
    reading = Reading(vocabulary=50, top_k=2, record=1)
    assert reading.logprobs == 11
    rest = [-np.inf] * 8
    ids = [4, 50, 9, 4, *range(10, 18)]
    got = reading.read(ids, [-1.0, 0.6, -0.4, -1.0, *rest], version=0)
    assert got.support.tolist() == [4, 9]
    assert got.topk[0].tolist() == [9]
    tied = reading.read(ids, [-2.3] * 2 + [-2.3] * 10, version=0)
    assert np.isnan(tied.logprob), "more tokens are tied for the last place than are known"


def test_a_row_goes_through_a_segment_and_back():
    row = Row("a", [1, 2])
    row.add(SampledToken(3, -0.5, 1.0, 7, 1.5, np.array([3, 4], np.int32)))
    row.tokens.append(9)
    row.add(SampledToken(4, -0.25, 0.5, 8))
    made = row.segment()
    assert made.tokens.tolist() == [1, 2, 3, 9, 4]
    assert made.action.tolist() == [False, False, True, False, True]
    assert made.entropy_upper[2::2].tolist() == [1.5, 0.5]
    assert [part.tolist() for part in (made.support[0], made.support[1])] == [[3, 4], []]
    other = Row("b")
    other.take_over(made)
    again = other.segment()
    for name in ("tokens", "action", "logprob", "entropy", "version", "entropy_upper"):
        np.testing.assert_array_equal(getattr(again, name), getattr(made, name))
