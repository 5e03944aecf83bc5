"""Each planted fault is named and nothing else is; nothing is named on clean dumps of different shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from estr.inspect.checks import CANNOT_TELL, CHECKS, run_checks
from estr.inspect.checks.statistics import compare, mean_of, neighbor, slope_within, wrong_side
from estr.inspect.checks.tokens import already_seen
from estr.inspect.read import read_dump
from inspect_synthetic import (
    World,
    planted,
    simulate,
    write_flat,
    write_ours,
    write_ours_jsonl,
    write_prime,
    write_slime,
    write_tokens,
    write_trl,
    write_verl,
)


def codes(path: Path, *, untold: bool = False) -> list[str]:
    found = run_checks(read_dump(path))
    return [finding.code for finding in found if untold or finding.code != CANNOT_TELL]


def check_planted(fault: str, tmp_path: Path, code: str, **changes) -> None:
    path = write_ours(planted(fault, **changes), tmp_path / "dump.parquet")
    found = run_checks(read_dump(path))
    assert [finding.code for finding in found] == [code], found
    assert found[0].evidence
    assert found[0].sentence.endswith(".")


@pytest.mark.parametrize("where", ["learner", "engine"])
@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_fault_A1_log_probabilities_divided_by_the_temperature(where, temperature, tmp_path):
    check_planted(f"A1-{where}", tmp_path, "A1", temperature=temperature)


def test_fault_A1_names_the_side_that_is_wrong(tmp_path):
    for where in ("learner", "engine"):
        (finding,) = run_checks(read_dump(write_ours(planted(f"A1-{where}"), tmp_path / "dump.parquet")))
        assert f"the {where}'s log-probabilities are divided" in finding.sentence


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_fault_A2_raw_log_probabilities_of_the_engine(temperature, tmp_path):
    check_planted("A2", tmp_path, "A2", temperature=temperature)


def test_fault_A3_learner_normalizes_over_the_whole_vocabulary(tmp_path):
    check_planted("A3", tmp_path, "A3")


def test_fault_A3_under_top_k_and_a_temperature(tmp_path):
    check_planted("A3", tmp_path, "A3", top_p=1.0, top_k=6, temperature=0.8)


def test_fault_A3_entropy_over_the_whole_vocabulary(tmp_path):
    check_planted("A3-entropy", tmp_path, "A3")


def test_fault_A4_hidden_repetition_penalty(tmp_path):
    check_planted("A4", tmp_path, "A4")


def test_fault_A5_missing_log_probabilities(tmp_path):
    rollouts = planted("A5")
    for write, name in ((write_ours, "dump.parquet"), (write_ours_jsonl, "dump.jsonl")):
        (finding,) = run_checks(read_dump(write(rollouts, tmp_path / name)))
        assert finding.code == "A5"
        missing = int((np.isnan(rollouts.columns["mu"]) & rollouts.alive).sum())
        assert finding.evidence == {"tokens": missing, "kinds": {"null, NaN or infinite": missing}}


@pytest.mark.parametrize(("value", "kind"), [(-9999.0, "a sentinel"), (0.7, "positive"), (0.0, "0 where")])
def test_fault_A5_numbers_that_stand_for_nothing(value, kind, tmp_path):
    rollouts = simulate(World(trajectories=40))
    flat = rollouts.columns["H"] > 2
    rollouts.columns["mu"][flat & (np.arange(flat.size).reshape(flat.shape) % 97 == 0)] = value
    found = {finding.code: finding for finding in run_checks(read_dump(write_ours(rollouts, tmp_path / "d.parquet")))}
    assert any(name.startswith(kind) for name in found["A5"].evidence["kinds"])


def test_fault_A10_entropy_one_position_off(tmp_path):
    check_planted("A10", tmp_path, "A10")


def test_fault_A10_the_learners_entropy_one_position_off(tmp_path):
    rollouts = simulate(World())
    later = rollouts.columns["H_pi"]
    later[:, :-1] = later[:, 1:].copy()
    later[~rollouts.alive] = np.nan
    assert codes(write_ours(rollouts, tmp_path / "d.parquet")) == ["A10"]


@pytest.mark.parametrize("way", ["rows", "packed", "reward"])
def test_fault_A12_values_of_other_rows(way, tmp_path):
    check_planted(f"A12-{way}", tmp_path, "A12")


def test_fault_A12_without_the_learners_entropy(tmp_path):
    for way in ("rows", "packed"):
        path = write_ours(planted(f"A12-{way}"), tmp_path / "dump.parquet", without=("learner_entropy",))
        assert codes(path) == ["A12"]


def test_fault_A12_rows_whose_lengths_are_those_of_other_rows(tmp_path):
    lines = '{"logprob": [-1.0, -2.0, -0.5], "entropy": [1.0]}\n{"logprob": [-1.0], "entropy": [1.0, 1.5, 0.5]}\n'
    (tmp_path / "d.jsonl").write_text(lines)
    assert codes(tmp_path / "d.jsonl") == ["A12"]


@pytest.mark.parametrize("way", ["sampled", "top5", "top10"])
def test_fault_A13_entropy_of_a_part_of_the_distribution(way, tmp_path):
    check_planted(f"A13-{way}", tmp_path, "A13")


def test_fault_A13_names_k(tmp_path):
    (finding,) = run_checks(read_dump(write_ours(planted("A13-top5"), tmp_path / "d.parquet")))
    assert finding.evidence["k"] == 5


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.4])
def test_fault_A15_entropy_before_temperature(temperature, tmp_path):
    check_planted("A15", tmp_path, "A15", temperature=temperature)


def test_fault_A17_noise_under_the_same_weights(tmp_path):
    check_planted("A17", tmp_path, "A17")
    (finding,) = run_checks(read_dump(write_ours(planted("A17"), tmp_path / "d.parquet")))
    assert finding.evidence["logit_noise"] == pytest.approx(0.05, rel=0.1)


def test_fault_A17_weights_that_never_move_although_versions_do(tmp_path):
    world = planted("A17", inter=6, switch=0.1, drift=0.0, trajectories=200)
    world.target += 5
    assert codes(write_ours(world, tmp_path / "d.parquet")) == ["A17"]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_fault_A20_log_probabilities_of_a_draft_model(temperature, tmp_path):
    check_planted("A20-draft", tmp_path, "A20", temperature=temperature)


def test_fault_A20_log_probabilities_of_the_position_before(tmp_path):
    check_planted("A20-shift", tmp_path, "A20")


CLEAN = {
    "ours": (write_ours, World(seed=1)),
    "ours, temperature 0.6, two switches a row": (write_ours, World(seed=2, temperature=0.6, switch=0.1)),
    "ours, temperature 1.4, top-p": (write_ours, World(seed=3, temperature=1.4, top_p=0.9)),
    "ours as JSON lines, top-k, bfloat16": (write_ours_jsonl, World(seed=4, top_k=6, rounding="bf16")),
    "ours, heavy staleness": (write_ours, World(seed=5, drift=0.4, inter=10, switch=0.25)),
    "ours, a policy that sharpens": (write_ours, World(seed=6, sharpen=0.06, bias=0.2, inter=6, temperature=0.8)),
    "padded batches of TRL": (write_trl, World(seed=7)),
    "padded rows of verl": (write_verl, World(seed=8, drift=0.2)),
    "flat rows of prime-rl": (write_prime, World(seed=9)),
    "samples of slime": (write_slime, World(seed=10, switch=0.1)),
    "flat tokens with a sequence index": (write_flat, World(seed=11, temperature=0.7)),
    "one token a row": (write_tokens, World(seed=12, vocabulary=300, trajectories=80)),
    "few long rows": (write_ours, World(seed=13, trajectories=16, shortest=150, longest=250)),
    "a small vocabulary": (write_ours, World(seed=14, vocabulary=4, bias=0.2)),
}


@pytest.mark.parametrize("shape", CLEAN)
def test_nothing_is_named_on_clean_dumps(shape, tmp_path):
    write, world = CLEAN[shape]
    path = tmp_path / ("dump.parquet" if write in (write_ours, write_tokens) else "dump.jsonl")
    assert codes(write(simulate(world), path)) == []


def test_a_clean_dump_with_all_columns_has_no_finding_at_all(tmp_path):
    assert codes(write_ours(simulate(World()), tmp_path / "dump.parquet"), untold=True) == []


def test_rows_of_exploring_samplers_are_not_blamed(tmp_path):
    faulty, clean = (
        write_ours(planted("A20-draft"), tmp_path / "a.parquet"),
        write_ours(simulate(World(seed=1)), tmp_path / "b.parquet"),
    )
    tables = []
    for path, sampler in ((faulty, "tempered"), (clean, "standard")):
        table = pq.read_table(path)
        tables.append(table.append_column("sampler", pa.array([sampler] * table.num_rows)))
    pq.write_table(pa.concat_tables(tables), tmp_path / "dump.parquet")
    assert codes(tmp_path / "dump.parquet") == []


def test_what_cannot_be_checked_is_told_with_the_missing_columns(tmp_path):
    path = write_trl(simulate(World(trajectories=40)), tmp_path / "dump.jsonl")
    untold = {f.evidence["fault"]: f.evidence["missing"] for f in run_checks(read_dump(path)) if f.code == CANNOT_TELL}
    assert untold["A17"] == ["version", "target_version"]
    assert untold["A1"] == ["temperature"]
    assert set(untold) == {"A1", "A2", "A10", "A12", "A13", "A15", "A17"}


def test_every_listed_fault_has_a_check():
    assert {check.code for check in CHECKS} == {f"A{n}" for n in (1, 2, 3, 4, 5, 10, 12, 13, 15, 17, 20)}


def test_too_few_tokens_say_nothing(tmp_path):
    assert codes(write_ours(planted("A17", trajectories=3), tmp_path / "dump.parquet")) == []


def test_compare_scores_one_minus_one_and_nothing():
    rng = np.random.default_rng(0)
    right, other = rng.uniform(0, 3, 4000), rng.uniform(0, 3, 4000)
    target = right + rng.normal(0, 0.5, 4000)
    assert compare(target, other, right).score == pytest.approx(1.0, abs=0.1)
    assert compare(target, right, other).score == pytest.approx(-1.0, abs=0.1)
    assert compare(target, rng.permutation(right), rng.permutation(right)).score == pytest.approx(0.0, abs=0.1)


def test_neighbors_stay_inside_their_row():
    values, row = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 0, 1, 1])
    np.testing.assert_array_equal(neighbor(values, row, 1), [2.0, np.nan, 4.0, np.nan])
    np.testing.assert_array_equal(neighbor(values, row, -1), [np.nan, 1.0, np.nan, 3.0])


def test_slope_within_bins_ignores_what_separates_them():
    x = np.array([0.0, 1.0, 2.0, 0.0, 1.0, 2.0])
    bins = np.array([0, 0, 0, 1, 1, 1])
    assert slope_within(0.5 * x + 10.0 * bins, x, bins).value == pytest.approx(0.5)


def test_wrong_side_is_the_share_of_squares():
    assert wrong_side(np.array([3.0, -4.0]), 1.0) == pytest.approx(16 / 25)
    assert wrong_side(np.array([3.0, -4.0]), -1.0) == pytest.approx(9 / 25)


def test_mean_of_leaves_out_what_is_not_known():
    found = mean_of(np.array([1.0, np.nan, 3.0]))
    assert (found.value, found.count) == (2.0, 2)
    assert found.error == pytest.approx(1.0)


def test_already_seen_looks_at_the_whole_row_before(tmp_path):
    line = '{"tokens": [5, 6, 5, 6, 7, 7], "action": [0, 0, 1, 1, 1, 1], "logprob": [-1, -1, -1, -1]}\n'
    (tmp_path / "d.jsonl").write_text(line)
    np.testing.assert_array_equal(already_seen(read_dump(tmp_path / "d.jsonl")), [True, True, False, True])
