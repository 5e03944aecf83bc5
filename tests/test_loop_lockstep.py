"""Imposed staleness: the versions of every token, replayed with the real weights, and repeatable bit for bit."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from estr.config import Config
from estr.models.builtin import resolve_model
from estr.models.precision import to_engine
from estr.runtime.builders import build_task
from estr.runtime.interrupts import Interrupted
from estr.storage.checkpoints import load_checkpoint
from estr.storage.metrics import read_metrics
from loop_helpers import (
    Watcher,
    ask_to_stop,
    assert_replays,
    go_on,
    metrics_without_clock,
    plain_model,
    published,
    rollouts,
    small,
    started,
    stored,
    train,
    wait_for,
    write_config,
)

STALE: dict[str, dict[str, Any]] = {
    "run": {"steps": 14, "eval_every": 4, "eval_prompts": 3},
    "task": {"name": "loop_tasks:Faulty", "how": "step", "every": 5, "only": 2, "turns": 3},
    "schedule": {"mode": "lockstep", "inter": 8, "intra": 3, "intra_every": 2, "attempts": 2},
    "learner": {"minibatches": 2, "learning_rate": 0.02},
}
"""Two groups a rollout batch, one a minibatch; the groups 2, 7, 12 … fail and are replaced."""


@dataclass
class Ran:
    config: Config
    path: Path
    weights: dict[int, dict[str, Tensor]]


def run(path: Path, **changes: Any) -> Ran:
    config, weights = small(**(STALE | changes)), {}
    train(config, path, hook=lambda parts: weights.update(kept=published(parts)))
    return Ran(config, path, weights["kept"])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(tmp_path_factory.mktemp("straight") / "run")


def check_versions(ran: Ran) -> None:
    """CONTRACT section 3: action i of a trajectory trained at v is sampled under max(0, v - inter - max(0, …))."""
    schedule, rows = ran.config.schedule, stored(ran.path)
    assert len(rows) == ran.config.run.steps * ran.config.rollout.group_size
    seen = set()
    for row in rows:
        i = np.arange(row.action.sum())
        behind = schedule.inter + np.maximum(0, schedule.intra - i // schedule.intra_every)
        np.testing.assert_array_equal(row.version[row.action], np.maximum(0, row.target_version - behind))
        assert (row.version[~row.action] == -1).all()
        assert row.target_version == row.trained_step - 1
        seen.add(len(set(row.version[row.action].tolist())))
    assert max(seen) == schedule.intra + 1, "some trajectory spans the whole window"


def check_replay(ran: Ran) -> None:
    dtype, path = ran.config.rollout.dtype, resolve_model(ran.config.model, build_task(ran.config))
    models = {
        version: plain_model(path, {name: to_engine(tensor, name, dtype) for name, tensor in tensors.items()})
        for version, tensors in ran.weights.items()
    }
    rows = stored(ran.path)
    for row in [*rows[:4], *rows[-12:]]:
        assert_replays(models, row)


def test_versions_follow_the_contract_and_replay_with_the_real_weights(straight: Ran) -> None:
    check_versions(straight)
    check_replay(straight)


def test_a_replay_under_other_versions_would_show(straight: Ran) -> None:
    """What makes the test above able to fail: one version off is far from 1e-4."""
    path = resolve_model(straight.config.model, build_task(straight.config))
    models = {version: plain_model(path, tensors) for version, tensors in straight.weights.items()}
    row = stored(straight.path)[-1]
    row.row["version"] = [version + (version > 0) for version in row.row["version"]]
    with pytest.raises(AssertionError):
        assert_replays(models, row, tolerance=1e-3)


def test_rounded_engine_weights_replay_with_rounded_weights(tmp_path: Path) -> None:
    ran = run(tmp_path / "run", rollout={"dtype": "int5"})
    check_versions(ran)
    check_replay(ran)


def test_fault_E1_a_group_that_fails_is_replaced_in_its_place(straight: Ran) -> None:
    """Whatever failed, each batch trains its groups in order, and dropped trajectories are kept with the reason."""
    trained = {(row.trained_step, int(row.group_id)) for row in stored(straight.path)}
    assert [number for _, number in sorted(trained)] == [0, 1, 4, 3, 5, 6, 9, 8, 10, 11, 14, 13, 15, 16]
    dropped = stored(straight.path, "dropped")
    assert {int(row.group_id) for row in dropped} == {2, 7, 12}
    assert {row.attempt for row in dropped} == {0, 1}
    assert all("the tool hung up" in row.drop_reason for row in dropped)


def same(one: Path, two: Path) -> None:
    assert metrics_without_clock(one) == metrics_without_clock(two)
    assert rollouts(one) == rollouts(two)


def test_two_runs_of_one_seed_are_equal_and_two_seeds_are_not(straight: Ran, tmp_path: Path) -> None:
    same(straight.path, run(tmp_path / "again").path)
    other = run(tmp_path / "other", run=STALE["run"] | {"seed": 1, "steps": 2})
    assert metrics_without_clock(other.path) != metrics_without_clock(straight.path)[:2]


@pytest.mark.parametrize(
    ("step", "notice"),
    [(6, ""), (0, "group 7 was dropped")],
    ids=["between two batches", "while a batch is collected and its first group was dropped"],
)
def test_a_run_that_was_interrupted_and_resumed_is_equal(straight: Ran, tmp_path: Path, step: int, notice: str) -> None:
    watcher = Watcher(
        on_step=lambda at: ask_to_stop() if at == step else None,
        on_notice=lambda text: ask_to_stop() if notice and text.startswith(notice) else None,
    )
    with pytest.raises(Interrupted):
        train(straight.config, tmp_path / "run", watcher)
    assert len(read_metrics(tmp_path / "run")) == 6
    assert load_checkpoint(tmp_path / "run/checkpoints/step-000006").kind == "interrupted"
    go_on(tmp_path / "run")
    same(straight.path, tmp_path / "run")


@pytest.mark.parametrize(
    "settings",
    [
        {"model": {"lora_rank": 2}, "learner": {"learning_rate": 0.05}},
        {"objective": {"kl_coef": 0.1}, "learner": {"schedule": "cosine", "warmup_steps": 3}},
        {"rollout": {"dtype": "int5"}, "schedule": STALE["schedule"], "learner": STALE["learner"]},
        {"objective": {"recipe": "decoupled_ppo"}, "learner": {"minibatches": 2, "epochs": 2}},
    ],
    ids=["adapters", "reference and learning-rate schedule", "rounded weights", "epochs"],
)
def test_what_a_run_remembers_comes_back(tmp_path: Path, settings: dict[str, Any]) -> None:
    if "model" in settings:
        pytest.importorskip("peft")
    config = small(**settings | {"run": {"steps": 8}})
    train(config, tmp_path / "straight")
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", Watcher(on_step=lambda at: ask_to_stop() if at == 4 else None))
    assert len(read_metrics(tmp_path / "run")) == 4
    go_on(tmp_path / "run")
    same(tmp_path / "straight", tmp_path / "run")
    one, two = (load_checkpoint(tmp_path / name / "checkpoints/step-000008") for name in ("straight", "run"))
    weights = [load_file(checkpoint.path / "model.safetensors") for checkpoint in (one, two)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    kept = two.tensors()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in one.tensors().items())


def test_a_process_of_its_own_that_was_terminated_is_resumed_to_the_same_numbers(straight: Ran, tmp_path: Path) -> None:
    """SIGTERM like SIGINT: a checkpoint, exit status 130; and the numbers do not depend on the process."""
    config, path = write_config(tmp_path / "run.toml", **STALE), tmp_path / "run"
    with started(tmp_path, "train", config, "--output", path, forked=True) as command:
        wait_for(lambda: path.exists() and len(read_metrics(path)) >= 2, "two steps")
        command.send(signal.SIGTERM)
        outcome = command.finish()
    assert outcome.status == 130
    assert f"interrupted; go on with: estr resume {path}" in outcome.complaint
    go_on(path)
    same(straight.path, path)


def test_steps_that_do_not_fill_the_last_batch_lose_no_trajectory(tmp_path: Path) -> None:
    """Five steps of two minibatches: what the last batch does not train is stored as finished."""
    config = small(run={"steps": 5}, learner={"minibatches": 2})
    path = train(config, tmp_path / "run")
    assert sorted(row.trained_step for row in stored(path)) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert sorted(row.trajectory_id for row in stored(path, "finished")) == ["00000005-000", "00000005-001"]


def test_epochs_store_each_trajectory_once_under_its_first_step(tmp_path: Path) -> None:
    config = small(objective={"recipe": "decoupled_ppo"}, learner={"minibatches": 2, "epochs": 2}, run={"steps": 8})
    path = train(config, tmp_path / "run")
    assert sorted(row.trained_step for row in stored(path)) == [1, 1, 2, 2, 5, 5, 6, 6]
    for row in stored(path):
        assert row.target_version == row.trained_step - 1
        assert np.isfinite(row.proximal_logprob[row.action]).all()
        fresh = row.trained_step in (1, 5)
        gap = np.abs(row.proximal_logprob[row.action] - row.learner_logprob[row.action]).max()
        assert (gap < 1e-4) == fresh, "q is of the start of the rollout batch"


def test_fault_C5_the_second_minibatch_sees_that_the_weights_moved(tmp_path: Path) -> None:
    path = train(small(run={"steps": 6}, learner={"minibatches": 2, "learning_rate": 0.02}), tmp_path / "run")
    deviation = [line["mismatch/ratio_deviation"] for line in read_metrics(path)]
    assert max(deviation[::2]) < 1e-4, "sampled by the weights that are trained"
    assert min(deviation[1::2]) > 1e-3, "one step later"


@pytest.mark.parametrize(
    ("rollout", "exact"),
    [({"temperature": 0.6}, True), ({"dtype": "int5"}, False), ({"dtype": "bfloat16"}, False)],
    ids=["temperature 0.6", "int5", "bfloat16"],
)
def test_fault_A2_A17_at_learning_rate_zero_only_engine_precision_is_left(
    tmp_path: Path, rollout: dict[str, Any], exact: bool
) -> None:
    path = train(small(run={"steps": 2}, rollout=rollout, learner={"learning_rate": 0.0}), tmp_path / "run")
    for row in stored(path):
        gap = np.abs(row.logprob[row.action] - row.learner_logprob[row.action])
        assert (gap.max() < 1e-4) == exact
        assert gap.max() < 1.0
    for line in read_metrics(path):
        assert (line["mismatch/delta_abs"] < 1e-4) == exact
        assert line["staleness/inter_max"] == line["staleness/intra_max"] == 0
        assert (line["engine/canary_error"] < 1e-4) == exact


FORGETFUL = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'][-1:] }}{% else %}{{ m['content'] }}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_fault_F1_F3_a_template_that_rewrites_history_forks_into_rows_that_agree(tmp_path: Path) -> None:
    """Each row is what the model read: engine and learner agree on it, and rows of one trajectory are linked."""
    config = small()
    shutil.copytree(resolve_model(config.model, build_task(config)), tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(FORGETFUL)
    settings = {"model": {"path": str(tmp_path / "model")}, "learner": {"learning_rate": 0.0}, "run": {"steps": 3}}
    path = train(small(**settings), tmp_path / "run")
    rows = stored(path)
    forked = [row for row in rows if row.segment > 0]
    assert forked
    names = {row.trajectory_id: row for row in rows}
    assert len(names) == len(rows)
    for row in forked:
        assert row.trajectory_id == f"{row.parent_id}#{row.segment}"
        assert names[row.parent_id].turns > row.segment
        assert row.reward == names[row.parent_id].reward
        assert row.advantage == names[row.parent_id].advantage
    for row in rows:
        at = row.action
        np.testing.assert_allclose(row.logprob[at], row.learner_logprob[at], atol=1e-4, rtol=0)
        np.testing.assert_allclose(row.entropy[at], row.learner_entropy[at], atol=1e-4, rtol=0)


def test_fault_D3_D5_adapters_and_the_tied_head_reach_the_engine(tmp_path: Path) -> None:
    """On the policy, with adapters that move far: the engine's log μ is the learner's log π at every version."""
    pytest.importorskip("peft")
    weights: dict[str, dict[int, dict[str, Tensor]]] = {}
    config = small(run={"steps": 4}, model={"lora_rank": 2}, learner={"learning_rate": 0.1, "max_grad_norm": 0.0})
    path = train(config, tmp_path / "run", hook=lambda parts: weights.update(kept=published(parts)))
    for row in stored(path):
        assert set(row.version[row.action].tolist()) == {row.target_version}
        np.testing.assert_allclose(row.logprob[row.action], row.learner_logprob[row.action], atol=1e-4)
    moved = [
        max(float((weights["kept"][v][name] - weights["kept"][0][name]).abs().max()) for name in weights["kept"][0])
        for v in (1, 2, 3)
    ]
    assert min(moved) > 0.01
