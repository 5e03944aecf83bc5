"""Where trajectories are generated: real engine processes, and an engine in this process."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from estr.models.builtin import resolve_model
from estr.models.load import load_model, merged_state
from estr.runtime.builders import build_rollout_worker, build_task, canary_tokens
from estr.runtime.messages import Activity, Died, Event, Finished, Job, Synced
from estr.runtime.pools import InlinePool, ProcessPool
from estr.runtime.rollout import RolloutWorker
from estr.trajectory import Trajectory, derive_seed
from loop_helpers import alive, assert_replays, plain_model, shared_files, small, wait_for
from loop_helpers import replay as replayed

CONFIG = small(
    task={"turns": 1, "stop": []}, rollout={"max_new_tokens": 150, "slots": 4, "parked": 0}, schedule={"mode": "async"}
)


class Interrupted(ProcessPool):
    """Somebody presses Ctrl-C while the engine processes start: they leave it to their parent."""

    def _wait_ready(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        super()._wait_ready()


class Home:
    """Model, weights of version 0 and two engine processes, started anew where a test has closed them."""

    def __init__(self, spool: Path) -> None:
        self.task, self.spool = build_task(CONFIG), spool
        self.path = resolve_model(CONFIG.model, self.task)
        loaded = load_model(self.path, "float32")
        self.tokenizer = loaded.tokenizer
        self.base = {name: tensor.clone() for name, tensor in merged_state(loaded.model).items()}
        self.version, self.groups, self.open = -1, 0, False
        self._canaries = [self.worker(version).engine.canary(canary_tokens(1024)) for version in (0, 1)]

    def pool(self) -> ProcessPool:
        if not self.open:
            self._pool = Interrupted(CONFIG, self.path, self.base, self.spool, engines=2, threads=1)
            self.version, self.open = -1, True
            self.publish(self._pool)
        return self._pool

    def weights(self, version: int) -> dict[str, Tensor]:
        """Odd versions have the sign of the last norm turned, which turns the order of all tokens round."""
        return {name: -tensor if version % 2 and name == LAST_NORM else tensor for name, tensor in self.base.items()}

    def worker(self, version: int) -> RolloutWorker:
        worker = build_rollout_worker(CONFIG, self.task, load_model(self.path, "float32").model, self.tokenizer)
        worker.engine.set_weights(version, self.weights(version), own=True)
        return worker

    def canary(self, version: int) -> np.ndarray:
        return self._canaries[version % 2]

    def publish(self, pool: ProcessPool | InlinePool, step: int = 1) -> int:
        """Publish the next version, or with ``step`` 2 the same weights under a newer one."""
        self.version += step
        pool.publish(self.version, self.weights(self.version), self.canary(self.version))
        return self.version

    def jobs(self, count: int = 4) -> list[Job]:
        self.groups += 1
        problem = self.task.train_problem(self.groups)
        return [Job(self.groups, sibling, 0, problem, 5, min_version=self.version) for sibling in range(count)]

    def close(self) -> None:
        if self.open:
            self._pool.close()
            self.open = False


LAST_NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("spool"))
    yield made
    made.close()


def finished(pool: ProcessPool, count: int, seen: list[Event] | None = None) -> list[Trajectory]:
    """The next ``count`` trajectories, by sibling; every event goes to ``seen``."""
    seen = [] if seen is None else seen

    def trajectories() -> list[Trajectory]:
        return [event.trajectory for event in seen if isinstance(event, Finished)]

    wait_for(lambda: seen.extend(pool.events(0.1)) or len(trajectories()) >= count, f"{count} trajectories")
    assert len(trajectories()) == count
    return sorted(trajectories(), key=lambda trajectory: trajectory.sibling)


def expected(home: Home, jobs: list[Job]) -> list[Trajectory]:
    """What an engine in this process makes of the jobs, by sibling."""
    worker = home.worker(home.version)
    for job in jobs:
        worker.submit(job)
    results = [result.trajectory for result in worker.run_all() if isinstance(result, Finished)]
    return sorted(results, key=lambda trajectory: trajectory.sibling)


def until_generating(pool: ProcessPool) -> list[Event]:
    seen: list[Event] = []

    def sampled() -> bool:
        seen.extend(pool.events(0.1))
        return any(isinstance(event, Activity) and event.sampled_tokens for event in seen)

    wait_for(sampled, "an engine that generates")
    return seen


def test_jobs_come_back_as_an_engine_in_this_process_makes_them(home: Home) -> None:
    pool, jobs = home.pool(), home.jobs()
    seen: list[Event] = []
    pool.submit(jobs)
    got = finished(pool, len(jobs), seen)
    for a, b in zip(got, expected(home, jobs), strict=True):
        assert (a.trajectory_id, a.seed, a.reward) == (b.trajectory_id, b.seed, b.reward)
        np.testing.assert_array_equal(a.segments[0].tokens, b.segments[0].tokens)
        assert set(a.action_versions.tolist()) == {home.version}
    assert len({a.segments[0].tokens.tobytes() for a in got}) == len(got)


def test_fault_C4_new_weights_reach_the_middle_of_a_turn(home: Home) -> None:
    """The next token follows the new weights, the earlier ones keep their version, nothing is restarted."""
    pool = home.pool()
    for _ in range(5):
        old, jobs = home.version, home.jobs()
        pool.submit(jobs)
        seen = until_generating(pool)
        new = home.publish(pool)
        trajectories = finished(pool, len(jobs), seen)
        spanning = [t for t in trajectories if len(set(t.action_versions.tolist())) == 2]
        if spanning:
            break
    else:
        pytest.fail("no trajectory saw two versions")
    models = {version: plain_model(home.path, home.weights(version)) for version in (old, new)}
    for trajectory in spanning[:2]:
        (row,) = trajectory.segments
        versions = trajectory.action_versions
        assert trajectory.turns == 1
        assert versions.tolist() == sorted(versions.tolist())
        assert set(versions.tolist()) == {old, new}
        assert_replays(models, row)
        first_new = int(np.argmax(versions == new))
        now = replayed(models, row)[first_new]
        row.version[row.action] = old
        before = replayed(models, row)[first_new]
        assert now.argmax() != before.argmax(), "the argmax flips with the very next token"


def test_the_engines_report_a_canary_of_each_version(home: Home) -> None:
    pool = home.pool()
    pool.events(0.0)
    version = home.publish(pool)
    synced: list[Synced] = []
    wait_for(
        lambda: synced.extend(e for e in pool.events(0.1) if isinstance(e, Synced)) or len(synced) == 2,
        "both engines to take the new version",
    )
    assert [event.version for event in synced] == [version, version]
    assert all(event.canary_error < 1e-4 for event in synced)


def test_fault_D8_no_token_is_sampled_before_the_version_that_was_asked_for(home: Home) -> None:
    """Jobs that are there before their weights wait for them: the handshake of a resume."""
    pool = home.pool()
    jobs = [replace(job, min_version=home.version + 1) for job in home.jobs()]
    pool.submit(jobs)
    early = [event for _ in range(3) for event in pool.events(0.1) if isinstance(event, Finished)]
    assert early == []
    version = home.publish(pool)
    assert {v for t in finished(pool, len(jobs)) for v in t.action_versions.tolist()} == {version}


def test_fault_D2_a_canary_of_other_weights_shows(home: Home) -> None:
    pool = home.pool()
    pool.events(0.0)
    home.version += 1
    pool.publish(home.version, home.weights(home.version), home.canary(home.version + 1))
    synced: list[Synced] = []
    wait_for(lambda: synced.extend(e for e in pool.events(0.1) if isinstance(e, Synced)) or synced, "a sync")
    assert synced[0].canary_error > 1e-2


def test_fault_D8_a_killed_engine_is_replaced_its_jobs_issued_again_and_no_sync_waits_for_it(home: Home) -> None:
    """The engine is stopped in the middle of its work, so that it holds the buffer which the second publication needs,
    and dies while the learner waits for that. The weights stay the same, so the tokens are known."""
    pool, jobs = home.pool(), home.jobs(8)
    pool.submit(jobs)
    seen = until_generating(pool)
    victim, other = pool.pids
    os.kill(victim, signal.SIGSTOP)
    killer = threading.Timer(0.3, os.kill, (victim, signal.SIGKILL))
    killer.start()
    for _ in range(3):
        home.publish(pool, step=2)
    killer.join()
    got = finished(pool, len(jobs), seen)
    assert [event.reason for event in seen if isinstance(event, Died)] == [
        "engine-0 was killed by SIGKILL (out of memory, or by hand)"
    ]
    assert pool.pids[1] == other
    assert pool.pids[0] != victim
    for trajectory, twin in zip(got, expected(home, jobs), strict=True):
        assert (trajectory.seed, trajectory.attempt) == (twin.seed, 0)
        np.testing.assert_array_equal(trajectory.segments[0].tokens, twin.segments[0].tokens)


def test_close_leaves_no_process_and_no_file(home: Home) -> None:
    pool = home.pool()
    pids, files = pool.pids, shared_files(os.getpid())
    assert all(alive(pid) for pid in pids)
    assert len(files) == 1
    pool.submit(home.jobs())
    pool.close()
    pool.close()
    home.open = False
    assert not any(alive(pid) for pid in pids)
    assert shared_files(os.getpid()) == []


def test_leftovers_of_a_killed_run_are_removed_at_the_next_start(home: Home, tmp_path: Path) -> None:
    orphan, owned = (Path(f"/dev/shm/estr-{os.getpid()}-{name}.weights") for name in ("orphan", "owned"))
    aside = tmp_path / "estr-1-orphan.weights"
    try:
        for path in (orphan, owned, aside):
            path.write_bytes(b"x")
        with owned.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            ProcessPool(CONFIG, home.path, home.base, tmp_path, engines=0, threads=1).close()
        assert owned.exists(), "its publisher lives: it holds a lock"
        assert not orphan.exists()
        assert not aside.exists()
    finally:
        owned.unlink(missing_ok=True)
        orphan.unlink(missing_ok=True)


def inline(home: Home, window: int, **settings: Any) -> InlinePool:
    config = small(**settings)
    model = load_model(home.path, "float32").model
    worker = build_rollout_worker(config, home.task, model, home.tokenizer, wait_for_tools=False)
    return InlinePool(worker, canary_tokens(1024), window=window)


def test_the_pool_in_this_process_keeps_a_window_of_versions(home: Home) -> None:
    pool = inline(home, window=3)
    for version in range(7):
        pool.publish(version, home.weights(version), home.canary(version))
    assert sorted(pool.versions) == [3, 4, 5, 6]
    for version, tensors in pool.versions.items():
        assert torch.equal(tensors[LAST_NORM], home.weights(version)[LAST_NORM])
    synced = [event for event in pool.events(0.0) if isinstance(event, Synced)]
    assert [event.version for event in synced] == list(range(7))
    assert all(event.canary_error < 1e-4 for event in synced)


def test_a_published_version_is_a_copy(home: Home) -> None:
    pool, live = inline(home, window=2), {name: tensor.clone() for name, tensor in home.base.items()}
    pool.publish(0, live, home.canary(0))
    live[LAST_NORM].zero_()
    assert torch.equal(pool.versions[0][LAST_NORM], home.base[LAST_NORM])


def test_versions_of_a_checkpoint_come_back_bit_for_bit_in_engine_precision(home: Home) -> None:
    pool, resumed = inline(home, 3, rollout={"dtype": "int5"}), inline(home, 3, rollout={"dtype": "int5"})
    for version in range(3):
        pool.publish(version, home.weights(version), home.canary(version))
        resumed.restore(version, pool.versions[version])
    for version, tensors in pool.versions.items():
        assert all(torch.equal(tensor, resumed.versions[version][name]) for name, tensor in tensors.items())


def test_another_attempt_has_another_seed_and_other_tokens(home: Home) -> None:
    pool = inline(home, window=1)
    home.close()
    home.version = -1
    home.publish(pool)
    first = home.jobs(1)[0]
    pool.submit([first, replace(first, attempt=1), replace(first, sibling=1)])
    trajectories = [event.trajectory for event in pool.events(0.0) if isinstance(event, Finished)]
    assert {t.seed for t in trajectories} == {derive_seed(5, first.group, *which) for which in ((0, 0), (0, 1), (1, 0))}
    assert len({t.segments[0].tokens.tobytes() for t in trajectories}) == 3


def test_a_cancelled_group_is_not_generated(home: Home) -> None:
    pool = inline(home, window=1)
    home.close()
    home.version = -1
    home.publish(pool)
    first, second = home.jobs(2), home.jobs(2)
    pool.submit([*first, *second])
    pool.cancel_group(first[0].group)
    groups = [event.trajectory.group for event in pool.events(0.0) if isinstance(event, Finished)]
    assert groups == [second[0].group] * 2
