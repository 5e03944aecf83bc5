"""Scoring, listing and reporting through the command line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from estr.cli.main import main
from estr.runtime.evaluation import Evaluation
from loop_helpers import estr, write_config

RUN = {"run": {"steps": 2, "eval_every": 2, "eval_prompts": 5}, "task": {"name": "calculator"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    config = write_config(directory / "run.toml", **RUN)
    assert main(["train", str(config), "--output", str(directory / "run")]) == 0
    return directory / "run"


def evaluation(rewards: list[list[float]]) -> Evaluation:
    return Evaluation(np.array(rewards), [], 0, 1.0)


def test_pass_at_k_in_closed_form() -> None:
    """n = 4 samples: none, one, two, all right. pass@2 = 1 - C(4 - c, 2) / C(4, 2)."""
    scored = evaluation([[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]])
    assert scored.mean == pytest.approx(7 / 16)
    assert scored.pass_at(1) == pytest.approx(7 / 16)
    assert scored.pass_at(2) == pytest.approx((0 + 1 / 2 + 5 / 6 + 1) / 4)
    assert scored.pass_at(4) == pytest.approx(3 / 4)
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"pass@{k}"):
            scored.pass_at(k)


def test_pass_at_k_is_the_mean_over_all_subsets() -> None:
    rewards = (np.random.default_rng(0).random((6, 5)) < 0.3).astype(float)
    for k in range(1, 6):
        subsets = list(itertools.combinations(range(5), k))
        expected = np.mean([[row[list(subset)].max() for subset in subsets] for row in rewards])
        assert evaluation(rewards.tolist()).pass_at(k) == pytest.approx(expected)


def test_only_full_reward_counts_as_passed() -> None:
    assert evaluation([[0.9, 0.5]]).pass_at(2) == 0
    assert evaluation([[0.9, 0.5]]).mean == pytest.approx(0.7)


EVAL = ("--set", "run.eval_prompts=5", "--set", "rollout.max_new_tokens=6", "--set", "task.name=calculator")


def test_eval_scores_a_model_with_several_samples(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = estr(capsys, "eval", "builtin:micro", "--json", "--samples", "4", *EVAL)
    assert outcome.status == 0, outcome.err
    result = json.loads(outcome.out)
    assert (result["model"], result["task"], result["problems"], result["samples"]) == (
        "builtin:micro",
        "calculator",
        5,
        4,
    )
    assert {"avg@4", "pass@1", "pass@2", "pass@4"} <= result.keys()
    assert 0 <= result["avg@4"] <= result["pass@4"] <= 1
    assert result["failed"] == 0
    again = estr(capsys, "eval", "builtin:micro", "--json", "--samples", "4", *EVAL)
    assert again.out == outcome.out


def test_eval_scores_a_run_as_the_run_did(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = estr(capsys, "eval", run, "--json")
    assert outcome.status == 0, outcome.err
    result = json.loads(outcome.out)
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert result["model"] == f"{run}, step 2"
    assert result["avg@1"] == lines[-1]["reward"]
    assert result["problems"] == 5
    plain = estr(capsys, "eval", run, "--set", "run.eval_temperature=0")
    assert plain.status == 0
    assert f"{run}, step 2 on calculator: 5 held-out problems, greedy" in plain.out
    assert "avg@1" in plain.out


def test_a_run_without_a_checkpoint_cannot_be_scored(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_bytes((run / "config.toml").read_bytes())
    outcome = estr(capsys, "eval", tmp_path)
    assert outcome.status == 2
    assert "has no checkpoint yet" in outcome.complaint


def test_recipes_and_tasks_are_listed_with_sources(capsys: pytest.CaptureFixture[str]) -> None:
    from estr import recipes

    listing = estr(capsys, "recipes")
    assert listing.status == 0
    assert all(name in listing.out for name in recipes())
    one = estr(capsys, "recipes", "estr")
    assert one.status == 0
    assert "2607.22186" in one.out
    assert all(f"{key} = " in one.out for key in ("tau", "eps", "clip_low", "clip_high"))
    tasks = estr(capsys, "tasks")
    assert tasks.status == 0
    for word in ("calculator:", "gsm8k:", "latency = 'none'"):
        assert word in tasks.out


def test_the_report_of_a_run_is_written_into_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "report.html").unlink()
    outcome = estr(capsys, "report", run)
    assert (outcome.status, outcome.out.strip()) == (0, str(run / "report.html"))
    assert (run / "report.html").exists()


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert estr(capsys, "--version").out.startswith("estr ")
    for command in ("train", "resume", "eval", "report", "recipes", "tasks"):
        outcome = estr(capsys, command, "--help")
        assert outcome.status == 0
        assert "--debug" in outcome.out
