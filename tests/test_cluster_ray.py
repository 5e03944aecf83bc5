"""Runs under a real Ray on this machine: two engine actors, killed and replaced; the same bits; what listens."""

from __future__ import annotations

import collections
import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ray_runs
from estr.config import Config, RuntimeConfig
from estr.config.load import load_config
from estr.config.validate import validate_config
from estr.errors import MissingExtraError, UsageError
from estr.runtime.cluster.connection import connect
from estr.runtime.cluster.weights import LatestWeights, from_store, to_store
from estr.storage.checkpoints import checkpoint_steps
from estr.storage.metrics import read_metrics
from estr.storage.run_directory import RunDirectory
from estr.transport import Publication
from loop_helpers import alive, descendants, metrics_without_clock, small, started, train, wait_for, write_config
from test_loop_lockstep import STALE
from torture.proof import Proof

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
pytestmark = pytest.mark.timeout(900)  # Ray and its actors take long to start on a busy machine
Do = Callable[..., Any]
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.fixture(scope="module")
def do() -> Iterator[Do]:
    """Calls a function in the process that has Ray."""
    with ray_runs.process() as executor:
        yield lambda function, *arguments: executor.submit(function, *arguments).result(timeout=800)


@pytest.fixture(scope="module")
def cluster(do: Do) -> ray_runs.Started:
    return do(ray_runs.start_cluster)


# ---------------------------------------------------------------------- without Ray


def test_weights_survive_the_store_bit_for_bit() -> None:
    tensors = {
        "plain": torch.randn(3, 5),
        "turned": torch.randn(4, 6).t(),
        "short": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(2.5),
    }
    again = from_store(to_store(tensors))
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name], tensor)


def test_only_the_newest_weights_are_taken_and_once() -> None:
    weights, canary = LatestWeights(), np.zeros(2, np.float32)
    assert (weights.latest, weights.version, weights.poll()) == (-1, -1, None)
    for version in (4, 5):
        weights.offer(Publication(version, {}, canary))
    assert (weights.latest, weights.version) == (5, -1)
    taken = weights.poll()
    assert taken is not None
    assert (taken.version, weights.version, weights.poll()) == (5, 5, None)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'estr\[ray\]'"):
        validate_config(Config(runtime={"kind": "ray"}))


def test_keys_for_ray_that_are_not_used_are_named() -> None:
    keys = {"engine_gpus": 1.0, "address": "auto"}
    assert 'runtime.kind = "local" does not use runtime.address, runtime.engine_gpus' in validate_config(
        Config(runtime=keys)
    )


def test_a_cluster_that_is_not_there_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            UsageError, match=f"runtime.address: no Ray cluster could be joined at '{address}': .*refused"
        ):
            connect(address, cpus=1, gpus=0, resources={}, store=0)


def test_the_configurations_of_the_page_are_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "cluster.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    for block in blocks:
        (tmp_path / "page.toml").write_text(block)
        config, notices = load_config(tmp_path / "page.toml")
        assert notices == []
        assert validate_config(config.model_copy(update={"runtime": RuntimeConfig()})) == []
    assert sum('kind = "ray"' in block for block in blocks) >= 3


# ---------------------------------------------------------------------- with it


@needs_ray
def test_two_engines_one_killed_and_nothing_lost(do: Do, cluster: ray_runs.Started, tmp_path: Path) -> None:
    told = do(ray_runs.run, ray_runs.OneKill, tmp_path / "run", ray_runs.DRILL)
    proof = Proof(tmp_path / "run")
    proof.check()
    assert proof.facts["trained"] == 10 * 2
    (killed,) = told.killed
    assert killed not in told.engines
    assert len(told.engines) == 2
    assert any(f"(process {killed}) died" in notice and "issued again" in notice for notice in told.notices)
    assert {"engines at work: 1", "engines at work: 2"} <= set(told.notices)
    assert max(line["engine/canary_error"] for line in read_metrics(proof.run)) < 1e-4
    spans = {line["version"] for line in read_metrics(proof.run)}
    assert spans == set(range(1, 11))


@needs_ray
def test_lockstep_gives_the_bits_of_the_local_runtime_even_where_an_engine_dies(
    do: Do, cluster: ray_runs.Started, tmp_path: Path
) -> None:
    changes = STALE | {"run": {"steps": 8, "eval_every": 4, "eval_prompts": 3}}
    train(small(**changes), tmp_path / "local")
    told = do(ray_runs.run, ray_runs.LockstepKill, tmp_path / "ray", changes | {"runtime": ray_runs.PATIENT})
    local, under_ray = Proof(tmp_path / "local"), Proof(tmp_path / "ray")
    assert any("died" in notice for notice in told.notices)
    assert under_ray.weights() == local.weights()
    assert under_ray.timeless() == local.timeless()


@needs_ray
def test_ranks_that_are_actors_learn_what_one_process_does_and_one_that_dies_ends_the_run(
    do: Do, cluster: ray_runs.Started, tmp_path: Path
) -> None:
    changes = {
        "run": {"steps": 4, "checkpoint_every": 1},
        "schedule": {"mode": "lockstep", "inter": 1},
        "learner": {"prompts_per_step": 2, "learning_rate": 0.005},
    }
    alone = train(small(**changes), tmp_path / "alone")
    spread = changes | {
        "learner": changes["learner"] | {"ranks": 2},
        "runtime": ray_runs.PATIENT | {"engines": 1},
    }
    told = do(ray_runs.run, ray_runs.RankKill, tmp_path / "ray", spread)
    assert re.match(r"learner-1 \(process \d+\) died: .*`estr resume` goes on", told.notices[-1]), told.notices
    assert not alive(told.killed[0])
    assert len(read_metrics(RunDirectory.open(tmp_path / "ray"))) < 4
    do(ray_runs.resume, tmp_path / "ray")
    lines, expected = metrics_without_clock(tmp_path / "ray"), metrics_without_clock(alone)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line, other in zip(lines, expected, strict=True):
        assert line == pytest.approx(other, rel=2e-3, abs=1e-5)
    Proof(tmp_path / "ray").check()


@needs_ray
@pytest.mark.slow
def test_a_driver_that_is_killed_takes_its_engines_with_it_and_resume_goes_on(
    do: Do, cluster: ray_runs.Started, tmp_path: Path
) -> None:
    runtime = ray_runs.PATIENT | {"address": cluster.address}
    changes = ray_runs.DRILL | {"runtime": runtime, "run": {"steps": 60, "checkpoint_every": 2}}
    config, run = write_config(tmp_path / "config.toml", **changes), tmp_path / "run"
    python_path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with started(tmp_path, "train", config, "--output", run, **cluster.environment, PYTHONPATH=python_path) as command:
        wait_for(lambda: run.exists() and checkpoint_steps(RunDirectory.open(run)), "a checkpoint")
        engines = do(ray_runs.engine_pids)
        assert len(engines) == 2, engines
        command.process.kill()
        command.process.wait()
    wait_for(lambda: not any(alive(pid) for pid in engines), "the end of the engines", 60)
    assert len(read_metrics(run)) < 60, "it was killed in the middle"
    do(ray_runs.resume, run)
    Proof(run).check()


@needs_ray
def test_nothing_listens_beyond_loopback_and_whoever_comes_needs_the_token(
    do: Do, cluster: ray_runs.Started, tmp_path: Path
) -> None:
    places = ray_runs.listening([cluster.pid, *descendants(cluster.pid)])
    found = {place for ones in places.values() for place in ones}
    assert len(found) >= 4, "the driver, the control store, the node manager and the object manager listen"
    assert {address for address, _ in found} <= LOOPBACK, found
    for address in _other_addresses():
        for _, port in found:
            with pytest.raises(OSError), socket.create_connection((address, port), timeout=2):
                pass
    token = Path(cluster.environment["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o077 == 0
    assert "token" in _knock(cluster, RAY_AUTH_MODE="disabled")
    (tmp_path / "wrong").write_text("0" * 64)
    assert "token" in _knock(cluster, RAY_AUTH_TOKEN_PATH=str(tmp_path / "wrong"))
    assert _knock(cluster) == "let in"


def _other_addresses() -> list[str]:
    """Addresses of this machine that are not loopback, as far as a route tells."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            return []
        return [address for address in (probe.getsockname()[0],) if not address.startswith("127.")]


def _knock(cluster: ray_runs.Started, **environment: str) -> str:
    """What a stranger is told by the cluster's control store."""
    code = (
        "from ray._raylet import GcsClient\n"
        f"try: GcsClient(address={cluster.address!r}).internal_kv_keys(b'', None, timeout=10); print('let in')\n"
        "except Exception as error: print(error)\n"
    )
    settings = os.environ | cluster.environment | environment
    return subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True).stdout.strip()


@needs_ray
@pytest.mark.slow
def test_ten_engines_killed_at_random_and_nothing_lost(do: Do, cluster: ray_runs.Started, tmp_path: Path) -> None:
    changes = ray_runs.DRILL | {"runtime": ray_runs.PATIENT | {"engine_timeout": 8.0}}
    told = do(ray_runs.run, ray_runs.TenKills, tmp_path / "run", changes, 0)
    proof = Proof(tmp_path / "run")
    proof.check()
    assert len(set(told.killed)) == 10
    assert sum("died" in notice or "no sign of life" in notice for notice in told.notices) >= 9
    assert collections.Counter(state for _, state, _, _ in proof.history)["trained"] >= 10 * 2


@needs_ray
@pytest.mark.slow
def test_an_episode_that_kills_its_engines_is_given_up(do: Do, cluster: ray_runs.Started, tmp_path: Path) -> None:
    task = {"name": "poison_tasks:Poison", "how": "die", "only": 1}
    changes = ray_runs.DRILL | {"task": task, "run": {"steps": 4, "checkpoint_every": 2}}
    told = do(ray_runs.run, ray_runs.Ran, tmp_path / "run", changes)
    proof = Proof(tmp_path / "run")
    proof.check()
    reasons = {name[:8]: reason for name, state, _, reason in proof.history if state == "dropped"}
    assert "its environment was at work in 2 engine processes that died" in reasons["00000001"]
    assert 2 <= sum("died" in notice and "replaced" in notice for notice in told.notices) <= 4


@needs_ray
@pytest.mark.slow
def test_engines_follow_the_nodes_of_a_cluster(tmp_path: Path) -> None:
    with ray_runs.process() as executor:
        told = executor.submit(ray_runs.run, ray_runs.Elastic, tmp_path / "run", ray_runs.DRILL).result(timeout=800)
    Proof(tmp_path / "run").check()
    assert told.engines == [1, 1, 2, 2, 2, 1, 1, 1, 1, 1]
    assert any("died" in notice for notice in told.notices)


@needs_ray
@pytest.mark.slow
def test_a_rank_on_another_node_learns_what_one_process_does(tmp_path: Path) -> None:
    changes = {
        "run": {"steps": 3},
        "schedule": {"mode": "lockstep", "inter": 1},
        "learner": {"prompts_per_step": 2, "learning_rate": 0.005},
    }
    alone = train(small(**changes), tmp_path / "alone")
    spread = changes | {"learner": changes["learner"] | {"ranks": 2}, "runtime": ray_runs.PATIENT | {"engines": 1}}
    with ray_runs.process() as executor:
        told = executor.submit(ray_runs.run, ray_runs.RankElsewhere, tmp_path / "ray", spread).result(timeout=800)
    assert "nodes: 2" in told.notices
    addresses = {notice.removeprefix("listens: ") for notice in told.notices if notice.startswith("listens: ")}
    assert addresses, "the meeting place listens"
    assert addresses <= LOOPBACK, addresses
    for line, other in zip(metrics_without_clock(tmp_path / "ray"), metrics_without_clock(alone), strict=True):
        assert line == pytest.approx(other, rel=2e-3, abs=1e-5)


@needs_ray
def test_the_end_of_a_cluster_leaves_nothing(do: Do, cluster: ray_runs.Started) -> None:
    assert do(ray_runs.stop_cluster) == []
    assert not Path(cluster.environment["RAY_AUTH_TOKEN_PATH"]).parent.exists()
