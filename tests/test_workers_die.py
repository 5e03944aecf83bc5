"""Engine processes that are killed, stop answering or run out of memory; environments that do that to them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from estr.errors import RunError
from estr.models.builtin import resolve_model
from estr.models.load import load_model, merged_state
from estr.runtime import pools
from estr.runtime.builders import build_rollout_worker, build_task, canary_tokens
from estr.runtime.calls import Calls, SharedCalls, read_calls
from estr.runtime.handles import _PRELOADED, preload
from estr.runtime.messages import Died, Event, Failed, Finished, Job
from estr.runtime.pools import ProcessPool
from forking import forked_engines
from loop_helpers import alive, descendants, small, started, wait_for, write_config


class Bench:
    """A pool of one engine process for a task, with weights of version 0 published."""

    def __init__(
        self,
        spool: Path,
        timeout: float = 60.0,
        memory: float = 0.0,
        attempts: int = 2,
        start: float = 60.0,
        **task: Any,
    ) -> None:
        self.config = small(
            task={"name": "poison_tasks:Poison", **task},
            schedule={"mode": "async", "attempts": attempts},
            runtime={"engine_timeout": timeout, "start_timeout": start, "engine_memory": memory},
        )
        self.task = build_task(self.config)
        path = resolve_model(self.config.model, self.task)
        loaded = load_model(path, "float32")
        self.weights = {name: tensor.clone() for name, tensor in merged_state(loaded.model).items()}
        worker = build_rollout_worker(self.config, self.task, loaded.model, loaded.tokenizer)
        worker.engine.set_weights(0, self.weights, own=True)
        self.canary = worker.engine.canary(canary_tokens(1024))
        self.pool = ProcessPool(self.config, path, self.weights, spool, engines=1, threads=1)
        self.pool.publish(0, self.weights, self.canary)
        self.seen: list[Event] = []

    def submit(self, *groups: int) -> None:
        self.pool.submit([Job(group, 0, 0, self.task.train_problem(group), 5) for group in groups])

    def settled(self, count: int, timeout: float = 90.0) -> dict[int, Finished | Failed]:
        """Outcomes by group once there are ``count``."""

        def outcomes() -> dict[int, Finished | Failed]:
            self.seen += self.pool.events(0.1)
            finished = {e.trajectory.group: e for e in self.seen if isinstance(e, Finished)}
            return finished | {e.job.group: e for e in self.seen if isinstance(e, Failed)}

        return wait_for(lambda: len(found := outcomes()) >= count and found, f"{count} outcomes", timeout)

    @property
    def deaths(self) -> list[str]:
        return [event.reason for event in self.seen if isinstance(event, Died)]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    benches: list[Bench] = []

    def make(**settings: Any) -> Bench:
        benches.append(Bench(tmp_path, **settings))
        return benches[-1]

    with forked_engines():
        yield make
        for bench in benches:
            bench.pool.close()


def test_an_engine_that_is_stopped_is_replaced_and_no_publication_waits_for_it_long(made: Any) -> None:
    bench = made(timeout=2.0)
    bench.submit(2)
    bench.settled(1)
    (victim,) = bench.pool.pids
    os.kill(victim, signal.SIGSTOP)
    bench.submit(3)
    for version in range(1, 4):
        bench.pool.publish(version, bench.weights, bench.canary)
    assert isinstance(bench.settled(2)[3], Finished)
    assert bench.deaths == ["engine-0 gave no sign of life for 2 s (runtime.engine_timeout)"]
    assert not alive(victim)
    assert bench.pool.pids != [victim]


def test_an_engine_that_is_killed_or_stopped_while_it_starts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from estr.runtime import builders

    real, blows = builders.build_rollout_worker, [signal.SIGKILL, signal.SIGSTOP]

    def struck(config: Any, *arguments: Any, **named: Any) -> Any:
        if "calls" in named:
            for number in blows:
                with contextlib.suppress(FileExistsError):
                    (tmp_path / f"blow-{number}").touch(exist_ok=False)
                    os.kill(os.getpid(), number)
        return real(config, *arguments, **named)

    monkeypatch.setattr(builders, "build_rollout_worker", struck)
    with forked_engines():
        bench = Bench(tmp_path, attempts=3, start=1.0)
        try:
            bench.submit(2)
            bench.settled(1)
        finally:
            bench.pool.close()
    assert len(list(tmp_path.glob("blow-*"))) == 2


def test_a_helper_that_is_killed_while_it_is_asked_for_an_engine_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []

    def struck(modules: Any) -> None:
        preload(modules)
        if len(killed) < 2:
            killed.append(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
            os.kill(killed[-1], signal.SIGKILL)

    monkeypatch.setattr(pools, "preload", struck)
    bench = Bench(tmp_path)
    try:
        bench.submit(2)
        assert isinstance(bench.settled(1)[2], Finished)
    finally:
        bench.pool.close()
    assert killed


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_what_the_helper_imports_starts_no_thread() -> None:
    """A process with threads must not be forked; the patterns that transformers compiles at a first load are there."""
    program = (
        "import importlib, os, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "from transformers import conversion_mapping\n"
        "print(len(os.listdir('/proc/self/task')), conversion_mapping._checkpoint_conversion_mapping_cache is None)"
    )
    modules = [name for name in _PRELOADED if name != "estr.runtime.helper"]  # which would end with this process
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *modules]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["1", "False"]


def test_an_engine_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from estr.runtime import builders

    def broken(*_: Any, calls: Any = None, **__: Any) -> Any:
        raise LookupError("no such model")

    def made(config: Any, *arguments: Any, **named: Any) -> Any:
        return (broken if "calls" in named else real)(config, *arguments, **named)

    real = builders.build_rollout_worker
    monkeypatch.setattr(builders, "build_rollout_worker", made)
    with forked_engines(), pytest.raises(RunError, match="engine-0 could not start: LookupError: no such model"):
        Bench(tmp_path)


def test_an_idle_engine_gives_signs_of_life(made: Any) -> None:
    bench = made(timeout=1.5)
    bench.submit(2)
    bench.settled(1)
    time.sleep(3.0)
    bench.submit(3)
    bench.settled(2)
    assert bench.deaths == []


@pytest.mark.parametrize(
    ("how", "blocking", "reason"),
    [
        ("loop", False, "gave no sign of life for 1.5 s"),
        ("die", False, r"was killed by SIGKILL \(out of memory, or by hand\)"),
        ("die", True, r"was killed by SIGKILL"),
        ("leave", False, r"ended without a word \(exit status 7\)"),
    ],
)
def test_a_poisonous_environment_costs_only_itself(made: Any, how: str, blocking: bool, reason: str) -> None:
    """It takes its process with it as often as it may try, then it is given up; its neighbours finish."""
    bench = made(timeout=1.5, how=how, blocking=blocking)
    bench.submit(0, 1, 2)
    outcomes = bench.settled(3)
    failed = outcomes[1]
    assert isinstance(failed, Failed)
    assert failed.final
    assert failed.reason.startswith("problem echo-1: its environment was at work in 2 engine processes that died")
    assert all(isinstance(outcomes[group], Finished) for group in (0, 2))
    assert len(bench.deaths) == 2
    assert all(re.search(reason, death) for death in bench.deaths)


def test_an_environment_that_floods_memory_is_refused_more_than_the_limit(made: Any) -> None:
    held = int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**20
    bench = made(memory=held + 1.0, how="flood")  # the forked engine begins with what this process holds
    bench.submit(0, 1)
    outcomes = bench.settled(2)
    assert isinstance(outcomes[0], Finished)
    assert isinstance(outcomes[1], Failed)
    assert "MemoryError" in outcomes[1].reason
    assert bench.deaths == []


def test_threads_and_descriptors_of_dead_engines_are_given_back(made: Any) -> None:
    bench = made()

    def resources() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = resources()
    for count in range(1, 4):
        os.kill(bench.pool.pids[0], signal.SIGKILL)
        bench.submit(2 * count)
        bench.settled(count)
    assert len(bench.deaths) == 3
    assert resources() == before


def test_calls_are_counted_and_legible_from_outside(tmp_path: Path) -> None:
    calls = SharedCalls(tmp_path / "calls")
    assert read_calls(tmp_path / "calls") == set()
    with calls.during("1/0/0"):
        calls.begin("1/0/0")
        calls.begin("2/0/0")
        assert read_calls(tmp_path / "calls") == {"1/0/0", "2/0/0"}
    calls.end("2/0/0")
    assert read_calls(tmp_path / "calls") == {"1/0/0"}
    calls.end("1/0/0")
    assert read_calls(tmp_path / "calls") == set()
    (tmp_path / "calls").write_bytes(b'["torn')
    assert read_calls(tmp_path / "calls") == set()
    assert Calls().running == []


def test_no_process_outlives_a_killed_learner_not_even_a_stopped_engine(tmp_path: Path) -> None:
    settings = {"run": {"steps": 10_000}, "schedule": {"mode": "async"}, "runtime": {"engines": 2}}
    config, run = write_config(tmp_path / "run.toml", **settings), tmp_path / "run"
    with started(tmp_path, "train", config, "--output", run) as command:
        wait_for(lambda: command.process.poll() is not None or (run / "metrics.jsonl").exists(), "the run to start")
        wait_for(lambda: len(command.children) == 2, "two engines")
        family = descendants(command.process.pid)
        os.kill(command.children[0], signal.SIGSTOP)
        command.send(signal.SIGKILL)
        command.finish()
        wait_for(lambda: not any(alive(pid) for pid in family), "every process to end")
