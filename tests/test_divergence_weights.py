"""Weights that a step has broken are neither published nor stored, and a run finds back to those before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from estr.storage.checkpoints import checkpoint_steps
from estr.storage.metrics import read_metrics
from estr.storage.run_directory import RunDirectory
from loop_helpers import SMALL, estr, published, small, train, write_config
from test_divergence import trained_once

BROKEN = SMALL["learner"] | {"learning_rate": 1e308}


@pytest.mark.parametrize("mode", ["lockstep", "async"])
def test_a_step_that_breaks_the_weights_is_divergence(tmp_path: Path, capsys: Any, mode: str) -> None:
    """The run says so, keeps nothing of the step, and goes on from before it with a rate that can be survived."""
    schedule, runtime = {"mode": mode}, {"engines": 1}
    config = write_config(tmp_path / "run.toml", run={"steps": 4}, learner=BROKEN, schedule=schedule, runtime=runtime)
    run = tmp_path / "run"
    outcome = estr(capsys, "train", config, "--output", run)
    assert outcome.status == 1
    assert "the optimizer step at version 0 left weights that are not finite" in outcome.complaint
    assert "learning rate 1e+308" in outcome.complaint
    assert "engine" not in outcome.err.replace("starting the engines", "")
    assert checkpoint_steps(RunDirectory(run)) == []
    assert read_metrics(run) == []
    written = run / "config.toml"
    written.write_text(written.read_text().replace("learning_rate = 1e+308", "learning_rate = 1e-3"))
    resumed = estr(capsys, "resume", run, "--accept-changes")
    assert resumed.status == 0, resumed.err
    assert [line["version"] for line in read_metrics(run)] == [1, 2, 3, 4]
    trained_once(run)


def test_a_run_may_go_back_from_broken_weights(tmp_path: Path, capsys: Any) -> None:
    learner = BROKEN | {"on_divergence": "rollback", "rollback_factor": 1e-311}
    outcome = estr(capsys, "train", write_config(tmp_path / "run.toml", learner=learner), "--output", tmp_path / "run")
    assert outcome.status == 0, outcome.err
    assert "going back to the start with learning rate 0.001: the optimizer step at version 0 left" in outcome.err
    trained_once(tmp_path / "run")


def test_weights_whose_log_probabilities_are_not_finite_are_not_published(tmp_path: Path) -> None:
    """Every weight is finite, but they are so large that nothing comes of them."""
    from estr.runtime.divergence import Divergence

    versions: list[dict[int, Any]] = []

    def blow_up(parts: Any) -> None:
        versions.append(published(parts))
        step = parts.learner.optimizer.step

        def too_far(rate: float) -> None:
            step(rate)
            parts.learner.model.model.norm.weight.data.fill_(3e38)

        parts.learner.optimizer.step = too_far

    with pytest.raises(Divergence, match="the weights of version 1 give log-probabilities that are not finite"):
        train(small(), tmp_path / "run", hook=blow_up)
    assert checkpoint_steps(RunDirectory(tmp_path / "run")) == []
    assert list(versions[0]) == [0]


def test_a_model_with_broken_weights_is_named_as_that(tmp_path: Path, capsys: Any) -> None:
    train(small(run={"steps": 1}), tmp_path / "run")
    model = tmp_path / "run" / "checkpoints" / "step-000001"
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = float("inf")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = write_config(tmp_path / "run.toml", model={"path": str(model)})
    outcome = estr(capsys, "train", config, "--output", tmp_path / "again")
    assert outcome.status == 2
    assert f"the model {model} cannot be trained: its weights " in outcome.complaint
