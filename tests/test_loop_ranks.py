"""Whole runs whose learner has two ranks: metrics, checkpoints on another number of ranks, export, ranks that die."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from estr.errors import RunError
from estr.runtime.ranks import rank_processes
from estr.runtime.setup import Parts
from estr.storage.checkpoints import checkpoint_steps
from estr.storage.metrics import read_metrics
from estr.storage.run_directory import RunDirectory
from loop_helpers import (
    Watcher,
    alive,
    go_on,
    metrics_without_clock,
    process_name,
    small,
    stored,
    train,
)
from ray_runs import listening
from test_divergence import trained_once

FIRST, ALL = 3, 5
PLAN: dict[str, dict[str, Any]] = {
    "run": {"steps": ALL, "checkpoint_every": FIRST, "eval_every": FIRST, "eval_prompts": 4},
    "schedule": {"mode": "lockstep", "inter": 1},
    "objective": {"recipe": "m2po", "kl_coef": 0.01},
    "learner": {"prompts_per_step": 2, "learning_rate": 0.005, "controllers": ["gac"]},
}


def plan(ranks: int, steps: int) -> dict[str, dict[str, Any]]:
    return PLAN | {"run": PLAN["run"] | {"steps": steps}, "learner": PLAN["learner"] | {"ranks": ranks}}


def change(run: Path, **values: int) -> None:
    """Other values in the stored configuration of a run."""
    path = run / "config.toml"
    for key, value in values.items():
        path.write_text(re.sub(rf"^{key} = .*$", f"{key} = {value}", path.read_text(), count=1, flags=re.MULTILINE))


def pids_of(parts: Parts) -> list[int]:
    return parts.learner.ranks._others.pids  # type: ignore[union-attr, attr-defined]


def test_a_run_of_two_ranks_is_that_of_one_and_each_goes_on_from_the_other(tmp_path: Path) -> None:
    """Metrics, checkpoints that go on with another number of ranks, what is exported, and what listens."""
    alone = train(small(**plan(1, ALL)), tmp_path / "alone")
    heard: dict[int, list[tuple[str, int]]] = {}
    seen: list[int] = []

    def look(parts: Parts) -> None:
        seen.extend(pids_of(parts))
        assert [process_name(pid) for pid in seen] == ["learner-1"]
        heard.update(listening([os.getpid(), *seen]))

    two = train(small(**plan(2, FIRST)), tmp_path / "two", hook=look)
    assert len(heard) == 2
    assert all({address for address, _ in places} == {"0100007F"} for places in heard.values())
    assert not any(alive(pid) for pid in seen)
    assert_close(metrics_without_clock(two), metrics_without_clock(alone)[:FIRST])
    assert_exported(two / "checkpoints" / f"step-{FIRST:06d}", alone / "checkpoints" / f"step-{FIRST:06d}")
    assert_close(
        [{"logprob": float(np.nansum(row.learner_logprob)), "advantage": row.advantage} for row in stored(two)],
        [{"logprob": float(np.nansum(r.learner_logprob)), "advantage": r.advantage} for r in stored(alone)][
            : len(stored(two))
        ],
    )
    change(two, steps=ALL, ranks=1)
    go_on(two)
    one = train(small(**plan(1, FIRST)), tmp_path / "one")
    change(one, steps=ALL, ranks=2)
    go_on(one)
    for path in (two, one):
        assert_close(metrics_without_clock(path), metrics_without_clock(alone))
        trained_once(path)


def assert_close(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(got) == len(expected)
    for line, other in zip(got, expected, strict=True):
        assert line == pytest.approx(other, rel=2e-3, abs=1e-5)


def assert_exported(directory: Path, expected: Path) -> None:
    """The same files with the same tensors, nothing pickled, and plain transformers computes with it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert {path.name for path in directory.iterdir()} == {path.name for path in expected.iterdir()}
    for name in ("model.safetensors", "trainer.safetensors"):
        got, wanted = load_file(directory / name), load_file(expected / name)
        assert {n: (t.shape, t.dtype) for n, t in got.items()} == {n: (t.shape, t.dtype) for n, t in wanted.items()}
        for tensor in got:
            torch.testing.assert_close(got[tensor], wanted[tensor], rtol=1e-3, atol=1e-4)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (directory, expected)]
    ids = torch.tensor([AutoTokenizer.from_pretrained(directory).encode("a b c")])
    with torch.no_grad():
        logits = [model(ids).logits for model in models]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


def test_a_rank_that_is_killed_ends_the_run_with_a_sentence_and_the_run_goes_on(tmp_path: Path, capsys: Any) -> None:
    """Engines in processes of their own, weights through shared memory, adapters gathered."""
    pytest.importorskip("peft")
    path, pids = tmp_path / "run", list[int]()
    config = small(
        run={"steps": 4, "checkpoint_every": 1},
        model={"lora_rank": 2},
        schedule={"mode": "async", "max_staleness": 2},
        learner={"prompts_per_step": 2, "learning_rate": 0.01, "ranks": 2},
    )

    def kill(step: int) -> None:
        if step == 2:
            os.kill(pids[0], signal.SIGKILL)

    with pytest.raises(RunError, match=r"learner-1 was killed by SIGKILL \(out of memory, or by hand\); `estr resume`"):
        train(config, path, Watcher(on_step=kill), hook=lambda parts: pids.extend(pids_of(parts)))
    assert not alive(pids[0])
    assert max(checkpoint_steps(RunDirectory(path))) < 3
    go_on(path)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]
    assert all(line["engine/canary_error"] < 1e-4 for line in read_metrics(path) if "engine/canary_error" in line)
    trained_once(path)


def test_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    config = small(learner={"ranks": 2})
    with (
        pytest.raises(RunError, match=r"learner-1 failed: model.path: there is no directory '.*nowhere'"),
        rank_processes(config, tmp_path / "nowhere", None, threads=1),
    ):
        pass


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_in_time(tmp_path: Path) -> None:
    pids: list[int] = []

    def stop(step: int) -> None:
        if step == 2:
            os.kill(pids[0], signal.SIGSTOP)

    config = small(learner={"ranks": 2, "rank_timeout": 20.0})
    with pytest.raises(RunError, match=r"learner.rank_timeout"):
        train(config, tmp_path / "run", Watcher(on_step=stop), hook=lambda parts: pids.extend(pids_of(parts)))
    assert not alive(pids[0])
