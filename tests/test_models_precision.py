import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.errors import UsageError
from estr.models.precision import PRECISIONS, parse_dtype, to_engine

rows = st.lists(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3),
    min_size=1,
    max_size=4,
)


def test_int8_by_hand():
    weight = torch.tensor([[127.0, 1.4, -2.6, 0.5], [1.0, 0.3, -1.0, 0.0]])
    expected = torch.tensor([[127.0, 1.0, -3.0, 0.0], [1.0, 38 / 127, -1.0, 0.0]])
    torch.testing.assert_close(to_engine(weight, "w", "int8"), expected, rtol=1e-7, atol=0)


def test_int2_has_three_values_a_row():
    weight = torch.tensor([[4.0, 1.9, -2.1, -4.0], [0.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[4.0, 0.0, -4.0, -4.0], [0.0, 0.0, 0.0, 0.0]])
    assert torch.equal(to_engine(weight, "w", "int2"), expected)


def test_int5_row_scale_is_per_output_channel():
    weight = torch.tensor([[15.0, 7.4], [1.5, 0.74]])
    expected = torch.tensor([[15.0, 7.0], [1.5, 0.7]])
    torch.testing.assert_close(to_engine(weight, "w", "int5"), expected)


def test_experts_are_rounded_row_by_row():
    weight = torch.randn(2, 3, 8)
    whole = to_engine(weight, "experts", "int4")
    assert torch.equal(whole[1, 2], to_engine(weight[1, 2:3], "row", "int4")[0])


def test_vectors_and_integers_stay():
    norm, ids = torch.randn(7), torch.arange(6).reshape(2, 3)
    assert torch.equal(to_engine(norm, "norm", "int2"), norm)
    assert to_engine(ids, "ids", "int8") is ids


def test_same_type_is_not_copied():
    weight = torch.randn(3, 3)
    assert to_engine(weight, "w", "float32") is weight


def test_bfloat16_is_a_cast():
    weight = torch.tensor([[1.0 + 2**-9, 3.0]])
    rounded = to_engine(weight, "w", "bfloat16")
    assert rounded.dtype is torch.bfloat16
    assert rounded.tolist() == [[1.0, 3.0]]


@settings(max_examples=60, deadline=None)
@given(rows, st.sampled_from(sorted(PRECISIONS)))
def test_idempotent_and_never_further_than_half_a_step(values, name):
    weight = torch.tensor(values)
    once = to_engine(weight, "w", name)
    assert torch.equal(to_engine(once, "w", name), once)
    if (bits := parse_dtype(name).bits) is not None:
        step = weight.abs().amax(-1, keepdim=True).double() / (2 ** (bits - 1) - 1)
        assert ((once - weight).abs() <= step * 0.5 * (1 + 1e-6) + 1e-30).all()
        assert torch.equal(once.abs().amax(-1), weight.abs().amax(-1))


def test_unknown_name_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'int8'"):
        parse_dtype("int88")
    with pytest.raises(UsageError, match="float32"):
        parse_dtype("fp32")
    with pytest.raises(UsageError):
        parse_dtype("int1")


def test_nan_is_refused_by_name():
    with pytest.raises(UsageError, match=r"mlp\.weight"):
        to_engine(torch.tensor([[float("nan"), 1.0]]), "mlp.weight", "int8")
