"""Samplers against closed forms: what is drawn, its log μ, its H and its support are of one distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.engines import local
from estr.engines.local import EngineSettings, LocalEngine
from estr.engines.sampler import Sampled, sample
from estr.engines.samplers import Cuts, Sampler, Standard, draw, leading, samplers
from test_engine_local import make_engine, make_model, run

FOUR = [0.5, 0.3, 0.15, 0.05]
CUTS_VECTORS = [
    ([0.60, 0.25, 0.08, 0.04, 0.02, 0.01], [0.25, 0.25, 0.25, 0.25, 0, 0]),
    ([0.98, 0.01, 0.005, 0.003, 0.001, 0.001], [1, 0, 0, 0, 0, 0]),
    ([0.02] * 50, [0.2] * 5 + [0] * 45),
]


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.log(torch.tensor(rows))


def distribution(
    sampler: Sampler, logits: torch.Tensor, position: int = 99, explore: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities that are sampled and those that are recorded, [n, V]."""
    n = len(logits)
    got = sampler.distribution(logits, torch.full((n,), position), torch.full((n,), explore))
    return got.logprob.exp(), got.recorded.exp()


def drawn(
    sampler: Sampler, logits: torch.Tensor, uniform: float | torch.Tensor, topk: int = 0, explore: bool = True
) -> Sampled:
    n = len(logits)
    u = torch.as_tensor(uniform, dtype=torch.float64).expand(n)
    return draw(sampler, logits, torch.full((n,), 99), torch.full((n,), explore), u, topk)


def supports(got: Sampled) -> list[list[int]]:
    assert got.support is not None
    ids, sizes = got.support
    return [part.tolist() for part in ids.split(sizes.tolist())]


def test_fault_A3_top_p_normalizes_over_the_kept_tokens() -> None:
    """p = [.5, .3, .15, .05], top-p .8 keeps two; over the whole vocabulary the ratio would be .8, H 1.142."""
    logits = logits_of(FOUR, FOUR)
    got = drawn(Standard(top_p=0.8), logits, torch.tensor([0.1, 0.9]))
    assert got.token.tolist() == [0, 1]
    assert got.logprob.tolist() == pytest.approx([math.log(0.625), math.log(0.375)], abs=1e-6)
    assert got.entropy.tolist() == pytest.approx([0.6616, 0.6616], abs=1e-4)
    assert supports(got) == [[0, 1], [0, 1]]
    full = sample(logits, 1.0, torch.tensor([0.1, 0.1], dtype=torch.float64))
    assert float((full.logprob[0] - got.logprob[0]).exp()) == pytest.approx(0.8, abs=1e-6)
    assert float(full.entropy[0]) == pytest.approx(1.142, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_k": 3, "top_p": 0.85}, [10 / 19, 6 / 19, 3 / 19, 0]),
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
        ({"top_p": 0.6}, [0.625, 0.375, 0, 0]),
        ({"min_p": 0.3}, [10 / 19, 6 / 19, 3 / 19, 0]),
        ({"min_p": 0.31}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.99, "min_p": 0.7}, [1, 0, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_k": 9}, FOUR),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
    ],
)
def test_temperature_then_top_k_then_top_p_then_min_p(options: dict[str, float], expected: list[float]) -> None:
    """Each step works on what the one before left, renormalized: top-k 2 makes .6 of the mass one token, not two."""
    order = torch.tensor([2, 0, 3, 1])
    sampled, recorded = distribution(Standard(**options), logits_of(FOUR)[:, order])
    assert torch.equal(sampled, recorded)
    assert sampled[0].tolist() == pytest.approx(torch.tensor(expected)[order].tolist(), abs=1e-6)


def test_temperature_comes_before_truncation() -> None:
    """At temperature .5 probabilities are squared: [.25, .09, .0225, .0025] / .365, of which .9 are two tokens."""
    sampled, _ = distribution(Standard(temperature=0.5, top_p=0.9), logits_of(FOUR))
    assert sampled[0].tolist() == pytest.approx([0.25 / 0.34, 0.09 / 0.34, 0, 0], abs=1e-6)
    at_one, _ = distribution(Standard(top_p=0.9), logits_of(FOUR))
    assert int((at_one > 0).sum()) == 3


def test_equally_likely_tokens_are_kept_by_their_ids() -> None:
    got = drawn(Standard(top_k=3), torch.zeros(1, 7), 0.5)
    assert supports(got) == [[0, 1, 2]]


def test_a_support_is_bounded_even_where_the_nucleus_is_not() -> None:
    got = drawn(Standard(top_p=0.95, max_support=8), torch.zeros(2, 100), 0.999)
    assert supports(got) == [list(range(8))] * 2
    assert got.logprob.tolist() == pytest.approx([-math.log(8)] * 2)
    assert got.entropy.tolist() == pytest.approx([math.log(8)] * 2)


def test_a_support_that_is_the_whole_vocabulary_is_not_recorded() -> None:
    got = drawn(Standard(min_p=0.01), logits_of(FOUR, [0.998, 0.001, 0.0005, 0.0005]), 0.5)
    assert supports(got) == [[], [0]]


@pytest.mark.parametrize(("probabilities", "expected"), CUTS_VECTORS)
def test_cuts_vectors(probabilities: list[float], expected: list[float]) -> None:
    logits = logits_of(probabilities)
    sampled, recorded = distribution(Cuts(), logits)
    assert sampled[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(sampled, recorded)
    kept = [i for i, value in enumerate(expected) if value]
    got = drawn(Cuts(), logits, 0.999)
    assert supports(got) == [kept]
    assert got.token.tolist() == kept[-1:]
    assert float(got.logprob) == pytest.approx(-math.log(len(kept)), abs=1e-6)
    assert float(got.entropy) == pytest.approx(math.log(len(kept)), abs=1e-6)


def test_cuts_falls_back_to_the_most_likely_token_where_asked() -> None:
    sampled, _ = distribution(Cuts(empty="argmax"), logits_of([0.02] * 50))
    assert sampled[0].tolist() == [1.0] + [0.0] * 49


def test_cuts_delta_is_inclusive_and_at_temperature_one() -> None:
    logits = logits_of([0.5, 0.44, 0.03, 0.03 - 1e-4, 1e-4])
    for temperature in (0.5, 1.0, 2.0):
        sampled, _ = distribution(Cuts(temperature=temperature), logits)
        assert (sampled[0] > 0).tolist() == [True, True, True, False, False]
        standard, _ = distribution(Cuts(temperature=temperature), logits, explore=False)
        assert torch.allclose(standard, (logits / temperature).softmax(-1))


def test_rows_of_both_kinds_in_one_batch() -> None:
    """Rows that explore are cut after ``warm`` tokens of their turn; all others are sampled as usual."""
    logits = logits_of(*[CUTS_VECTORS[0][0]] * 4)
    position, explore = torch.tensor([4, 5, 5, 50]), torch.tensor([True, True, False, False])
    got = draw(Cuts(warm=5), logits, position, explore, torch.full((4,), 0.99, dtype=torch.float64))
    assert supports(got) == [[], [0, 1, 2, 3], [], []]
    assert got.entropy.tolist() == pytest.approx([1.1082, math.log(4), 1.1082, 1.1082], abs=1e-3)
    usual = sample(logits, 1.0, torch.full((4,), 0.99, dtype=torch.float64))
    for row in (0, 2, 3):
        assert (got.token[row], got.logprob[row]) == (usual.token[row], usual.logprob[row])


def test_cuts_can_record_the_policy_before_the_transform() -> None:
    """The paper's ratio has the policy below the line, never 1/|S|: log μ and H are then those of the policy."""
    logits = logits_of(CUTS_VECTORS[0][0])
    got = drawn(Cuts(temperature=0.8, record="policy"), logits, 0.999)
    policy = (logits / 0.8).log_softmax(-1)
    assert got.token.tolist() == [3], "drawn by CUTS all the same"
    assert float(got.logprob) == pytest.approx(float(policy[0, 3]), abs=1e-6)
    assert float(got.entropy) == pytest.approx(float(-(policy.exp() * policy).sum()), abs=1e-6)
    assert supports(got) == [[]]


def test_likely_tokens_are_those_of_the_recorded_distribution() -> None:
    got = drawn(Standard(top_p=0.8), logits_of(FOUR), 0.1, topk=3)
    assert got.topk is not None
    assert got.topk[0][0, :2].tolist() == [0, 1]
    assert got.topk[1][0].tolist() == pytest.approx([math.log(0.625), math.log(0.375), -math.inf], abs=1e-6)
    plain = drawn(Standard(), logits_of(FOUR), 0.1, topk=9)
    assert plain.topk is not None
    assert plain.topk[0].tolist() == [[0, 1, 2, 3]], "at most the vocabulary"
    assert plain.topk[1][0].tolist() == pytest.approx(torch.log(torch.tensor(FOUR)).tolist(), abs=1e-6)


ROWS = st.lists(
    st.lists(st.floats(-8, 8, width=32), min_size=12, max_size=12), min_size=1, max_size=5
)  # n rows of logits over 12 tokens
SAMPLERS = st.one_of(
    st.builds(
        Standard,
        temperature=st.sampled_from([0.3, 1.0, 1.7]),
        top_k=st.integers(0, 14),
        top_p=st.floats(0.01, 1.0),
        min_p=st.floats(0.0, 1.0),
        max_support=st.integers(1, 14),
    ),
    st.builds(
        Cuts,
        temperature=st.sampled_from([0.3, 1.0, 1.7]),
        k=st.integers(1, 14),
        delta=st.floats(0.0, 1.0),
        warm=st.integers(0, 3),
        empty=st.sampled_from(["uniform", "argmax"]),
    ),
)


@settings(max_examples=150, deadline=None)
@given(ROWS, SAMPLERS, st.integers(0, 2**32))
def test_nothing_is_drawn_outside_the_support_and_all_values_are_of_one_distribution(rows, sampler, seed) -> None:
    logits, generator = torch.tensor(rows), torch.Generator().manual_seed(seed)
    n = len(rows)
    position, explore = torch.randint(0, 5, (n,), generator=generator), torch.rand(n, generator=generator) < 0.5
    got = sampler.distribution(logits, position, explore)
    assert torch.allclose(got.logprob.exp().sum(-1), torch.ones(n), atol=1e-5)
    uniform = torch.rand(n, generator=generator, dtype=torch.float64)
    result = draw(sampler, logits, position, explore, uniform)
    kept = supports(result) if result.support is not None else [[]] * n
    for i in range(n):
        inside = kept[i] or list(range(12))
        log_p = got.logprob[i].double()
        assert int(result.token[i]) in inside
        assert log_p[inside].isfinite().all()
        assert len(inside) == int(got.logprob[i].isfinite().sum())
        assert float(result.logprob[i]) == pytest.approx(float(log_p[result.token[i]]), abs=1e-6)
        assert float(result.entropy[i]) == pytest.approx(float(torch.special.entr(log_p.exp()).sum()), abs=1e-5)


@settings(max_examples=150, deadline=None)
@given(ROWS, SAMPLERS, st.integers(0, 2**32))
def test_a_row_does_not_depend_on_its_neighbours(rows, sampler, seed) -> None:
    logits, generator = torch.tensor(rows), torch.Generator().manual_seed(seed)
    n = len(rows)
    position, explore = torch.randint(0, 5, (n,), generator=generator), torch.rand(n, generator=generator) < 0.5
    uniform = torch.rand(n, generator=generator, dtype=torch.float64)
    together = draw(sampler, logits, position, explore, uniform, 3)
    for i in range(n):
        one = slice(i, i + 1)
        alone = draw(sampler, logits[one], position[one], explore[one], uniform[one], 3)
        assert int(alone.token) == int(together.token[i])
        assert float(alone.logprob) == pytest.approx(float(together.logprob[i]), abs=1e-6)
        if together.support is not None:
            assert supports(alone)[0] == supports(together)[i]
        assert torch.equal(alone.topk[0][0], together.topk[0][i])


@settings(max_examples=150, deadline=None)
@given(ROWS, st.floats(0.01, 0.999))
def test_top_p_keeps_the_smallest_set_that_reaches_its_mass(rows, top_p) -> None:
    logits = torch.tensor(rows)
    probability = logits.double().softmax(-1)
    sampled, _ = distribution(Standard(top_p=top_p), logits)
    for p, kept in zip(probability, sampled > 0, strict=True):
        assert float(p[kept].min()) >= float(p[~kept].max() if (~kept).any() else 0.0) - 1e-6
        assert float(p[kept].sum()) >= top_p - 2e-6
        assert float(p[kept].sum() - p[kept].min()) < top_p + 1e-6 or int(kept.sum()) == 1


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"min_p": 0.2}, {"top_p": 0.95, "min_p": 0.1}])
def test_a_flat_row_beside_a_peaked_one_changes_nothing_bit_for_bit(options: dict[str, float]) -> None:
    """The flat row's nucleus is larger than the first look, the peaked one's is not."""
    logits = torch.stack([torch.linspace(0, 2, 3000), torch.linspace(0, 300, 3000), torch.zeros(3000)])
    sampler = Standard(**options)
    u = torch.full((3,), 0.7, dtype=torch.float64)
    together = drawn(sampler, logits, u)
    sizes = [len(ids) for ids in supports(together)]
    assert sizes[0] > 1000
    assert 0 < sizes[1] < 64
    for i in range(3):
        alone = drawn(sampler, logits[i : i + 1], u[i : i + 1])
        assert supports(alone)[0] == supports(together)[i]
        assert (alone.token[0], alone.logprob[0]) == (together.token[i], together.logprob[i])
        assert alone.entropy[0] == together.entropy[i]
    p = logits[0].double().softmax(-1).flip(0)
    wanted = 3000
    if "top_p" in options:
        wanted = int((p.cumsum(0) - p < options["top_p"] * (1 - 1e-6)).sum())
    if "min_p" in options:
        wanted = min(wanted, int((p >= options["min_p"] * p[0]).sum()))
    assert sizes[0] == pytest.approx(wanted, abs=1)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(-3, 3), min_size=9, max_size=9), min_size=1, max_size=4), st.integers(1, 12))
def test_leading_is_a_stable_sort(rows, k) -> None:
    scores = torch.tensor(rows, dtype=torch.float32)
    scores[scores == -3] = -math.inf
    values, ids = leading(scores, k)
    expected = np.argsort(-scores.numpy(), axis=-1, kind="stable")[:, :k]
    assert ids.numpy().tolist() == expected.tolist()
    assert torch.equal(values, scores.gather(1, ids))


@pytest.mark.parametrize("sampler", [Standard(top_p=0.9), Standard(top_k=2), Standard(min_p=0.1), Cuts()])
def test_logits_that_are_not_numbers_are_recorded_as_such(sampler: Sampler) -> None:
    """Broken weights give tokens that the objective drops and counts, not a crash (FAULTS A5)."""
    logits = torch.full((2, 6), torch.nan)
    logits[1] = torch.arange(6.0)
    got = drawn(sampler, logits, 0.5, topk=2)
    assert not got.logprob[0].isfinite()
    assert got.logprob[1].isfinite()


def test_samplers_are_found_by_name_and_check_their_settings() -> None:
    assert set(samplers.table()) == {"standard", "cuts", "mixed_cuts"}
    assert samplers.make("cuts", {"k": 3}) == Cuts(k=3)
    with pytest.raises(ValueError, match="did you mean 'cuts'"):
        samplers.make("cut", {})
    with pytest.raises(ValueError, match="did you mean 'delta'"):
        samplers.make("cuts", {"dleta": 3})
    for options in ({"top_p": 0.0}, {"top_p": 1.1}, {"temperature": 0.0}, {"min_p": 2.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Standard(**options)
    with pytest.raises(ValueError, match="empty"):
        Cuts(empty="nothing")


# ---------------------------------------------------------------------- in the engine


def test_the_default_path_is_what_it_was() -> None:
    """Scaled logits, log-softmax, one inversion; no other sampler is asked, and another one gives the same bits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 300, generator=generator) * 4
    uniform = torch.rand(64, generator=generator, dtype=torch.float64)
    logprob = torch.log_softmax(logits / 0.7, -1)
    cumulative = logprob.exp().double().cumsum(-1)
    token = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
    got = sample(logits, 0.7, uniform)
    assert torch.equal(got.token, token)
    assert torch.equal(got.logprob, logprob.gather(1, token[:, None])[:, 0])
    assert torch.allclose(got.entropy, torch.special.entr(logprob.exp()).sum(-1), rtol=1e-6, atol=1e-6)
    other = draw(Standard(temperature=0.7), logits, torch.zeros(64), torch.zeros(64, dtype=torch.bool), uniform)
    for name in ("token", "logprob", "entropy"):
        assert torch.equal(getattr(other, name), getattr(got, name))


@pytest.mark.parametrize("sampler", [None, Standard(temperature=0.8), Standard(0.8, 0, 1.0, 0.0)])
def test_a_sampler_that_does_nothing_costs_nothing(sampler: Sampler | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "draw", None)
    engine = make_engine(temperature=0.8, sampler=sampler)
    engine.start("x", [1, 2, 3], seed=0, limit=6)
    run(engine)
    segment = engine.release("x")
    assert segment.support is None
    assert segment.topk_ids is None


def test_greedy_decoding_ignores_the_sampler() -> None:
    engine = make_engine(temperature=0.0, sampler=Standard(top_p=0.5), topk=3)
    engine.start("x", [1, 2, 3], seed=0, limit=6)
    run(engine)
    assert (engine.release("x").logprob[3:] == 0).all()


def test_two_temperatures_are_refused() -> None:
    with pytest.raises(ValueError, match=r"temperature 0\.5 is not the engine's 1\.0"):
        LocalEngine(make_model(), EngineSettings(sampler=Standard(temperature=0.5, top_p=0.5)))


def direct_log_softmax(model: torch.nn.Module, segment, temperature: float) -> torch.Tensor:
    """Log-probabilities [A, V] at the action tokens by the model's own forward pass."""
    ids = torch.from_numpy(segment.tokens).long()[None]
    with torch.no_grad():
        logits = model(ids).logits[0].float() / temperature
    return logits[torch.from_numpy(np.flatnonzero(segment.action) - 1)].log_softmax(-1)


def test_the_engine_files_support_and_likely_tokens_under_their_action_tokens() -> None:
    """Over several turns, with rows coming, going and moving; top-p at temperature .9."""
    model = make_model()
    engine = make_engine(model, temperature=0.9, sampler=Standard(0.9, top_p=0.7), topk=4)
    for i in range(9):
        engine.start(f"k{i}", [5, 6, 7 + i], seed=i, limit=3 + i % 4)
    for turn in run(engine):
        engine.extend(turn.key, [11, 12], seed=3, limit=4)
    run(engine)
    for i in range(8):
        segment = engine.release(f"k{i}")
        log_p = direct_log_softmax(model, segment, 0.9)
        assert segment.support is not None
        assert len(segment.support) == segment.action_count
        for a, token in enumerate(segment.tokens[segment.action]):
            kept = torch.from_numpy(segment.support[a]).long()
            assert token in kept
            assert float(log_p[a][kept].exp().sum()) >= 0.7 - 1e-4
            renormalized = log_p[a][kept] - log_p[a][kept].logsumexp(0)
            mine = float(segment.logprob[segment.action][a])
            assert mine == pytest.approx(float(renormalized[kept == int(token)]), abs=1e-4)
            entropy = float(segment.entropy[segment.action][a])
            assert entropy == pytest.approx(float(torch.special.entr(renormalized.exp()).sum()), abs=1e-4)
            best = segment.topk_logprob[a]
            assert set(segment.topk_ids[a][np.isfinite(best)]) <= set(kept.tolist())
            assert np.isfinite(best).sum() == min(4, len(kept))


def test_mixed_cuts_rows_share_a_decode_batch() -> None:
    """Exploring rows are uniform on their support after the warm tokens of each turn, the others untouched."""
    model = make_model()
    engine = make_engine(model, slots=6, sampler=Cuts(k=4, delta=0.01, warm=2), end_ids=())
    plain = make_engine(make_model(), slots=6, end_ids=())
    for i in range(6):
        engine.start(f"k{i}", [5, 6, 7], seed=i, limit=5, explore=i >= 3)
        plain.start(f"k{i}", [5, 6, 7], seed=i, limit=5)
    run(engine)
    run(plain)
    for i in range(6):
        assert engine.extend(f"k{i}", [20, 21], seed=i, limit=4)
    run(engine)
    for i in range(6):
        segment, usual = engine.release(f"k{i}"), plain.release(f"k{i}")
        if i < 3:
            assert segment.support is None
            assert segment.tokens[: len(usual.tokens)].tolist() == usual.tokens.tolist()
            assert segment.logprob[:8].tobytes() == usual.logprob.tobytes()
            continue
        assert segment.tokens[:5].tolist() == usual.tokens[:5].tolist(), "the warm tokens are sampled as usual"
        assert segment.support is not None
        sizes = np.diff(segment.support.offsets)
        assert (sizes > 0).tolist() == [False, False, True, True, True, False, False, True, True]
        cut = sizes > 0
        np.testing.assert_allclose(segment.logprob[segment.action][cut], -np.log(sizes[cut]), atol=1e-6)
        np.testing.assert_allclose(segment.entropy[segment.action][cut], np.log(sizes[cut]), atol=1e-6)
        log_p = direct_log_softmax(model, segment, 1.0)
        for a in np.flatnonzero(cut):
            best = log_p[a].topk(4)
            assert set(segment.support[a].tolist()) == set(best.indices[best.values.exp() >= 0.01].tolist())


def test_a_fork_starts_a_new_support() -> None:
    engine = make_engine(sampler=Standard(top_k=3), end_ids=())
    engine.start("x", [1, 2, 3], seed=0, limit=4)
    run(engine)
    first = engine.fork("x", [1, 2, 50, 51, 52], seed=1, limit=5)
    run(engine)
    second = engine.release("x")
    assert first is not None
    assert len(first.support) == 4
    assert len(second.support) == 5
    assert np.diff(first.support.offsets).tolist() == [3] * 4
