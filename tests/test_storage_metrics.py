"""metrics.jsonl and timeline.jsonl: strict JSON, readable at any moment, withdrawn on resume."""

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.errors import RunError, UsageError
from estr.storage import files
from estr.storage.metrics import MetricsWriter, TimelineWriter, encode_line, read_metrics, read_timeline


def strict(line: str):
    def refuse(name):
        raise AssertionError(f"{name} in {line}")

    return json.loads(line, parse_constant=refuse)


def test_lines_are_sorted_and_missing_values_left_out(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(1, {"version": 1, "reward/mean": float("nan"), "grad/norm": np.float32(0.5), "eval/reward": None})
        writer.write(2, {"version": 2, "tokens/action": torch.tensor(7), "policy/entropy": float("inf")})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"grad/norm": 0.5, "step": 1, "version": 1}\n{"step": 2, "tokens/action": 7, "version": 2}\n'
    )
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), st.floats() | st.integers() | st.none() | st.booleans() | st.lists(st.floats())))
def test_any_values_make_strict_json(values):
    line = encode_line(values)
    assert "\n" not in line
    strict(line)


def test_each_line_is_readable_as_soon_as_it_is_written(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 4):
        writer.write(step, {})
        assert len(read_metrics(tmp_path)) == step


def test_a_torn_last_line_is_skipped_in_reading_and_cut_in_writing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_metrics(path) == [{"step": 1}]
    with MetricsWriter(path) as writer:
        writer.write(2, {})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_torn_line_longer_than_one_block_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + "x" * 200_000)
    MetricsWriter(path).close()
    assert path.read_text() == '{"step": 1}\n'
    path.write_text("x" * 200_000)
    MetricsWriter(path).close()
    assert path.read_text() == ""


def test_a_malformed_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[2]\n{"step": 3}\n')
    with pytest.raises(UsageError, match=r"metrics\.jsonl, line 2"):
        read_metrics(path)


def test_no_file_yet_is_no_lines(tmp_path):
    assert read_metrics(tmp_path) == []


def test_withdraw_after_rewrites_and_goes_on(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": step / 2})
        assert writer.withdraw_after(3) == 2
        assert writer.withdraw_after(3) == 0
        writer.write(4, {"loss": 9.0})
    assert [(record["step"], record["loss"]) for record in read_metrics(tmp_path)] == [
        (1, 0.5), (2, 1.0), (3, 1.5), (4, 9.0)
    ]  # fmt: skip
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lines_of_the_timeline_are_written_together_and_in_order(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("estr.storage.metrics.time.monotonic", lambda: clock[0])
    writes = []
    monkeypatch.setattr(
        "estr.storage.metrics.write_all", lambda file, data: writes.append(data) or os.write(file, data)
    )
    with TimelineWriter(tmp_path / "timeline.jsonl") as writer:
        for start in range(5):
            clock[0] += 0.4
            writer.write("learner", "train", float(start), start + 1.0, 0)
        assert [len(data.splitlines()) for data in writes] == [3]
    assert [record["start"] for record in read_timeline(tmp_path)] == [0, 1, 2, 3, 4]
    assert len(writes) == 2


def test_lines_of_the_timeline_that_wait_are_withdrawn_too(tmp_path):
    with TimelineWriter(tmp_path / "timeline.jsonl") as writer:
        for version in range(3):
            writer.write("learner", "train", 0.0, 1.0, version)
        assert writer.withdraw_after(1) == 1
    assert [record["version"] for record in read_timeline(tmp_path)] == [0, 1]


def test_timeline_withdraws_by_version(tmp_path):
    with TimelineWriter(tmp_path / "timeline.jsonl") as writer:
        writer.write("engine-0", "generate", 0.0, 1.5, version=0)
        writer.write("learner", "wait", 0.0, 1.0)
        writer.write("learner", "train", 1.5, 2.0, version=3)
        assert writer.withdraw_after(2) == 1
    assert [record["actor"] for record in read_timeline(tmp_path)] == ["engine-0", "learner"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failed_line_leaves_the_lines_before(tmp_path, monkeypatch, code):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {})
    real, calls = os.write, []

    def short_then_fail(descriptor, data):
        calls.append(data)
        if len(calls) > 1:
            raise OSError(code, "no")
        return real(descriptor, data[:3])

    monkeypatch.setattr(files.os, "write", short_then_fail)
    with pytest.raises(RunError, match="cannot write"):
        writer.write(2, {})
    monkeypatch.undo()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    writer.write(2, {})
    assert len(read_metrics(tmp_path)) == 2


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_failed_withdrawal_keeps_every_line(tmp_path, monkeypatch, call):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 4):
        writer.write(step, {})

    def fail(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files.os, call, fail)
    with pytest.raises(RunError, match="the disk is full"):
        writer.withdraw_after(1)
    monkeypatch.undo()
    assert len(read_metrics(tmp_path)) == 3
    writer.write(4, {})
    assert len(read_metrics(tmp_path)) == 4


def test_a_killed_process_loses_no_line(tmp_path):
    code = (
        "import os, sys; from estr.storage.metrics import MetricsWriter; w = MetricsWriter(sys.argv[1]);"
        "[w.write(step, {'a': 1.0}) for step in range(1, 101)]; os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "metrics.jsonl")], timeout=60, check=False)
    assert done.returncode == 9
    assert len(read_metrics(tmp_path)) == 100
