"""Rollouts of several shapes become the same flat arrays; malformed ones are told with file and place."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from estr.errors import UsageError
from estr.inspect.formats import PRESETS, detect, parse_mapping
from estr.inspect.read import read_dump
from inspect_synthetic import (
    World,
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

WRITERS = {
    "estr": (write_ours, "parquet"),
    "estr lines": (write_ours_jsonl, "jsonl"),
    "trl": (write_trl, "jsonl"),
    "verl": (write_verl, "jsonl"),
    "prime-rl": (write_prime, "jsonl"),
    "slime": (write_slime, "jsonl"),
    "estr flat": (write_flat, "jsonl"),
    "estr tokens": (write_tokens, "parquet"),
}


@pytest.fixture(scope="module")
def rollouts():
    return simulate(World(trajectories=40, switch=0.1))


def lines(tmp_path: Path, *records: object) -> Path:
    path = tmp_path / "dump.jsonl"
    path.write_text("".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("name", WRITERS)
def test_every_shape_gives_the_same_tokens(name, rollouts, tmp_path):
    write, suffix = WRITERS[name]
    dump = read_dump(write(rollouts, tmp_path / f"dump.{suffix}"))
    alive = rollouts.alive
    assert dump.preset == name.split()[0]
    assert dump.trajectories == len(alive)
    np.testing.assert_array_equal(dump.row, np.repeat(np.arange(len(alive)), alive.sum(1)))
    np.testing.assert_allclose(dump.logprob, rollouts.columns["mu"][alive], rtol=1e-6)
    np.testing.assert_allclose(dump.learner_logprob, rollouts.columns["pi"][alive], rtol=1e-6)
    ids = dump.stream.ids[dump.stream.offsets[dump.row] + dump.position]
    np.testing.assert_array_equal(ids, rollouts.tokens[alive])


def test_versions_and_staleness(rollouts, tmp_path):
    dump = read_dump(write_ours(rollouts, tmp_path / "dump.parquet"))
    version = rollouts.columns["version"]
    last = np.nanmax(version, axis=1)
    np.testing.assert_array_equal(dump.version, version[rollouts.alive])
    np.testing.assert_array_equal(dump.lag, (rollouts.target[:, None] - version)[rollouts.alive])
    np.testing.assert_array_equal(dump.inter, (rollouts.target - last)[dump.row])
    np.testing.assert_array_equal(dump.intra, (last[:, None] - version)[rollouts.alive])


def test_versions_of_generation_calls_are_known_at_both_ends(rollouts, tmp_path):
    dump = read_dump(write_slime(rollouts, tmp_path / "dump.jsonl"))
    first, last = dump.starts[:-1], dump.starts[1:] - 1
    version = rollouts.columns["version"]
    np.testing.assert_array_equal(dump.version[first], np.nanmin(version, axis=1))
    np.testing.assert_array_equal(dump.version[last], np.nanmax(version, axis=1))
    moved = np.nanmin(version, axis=1) < np.nanmax(version, axis=1)
    inner = np.setdiff1d(np.flatnonzero(moved[dump.row]), np.concatenate([first, last]))
    assert len(inner)
    assert np.isnan(dump.version[inner]).all()


def test_a_run_directory_is_read_whole(tmp_path, rollouts):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.toml").write_text("")
    for step in (1, 2):
        write_ours(rollouts, tmp_path / "rollouts" / f"step-{step:06d}.parquet")
    dump = read_dump(tmp_path)
    assert dump.rows == 2 * len(rollouts.alive)


def test_a_run_without_rollouts_yet_is_empty(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.toml").write_text("")
    assert read_dump(tmp_path).token_count == 0


def test_a_directory_of_json_lines(tmp_path, rollouts):
    for step in (1, 2):
        (tmp_path / f"step_{step}").mkdir()
        write_prime(rollouts, tmp_path / f"step_{step}" / "rank_0.jsonl")
    assert read_dump(tmp_path).rows == 2 * len(rollouts.alive)


def test_a_fork_belongs_to_its_trajectory(tmp_path):
    rows = [
        {"trajectory_id": "a", "parent_id": None, "tokens": [1, 2], "action": [False, True], "logprob": [None, -1.0]},
        {"trajectory_id": "b", "parent_id": None, "tokens": [1, 2], "action": [False, True], "logprob": [None, -1.0]},
        {"trajectory_id": "a#1", "parent_id": "a", "tokens": [1, 3], "action": [False, True], "logprob": [None, -2.0]},
    ]
    dump = read_dump(lines(tmp_path, *rows))
    assert dump.trajectories == 2
    np.testing.assert_array_equal(dump.trajectory, [0, 1, 0])


def test_tool_text_is_no_action(tmp_path):
    record = {
        "prompt_ids": [[0, 0, 7], [5, 6, 7]],
        "prompt_mask": [[0, 0, 1], [1, 1, 1]],
        "completion_ids": [[11, 12, 13, 14], [15, 16, 0, 0]],
        "completion_mask": [[1, 1, 1, 1], [1, 1, 0, 0]],
        "tool_mask": [[1, 0, 0, 1], [1, 1, 1, 1]],
        "sampling_per_token_logps": [[-1, 0, 0, -2], [-3, -4, 0, 0]],
        "advantages": [0.5, -0.5],
    }
    dump = read_dump(lines(tmp_path, record))
    np.testing.assert_array_equal(dump.logprob, [-1, -2, -3, -4])
    np.testing.assert_array_equal(dump.advantage, [0.5, 0.5, -0.5, -0.5])
    np.testing.assert_array_equal(dump.position, [1, 4, 3, 4])
    np.testing.assert_array_equal(dump.stream.ids[dump.stream.offsets[dump.row] + dump.position], [11, 14, 15, 16])


def test_lists_may_cover_the_row_the_response_or_the_actions(tmp_path):
    record = {
        "tokens": [1, 2, 3, 4, 5],
        "action": [0, 0, 1, 0, 1],
        "logprob": [None, None, -1.0, None, -2.0],
        "learner_logprob": [-1.5, 0.0, -2.5],
        "entropy": [0.3, 0.4],
    }
    dump = read_dump(lines(tmp_path, record))
    np.testing.assert_array_equal(dump.logprob, [-1, -2])
    np.testing.assert_array_equal(dump.learner_logprob, [-1.5, -2.5])
    np.testing.assert_array_equal(dump.entropy, [0.3, 0.4])
    np.testing.assert_array_equal(dump.position, [2, 4])


def test_padded_batches_in_parquet(tmp_path, rollouts):
    record = json.loads(write_trl(rollouts, tmp_path / "a.jsonl", batch=40).read_text())
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "a.parquet")
    one, two = read_dump(tmp_path / "a.jsonl"), read_dump(tmp_path / "a.parquet")
    np.testing.assert_array_equal(one.logprob, two.logprob)
    np.testing.assert_array_equal(one.advantage, two.advantage)


def test_columns_can_be_named_by_hand(tmp_path):
    path = lines(tmp_path, {"old_logp": [-1.0, -2.0], "new_logp": [-1.5, -2.0], "keep": [1, 0], "score": 3})
    mapping = parse_mapping(["logprob=old_logp", "learner_logprob=new_logp", "action=keep", "reward=score"])
    dump = read_dump(path, None, mapping)
    np.testing.assert_array_equal(dump.delta, [-0.5])
    np.testing.assert_array_equal(dump.reward, [3.0])


def test_texts_without_tokens_are_read_for_what_they_have(tmp_path):
    table = {"step": [1, 1], "prompt": ["p", "p"], "completion": ["a", "b"], "advantage": [1.0, -1.0], "r": [1.0, 0.0]}
    pq.write_table(pa.table(table), tmp_path / "completions_00001.parquet")
    dump = read_dump(tmp_path / "completions_00001.parquet", None, {"reward": "r"})
    assert (dump.preset, dump.token_count, dump.rows) == ("trl", 0, 2)
    np.testing.assert_array_equal(dump.group, [0, 0])
    verl = read_dump(lines(tmp_path, {"input": "p", "output": "a", "gts": None, "score": 1.0, "step": 3}))
    assert (verl.preset, verl.trajectories) == ("verl", 1)


def test_messages_as_prompt_and_rewards_as_dictionaries_do_no_harm(tmp_path):
    record = {
        "tokens": [1, 2],
        "response_length": 1,
        "loss_mask": [1],
        "rollout_log_probs": [-1.0],
        "prompt": [{"role": "user", "content": "hi"}],
        "reward": {"score": 1.0},
        "weight_versions": ["a1b2", "c3d4"],
    }
    dump = read_dump(lines(tmp_path, record))
    assert dump.preset == "slime"
    assert np.isnan(dump.reward).all()
    assert np.isnan(dump.version).all()


def test_presets_are_told_apart_by_their_columns():
    assert detect(["completion_ids", "completion_mask"]) == "trl"
    assert detect(["responses", "rollout_log_probs"]) == "verl"
    assert detect(["token_ids", "inference_logprobs"]) == "prime-rl"
    assert detect(["tokens", "response_length", "rollout_log_probs"]) == "slime"
    assert detect(["something"]) is None
    assert set(PRESETS) == {"estr", "trl", "verl", "prime-rl", "slime"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"logprob": [-1.0]}\n{"logprob": [-1.0\n', ["line 2", "not a JSON object"]),
        ('{"logprob": [-1.0]}\n\n[1, 2]\n', ["line 3", "not a JSON object but list"]),
        ('{"logprob": [-1.0]}\n{"logprob": ["high"]}\n', ["line 2", "logprob must hold numbers", "'high'"]),
        ('{"logprob": [-1.0]}\n{"logprob": [[-1.0], [[2]]]}\n', ["line 2", "logprob must be a list of numbers"]),
        (
            '{"logprob": [-1, -2], "entropy": [1, 2]}\n{"logprob": [-1, -2], "entropy": [1]}\n',
            ["line 2", "entropy", "1", "2"],
        ),
        ('{"logprob": [-1, -2, -3], "tokens": [4, 5]}\n', ["line 1", "tokens has 2 entries where 3"]),
        ('{"logprob": [-1, -2], "tokens": [4, null]}\n', ["line 1", "tokens must be whole numbers"]),
        ('{"logprob": [-1], "target_version": "new"}\n', ["line 1", "target_version must hold numbers"]),
        ('{"logprob": [-1], "temperature": "warm"}\n', ["line 1", "temperature"]),
        ('{"logprob": -1.0, "entropy": 2.0}\n', ["line 1", "which trajectory"]),
        ('{"logprob": [-1, -2], "sequence": [1, 0]}\n', ["line 1", "sequence"]),
        ('{"logprob": [-1, -2], "sequence": [0, 3], "reward": [1.0]}\n', ["line 1", "reward has 1 entries"]),
        ('{"completion_ids": [[1], [2]], "sampling_per_token_logps": [[-1]]}\n', ["line 1", "one number of rows"]),
        ("", ["is empty"]),
        ('{"foo": 1}\n', ["no column that is known", "foo", "--map"]),
    ],
)
def test_malformed_lines_are_told_with_their_place(text, words, tmp_path):
    path = tmp_path / "dump.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read_dump(path)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "dump.jsonl").write_bytes(b'{"logprob": [-1]}\n\xff\xfe\n')
    with pytest.raises(UsageError, match="line 2"):
        read_dump(tmp_path / "dump.jsonl")


def test_a_deeply_nested_line_is_refused(tmp_path):
    (tmp_path / "dump.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(UsageError, match="line 1"):
        read_dump(tmp_path / "dump.jsonl")


def test_malformed_parquet(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(UsageError, match=r"a\.parquet cannot be read as Parquet"):
        read_dump(tmp_path / "a.parquet")
    pq.write_table(pa.table({"logprob": [[-1.0], [-1.0, -2.0]], "entropy": [[1.0], [1.0]]}), tmp_path / "b.parquet")
    with pytest.raises(UsageError, match=r"b\.parquet row 2: entropy has 1 entries where 2"):
        read_dump(tmp_path / "b.parquet")
    pq.write_table(pa.table({"logprob": [["x"], ["y"]]}), tmp_path / "c.parquet")
    assert np.isnan(read_dump(tmp_path / "c.parquet").logprob).all()


def test_pickles_are_never_loaded(tmp_path):
    (tmp_path / "0.pt").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(UsageError, match="pickle"):
        read_dump(tmp_path / "0.pt")


def test_what_is_not_there_and_what_is_not_known(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        read_dump(tmp_path / "nothing")
    with pytest.raises(UsageError, match="neither Parquet nor JSONL"):
        read_dump(tmp_path)
    path = lines(tmp_path, {"logprob": [-1.0]})
    with pytest.raises(UsageError, match="did you mean 'verl'"):
        read_dump(path, "ver1")
    with pytest.raises(UsageError, match="has no column 'logprobs'; did you mean 'logprob'"):
        read_dump(path, None, {"logprob": "logprobs"})
    with pytest.raises(UsageError, match="no field 'logprobb'; did you mean 'logprob'"):
        parse_mapping(["logprobb=x"])
    with pytest.raises(UsageError, match="ours=theirs"):
        parse_mapping(["logprob"])


def test_a_part_of_the_rows_is_a_dump_of_its_own(rollouts, tmp_path):
    dump = read_dump(write_ours(rollouts, tmp_path / "dump.parquet"))
    chosen = np.arange(dump.rows) % 3 == 1
    part = dump.select(chosen)
    assert part.rows == part.trajectories == chosen.sum()
    kept = chosen[dump.row]
    np.testing.assert_array_equal(part.logprob, dump.logprob[kept])
    np.testing.assert_array_equal(part.name[part.row], dump.name[dump.row[kept]])
    np.testing.assert_array_equal(
        part.stream.ids[part.stream.offsets[part.row] + part.position],
        dump.stream.ids[dump.stream.offsets[dump.row[kept]] + dump.position[kept]],
    )


def test_rows_of_exploring_samplers_are_marked(tmp_path):
    records = [{"logprob": [-1.0], "sampler": sampler} for sampler in ("standard", "cuts", "tempered", None)]
    np.testing.assert_array_equal(read_dump(lines(tmp_path, *records)).standard, [True, False, False, True])
