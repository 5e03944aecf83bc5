"""What a dry run checks beside the configuration, and models and tasks that are wrong: one sentence each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from estr.environments.registry import make_task
from estr.errors import UsageError
from estr.models.builtin import resolve_model
from estr.runtime.builders import build_task
from loop_helpers import estr, small, write_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    target = tmp_path / "model"
    config = small()
    shutil.copytree(resolve_model(config.model, build_task(config)), target)
    return target


def dry(tmp_path: Path, capsys: Any, path: object) -> Any:
    config = write_config(tmp_path / "run.toml", model={"path": str(path)})
    return estr(capsys, "train", config, "--dry-run")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "model.path is empty; give a model directory"),
        (" ", "model.path is empty"),
        ("/nowhere/at/all", "model.path: there is no directory '/nowhere/at/all'"),
        ("~nobody-of-that-name/x", "model.path: there is no directory '~nobody-of-that-name/x'"),
        ("builtin:huge", "there is no 'builtin:huge'; did you mean 'builtin:"),
    ],
)
def test_a_dry_run_refuses_a_model_that_is_not_there(tmp_path, capsys, path, words):
    outcome = dry(tmp_path, capsys, path)
    assert outcome.status == 2
    assert words in outcome.complaint


def test_a_dry_run_loads_configuration_and_tokenizer(tmp_path, capsys, model):
    assert dry(tmp_path, capsys, model).status == 0
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    assert f"{model}: the configuration cannot be loaded" in dry(tmp_path, capsys, model).complaint
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").unlink()
    assert "has no weights" in dry(tmp_path, capsys, model).complaint
    (model / "tokenizer.json").write_text("{")
    assert "the tokenizer cannot be loaded" in dry(tmp_path, capsys, model).complaint


def test_a_dry_run_says_that_a_hub_name_is_not_checked(tmp_path, capsys):
    outcome = dry(tmp_path, capsys, "somebody/some-model")
    assert outcome.status == 0
    assert "taken for a hub name, which is not checked" in outcome.err


def test_a_template_that_raises_anything_is_refused_in_a_sentence(tmp_path, capsys, model):
    (model / "chat_template.jinja").write_text("{{ range(10 ** 400) }}")
    config = write_config(tmp_path / "run.toml", model={"path": str(model)})
    assert "chat template refuses" in estr(capsys, "train", config, "--output", tmp_path / "run").complaint


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("none", "the task returned NoneType for problem 0, not an estr.environments.Problem"),
        ("prompt", "the task returned problem 0 whose prompt has half a surrogate pair in it"),
        ("empty", "OddEnvironment.reset returned no message for the policy to answer"),
        ("message", "OddEnvironment.reset returned a message with half a surrogate pair"),
    ],
)
def test_what_a_task_gets_wrong_is_said(tmp_path, capsys, how, words):
    config = write_config(
        tmp_path / "run.toml", task={"name": "odd_tasks:Odd", "how": how}, schedule={"mode": "lockstep", "attempts": 1}
    )
    outcome = estr(capsys, "train", config, "--output", tmp_path / "run")
    assert outcome.status == 1
    assert words in outcome.complaint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"turns": "2"}, "task.turns of task 'loop_tasks:Echo' must be a number like"),
        ({"turns": True}, "must be a number like"),
        ({"turns": [1]}, "must be a number like"),
    ],
)
def test_options_of_a_task_of_ones_own_are_of_their_defaults_kind(options, words):
    with pytest.raises(UsageError, match=words):
        make_task("loop_tasks:Echo", **options)


def test_fewer_steps_than_are_done_are_refused_on_resume(tmp_path, capsys):
    run = tmp_path / "run"
    assert estr(capsys, "train", write_config(tmp_path / "run.toml", run={"steps": 2}), "--output", run).status == 0
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("\nsteps = 2\n", "\nsteps = 1\n"))
    outcome = estr(capsys, "resume", run)
    assert outcome.status == 2
    assert "run.steps = 1" in outcome.complaint
    assert "less than the 2 steps that are done" in outcome.complaint


def test_recipes_and_tasks_are_listed_without_rich(capsys, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "rich" else find(name, *rest))
    out = estr(capsys, "recipes").out
    assert "estr" in out
    assert "gate E token; surrogate E token" in out
    assert "calculator" in estr(capsys, "tasks").out


def test_a_report_is_not_written_into_a_directory_that_is_not_there(tmp_path, capsys):
    run = tmp_path / "run"
    assert estr(capsys, "train", write_config(tmp_path / "run.toml", run={"steps": 0}), "--output", run).status == 0
    outcome = estr(capsys, "report", run, "--html", tmp_path / "absent" / "report.html")
    assert outcome.status == 2
    assert "does not exist; make it first" in outcome.complaint
    assert not (tmp_path / "absent").exists()
