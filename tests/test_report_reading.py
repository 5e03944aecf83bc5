"""Reading a run directory for the report: tolerant of what is torn, missing or unfinished."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.errors import UsageError
from estr.report.data import continuous_time, read_json_lines, read_metrics, read_run, read_runs, read_timeline
from estr.report.decode import CONTROLS, token_texts
from estr.report.rollouts import read_rollout_tokens, read_rows
from report_synthetic import write_rollouts, write_run

NAN = float("nan")


def row(identity="a", **changes):
    """A stored row of five tokens, three of them actions."""
    base = {
        "trajectory_id": identity,
        "group_id": "g",
        "task_id": "t",
        "prompt": "p",
        "tokens": [1, 2, 3, 4, 5],
        "action": [False, True, True, False, True],
        "logprob": [NAN, -1.0, -2.0, NAN, -3.0],
        "entropy": [NAN, 0.1, 0.2, NAN, 0.3],
        "version": [-1, 4, 4, -1, 6],
        "learner_logprob": [NAN, -1.5, -2.0, NAN, -2.0],
        "reward": 1.0,
        "advantage": 0.5,
        "finish_reason": "stop",
        "turns": 2,
        "state": "trained",
        "trained_step": 8,
        "target_version": 7,
        "text": "hello",
        "segment": 0,
    }
    return base | changes


def read(directory, rows, budget=10**9):
    directory.mkdir(exist_ok=True)
    write_rollouts(directory / "000001.parquet", rows)
    notes = []
    return read_rollout_tokens(directory, budget, notes), notes


def test_only_action_tokens_are_read_and_aligned(tmp_path):
    rollouts, notes = read(tmp_path, [row("a"), row("b", reward=0.0)])
    assert rollouts.token_count == 6
    assert rollouts.row.tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_allclose(rollouts.delta, [-0.5, 0, 1, -0.5, 0, 1])
    assert rollouts.tokens["version"].tolist() == [4, 4, 6, 4, 4, 6]
    np.testing.assert_allclose(rollouts.advantage, 0.5)
    assert rollouts.columns["reward"].tolist() == [1.0, 0.0]
    assert notes == []


def test_rows_without_a_learner_have_no_delta_and_keep_their_neighbors_in_place(tmp_path):
    rollouts, _ = read(tmp_path, [row("a", learner_logprob=None, trained_step=None, state="dropped"), row("b")])
    assert np.isnan(rollouts.delta[:3]).all()
    np.testing.assert_allclose(rollouts.delta[3:], [-0.5, 0, 1])
    assert np.isnan(rollouts.columns["trained_step"][0])


def test_a_column_of_another_length_counts_as_missing(tmp_path):
    rollouts, _ = read(tmp_path, [row("a", learner_logprob=[-1.0]), row("b")])
    assert np.isnan(rollouts.delta[:3]).all()
    np.testing.assert_allclose(rollouts.delta[3:], [-0.5, 0, 1])


def test_fault_A5_a_missing_logprob_makes_its_token_unknown_not_zero(tmp_path):
    rollouts, _ = read(tmp_path, [row("a", logprob=[NAN, -1.0, None, NAN, -3.0])])
    assert np.isnan(rollouts.delta).tolist() == [False, True, False]


def test_segments_of_one_trajectory_are_neighbors_in_order(tmp_path):
    fork = {"parent_id": "a", "version": [-1, 8, 8, -1, 9]}
    rows = [row("a#1", segment=1, **fork), row("b"), row("a", segment=0)]
    rollouts, _ = read(tmp_path, rows)
    assert rollouts.columns["trajectory_id"].tolist() == ["a", "a#1", "b"]
    assert rollouts.trajectory.tolist() == [0, 0, 1]
    assert rollouts.tokens["version"].tolist() == [4, 4, 6, 8, 8, 9, 4, 4, 6]
    assert [found["trajectory_id"] for found in read_rows(rollouts, [1, 2])] == ["a#1", "b"]


def test_a_broken_file_is_noted_and_the_rest_is_read(tmp_path):
    (tmp_path / "000000.parquet").write_bytes(b"PAR1 torn")
    rollouts, notes = read(tmp_path, [row()])
    assert len(rollouts) == 1
    assert notes == ["rollouts: 1 file(s) could not be read, for example 000000.parquet."]


def test_no_rollouts_at_all(tmp_path):
    rollouts = read_rollout_tokens(tmp_path / "rollouts", 10, [])
    assert (len(rollouts), rollouts.token_count, rollouts.trajectories, len(rollouts.delta)) == (0, 0, 0, 0)


def test_beyond_the_budget_an_even_choice_with_the_newest_is_read(tmp_path):
    for index in range(10):
        write_rollouts(tmp_path / f"{index:06d}.parquet", [row(f"t{index}")])
    rollouts = read_rollout_tokens(tmp_path, 25, [])
    assert (rollouts.groups_read, rollouts.groups_total) == (5, 10)
    assert rollouts.columns["trajectory_id"][-1] == "t9"
    assert rollouts.columns["trajectory_id"][0] == "t0"


def test_files_of_the_storage_room_are_understood(tmp_path):
    storage = pytest.importorskip("estr.storage.rollouts")
    import pyarrow.parquet as pq

    from estr.config.sections import RolloutConfig
    from estr.trajectory import Segment, Trajectory

    base = row()
    segment = Segment(
        np.array(base["tokens"], np.int32),
        np.array(base["action"]),
        np.array(base["logprob"], np.float32),
        np.array(base["entropy"], np.float32),
        np.array(base["version"], np.int32),
    )
    trajectory = Trajectory(3, 1, 0, "t", "p", 9, [segment, segment], "text", 1.0, "stop", 2, forks=1)
    learner = [np.array(base["learner_logprob"], np.float32)] * 2
    settled = storage.Settlement("trained", trained_step=8, target_version=7, advantage=0.5, learner_logprob=learner)
    pq.write_table(storage.to_table(storage.rows_from(trajectory, settled, RolloutConfig())), tmp_path / "1.parquet")
    rollouts = read_rollout_tokens(tmp_path, 10**6, [])
    assert rollouts.trajectories == 1
    assert len(rollouts) == 2
    np.testing.assert_allclose(rollouts.delta, [-0.5, 0, 1] * 2)


def test_a_torn_last_line_is_left_out_in_silence_and_other_bad_lines_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\nnot json\n[1]\n{"step": 2}\n{"step": 3, "rew')
    notes = []
    assert read_json_lines(path, notes) == [{"step": 1}, {"step": 2}]
    assert notes == ["metrics.jsonl: 2 unreadable line(s) left out, the first is line 2."]


def test_metrics_are_sorted_columns_of_numbers(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 2, "a": 5, "s": "x"}, {"step": 1, "a": None, "flag": True}, {"step": 3}]
    path.write_text("\n".join(json.dumps(one) for one in rows))
    metrics = read_metrics(path, [])
    assert metrics["step"].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(metrics["a"], [NAN, 5, NAN])
    assert set(metrics.columns) == {"step", "a"}
    assert np.isnan(metrics["nowhere"]).all()
    assert not metrics.has("nowhere")


def test_wall_time_of_dates_and_of_a_clock_that_started_over():
    np.testing.assert_allclose(continuous_time(np.array([1.7e9, 1.7e9 + 5])), [0, 5])
    np.testing.assert_allclose(continuous_time(np.array([10.0, 20, 3, 8])), [10, 20, 20, 25])
    assert continuous_time(np.zeros(0)).tolist() == []


def test_timeline_leaves_out_what_is_no_span(tmp_path):
    path = tmp_path / "timeline.jsonl"
    rows = [
        {"actor": "engine-1", "kind": "generate", "start": 0, "end": 2, "version": 0},
        {"actor": "learner", "kind": "train", "start": 1, "end": 0.5},
        {"actor": "learner", "kind": "dance", "start": 1, "end": 3},
        {"actor": "engine-10", "kind": "idle", "start": 1, "end": 2},
        {"actor": "engine-2", "kind": "idle", "start": "1", "end": 2},
    ]
    path.write_text("\n".join(json.dumps(one) for one in rows))
    timeline = read_timeline(path, [])
    assert timeline.actors == ["engine-1", "engine-10", "learner"]
    assert timeline.kind.tolist() == ["generate", "other", "idle"]
    assert timeline.seconds == 3


def test_evaluations_before_the_first_step_are_found(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "wall_time": 2}\n{"step": 2, "wall_time": 5, "eval/reward": 0.5}'
    )
    lines = ['{"step": 0, "reward": 0.25, "problems": 300, "temperature": 0.0}', '{"step": 2, "reward": 0.5}', "{to"]
    (tmp_path / "evaluations.jsonl").write_text("\n".join(lines))
    found = read_run(tmp_path, "r", 10).evaluations
    assert found.step.tolist() == [0, 2]
    assert found.reward.tolist() == [0.25, 0.5]
    assert found.seconds.tolist() == [0, 5]


def test_how_evaluations_were_decoded_is_said(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0, "reward": 0.25, "problems": 300, "temperature": 0.0}')
    assert read_run(tmp_path, "r", 10).evaluations.decoding == "300 problems, greedy"


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no run directory"):
        read_runs([tmp_path], 10)
    with pytest.raises(UsageError, match="at least one"):
        read_runs([], 10)


def test_labels_tell_runs_apart(tmp_path):
    for name in ("x/run", "y/run", "other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text("")
    paths = [tmp_path / "x/run", tmp_path / "y/run", tmp_path / "x/run"]
    assert [run.label for run in read_runs(paths, 30)] == ["x/run (1)", "y/run", "x/run (3)"]
    assert [run.label for run in read_runs([tmp_path / "other"], 30)] == ["other"]


def test_hyperparameters_stand_in_either_place(tmp_path):
    (tmp_path / "config.toml").write_text('[objective]\nrecipe = "estr"\neps = 0.02\n[objective.estr]\ntau = 0.5\n')
    run = read_run(tmp_path, "r", 10)
    assert run.hyperparameter("tau", 1.0) == 0.5
    assert run.hyperparameter("eps", 0.01) == 0.02
    assert run.hyperparameter("clip_low", 0.2) == 0.2


def test_a_config_that_is_no_toml_is_noted(tmp_path):
    (tmp_path / "config.toml").write_text("= nonsense")
    run = read_run(tmp_path, "r", 10)
    assert run.recipe == ""
    assert len(run.notes) == 1


def test_a_character_of_several_tokens_belongs_to_the_last_of_them():
    pieces = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b"\n", 5: b"\xff"}

    def decode(ids):
        return b"".join(pieces[i] for i in ids).decode("utf-8", "replace")

    assert token_texts([1, 2, 3, 4], decode) == ["a", "", "é", "\n"]
    assert token_texts([1, 5], decode) == ["a", "\ufffd"]
    assert token_texts([], decode) == []


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30))
def test_token_texts_of_bytes_make_up_the_whole_text(text):
    data = text.encode("utf-8", "surrogatepass").decode("utf-8", "ignore").encode()
    joined = "".join(token_texts(list(data), lambda ids: bytes(ids).decode("utf-8", "replace")))
    assert joined == data.decode().translate(CONTROLS)


def test_invisible_characters_are_shown():
    def decode(ids):
        return "".join(map(chr, ids))

    assert token_texts([0x202E, 97, 7, 0x200B, 10], decode) == ["‹U+202E›", "a", "␇", "‹U+200B›", "\n"]


def test_the_synthetic_run_has_the_shape_it_claims(tmp_path):
    run = read_run(write_run(tmp_path / "run", 12), "run", 10**6)
    assert run.metrics.lines == 12
    assert run.rollouts.trajectories == 96
    assert run.notes == []


def test_damaged_statistics_do_not_end_the_process(tmp_path):
    """Asked for a column's facts, Arrow ends the process where its statistics do not fit the schema."""
    buffer = io.BytesIO()
    pq.write_table(pa.table({"action": [[True, False], [True]], "tokens": [[1, 2], [3]]}), buffer)
    data = buffer.getvalue()
    footer = range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data) - 8)
    for at in footer:  # optional becomes required, among much else
        changed = data[:at] + bytes([(data[at] - 2) & 255]) + data[at + 1 :]
        (tmp_path / f"step-{at:06d}.parquet").write_bytes(changed)
    program = "import sys, pathlib; from estr.report.rollouts import _row_groups; "
    program += "groups, bad = _row_groups(pathlib.Path(sys.argv[1])); print(len(groups), len(bad))"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    read, refused = map(int, done.stdout.split())
    assert read > 0
    assert refused > 0
    assert read + refused >= len(footer)
