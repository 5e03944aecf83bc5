"""Bad input through the command line: exit status, one clear sentence, nothing lost, no traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from estr.cli.main import main
from estr.config import Config
from estr.errors import EstrError
from estr.models.builtin import resolve_model
from estr.runtime.builders import build_task
from estr.storage.metrics import read_metrics
from loop_helpers import SMALL, Outcome, estr, small, stored, write_config

GOOD = """
[run]
steps = 2
[model]
path = "builtin:micro"
[task]
name = "loop_tasks:Echo"
[learner]
prompts_per_step = 2
"""


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Train with a file of this text: exit status 2, and no run directory is left; the sentence."""

    def run(text: str, *arguments: object) -> str:
        (tmp_path / "run.toml").write_text(text)
        outcome = estr(capsys, "train", tmp_path / "run.toml", "--output", tmp_path / "run", *arguments)
        assert outcome.status == 2, outcome.err
        assert not (tmp_path / "run").exists()
        assert not list(tmp_path.glob(".run*"))
        return outcome.complaint

    return run


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[lerner]\nlearning_rate = 1\n", ["run.toml, line 1: there is no section 'lerner'", "'learner'"]),
        ("[run]\nsteps = 2\n[learner]\nlearning_rat = 1\n", ["line 4: learner.learning_rat", "'learning_rate'"]),
        ("[run]\nsteps = 2\nseed = \n", ["run.toml", "line 3"]),
        ("[run]\nsteps = 'many'\n", ["line 2: run.steps must be a whole number, got 'many'"]),
        ("[run]\nsteps = true\n", ["line 2: run.steps must be a whole number, got true"]),
        ("[learner]\nlearning_rate = -1.0\n", ["line 2: learner.learning_rate must be at least 0, got -1.0"]),
        ("[schedule]\nmode = 'asink'\n", ["line 2: schedule.mode", "'asink'", "did you mean 'async'?"]),
        ("[objective]\nrecipe = 'estrr'\n", ["line 2: objective.recipe", "'estrr'", "did you mean 'estr'?"]),
        ("[objective]\nrecipe = 'estr'\ntaau = 1\n", ["line 3", "taau", "did you mean 'tau'?"]),
        ("[objective]\nadvantage = 'gpro'\n", ["gpro", "'grpo'"]),
        ("[task]\nname = 'calculater'\n", ["no task 'calculater'", "did you mean 'calculator'?"]),
        ("[task]\nlevel = [1]\n", ["'level'", "did you mean 'levels'?"]),
        ("[task]\nname = 'nowhere_to_be_found:Task'\n", ["cannot import 'nowhere_to_be_found'"]),
        ("[task]\nname = 'loop_tasks:Eco'\n", ["no class 'Eco'", "did you mean 'Echo'?"]),
        ("[task]\nname = 'loop_tasks:Echo'\nturn = 1\n", ["no option 'turn'", "did you mean 'turns'?"]),
        ("[model]\npath = 'builtin:macro'\n", ["there is no 'builtin:macro'", "did you mean 'builtin:micro'?"]),
        ("[model]\npath = './nowhere'\n", ["there is no directory './nowhere'"]),
        ("[rollout]\ntop_p = 0.9\n[schedule]\nmode = 'lockstep'\n[rollout2]\n", ["line 5: there is no section"]),
        ("[learner]\nminibatches = 9\n", ["learner.minibatches = 9", "learner.prompts_per_step"]),
        ("[rollout]\ndtype = 'int9'\n", ["rollout.dtype", "int2 to int8"]),
    ],
)
def test_a_wrong_configuration_is_refused_with_its_place(refused: Any, text: str, words: list[str]) -> None:
    sentence = refused(text)
    for word in words:
        assert word in sentence, sentence


def test_a_wrong_set_is_refused(refused: Any) -> None:
    assert "--set learner.learning_rat" in refused(GOOD, "--set", "learner.learning_rat=1")
    assert "did you mean 'task'?" in refused(GOOD, "--set", "tusk.name=x")
    assert "--set" in refused(GOOD, "--set", "run.steps")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian", "x.toml"], "there is no command 'trian'; did you mean 'train'?"),
        (["train"], "config"),
        (["train", "absent.toml"], "absent.toml"),
        (["train", "x.toml", "--outptu", "y"], "--outptu"),
        (["resume", "absent"], "absent"),
        (["report", "absent"], "absent"),
        (["eval", "./absent"], "there is no directory './absent'"),
        (["eval", "builtin:micro", "--samples", "0"], "at least 1"),
        (["eval", "builtin:micro", "--set", "task.name=calculater"], "did you mean 'calculator'?"),
        (["recipes", "esstr"], "did you mean 'estr'?"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_command_is_refused(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = estr(capsys, *arguments)
    assert outcome.status == 2
    assert words in outcome.complaint
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_no_run_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in ("resume", "report"):
        outcome = estr(capsys, command, tmp_path)
        assert outcome.status == 2
        assert str(tmp_path) in outcome.complaint
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- models and data


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory of one's own."""
    config = small()
    target = tmp_path / "model"
    shutil.copytree(resolve_model(config.model, build_task(config)), target)
    return target


def with_model(model: Path, more: str = "") -> str:
    return GOOD.replace('"builtin:micro"', f'"{model}"') + more


def test_a_model_without_a_tokenizer_is_refused(refused: Any, model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()
    assert f"{model} has no tokenizer" in refused(with_model(model))


def test_a_model_without_safetensors_is_refused(refused: Any, model: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({}, model / "pytorch_model.bin")
    assert "only as pickled files (pytorch_model.bin)" in refused(with_model(model))
    (model / "pytorch_model.bin").unlink()
    assert f"{model} has no weights" in refused(with_model(model))


def test_a_damaged_model_is_refused(refused: Any, model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"{model}: the model cannot be loaded" in refused(with_model(model))
    (model / "config.json").write_text("{")
    assert "config.json' is not a valid JSON file" in refused(with_model(model))


def test_code_that_comes_with_a_model_is_not_run_unasked(refused: Any, model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config |= {
        "model_type": "homemade",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert "model.trust_remote_code = true" in refused(with_model(model))
    assert not (tmp_path / "ran").exists()


def test_a_malformed_line_of_data_is_named(refused: Any, tmp_path: Path) -> None:
    row = json.dumps({"question": "How many?", "answer": "So many.\n#### 3"})
    data = tmp_path / "data.jsonl"
    text = f'[model]\npath = "builtin:micro"\n[task]\nname = "gsm8k"\npath = "{data}"\n'
    assert "data.jsonl" in refused(text)
    data.write_text(f"{row}\n{row}\n{{'question': 1}}\n")
    assert f"{data}, line 3: " in refused(text)
    data.write_text(f"{row}\n" + json.dumps({"question": "How many?"}) + "\n")
    assert f"{data}, line 2: the field 'answer' is missing" in refused(text)


def test_a_prompt_longer_than_the_context_is_refused(refused: Any) -> None:
    text = GOOD.replace('"loop_tasks:Echo"', '"loop_tasks:Faulty"\nhow = "long"\nevery = 2')
    sentence = refused(text)
    assert "problem echo-0 has a prompt of" in sentence
    assert "rollout.max_context" in sentence


# ---------------------------------------------------------------------- failures at run time


@pytest.fixture
def runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """A small lockstep run with a faulty task."""

    def run(how: str, schedule: dict[str, Any] | None = None, steps: int = 3, **task: Any) -> Outcome:
        settings = {
            "run": {"steps": steps},
            "task": {"name": "loop_tasks:Faulty", "how": how, **task},
            "schedule": SMALL["schedule"] | {"attempts": 2, "max_failed_groups": 3, **(schedule or {})},
        }
        return estr(capsys, "train", write_config(tmp_path / "run.toml", **settings), "--output", tmp_path / "run")

    return run


def test_a_verifier_that_raises_ends_the_run_with_the_cause(runs: Any, tmp_path: Path) -> None:
    outcome = runs("reward")
    assert outcome.status == 1
    assert "3 groups in a row failed; the last one: problem echo-" in outcome.complaint
    assert "FaultyEnvironment.reward raised ZeroDivisionError: no answer to divide by" in outcome.complaint
    assert f"what was reached is in {tmp_path / 'run'}" in outcome.complaint


def test_a_verifier_that_was_mended_lets_the_run_go_on(
    runs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = tmp_path / "mended"
    assert runs("reward", flag=str(flag)).status == 1
    flag.touch()
    outcome = estr(capsys, "resume", tmp_path / "run")
    assert outcome.status == 0, outcome.err
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]


def test_a_tool_that_always_hangs_ends_the_run(runs: Any) -> None:
    outcome = runs("hang", schedule={"attempts": 1, "max_failed_groups": 2}, tool_timeout=0.05)
    assert outcome.status == 1
    assert "FaultyEnvironment.step took longer than 0.05 s (task.tool_timeout)" in outcome.complaint


def test_a_tool_that_sometimes_hangs_costs_its_group(runs: Any, tmp_path: Path) -> None:
    outcome = runs("hang", every=3, only=1, tool_timeout=0.05)
    assert outcome.status == 0, outcome.err
    assert "group 1 was dropped: problem echo-1: FaultyEnvironment.step took longer than" in outcome.err
    assert {int(row.group_id) % 3 for row in stored(tmp_path / "run")} == {0, 2}
    assert {row.attempt for row in stored(tmp_path / "run", "dropped")} == {0, 1}
    assert len(stored(tmp_path / "run")) == 12


def test_a_prompt_that_does_not_fit_later_costs_its_group(runs: Any, tmp_path: Path) -> None:
    outcome = runs("long", every=5, only=3)
    assert outcome.status == 0, outcome.err
    assert "group 3 was dropped" in outcome.err
    assert "leaves no room in a context of" in outcome.err
    assert {row.attempt for row in stored(tmp_path / "run", "dropped")} == {0}, "trying again cannot help"


@pytest.mark.parametrize("only", [0, 3])
def test_a_task_that_raises_ends_the_run(runs: Any, only: int) -> None:
    outcome = runs("problem", every=5, only=only)
    assert outcome.status == 1
    assert f"the task raised LookupError for problem {only}: the shelf is empty" in outcome.complaint


def test_a_task_without_held_out_problems_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"run": {"eval_every": 1}, "task": {"name": "loop_tasks:Faulty", "how": "held-out"}}
    outcome = estr(capsys, "train", write_config(tmp_path / "run.toml", **settings), "--output", tmp_path / "run")
    assert outcome.status == 1
    assert "the task raised LookupError for its held-out problems: the cupboard is bare" in outcome.complaint


def test_an_environment_that_cannot_begin_costs_its_group(runs: Any, tmp_path: Path) -> None:
    outcome = runs("reset", every=4)
    assert outcome.status == 0, outcome.err
    assert "group 0 was dropped: problem echo-0: FaultyEnvironment.reset raised ConnectionError" in outcome.err
    assert len(stored(tmp_path / "run")) == 12


def test_weights_that_diverge_end_the_run_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"run": {"steps": 20}, "learner": SMALL["learner"] | {"learning_rate": 1e30, "max_skipped_steps": 2}}
    outcome = estr(capsys, "train", write_config(tmp_path / "run.toml", **settings), "--output", tmp_path / "run")
    assert outcome.status == 1
    assert "learning" in outcome.complaint


def test_a_traceback_is_for_those_who_ask(tmp_path: Path) -> None:
    with pytest.raises(EstrError, match="absent"):
        main(["resume", str(tmp_path / "absent"), "--debug"])


def test_a_dry_run_prints_the_configuration_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path / "run.toml")
    monkeypatch.chdir(tmp_path)
    outcome = estr(capsys, "train", config, "--dry-run", "--set", "run.seed=7")
    assert outcome.status == 0
    (tmp_path / "resolved.toml").write_text(outcome.out)
    again = estr(capsys, "train", tmp_path / "resolved.toml", "--dry-run")
    assert again.out == outcome.out
    assert "seed = 7" in outcome.out
    assert Config.model_fields.keys() <= {line.strip("[]") for line in outcome.out.splitlines()}
    assert {path.name for path in tmp_path.iterdir()} == {"run.toml", "resolved.toml"}
