"""rollouts/*.parquet: CONTRACT's columns, files by rename, no trajectory twice."""

import errno
import math
import os
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.config import RolloutConfig
from estr.errors import RunError, UsageError
from estr.storage import files, rollout_files
from estr.storage.rollout_files import RolloutWriter, read_rollouts
from estr.storage.rollouts import SCHEMA, Settlement, rows_from, to_table
from estr.trajectory import Segment, Trajectory

NAN = float("nan")


def segment(length=5, actions=(2, 3, 4), version=3):
    action = np.isin(np.arange(length), actions)
    return Segment(
        tokens=np.arange(length, dtype=np.int32),
        action=action,
        logprob=np.where(action, -0.5, NAN).astype(np.float32),
        entropy=np.where(action, 0.25, NAN).astype(np.float32),
        version=np.where(action, version, -1).astype(np.int32),
    )


def trajectory(group=1, sibling=0, segments=1, **values):
    defaults = {"attempt": 0, "task_id": "t/1", "prompt": "2+2?", "seed": 2**62, "text": "4", "reward": 1.0,
                "finish_reason": "stop", "turns": 1, "group_key": "k"}  # fmt: skip
    return Trajectory(group=group, sibling=sibling, segments=[segment() for _ in range(segments)], **defaults | values)


def rows(group=1, step=1, **values):
    settlement = Settlement("trained", trained_step=step, target_version=step - 1, advantage=0.5)
    return rows_from(trajectory(group, **values), settlement, RolloutConfig())


CONTRACT_COLUMNS = [
    "trajectory_id", "group_id", "task_id", "prompt", "tokens", "action", "logprob", "entropy", "version",
    "entropy_kind", "entropy_upper", "temperature", "top_p", "top_k", "learner_logprob", "learner_entropy",
    "proximal_logprob", "reward", "advantage", "token_advantage", "finish_reason", "turns", "seed", "state",
    "drop_reason", "trained_step", "target_version", "text", "parent_id", "segment",
]  # fmt: skip


def test_schema_has_the_contract_columns_and_types():
    assert set(CONTRACT_COLUMNS) <= set(SCHEMA.names)
    types = {name: str(SCHEMA.field(name).type) for name in SCHEMA.names}
    assert types["tokens"] == types["version"] == "list<item: int32>"
    assert types["action"] == "list<item: bool>"
    assert types["logprob"] == types["entropy"] == types["learner_logprob"] == "list<item: float>"
    assert types["trajectory_id"] == types["prompt"] == types["text"] == "string"


def test_a_row_reads_back_as_it_was(tmp_path):
    learner = [np.array([NAN, NAN, -0.4, -0.5, -0.6])]
    settlement = Settlement("trained", trained_step=7, target_version=6, advantage=-0.25, learner_logprob=learner)
    with RolloutWriter(tmp_path) as writer:
        writer.write(7, rows_from(trajectory(), settlement, RolloutConfig(temperature=0.5)))
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000007.parquet"]
    (row,) = read_rollouts(tmp_path).to_pylist()
    assert row["trajectory_id"] == "00000001-000"
    assert (row["group_id"], row["seed"], row["temperature"]) == ("00000001", 2**62, 0.5)
    assert (row["state"], row["trained_step"], row["target_version"], row["advantage"]) == ("trained", 7, 6, -0.25)
    assert row["version"] == [-1, -1, 3, 3, 3]
    assert [math.isnan(value) for value in row["entropy"]] == [True, True, False, False, False]
    assert row["learner_logprob"][2:] == pytest.approx([-0.4, -0.5, -0.6])
    assert row["proximal_logprob"] is None
    assert row["drop_reason"] is None
    assert row["parent_id"] is None
    meta = pq.ParquetFile(tmp_path / "step-000007.parquet").metadata
    assert meta.row_group(0).column(0).compression == "ZSTD"


def test_a_forked_history_makes_rows_with_parent(tmp_path):
    made = rows(segments=3)
    assert [row["trajectory_id"] for row in made] == ["00000001-000", "00000001-000#1", "00000001-000#2"]
    assert [row["parent_id"] for row in made] == [None, "00000001-000", "00000001-000"]
    assert [row["segment"] for row in made] == [0, 1, 2]
    assert [row["text"] for row in made] == ["4", "", ""]


def test_a_trajectory_without_tokens_makes_one_empty_row():
    settlement = Settlement("dropped", drop_reason="the tool hung")
    (row,) = to_table(rows_from(trajectory(segments=0, reward=NAN), settlement, RolloutConfig())).to_pylist()
    assert row["tokens"] == []
    assert row["drop_reason"] == "the tool hung"
    assert math.isnan(row["reward"])


def test_misaligned_learner_columns_are_refused():
    settlement = Settlement("trained", trained_step=1, learner_entropy=[np.zeros(3)])
    with pytest.raises(ValueError, match="learner_entropy of segment 0"):
        rows_from(trajectory(), settlement, RolloutConfig())


@pytest.mark.parametrize(
    "values", [{"state": "trained"}, {"state": "dropped"}, {"state": "finished", "trained_step": 1}]
)
def test_settlements_that_contradict_themselves_are_refused(values):
    with pytest.raises(ValueError, match="if and only if"):
        Settlement(**values)


@settings(max_examples=30, deadline=None)
@given(st.text(alphabet=st.characters(), max_size=20), st.text(alphabet=st.characters(codec=None), max_size=20))
def test_any_text_can_be_stored(prompt, text):
    made = rows(prompt=prompt, text=text + "\ud800", task_id="../../etc/passwd\0")
    (row,) = to_table(made).to_pylist()
    assert row["text"].endswith("?")


def test_names_from_data_never_become_paths(tmp_path):
    with RolloutWriter(tmp_path / "rollouts") as writer:
        writer.write(1, rows(task_id="../../x", group_key="../y", prompt="/z"))
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [
        "rollouts",
        "rollouts/step-000001.parquet",
    ]


@pytest.mark.parametrize("background", [False, True])
def test_no_trajectory_twice(tmp_path, background):
    with RolloutWriter(tmp_path, background=background) as writer:
        writer.write(1, rows(1))
        with pytest.raises(RunError, match="00000001-000 is in"):
            writer.write(2, rows(1, step=2))
        with pytest.raises(RunError, match="twice"):
            writer.write(2, rows(2, step=2) + rows(2, step=2))
    with pytest.raises(RunError, match="00000001-000 is in"):
        RolloutWriter(tmp_path).write(2, rows(1, step=2))


def test_a_directory_that_holds_one_twice_is_refused(tmp_path):
    for step in (1, 2):
        pq.write_table(to_table(rows(step=step)), tmp_path / f"step-{step:06d}.parquet")
    with pytest.raises(RunError, match="stands twice"):
        RolloutWriter(tmp_path).withdraw_after(2)


def test_a_damaged_file_that_a_resume_withdraws_is_no_hindrance_and_another_is_told(tmp_path):
    RolloutWriter(tmp_path).write(1, rows(step=1))
    (tmp_path / "step-000002.parquet").write_bytes(b"PAR1junk")
    assert RolloutWriter(tmp_path).withdraw_after(1) == 1
    (tmp_path / "step-000001.parquet").write_bytes(b"PAR1junk")
    with pytest.raises(UsageError, match=r"step-000001.parquet cannot be read as Parquet: .*; move it away"):
        RolloutWriter(tmp_path).withdraw_after(1)


def test_rows_of_another_step_are_refused(tmp_path):
    with pytest.raises(ValueError, match="trained in step 3"):
        RolloutWriter(tmp_path).write(2, rows(step=3))


def test_withdraw_after_removes_later_steps_and_unsettled_rows(tmp_path):
    finished = rows_from(trajectory(9), Settlement("finished"), RolloutConfig())
    with RolloutWriter(tmp_path, background=True) as writer:
        for step in range(1, 5):
            writer.write(step, rows(step, step=step))
        writer.write(2, rows(10, step=2))
        writer.write(2, finished)
        assert writer.withdraw_after(2) == 3
        kept = read_rollouts(tmp_path, ["trajectory_id"]).column(0).to_pylist()
        assert sorted(kept) == ["00000001-000", "00000002-000", "00000010-000"]
        writer.write(3, rows(3, step=3))
        writer.write(3, rows(9, step=3))
    assert read_rollouts(tmp_path).num_rows == 5


def write_and_flush(writer, step):
    writer.write(step, rows(step, step=step))
    writer.flush()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("call", "failing"), [("write", 0), ("fsync", 0), ("fsync", 1), ("rename", 0)])
def test_a_failed_write_leaves_no_file_and_is_reported(tmp_path, monkeypatch, call, failing, background):
    writer = RolloutWriter(tmp_path, background=background)
    write_and_flush(writer, 1)
    real, calls = getattr(os, call), []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) > failing:
            raise OSError(errno.ENOSPC, "full")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, fail)
        with pytest.raises(RunError, match=r"cannot write .*step-000002\.parquet: the disk is full"):
            write_and_flush(writer, 2)
    if background:
        with pytest.raises(RunError, match="the disk is full"):
            writer.write(3, rows(3, step=3))
        with pytest.raises(RunError, match="the disk is full"):
            writer.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001.parquet"]
    write_and_flush(RolloutWriter(tmp_path), 2)


@pytest.mark.parametrize("moment", ["write", "fsync", "rename"])
def test_a_kill_leaves_whole_files_only(tmp_path, moment):
    code = f"""
        import os, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import test_storage_rollouts as here
        writer = here.RolloutWriter(sys.argv[1])
        writer.write(1, here.rows(1))
        real = os.write
        os.write = lambda descriptor, data: real(descriptor, data[:10]) and os._exit(9)
        if {moment!r} != "write":
            os.write = real
            setattr(os, {moment!r}, lambda *_: os._exit(9))
        writer.write(2, here.rows(2, step=2))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], timeout=60, check=False)
    assert done.returncode == 9
    assert read_rollouts(tmp_path).num_rows == 1
    with RolloutWriter(tmp_path) as writer:
        writer.write(2, rows(2, step=2))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-000001.parquet", "step-000002.parquet"]


def test_reading_says_what_is_wrong(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        read_rollouts(tmp_path / "none")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 this is not it PAR1")
    with pytest.raises(UsageError, match=r"bad\.parquet cannot be read as Parquet"):
        read_rollouts(tmp_path)


def test_reading_without_rollouts_and_with_unknown_columns(tmp_path):
    assert read_rollouts(tmp_path).schema == SCHEMA
    assert read_rollouts(tmp_path, ["tokens", "none"]).column_names == ["tokens"]
    pq.write_table(pa.table({"tokens": [[1]], "other": [2]}), tmp_path / "foreign.parquet")
    assert read_rollouts(tmp_path / "foreign.parquet", ["tokens", "none"]).column_names == ["tokens"]


def test_a_long_run_remembers_the_newest_ids_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_files, "_REMEMBERED", 4)
    writer = RolloutWriter(tmp_path)
    for step in range(1, 6):
        writer.write(step, rows(step, step=step))
    assert len(writer._ids._ids) == len(writer._ids._order) == 4
    with pytest.raises(RunError, match="must not be stored twice"):
        writer.write(6, rows(5, step=6))
