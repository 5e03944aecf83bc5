"""Whole runs with engine processes at learning rate 0: engine and learner agree; what a run leaves behind."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from estr.cli.main import main
from estr.models.builtin import resolve_model
from estr.models.load import load_model
from estr.runtime.builders import build_task
from estr.storage.metrics import read_json_lines, read_metrics
from estr.storage.rollout_files import read_rollouts
from loop_helpers import estr, small, snapshot, stored, write_config

SHARED: dict[str, Any] = {
    "run": {"steps": 6, "eval_every": 3, "eval_prompts": 2},
    "task": {"name": "loop_tasks:Echo", "turns": 3, "delay": 0.15},
    "learner": {"learning_rate": 0.0},
    "runtime": {"engines": 1, "learner_threads": 1},
}
ASYNC = SHARED | {"schedule": {"mode": "async", "max_staleness": 3}}
SYNC = SHARED | {"schedule": {"mode": "sync"}, "learner": {"learning_rate": 0.0, "minibatches": 2}}


def trained(directory: Path, settings: dict[str, Any]) -> Path:
    assert (
        main(["train", str(write_config(directory / "run.toml", **settings)), "--output", str(directory / "run")]) == 0
    )
    return directory / "run"


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("async"), ASYNC)


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("sync"), SYNC)


def check_agreement(run: Path, count: int) -> None:
    """log μ = log π and H = H of π on every action token, and nothing on any other."""
    rows = stored(run)
    assert len(rows) == count
    assert max(row.turns for row in rows) == 3
    assert {row.finish_reason for row in rows} == {"stop", "length"}, "finished ones, and ones that were cut"
    assert any((np.diff(row.action.astype(int)) == 1).sum() >= 2 for row in rows), "actions after a tool's answer"
    for row in rows:
        at = row.action
        np.testing.assert_allclose(row.logprob[at], row.learner_logprob[at], atol=1e-4, rtol=0)
        np.testing.assert_allclose(row.entropy[at], row.learner_entropy[at], atol=1e-4, rtol=0)
        assert (row.entropy[at] > 0).all()
        for name in ("logprob", "entropy", "learner_logprob", "learner_entropy"):
            assert np.isnan(getattr(row, name)[~at]).all()
    assert len({row.reward for row in rows}) > 4, "rewards differ, so that there was a gradient"


def test_engine_and_learner_agree_in_async_across_turns_cuts_and_syncs(asynchronous: Path) -> None:
    check_agreement(asynchronous, 24)
    spans = [len(set(row.version[row.action].tolist())) for row in stored(asynchronous)]
    assert max(spans) >= 2, "some trajectory saw a weight sync"


def test_engine_and_learner_agree_in_sync(synchronous: Path) -> None:
    check_agreement(synchronous, 12)


def test_mismatch_metrics_are_zero_where_weights_are_equal(asynchronous: Path, synchronous: Path) -> None:
    for line in [*read_metrics(asynchronous), *read_metrics(synchronous)]:
        assert line["mismatch/delta_abs"] < 1e-4
        assert line["mismatch/kl"] < 1e-6
        assert line["engine/canary_error"] < 1e-4
        assert line["gate/masked_fraction"] == 0
        assert line["grad/norm"] > 0


def test_fault_C1_no_trained_trajectory_exceeds_the_bound(asynchronous: Path) -> None:
    behind = [int(row.target_version - row.version[row.action].min()) for row in stored(asynchronous)]
    assert min(behind) >= 0
    assert 0 < max(behind) <= 3, "it was asynchronous, within the bound"


def test_fault_C2_C4_versions_are_of_each_token(asynchronous: Path) -> None:
    for row in stored(asynchronous):
        versions = row.version[row.action]
        assert (np.diff(versions) >= 0).all()
        assert versions[0] >= 0
        assert versions[-1] <= row.target_version


def test_fault_C7_C10_sync_waits_for_each_batch_and_counts_each_step(synchronous: Path) -> None:
    """Two minibatches: the second one is one version behind, never more, and never less."""
    for row in stored(synchronous):
        assert set(row.version[row.action].tolist()) == {2 * ((row.trained_step - 1) // 2)}
    assert [line["staleness/inter_mean"] for line in read_metrics(synchronous)] == [0, 1, 0, 1, 0, 1]
    assert [line["version"] for line in read_metrics(synchronous)] == [1, 2, 3, 4, 5, 6]


def test_fault_E2_every_group_is_trained_once_and_none_is_skipped(asynchronous: Path, synchronous: Path) -> None:
    assert sorted(int(row.group_id) for row in stored(asynchronous)) == sorted([*range(12)] * 2)
    assert sorted(int(row.group_id) for row in stored(synchronous)) == sorted([*range(6)] * 2)
    for run in (asynchronous, synchronous):
        names = read_rollouts(run).column("trajectory_id").to_pylist()
        assert len(set(names)) == len(names)


# ---------------------------------------------------------------------- the run directory (CONTRACT section 4)

METRICS = [
    *("step", "version", "wall_time", "reward/mean", "policy/entropy", "grad/norm", "learner/learning_rate"),
    *("mismatch/kl", "mismatch/ratio_deviation", "mismatch/delta_abs", "tokens/action", "tokens/invalid"),
    *("gate/masked_fraction", "gate/undecided_fraction", "clip/fraction"),
    *("staleness/inter_mean", "staleness/inter_max", "staleness/intra_mean", "staleness/intra_max"),
    *("throughput/trained_tokens_per_second", "throughput/generated_tokens_per_second"),
    *("time/engine_idle_fraction", "time/learner_idle_fraction"),
]
LISTS = {name: pa.list_(pa.float32()) for name in ("logprob", "entropy", "entropy_upper", "learner_logprob")}
COLUMNS = {
    **dict.fromkeys(("trajectory_id", "group_id", "task_id", "prompt", "entropy_kind", "finish_reason"), pa.string()),
    **dict.fromkeys(("state", "drop_reason", "text", "parent_id"), pa.string()),
    **dict.fromkeys(("tokens", "version"), pa.list_(pa.int32())),
    **LISTS,
    **dict.fromkeys(("learner_entropy", "proximal_logprob", "token_advantage"), pa.list_(pa.float32())),
    **dict.fromkeys(("temperature", "top_p", "reward", "advantage"), pa.float64()),
    **dict.fromkeys(("seed", "trained_step", "target_version"), pa.int64()),
    **dict.fromkeys(("top_k", "turns", "segment"), pa.int32()),
    "action": pa.list_(pa.bool_()),
}


def test_a_run_leaves_what_the_contract_names(asynchronous: Path) -> None:
    names = {path.name for path in asynchronous.iterdir() if not path.name.startswith(".")}
    assert names >= {"config.toml", "metrics.jsonl", "rollouts", "spool", "checkpoints", "report.html"}
    config = tomllib.loads((asynchronous / "config.toml").read_text())
    assert config["schedule"]["max_staleness"] == 3
    assert config["objective"]["tau"] == 1.0, "the whole resolved configuration"
    report = (asynchronous / "report.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?https?:|@import|url\(\s*["']?https?:""", report)


def test_metrics_have_a_line_a_step_with_every_key(asynchronous: Path, synchronous: Path) -> None:
    for run in (asynchronous, synchronous):
        lines = read_metrics(run)
        assert [line["step"] for line in lines] == list(range(1, 7))
        assert [line["step"] for line in lines if "eval/reward" in line] == ([3, 6] if run == asynchronous else [4, 6])
        for line in lines:
            assert not set(METRICS) - line.keys()
            assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
        assert [line["wall_time"] for line in lines] == sorted(line["wall_time"] for line in lines)
    evaluations = read_json_lines(asynchronous / "evaluations.jsonl")
    assert [(line["step"], line["problems"], line["temperature"]) for line in evaluations] == [
        (0, 2, 1.0),
        (3, 2, 1.0),
        (6, 2, 1.0),
    ]


def test_rollouts_have_every_column(asynchronous: Path) -> None:
    table = read_rollouts(asynchronous)
    assert {name: table.schema.field(name).type for name in COLUMNS} == COLUMNS
    for row in table.to_pylist():
        length = len(row["tokens"])
        lists = ("action", "logprob", "entropy", "version", "learner_logprob", "learner_entropy")
        assert all(len(row[name]) == length for name in lists)
        assert row["entropy_kind"] == "exact"
        assert row["state"] == "trained"
        assert row["trained_step"] == row["target_version"] + 1
        assert row["prompt"].startswith("Say ")
        assert row["text"]


def test_fault_D5_the_last_checkpoint_is_a_plain_model(asynchronous: Path) -> None:
    """The library loads it by itself; at learning rate 0 it is the model the run began with, tied head included."""
    path = asynchronous / "checkpoints/step-000006"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    config = small(**ASYNC)
    first = load_model(resolve_model(config.model, build_task(config)), "float32").model
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    for name, tensor in first.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    assert not [path for path in asynchronous.rglob("*") if path.suffix in (".bin", ".pt", ".pkl", ".pth")]


def test_resuming_a_finished_run_says_so(asynchronous: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(asynchronous)
    outcome = estr(capsys, "resume", asynchronous)
    assert outcome.status == 0
    assert outcome.out == f"{asynchronous} is finished: 6 of 6 steps are done\n"
    after = snapshot(asynchronous)
    assert {k: v for k, v in after.items() if k != ".lock"} == {k: v for k, v in before.items() if k != ".lock"}


def test_training_into_a_run_that_exists_is_refused_and_leaves_it_untouched(
    asynchronous: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(asynchronous)
    outcome = estr(capsys, "train", write_config(tmp_path / "run.toml"), "--output", asynchronous)
    assert outcome.status == 2
    assert outcome.complaint.startswith(f"{asynchronous} exists already; choose another --output, or go on with: ")
    assert snapshot(asynchronous) == before


def test_the_report_command_writes_where_it_is_told(
    asynchronous: Path, synchronous: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = estr(capsys, "report", asynchronous, synchronous, "--html", tmp_path / "both.html")
    assert (outcome.status, outcome.out.strip()) == (0, str(tmp_path / "both.html"))
    assert (tmp_path / "both.html").stat().st_size > 10_000
    assert estr(capsys, "report", asynchronous, synchronous).status == 2


def test_the_timeline_says_what_engines_got_done_and_how_long_tools_took(asynchronous: Path) -> None:
    spans = [span for span in read_json_lines(asynchronous / "timeline.jsonl") if span["kind"] == "generate"]
    rows = stored(asynchronous)
    last = max(row.trained_step for row in rows)  # what engines did just before it may not have been told yet
    finished = sum(int(row.action.sum()) for row in rows if row.trained_step < last - 1)
    sampled = sum(span["sampled_tokens"] for span in spans)
    assert sampled >= finished > 0, "every token was sampled in some stretch of the timeline"
    assert 0 < sum(span["decode_steps"] for span in spans) <= sampled
    waits = [seconds for span in spans for seconds in span["tool_seconds"]]
    assert max(waits) >= 0.15, "the task's artificial delay"
    assert min(waits) >= 0.0
