"""What δ is made of: closed forms of the decomposition, switches, masks of recipes; and the JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import estr.inspect
from estr.diagnostics import estr_keep
from estr.inspect.dump import Dump
from estr.inspect.inspection import inspect_dump, plain
from estr.inspect.ratios import Distribution, decompose, entropy_of, fit_by_lag, nonnegative_least_squares
from estr.inspect.read import read_dump
from estr.inspect.recipes import verdicts
from estr.inspect.switches import WINDOW, version_switches
from estr.objectives import recipes
from inspect_synthetic import World, simulate, write_ours, write_trl


def dump_of(rows: list[int], **columns) -> Dump:
    """A dump of as many tokens as ``rows`` says, all else unknown."""
    row = np.asarray(rows, np.int64)
    n, r = len(row), int(row.max()) + 1
    unknown, per_row = np.full(n, np.nan), np.full(r, np.nan)
    token = ("logprob", "learner_logprob", "proximal_logprob", "entropy", "entropy_upper", "learner_entropy", "version")
    empty = Dump(
        source="made",
        preset="estr",
        row=row,
        position=np.arange(n),
        **dict.fromkeys((*token, "advantage"), unknown),
        trajectory=np.arange(r),
        group=np.full(r, -1),
        **dict.fromkeys(
            ("reward", "row_advantage", "target_version", "trained_step", "temperature", "top_p", "top_k", "min_p"),
            per_row,
        ),
        standard=np.ones(r, bool),
        entropy_kind="exact",
        name=np.array([f"row {i}" for i in range(r)], object),
        text=np.array([""] * r, object),
    )
    return replace(empty, **{name: np.asarray(value, float) for name, value in columns.items()})


def planted_parts(noise: float, inter: float, intra: float, *, fresh: bool, tokens: int = 6000) -> Dump:
    """δ² is exactly H·(noise + inter·Δ_inter + intra·(v_last − v)), its sign random."""
    rng = np.random.default_rng(0)
    rows = np.repeat(np.arange(tokens // 6), 6)
    version = np.tile([0, 0, 1, 1, 2, 2], tokens // 6) + np.repeat(rng.integers(0, 3, tokens // 6), 6)
    last = version[5::6]
    lag = rng.integers(0 if fresh else 1, 5, tokens // 6)
    target = last + lag
    entropy = rng.uniform(0.1, 3, tokens)
    squared = entropy * (noise + inter * lag[rows] + intra * (last[rows] - version))
    delta = np.sqrt(squared) * rng.choice([-1, 1], tokens)
    return dump_of(
        rows.tolist(),
        logprob=np.full(tokens, -1.0),
        learner_logprob=delta - 1.0,
        entropy=entropy,
        version=version,
        target_version=target,
    )


@pytest.mark.parametrize("fresh", [True, False])
def test_parts_of_delta_are_found_exactly(fresh):
    dump = planted_parts(0.01, 0.03, 0.02, fresh=fresh)
    parts = decompose(dump)
    x = dump.entropy
    assert parts.noise == pytest.approx(0.01 * x.mean())
    assert parts.inter == pytest.approx(0.03 * (x * dump.inter).mean())
    assert parts.intra == pytest.approx(0.02 * (x * dump.intra).mean())
    assert parts.unexplained == pytest.approx(0.0, abs=1e-9)
    assert parts.total == pytest.approx((dump.delta**2).mean())
    assert (parts.zero_lag is not None) == fresh


def test_pure_noise_is_all_noise():
    parts = decompose(planted_parts(0.05, 0.0, 0.0, fresh=True))
    assert parts.noise == pytest.approx(parts.total)
    assert (parts.inter, parts.intra) == (pytest.approx(0.0), pytest.approx(0.0))


def test_fault_A17_zero_lag_gives_the_noise_on_the_logits():
    """Same weights, N(0, .05) on every logit: mean δ² shows as noise, and its size as .05."""
    rng = np.random.default_rng(1)
    z = rng.normal(0, 2, (4000, 30))
    engine = z + rng.normal(0, 0.05, z.shape)
    mu, pi = (np.log(np.exp(x) / np.exp(x).sum(1, keepdims=True)) for x in (engine, z))
    token = (mu + rng.gumbel(size=mu.shape)).argmax(1)
    rows = np.arange(4000)
    dump = dump_of(
        (rows // 20).tolist(),
        logprob=mu[rows, token],
        learner_logprob=pi[rows, token],
        entropy=-(np.exp(mu) * mu).sum(1),
        version=np.zeros(4000),
        target_version=np.zeros(200),
    )
    parts = decompose(dump)
    assert parts.logit_noise == pytest.approx(0.05, rel=0.05)
    assert parts.noise == pytest.approx(parts.total)
    assert parts.total > 0


def test_staleness_that_never_varies_cannot_be_told_from_noise():
    dump = dump_of([0] * 6 + [1] * 6, version=[0] * 12, logprob=[-1.0] * 12, entropy=[1.0] * 12)
    dump = replace(dump, learner_logprob=np.linspace(-1, -0.5, 12), target_version=np.array([3.0, 3.0]))
    parts = decompose(dump)
    assert parts.noise is None
    assert "Δ_inter 3" in parts.note
    assert decompose(replace(dump, target_version=np.full(2, np.nan))).note.startswith("Versions of tokens")


def test_nonnegative_least_squares_keeps_to_the_edge():
    design = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    np.testing.assert_allclose(nonnegative_least_squares(design, np.array([1.0, 3.0, 5.0])), [1.0, 2.0])
    np.testing.assert_allclose(nonnegative_least_squares(design, np.array([3.0, 2.0, 1.0])), [2.0, 0.0])


def test_distribution_of_delta():
    found = Distribution.of(np.array([-1.0, 0.0, 1.0, np.nan]))
    assert (found.tokens, found.mean, found.absolute) == (3, 0.0, pytest.approx(2 / 3))
    assert found.std == pytest.approx(np.sqrt(2 / 3))
    assert found.quantiles["0.5"] == 0.0
    assert Distribution.of(np.array([np.nan])).mean is None


def test_the_fit_of_every_lag_finds_its_own_slope():
    fits = fit_by_lag(planted_parts(0.01, 0.03, 0.0, fresh=True))
    assert [one.lag for one in fits] == sorted(one.lag for one in fits)
    first = next(one for one in fits if one.lag == 0)
    assert first.fit is not None
    assert first.fit.slope == pytest.approx(0.01)
    assert first.fit.exponent == pytest.approx(1.0, abs=0.05)


def test_an_interval_of_entropies_counts_by_its_middle_and_the_learners_stands_in():
    dump = dump_of([0, 0], entropy=[1.0, 2.0], entropy_upper=[3.0, np.nan], learner_entropy=[9.0, 9.0])
    np.testing.assert_array_equal(entropy_of(dump), [2.0, 2.0])
    np.testing.assert_array_equal(entropy_of(replace(dump, entropy=np.full(2, np.nan))), [9.0, 9.0])


def test_switches_are_found_with_what_stands_around_them():
    version = [1, 1, 1, 2, 2, 2, 5, 5]
    dump = dump_of(
        [0, 0, 0, 0, 0, 0, 1, 1],
        version=version,
        entropy=[1, 1, 1, 3, 3, 3, 7, 7],
        logprob=[-1.0] * 8,
        learner_logprob=[-1.5, -1.5, -1.5, -1.1, -1.1, -1.1, -1, -1],
        target_version=[2, 5],
    )
    found = version_switches(dump)
    assert (found.count, found.trajectories) == (1, 1)
    at = dict(zip(found.offsets.tolist(), range(2 * WINDOW), strict=True))
    assert found.entropy[at[-1]] == 1.0
    assert found.entropy[at[0]] == 3.0
    assert found.delta_abs[at[-3]] == pytest.approx(0.5)
    assert found.delta_abs[at[2]] == pytest.approx(0.1)
    assert np.isnan(found.entropy[at[3]])
    assert np.isnan(found.entropy[at[-4]])
    assert found.entropy_elsewhere == pytest.approx(26 / 8)


def test_the_change_at_switches_is_a_mean_over_switches():
    rows = [0] * 4 + [1] * 4
    dump = dump_of(rows, version=[0, 0, 1, 1] * 2, entropy=[1, 1, 2, 2, 1, 1, 4, 4], logprob=[-1.0] * 8)
    change = version_switches(dump).entropy_change
    assert change.mean == pytest.approx(2.0)
    assert change.error == pytest.approx(np.std([1, 3], ddof=1) / np.sqrt(2))


def test_tokens_without_versions_are_no_switch():
    dump = dump_of([0] * 4, version=[0, np.nan, 1, 1], entropy=[1.0] * 4)
    assert version_switches(dump).count == 0


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    world = World(trajectories=80, drift=0.5, inter=8, switch=0.2)
    return read_dump(write_ours(simulate(world), tmp_path_factory.mktemp("d") / "dump.parquet"))


def test_masked_fractions_are_those_of_the_objectives(stored):
    found = verdicts(stored)
    assert found.masked.keys() | found.left_out.keys() == recipes().keys()
    expected = 1 - estr_keep(stored.delta, stored.entropy).mean()
    assert found.masked["estr"] == pytest.approx(expected, abs=1e-3)
    assert found.masked["estr"] > 0
    assert found.masked["reinforce"] == 0.0
    low, high = np.log(0.5), np.log(5.0)
    assert found.masked["icepop"] == pytest.approx(
        1 - ((stored.delta >= low) & (stored.delta <= high)).mean(), abs=1e-3
    )
    assert set(found.left_out) >= {"pdm", "score_centering", "dar"}
    assert found.gates["icepop"] == pytest.approx(found.masked["icepop"], abs=1e-3)


def test_disagreements_are_kept_by_one_and_stopped_by_the_other(stored):
    for pair in verdicts(stored).disagreements:
        assert pair.tokens >= len(pair.examples) > 0
        assert pair.share == pytest.approx(pair.tokens / stored.token_count)
        if (pair.kept_by, pair.dropped_by) == ("estr", "icepop"):
            kept = estr_keep(stored.delta, stored.entropy)
            outside = (stored.delta < np.log(0.5)) | (stored.delta > np.log(5.0))
            assert pair.tokens == (kept & outside).sum()
            best = np.abs(stored.delta)[kept & outside].max()
            assert abs(stored.delta[pair.examples[0]]) == best


def test_fault_A5_tokens_without_a_log_probability_count_as_dropped(stored):
    broken = stored.logprob.copy()
    broken[::10] = np.nan
    found = verdicts(replace(stored, logprob=broken))
    assert found.tokens == stored.token_count
    assert found.masked["reinforce"] == pytest.approx(np.isnan(broken).mean())


def test_without_a_learner_nothing_is_masked(stored):
    found = verdicts(replace(stored, learner_logprob=np.full(stored.token_count, np.nan)))
    assert found.masked == {}
    assert found.disagreements == []


def test_the_json_object_has_what_the_contract_names(stored):
    value = inspect_dump(stored).to_json()
    names = {"tokens", "trajectories", "entropy_kind", "delta", "fit", "staleness", "recipes", "findings"}
    assert names <= value.keys()
    assert {"mean", "std", "quantiles"} <= value["delta"].keys()
    assert {"exponent", "slope", "r2", "bins"} <= value["fit"].keys()
    assert sum(value["staleness"]["inter"].values()) == stored.trajectories
    assert sum(value["staleness"]["intra"].values()) == stored.trajectories
    assert all(0 <= entry["masked_fraction"] <= 1 for entry in value["recipes"].values())
    assert sum(one["count"] for one in value["fit"]["bins"]) == stored.token_count
    assert value["findings"] == []
    assert json.loads(json.dumps(value, allow_nan=False)) == value


def test_the_json_object_of_a_dump_with_little_in_it(tmp_path):
    value = inspect_dump(read_dump(write_trl(simulate(World(trajectories=16)), tmp_path / "d.jsonl"))).to_json()
    assert value["entropy_kind"] == "absent"
    assert value["fit"]["exponent"] is None
    assert value["staleness"] == {"inter": {}, "intra": {}}
    assert {finding["code"] for finding in value["findings"]} == {"cannot-tell"}


def test_the_json_object_of_nothing_at_all(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.toml").write_text("")
    value = inspect_dump(read_dump(tmp_path)).to_json()
    assert (value["tokens"], value["trajectories"], value["recipes"]) == (0, 0, {})


def test_plain_turns_what_json_does_not_have_into_null():
    assert plain({1: np.float64("nan"), "a": [np.int64(2), float("inf")], "b": np.array([1.0])}) == {
        "1": None,
        "a": [2, None],
        "b": [1.0],
    }


def lines_run(work: Callable[[], object]) -> int:
    """Lines of estr/inspect that Python executes while it works."""
    folder, count = str(Path(estr.inspect.__file__).parent), 0

    def trace(frame, event, argument):
        nonlocal count
        if not frame.f_code.co_filename.startswith(folder):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_no_python_loop_runs_over_tokens(tmp_path):
    """A million tokens in seconds: far fewer lines of Python run than there are tokens (a bounded number of optimizer
    batches and of rows is looked at one by one)."""
    few, many = (
        read_dump(write_ours(simulate(World(trajectories=n, drift=0.3)), tmp_path / f"{n}.parquet")) for n in (100, 800)
    )
    assert many.token_count > 7 * few.token_count
    lines = lines_run(lambda: inspect_dump(many))
    assert lines < many.token_count / 2
    assert lines < 3 * lines_run(lambda: inspect_dump(few))
