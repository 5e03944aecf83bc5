"""TokenBatch: what it accepts, what it refuses, and how padded rows become one."""

import re

import pytest
import torch

from estr import TokenBatch

torch.set_num_threads(1)


def make(n=3, **fields):
    values = {
        "logprob": torch.full((n,), -1.0),
        "behavior_logprob": torch.full((n,), -1.0),
        "advantage": torch.ones(n),
        "sequence": torch.zeros(n, dtype=torch.int64),
    }
    return TokenBatch(**{**values, **fields})


def test_counts_and_defaults():
    batch = make(sequence=torch.tensor([0, 0, 1]))
    assert (batch.tokens, batch.sequence_count, batch.sequences) == (3, 2, 2)
    assert make(sequences=5).sequence_count == 5
    assert make(0).sequence_count == 0
    assert make(0, sequences=2).sequence_count == 2
    assert make(0, sequences=2, advantage=torch.ones(2)).advantage.shape == (0,)


def test_advantage_per_sequence_is_broadcast():
    batch = make(4, sequence=torch.tensor([0, 0, 1, 2]), advantage=torch.tensor([1.0, 2.0, 3.0]))
    assert batch.advantage.tolist() == [1, 1, 2, 3]


def test_advantage_of_ambiguous_length_is_refused():
    sequence = torch.tensor([0, 0, 1])
    with pytest.raises(ValueError, match=r"advantage.*ambiguous"):
        make(sequence=sequence, sequences=3)
    assert make(sequence=torch.arange(3)).advantage.tolist() == [1, 1, 1]
    values = torch.tensor([1.0, 2.0, 3.0])
    options = {"sequence": sequence, "sequences": 3, "advantage": values}
    assert make(**options, advantage_scope="token").advantage.tolist() == [1, 2, 3]
    assert make(**options, advantage_scope="sequence").advantage.tolist() == [1, 1, 2]
    with pytest.raises(ValueError, match="advantage_scope"):
        make(advantage_scope="row")
    with pytest.raises(ValueError, match="advantage must have shape"):
        make(advantage_scope="sequence")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprob", torch.zeros(3, 1)),
        ("behavior_logprob", torch.zeros(3, 1)),
        ("behavior_logprob", torch.zeros(1)),
        ("behavior_logprob", torch.tensor(0.0)),
        ("advantage", torch.ones(3, 1)),
        ("advantage", torch.ones(2)),
        ("behavior_entropy", torch.zeros(1, 3)),
        ("behavior_entropy_upper", torch.zeros(2)),
        ("proximal_logprob", torch.zeros(4)),
        ("proximal_entropy", torch.zeros(3, 1)),
        ("reference_logprob", torch.zeros(1)),
        ("entropy", torch.zeros(3, 1)),
        ("sequence", torch.zeros(3, 1, dtype=torch.int64)),
        ("sequence", torch.zeros(2, dtype=torch.int64)),
        ("version", torch.zeros(1, dtype=torch.int64)),
        ("group", torch.zeros(3, dtype=torch.int64)),
        ("reward", torch.zeros(3)),
        ("topk_logprob", torch.zeros(3)),
        ("topk_logprob", torch.zeros(2, 4)),
    ],
)
def test_shapes_that_do_not_match_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        make(**{field: value})


def test_topk_fields_must_have_one_width():
    with pytest.raises(ValueError, match="topk_logprob"):
        make(behavior_topk_logprob=torch.zeros(3, 4), topk_logprob=torch.zeros(3, 5))


@pytest.mark.parametrize("sequence", [[1, 0, 0], [-1, 0, 0]])
def test_sequence_must_not_fall(sequence):
    with pytest.raises(ValueError, match="sequence"):
        make(sequence=torch.tensor(sequence))


def test_sequences_must_cover_the_index():
    with pytest.raises(ValueError, match="sequences"):
        make(sequence=torch.tensor([0, 1, 2]), sequences=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sequence", torch.zeros(3)),
        ("version", torch.zeros(3)),
        ("logprob", torch.ones(3, dtype=torch.bool)),
        ("topk_ids", torch.zeros(3, 2)),
    ],
)
def test_types_are_checked(field, value):
    with pytest.raises(ValueError, match=field):
        make(**{field: value})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_raised_to_float32(dtype):
    logprob = torch.full((3,), -1.0, dtype=dtype, requires_grad=True)
    batch = make(logprob=logprob, behavior_entropy=torch.ones(3, dtype=dtype))
    assert batch.logprob.dtype == batch.behavior_entropy.dtype == torch.float32
    batch.logprob.sum().backward()
    assert logprob.grad.tolist() == [1, 1, 1]


def test_double_stays_and_integers_become_float32():
    batch = make(logprob=torch.zeros(3, dtype=torch.float64), advantage=torch.tensor([1, -1, 0]))
    assert batch.logprob.dtype == torch.float64
    assert batch.advantage.dtype == torch.float32


def test_only_the_policy_carries_a_graph():
    live = torch.full((3,), -1.0, requires_grad=True)
    names = ("logprob", "behavior_logprob", "advantage", "entropy", "proximal_logprob")
    batch = make(**dict.fromkeys(names, live * 1))
    assert batch.logprob.requires_grad
    assert batch.entropy.requires_grad
    assert not batch.behavior_logprob.requires_grad
    assert not batch.advantage.requires_grad
    assert not batch.proximal_logprob.requires_grad
    assert not batch.detach().logprob.requires_grad
    assert batch.logprob.requires_grad


PADDED = torch.tensor([[1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0]]).bool()


def padded(**fields):
    grid = torch.arange(18.0).view(3, 6)
    values = {"logprob": -grid, "behavior_logprob": -grid, "advantage": torch.tensor([1.0, 2.0, 3.0])}
    return TokenBatch.from_padded(mask=PADDED, **{**values, **fields})


def test_from_padded_selects_row_by_row():
    batch = padded(reward=torch.tensor([0.0, 1.0, 0.0]), group=torch.tensor([4, 4, 5]), target_version=7)
    assert batch.logprob.tolist() == [0, -2, -5, -13, -14]
    assert batch.sequence.tolist() == [0, 0, 0, 2, 2]
    assert batch.advantage.tolist() == [1, 1, 1, 3, 3]
    assert (batch.sequence_count, batch.target_version) == (3, 7)
    assert batch.group.tolist() == [4, 4, 5]


def test_from_padded_takes_advantages_per_token_and_top_k():
    grid = torch.arange(18.0).view(3, 6)
    batch = padded(advantage=grid, topk_logprob=grid.unsqueeze(-1).expand(3, 6, 2))
    assert batch.advantage.tolist() == [0, 2, 5, 13, 14]
    assert batch.topk_logprob[:, 1].tolist() == [0, 2, 5, 13, 14]


def test_from_padded_with_as_many_tokens_as_rows():
    mask = torch.tensor([[1, 1], [0, 0]]).bool()
    grid = torch.zeros(2, 2)
    batch = TokenBatch.from_padded(mask=mask, logprob=grid, behavior_logprob=grid, advantage=torch.tensor([1.0, 2.0]))
    assert batch.advantage.tolist() == [1, 1]


def test_fault_B18_interior_zeros_of_a_mask():
    mask = torch.tensor([[1, 0, 1, 0, 0, 1]]).bool()
    values = torch.arange(6.0).view(1, 6)
    batch = TokenBatch.from_padded(mask=mask, logprob=-values, behavior_logprob=-values, advantage=torch.ones(1))
    assert batch.tokens == 3
    assert batch.logprob.tolist() == [0, -2, -5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprob": torch.zeros(3, 5)}, "logprob"),
        ({"behavior_logprob": torch.zeros(3, 6, 1)}, "behavior_logprob"),
        ({"advantage": torch.zeros(2)}, "advantage"),
        ({"advantage": torch.zeros(3, 1)}, "advantage"),
        ({"reward": torch.zeros(3, 6)}, "reward"),
        ({"topk_logprob": torch.zeros(3, 6)}, "topk_logprob"),
        ({"entropies": torch.zeros(3, 6)}, "entropies.*did you mean"),
        ({"behavior_logprob": None}, "behavior_logprob"),
    ],
)
def test_from_padded_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        padded(**change)


def test_from_padded_needs_a_mask_of_two_dimensions():
    with pytest.raises(ValueError, match="mask"):
        TokenBatch.from_padded(mask=torch.ones(3).bool(), logprob=None, behavior_logprob=None, advantage=None)
    with pytest.raises(ValueError, match="mask"):
        TokenBatch.from_padded(mask=torch.ones(3, 6), logprob=None, behavior_logprob=None, advantage=None)


def test_slice_and_concatenate_are_inverse():
    batch = make(
        5,
        logprob=torch.arange(5.0),
        sequence=torch.tensor([0, 0, 2, 2, 3]),
        advantage=torch.arange(5.0),
        advantage_scope="token",
        reward=torch.arange(4.0),
        target_version=3,
    )
    pieces = [batch.slice(0, 2), batch.slice(2, 4)]
    assert pieces[0].logprob.tolist() == [0, 1]
    assert pieces[1].sequence.tolist() == [0, 0, 1]
    assert pieces[1].reward.tolist() == [2, 3]
    joined = TokenBatch.concatenate(pieces)
    assert joined.sequence.tolist() == batch.sequence.tolist()
    assert joined.advantage.tolist() == batch.advantage.tolist()
    assert (joined.sequence_count, joined.target_version) == (4, 3)


def test_concatenate_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="empty"):
        TokenBatch.concatenate([])
    with pytest.raises(ValueError, match="behavior_entropy"):
        TokenBatch.concatenate([make(), make(behavior_entropy=torch.ones(3))])
    with pytest.raises(ValueError, match="target_version"):
        TokenBatch.concatenate([make(target_version=1), make(target_version=2)])


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("behavior_logprob", "x", "behavior_logprob must be a tensor or an array of numbers, got 'x'"),
        ("reward", object, "reward must be a tensor"),
        ("topk_ids", torch.tensor(0), "topk_ids must have shape [2, K], got []"),
        ("sequences", "2", "sequences must be a whole number, got '2'"),
        ("target_version", 2.5, "target_version must be a whole number, got 2.5"),
    ],
)
def test_what_is_no_tensor_or_number_is_refused_by_name(field, value, sentence):
    values = {"logprob": torch.zeros(2), "behavior_logprob": torch.zeros(2), "advantage": torch.ones(2)}
    with pytest.raises(ValueError, match=re.escape(sentence)):
        TokenBatch(**{**values, "sequence": torch.tensor([0, 1]), field: value})


def test_padded_top_k_without_its_last_axis_is_refused():
    rows = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=re.escape("topk_ids must have shape [B, T, K], got []")):
        TokenBatch.from_padded(
            mask=rows == 0, logprob=rows, behavior_logprob=rows, advantage=rows, topk_ids=torch.tensor(0)
        )
