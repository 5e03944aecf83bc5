"""Whole runs on `calculator` with vLLM in the engine process: asynchronous, with weights in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estr.cli.main import main
from estr.config import ModelConfig
from estr.environments.registry import make_task
from estr.models.builtin import resolve_model
from estr.models.load import load_model, save_model
from estr.storage.metrics import read_metrics
from loop_helpers import stored, write_config

SETTINGS: dict[str, Any] = {
    "run": {"steps": 12},
    "model": {"path": "builtin:tiny"},
    "task": {"name": "calculator"},
    "rollout": {"engine": "vllm", "group_size": 4, "max_new_tokens": 24, "max_turns": 4, "slots": 16, "parked": -1},
    "schedule": {"mode": "async", "max_staleness": 4},
    "learner": {"prompts_per_step": 4, "learning_rate": 0.0},
    "runtime": {"engines": 1, "learner_threads": 1, "start_timeout": 1200, "engine_timeout": 600},
}


def trained(directory: Path, **changes: dict[str, Any]) -> Path:
    names = SETTINGS.keys() | changes.keys()
    settings = {name: {**SETTINGS.get(name, {}), **changes.get(name, {})} for name in names}
    file = write_config(directory / "run.toml", **settings)
    assert main(["train", str(file), "--output", str(directory / "run")]) == 0
    return directory / "run"


@pytest.fixture(scope="module")
def tiny() -> Path:
    return resolve_model(ModelConfig(path="builtin:tiny"), make_task("calculator"))


def untied(path: Path, directory: Path) -> Path:
    """The same model with a head of its own, which begins as a copy of the embeddings."""
    loaded = load_model(path, "float32")
    model = loaded.model
    config = type(model.config).from_dict(model.config.to_dict() | {"tie_word_embeddings": False})
    other = type(model)(config).float()
    other.load_state_dict(model.state_dict() | {"lm_head.weight": model.get_input_embeddings().weight.clone()})
    save_model(other, loaded.tokenizer, directory)
    return directory


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_at_learning_rate_0_the_engines_numbers_are_the_learners(tmp_path, tiny, tied):
    path = tiny if tied else untied(tiny, tmp_path / "untied")
    run = trained(tmp_path, model={"path": str(path)})
    lines, rows = read_metrics(run), stored(run)
    assert len(lines) == 12
    assert [line["version"] for line in lines] == list(range(1, 13))
    assert max(line["engine/canary_error"] for line in lines) <= 1e-4
    assert len(rows) == 12 * 16
    for row in rows:
        at = row.action
        np.testing.assert_allclose(row.logprob[at], row.learner_logprob[at], atol=1e-4, rtol=0)
        np.testing.assert_allclose(row.entropy[at], row.learner_entropy[at], atol=1e-4, rtol=0)
    assert {row.entropy_kind for row in rows} == {"exact"}
    assert max(row.turns for row in rows) > 1
    assert max(line["reward/mean"] for line in lines) > 0


def test_new_weights_reach_trajectories_that_are_under_way(tmp_path):
    run = trained(tmp_path, learner={"learning_rate": 1e-3})
    lines, rows = read_metrics(run), stored(run)
    assert max(line["engine/canary_error"] for line in lines) <= 1e-4, "learning changed the weights at every step"
    assert min(line["mismatch/delta_abs"] for line in lines[4:]) > 1e-4, "tokens were trained under newer weights"
    spans = [len(set(row.version[row.action].tolist())) for row in rows]
    assert max(spans) >= 2
    for row in rows:
        versions = row.version[row.action]
        assert (np.diff(versions) >= 0).all()
        assert 0 <= row.target_version - versions[0] <= 4


def test_without_the_plugin_the_interval_contains_the_exact_entropy(tmp_path):
    changes = {"entropy": "bounded", "entropy_topk": 4}
    run = trained(tmp_path, run={"steps": 3}, rollout=changes, objective={"recipe": "estr"})
    rows = stored(run)
    for row in rows:
        at = row.action
        assert row.entropy_kind == "bounded"
        assert (row.entropy[at] <= row.learner_entropy[at] + 1e-5).all()
        assert (row.learner_entropy[at] <= row.entropy_upper[at] + 1e-5).all()
        np.testing.assert_allclose(row.logprob[at], row.learner_logprob[at], atol=1e-4, rtol=0)
    widths = np.concatenate([(row.entropy_upper - row.entropy)[row.action] for row in rows])
    assert widths.max() > 0.05
    assert all("gate/undecided_fraction" in line for line in read_metrics(run))
