"""A whole run whose tool runs what the model says, in the sandbox.

In a file of its own: functions of test_environments_sandbox.py are called inside sandboxes, where this file's imports
(torch) would not fit into the limits.
"""

from __future__ import annotations

from estr.storage.rollout_files import read_rollouts
from loop_helpers import estr, write_config


def test_a_run_trains_with_a_tool_that_runs_what_the_model_says(tmp_path, capsys):
    config = write_config(tmp_path / "run.toml", task={"name": "sandbox_tasks:Code", "turns": 2}, run={"steps": 2})
    outcome = estr(capsys, "train", config, "--output", tmp_path / "run")
    assert outcome.status == 0, outcome.err
    stored = read_rollouts(tmp_path / "run").to_pylist()
    assert len(stored) == 2 * 2 * 2
    assert {row["state"] for row in stored} == {"trained"}
    said = "".join(row["text"] for row in stored)
    assert "error" in said or "ok" in said
    assert "broken" not in said
