"""Rows to micro-batches and back, and scoring by them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.errors import RunError
from estr.learner.packing import pack, unpack
from estr.learner.scoring import score, score_norms
from estr.models.forward import prepare_model
from estr.trajectory import Segment
from learner_helpers import plain_values, random_groups, segment, tiny_model


def row(length: int, first: int = 1, start: int = 10) -> Segment:
    """Tokens start, start + 1, …; all from ``first`` on are actions whose log-probability is the token's number."""
    tokens = list(range(start, start + length))
    return segment(tokens, [i >= first for i in range(length)], [-float(t) for t in tokens[first:]])


def test_one_row_is_read_up_to_its_last_prediction() -> None:
    (microbatch,) = pack([[segment([5, 6, 7, 8, 9], [0, 0, 1, 1, 0], [-1.0, -2.0], [0.5, 0.6], [3, 4])]], 100)
    assert microbatch.tokens.tolist() == [5, 6, 7]
    assert microbatch.cu_seqlens.tolist() == [0, 3]
    assert microbatch.predict.tolist() == [1, 2]
    assert microbatch.target.tolist() == [7, 8]
    assert microbatch.behavior_logprob.tolist() == [-1.0, -2.0]
    assert microbatch.behavior_entropy.tolist() == pytest.approx([0.5, 0.6])
    assert microbatch.version.tolist() == [3, 4]


def test_fault_A12_every_output_returns_to_its_row() -> None:
    """Rows of 5, 1 and 3 actions, packed longest first."""
    units = [[row(n + 1, start=10 * i)] for i, n in enumerate((5, 1, 3), start=1)]
    microbatches = pack(units, 5)
    assert [m.units for m in microbatches] == [(0,), (1, 2)]
    tag = [torch.tensor([float(m.units[s]) for s in m.sequence]) for m in microbatches]
    first, second = unpack(units, microbatches, tag, [10 * t for t in tag])
    assert [r[0].tolist() for r in first] == [[0.0] * 5, [1.0], [2.0] * 3]
    assert [r[0].tolist() for r in second] == [[0.0] * 5, [10.0], [20.0] * 3]


def test_fault_B16_labels_cross_no_boundary() -> None:
    first = segment([10, 11, 12], [0, 1, 1])
    second = segment([20, 21], [0, 1])
    (microbatch,) = pack([[first], [second]], 100)
    assert microbatch.target.tolist() == [11, 12, 21]
    assert microbatch.tokens[microbatch.predict].tolist() == [10, 11, 20]
    assert microbatch.cu_seqlens.tolist() == [0, 2, 3]


def test_fault_B16_packs_of_a_single_token() -> None:
    (microbatch,) = pack([[segment([7, 8], [0, 1])]], 1)
    assert microbatch.tokens.tolist() == [7]
    assert microbatch.predict.tolist() == [0]
    assert microbatch.target.tolist() == [8]


def test_fault_B17_an_end_token_that_equals_padding_is_trained() -> None:
    (microbatch,) = pack([[segment([5, 7, 2], [0, 1, 1])]], 100)
    assert microbatch.target.tolist() == [7, 2]


def test_fault_B18_interior_holes() -> None:
    (microbatch,) = pack([[segment([9, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 0, 1])]], 100)
    assert microbatch.target.tolist() == [1, 3, 6]
    assert microbatch.predict.tolist() == [0, 2, 5]


def test_fault_B19_columns_of_unequal_length_are_refused() -> None:
    good = segment([1, 2, 3, 4], [0, 1, 1, 1])
    with pytest.raises(ValueError, match="one length"):
        Segment(np.arange(7, dtype=np.int32), good.action, good.logprob, good.entropy, good.version)


def test_fault_B22_tool_output_is_read_and_not_trained() -> None:
    (microbatch,) = pack([[segment([1, 30, 40, 41, 31], [0, 1, 0, 0, 1])]], 100)
    assert microbatch.target.tolist() == [30, 31]
    assert microbatch.tokens.tolist() == [1, 30, 40, 41]


def test_an_action_without_a_predecessor_is_an_error() -> None:
    with pytest.raises(RunError, match="row 1 of trajectory 0 starts with an action"):
        pack([[row(3), segment([1, 2], [1, 1])]], 100)


def test_rows_of_one_unit_stay_together_and_are_one_sequence() -> None:
    units = [[row(4), row(3)], [row(9)]]
    microbatches = pack(units, 8)
    assert [m.units for m in microbatches] == [(0,), (1,)]
    assert microbatches[0].sequence.tolist() == [0] * 5
    assert microbatches[0].cu_seqlens.tolist() == [0, 3, 5]


def test_units_without_actions_are_in_no_microbatch() -> None:
    units = [[segment([1, 2], [0, 0])], [row(3)], []]
    (microbatch,) = pack(units, 100)
    assert microbatch.units == (1,)
    (columns,) = unpack(units, [microbatch], [torch.tensor([1.0, 2.0])])
    assert [[c.tolist() for c in rows] for rows in columns] == [[[]], [[1.0, 2.0]], []]
    assert pack([], 10) == []


def test_siblings_read_their_prompt_once() -> None:
    first = segment([5, 6, 7, 8], [0, 0, 1, 1])
    second = segment([5, 6, 9, 3, 4], [0, 0, 1, 0, 1])
    other = segment([5, 7, 6], [0, 1, 1])
    (microbatch,) = pack([[first], [other], [second]], 8, share=True)
    assert microbatch.tokens.tolist() == [5, 6, 7, 5, 7, 9, 3]
    assert microbatch.read is not None
    assert microbatch.read.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6]
    assert microbatch.cu_seqlens.tolist() == [0, 3, 5, 9]
    assert microbatch.predict.tolist() == [1, 2, 3, 4, 1, 6]
    assert microbatch.target.tolist() == [7, 8, 7, 6, 9, 4]
    assert pack([[first], [other]], 100, share=True)[0].read is None


def test_siblings_are_packed_side_by_side() -> None:
    prompts = [list(range(10)), list(range(20, 30))]
    units = [[segment([*prompts[i % 2], *range(40, 40 + n)], [0] * 10 + [1] * n)] for i, n in enumerate((9, 8, 5, 4))]
    assert [m.units for m in pack(units, 24, share=True)] == [(0, 2), (1, 3)]
    assert [m.units for m in pack(units, 24)] == [(0,), (1,), (2,), (3,)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=3), max_size=12),
    st.integers(1, 30),
    st.booleans(),
)
def test_packing_is_a_partition_under_the_budget(masks: list[list[list[bool]]], budget: int, share: bool) -> None:
    rng = np.random.default_rng(0)
    units = []
    for rows in masks:
        unit = []
        for mask in rows:
            mask = [False, *mask]
            unit.append(segment(rng.integers(0, 3, len(mask)).tolist(), mask, rng.normal(size=sum(mask))))
        units.append(unit)
    microbatches = pack(units, budget, share=share)
    packed = sorted(u for m in microbatches for u in m.units)
    assert packed == [u for u, rows in enumerate(units) if any(r.action_count for r in rows)]
    for m in microbatches:
        assert len(m.tokens) <= budget or len(m.units) == 1
        assert m.sequence.unique().tolist() == list(range(len(m.units)))
        assert (m.sequence.diff() >= 0).all()
        read = m.tokens if m.read is None else m.tokens[m.read]
        rows = [units[unit][place] for unit, place, _ in m.rows]
        assert read.tolist() == [int(t) for row in rows for t in row.tokens[: np.flatnonzero(row.action)[-1]]]
    (columns,) = unpack(units, microbatches, [m.behavior_logprob for m in microbatches])
    for rows, values in zip(units, columns, strict=True):
        for r, column in zip(rows, values, strict=True):
            assert column.tolist() == r.logprob[r.action].tolist()
    for m in microbatches:
        assert torch.equal(m.gather(columns), m.behavior_logprob)


@pytest.mark.parametrize("budget", [1, 25, 4096])
@pytest.mark.parametrize("tied", [True, False])
def test_scores_equal_a_plain_forward_pass(budget: int, tied: bool) -> None:
    model = tiny_model(tied=tied).eval()
    rows = [s for group in random_groups() for t in group for s in t.segments]
    expected = [plain_values(model, r, 0.7) for r in rows]
    prepare_model(model)
    for (logprob, entropy), (a, b) in zip(score(model, rows, 0.7, budget), expected, strict=True):
        assert logprob.dtype == entropy.dtype == np.float32
        assert np.allclose(logprob, a.detach(), atol=2e-5)
        assert np.allclose(entropy, b.detach(), atol=2e-5)


def test_score_norms_equal_a_backward_pass_for_each_unit() -> None:
    model = tiny_model().eval()
    units = [t.segments for t in random_groups(1, 3)[0]]
    expected, logprobs = [], []
    for rows in units:
        model.zero_grad()
        values = torch.cat([plain_values(model, r)[0] for r in rows])
        values.sum().backward()
        expected.append(sum(float(p.grad.double().square().sum()) for p in model.parameters()) ** 0.5)
        logprobs.append(values.detach())
    model.zero_grad()
    prepare_model(model)
    norms, flat = score_norms(model, [*units, [segment([1, 2], [0, 0])]], 1.0)
    assert norms.tolist() == pytest.approx([*expected, 0.0], rel=1e-4)
    assert torch.allclose(flat, torch.cat(logprobs), atol=1e-5)
    assert all(p.grad is None for p in model.parameters())
