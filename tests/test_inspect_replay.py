"""``estr replay``: a step under the run's own recipe gives again what the run logged; under another what that would."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from estr import TokenBatch, objective
from estr.cli.main import main
from estr.errors import RunError
from estr.inspect.read import read_dump
from estr.inspect.replay import replay
from estr.storage.metrics import read_metrics
from inspect_synthetic import World, simulate, write_ours
from loop_helpers import write_config

STALE = {
    "run": {"steps": 5, "checkpoint_every": 2, "eval_every": 0, "keep_checkpoints": 5},
    "rollout": {"dtype": "int5"},
    "schedule": {"mode": "lockstep", "inter": 1, "intra": 1},
    "objective": {"recipe": "estr", "tau": 0.001},
    "learner": {"minibatches": 2, "prompts_per_step": 4},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short stale run with rewards that differ, so that losses and masks are not trivial."""
    folder = tmp_path_factory.mktemp("replay")
    config = write_config(folder / "config.toml", **STALE)
    assert main(["train", str(config), "--output", str(folder / "run")]) == 0
    return folder / "run"


def replayed(capsys, *arguments: str) -> dict:
    capsys.readouterr()
    assert main(["replay", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_runs_own_recipe_gives_its_own_metrics_again(run, capsys):
    steps = replayed(capsys, str(run))["own"]["steps"]
    logged = read_metrics(run)
    assert len(steps) == len(logged) == 5
    for step, line in zip(steps, logged, strict=True):
        assert step["step"] == line["step"]
        assert step["loss"] == pytest.approx(line["loss"], rel=1e-6, abs=1e-9)
        assert step["masked_fraction"] == pytest.approx(line["gate/masked_fraction"])
        assert step["tokens"] == line["tokens/action"]
    assert any(0 < step["masked_fraction"] < 1 for step in steps)


def test_the_parameter_gradient_is_the_one_that_was_applied(run, capsys):
    steps = replayed(capsys, str(run))["own"]["steps"]
    known = [step for step in steps if step["parameter_gradient_norm"] is not None]
    assert [step["step"] for step in known] == [3, 5]  # checkpoints stand after steps 2 and 4
    logged = {line["step"]: line["grad/norm"] for line in read_metrics(run)}
    for step in known:
        assert step["parameter_gradient_norm"] == pytest.approx(logged[step["step"]], rel=1e-4)


def test_another_recipe_and_other_hyperparameters(run, capsys):
    value = replayed(capsys, str(run), "--recipe", "grpo")
    assert value["replayed"]["recipe"] == "grpo"
    assert all(step["masked_fraction"] == 0 for step in value["replayed"]["steps"])
    looser = replayed(capsys, str(run), "--set", "objective.tau=1.0")
    assert looser["replayed"]["hyperparameters"]["tau"] == 1.0
    for own, other in zip(looser["own"]["steps"], looser["replayed"]["steps"], strict=True):
        assert other["masked_fraction"] <= own["masked_fraction"]


def test_lines_for_a_terminal(run, capsys):
    assert main(["replay", str(run), "--recipe", "icepop"]) == 0
    out = capsys.readouterr().out
    assert "own: objective('estr', tau=0.001" in out
    assert "replayed: objective('icepop', low=0.5" in out
    assert len([line for line in out.splitlines() if line[:6].strip().isdigit()]) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--recipe", "icepo"], "did you mean 'icepop'"),
        (["--recipe", "pdm"], "pdm cannot be replayed"),
        (["--set", "objective.taux=1"], "taux"),
    ],
)
def test_what_cannot_be_replayed_is_told(run, arguments, words, capsys):
    capsys.readouterr()
    assert main(["replay", str(run), *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_run_without_trained_trajectories(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(RunError, match="no trained trajectory"):
        replay(read_dump(tmp_path), objective("grpo"))


def test_a_replayed_step_is_the_objective_on_its_tokens(tmp_path):
    """Loss and gradient of the tokens of one step, with the step's own denominators."""
    dump = read_dump(write_ours(simulate(World(trajectories=64, drift=0.4, inter=6)), tmp_path / "d.parquet"))
    recipe = objective("icepop", low=0.8, high=1.25)
    steps = replay(dump, recipe)
    assert [step.step for step in steps] == [1, 2]
    for step in steps:
        chosen = dump.trained_step[dump.row] == step.step
        logprob = torch.tensor(dump.learner_logprob[chosen], dtype=torch.float32, requires_grad=True)
        batch = TokenBatch(
            logprob=logprob,
            behavior_logprob=torch.tensor(dump.logprob[chosen], dtype=torch.float32),
            proximal_logprob=logprob.detach(),
            advantage=torch.tensor(dump.advantage[chosen], dtype=torch.float32),
            sequence=torch.tensor(np.unique(dump.row[chosen], return_inverse=True)[1]),
            advantage_scope="token",
        )
        output = recipe(batch)
        output.loss.backward()
        assert step.loss == pytest.approx(float(output.loss.detach()))
        assert step.gradient_norm == pytest.approx(float(logprob.grad.norm()), rel=1e-5)
        np.testing.assert_array_equal(np.sort(step.kept), np.flatnonzero(chosen)[output.keep.numpy()])


def test_tokens_the_learner_left_out_stay_in_the_denominator(tmp_path):
    from dataclasses import replace

    dump = read_dump(write_ours(simulate(World(trajectories=32)), tmp_path / "d.parquet"))
    unseen = np.where(dump.row < 8, np.nan, dump.learner_logprob)
    (whole,) = replay(dump, objective("reinforce"))
    (part,) = replay(replace(dump, learner_logprob=unseen), objective("reinforce"))
    assert part.tokens == whole.tokens == dump.token_count
    assert part.seen == int((dump.row >= 8).sum())
    expected = -(dump.advantage * dump.learner_logprob)[dump.row >= 8].sum() / dump.token_count
    assert part.loss == pytest.approx(expected, rel=1e-4)
