"""What tests of Ray do in a process of its own: theirs is forked by others and must have none of Ray's threads."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from estr.errors import RunError
from estr.runtime.setup import Parts
from estr.storage.run_directory import RunDirectory
from estr.storage.run_record import RunRecord
from loop_helpers import TESTS, Watcher, alive, descendants, go_on, process_name, small, train

CPUS = 4
STORE = 100 << 20  # bytes
PATIENT = {"kind": "ray", "engines": 2, "learner_threads": 1, "start_timeout": 250.0, "engine_timeout": 100.0}
DRILL: dict[str, dict[str, Any]] = {
    "run": {"steps": 10, "checkpoint_every": 2, "keep_checkpoints": 2},
    "task": {"name": "torture.parts:Torture"},
    "rollout": {"max_new_tokens": 6, "max_turns": 4},
    "schedule": {"mode": "async", "max_staleness": 3, "attempts": 2, "wait_timeout": 250.0},
    "learner": {"minibatches": 2, "learning_rate": 1e-3},
    "runtime": PATIENT,
}
"""Tools with delays, episodes that fail, minibatches and retries; see torture.parts."""

_session: dict[str, Any] = {}


@contextmanager
def process() -> Iterator[ProcessPoolExecutor]:
    """A process that runs what it is given, one after the other; it ends with this one."""
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(1, mp_context=context, initializer=_settle, initargs=(os.environ["ESTR_CACHE"],))
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def _settle(cache: str) -> None:
    import torch

    os.environ["ESTR_CACHE"] = cache
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


# ---------------------------------------------------------------------- one cluster for all tests


@dataclass(frozen=True)
class Started:
    address: str
    pid: int
    environment: dict[str, str]


def start_cluster() -> Started:
    """A cluster as a run without ``runtime.address`` starts it."""
    from estr.runtime.cluster.connection import connect

    _session["cluster"] = connect("", cpus=CPUS, gpus=0, resources={}, store=STORE)
    import ray

    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    environment = {name: os.environ[name] for name in names}
    return Started(ray.get_runtime_context().gcs_address, os.getpid(), environment)


def stop_cluster() -> list[int]:
    """End it; processes of it that are still there a while later."""
    before = descendants(os.getpid())
    _session.pop("cluster").close()
    deadline = time.monotonic() + 20
    while (left := [pid for pid in before if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def engine_pids() -> list[int]:
    """Processes of engine actors of this session's cluster, whoever drives them."""
    return [pid for pid in descendants(os.getpid()) if process_name(pid).startswith("ray::EngineActo")]


# ---------------------------------------------------------------------- runs


@dataclass
class Told:
    """What came of a run: notices, process ids of all engines that were killed, and of those at its end."""

    notices: list[str] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    engines: list[int] = field(default_factory=list)


class Ran:
    """A run in this process; subclasses say what happens after a step."""

    def __init__(self, path: Path, changes: dict[str, dict[str, Any]]) -> None:
        self.told, self._path, self._config = Told(), path, small(**changes)
        self._parts: Parts | None = None

    def go(self) -> Told:
        os.chdir(TESTS)
        train(self._config, self._path, Watcher(self.after, self.told.notices.append), self._take)
        _end(self._path)
        return self.told

    def _take(self, parts: Parts) -> None:
        self._parts = parts

    @property
    def parts(self) -> Parts:
        assert self._parts is not None
        return self._parts

    @property
    def pids(self) -> list[int]:
        return list(self.parts.pool.pids)  # type: ignore[attr-defined]

    def after(self, step: int) -> None:
        """Called by the learner when ``step`` is done."""

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.told.killed.append(pid)

    def until(self, condition: Callable[[], bool], what: str, timeout: float = 250.0) -> None:
        """Let the run take events until ``condition`` holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}"
            self.parts.collector.absorb_waiting()
            time.sleep(0.02)


class OneKill(Ran):
    """One of two engines is killed after step 2; step 5 waits until there are two again."""

    def after(self, step: int) -> None:
        if step == 2:
            self.kill(self.pids[0])
        if step == 5:
            self.until(lambda: len(set(self.pids) - set(self.told.killed)) == 2, "two engines")
            self.told.engines = self.pids


class LockstepKill(Ran):
    """The engine whose turn it is next dies after step 3."""

    def after(self, step: int) -> None:
        if step == 3:
            import ray

            pool: Any = self.parts.pool
            engine = pool._engines[pool._turn % len(pool._engines)]
            self.kill(ray.get(engine.actor.hello.remote()).pid)


class RankKill(Ran):
    """The second rank of the learner dies after step 2; what the run says of it is told as a notice."""

    def go(self) -> Told:
        os.chdir(TESTS)
        try:
            train(self._config, self._path, Watcher(self.after), self._take)
        except RunError as error:
            self.told.notices.append(str(error))
        return self.told

    def after(self, step: int) -> None:
        if step == 2:
            others: Any = self.parts.learner.ranks._others  # type: ignore[union-attr]
            self.kill(others.pids[0])


class TenKills(Ran):
    """Ten blows at random moments, from another thread: SIGKILL mostly, SIGSTOP now and then."""

    def __init__(self, path: Path, changes: dict[str, dict[str, Any]], seed: int) -> None:
        super().__init__(path, changes)
        self._draw, self._dealt = random.Random(seed), threading.Event()

    def _take(self, parts: Parts) -> None:
        super()._take(parts)
        threading.Thread(target=self._strike, daemon=True).start()

    def _strike(self) -> None:
        while len(self.told.killed) < 10:
            time.sleep(self._draw.uniform(0.0, 1.0))
            fresh = [pid for pid in self.pids if pid not in self.told.killed]
            if fresh:
                pid = self._draw.choice(fresh)
                os.kill(pid, signal.SIGSTOP if self._draw.random() < 0.2 else signal.SIGKILL)
                self.told.killed.append(pid)
        self._dealt.set()

    def after(self, step: int) -> None:
        """The run lasts as long as the blows do: a tenth of them a step."""
        self.until(lambda: len(self.told.killed) >= step or self._dealt.is_set(), "a blow")


def run(kind: type[Ran], path: Path, changes: dict[str, dict[str, Any]], *more: Any) -> Told:
    return kind(path, changes, *more).go()


def resume(path: Path) -> None:
    os.chdir(TESTS)
    go_on(path)
    _end(path)


def _end(path: Path) -> None:
    """What the command writes down when a run has ended well."""
    with RunDirectory.open(path, lock=True) as directory:
        RunRecord(directory).end("finished")


# ---------------------------------------------------------------------- what listens


def listening(pids: Sequence[int]) -> dict[int, list[tuple[str, int]]]:
    """(address, port) at which each process listens, by /proc; addresses as hexadecimal text."""
    found = {}
    for pid in pids:
        inodes = set()
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(entry)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        found[pid] = [place for inode, place in _listeners().items() if inode in inodes]
    return found


def _listeners() -> dict[str, tuple[str, int]]:
    places = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A":
                address, _, port = columns[1].rpartition(":")
                places[columns[9]] = (address, int(port, 16))
    return places


# ---------------------------------------------------------------------- nodes that come and go


class Nodes:
    """Several nodes of Ray on this machine: a head with room for the learner, others with room for one engine."""

    def __init__(self, directory: Path, head_cpus: int = 1) -> None:
        token = directory / "token"
        token.write_text("5" * 64)
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}
        os.environ |= {"RAY_max_direct_call_object_size": "100"}  # bytes; all else goes through the object store
        from ray.cluster_utils import Cluster

        head = {"num_cpus": head_cpus, "object_store_memory": STORE, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address

    def add(self) -> Any:
        return self._cluster.add_node(num_cpus=1, object_store_memory=STORE)

    def lose(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def shutdown(self) -> None:
        self._cluster.shutdown()


class OnNodes(Ran):
    """A run on nodes of its own, which end with it."""

    def __init__(self, nodes: Nodes, path: Path, changes: dict[str, dict[str, Any]]) -> None:
        self._nodes = nodes
        super().__init__(path, changes)

    def go(self) -> Told:
        try:
            return super().go()
        finally:
            self._nodes.shutdown()


class Elastic(OnNodes):
    """Begins with one node for engines; another joins after step 2; the first is lost after step 5."""

    def __init__(self, path: Path, changes: dict[str, dict[str, Any]]) -> None:
        nodes = Nodes(path.parent)
        self._first = nodes.add()
        runtime = changes["runtime"] | {"engines": 0, "address": nodes.address}
        super().__init__(nodes, path, changes | {"runtime": runtime})

    def after(self, step: int) -> None:
        self.told.engines.append(len(self.pids))
        if step == 2:
            self._nodes.add()
            self.until(lambda: len(self.pids) == 2, "an engine on the node that joined")
        if step == 5:
            self._nodes.lose(self._first)
            self.until(lambda: len(self.pids) == 1, "the end of the engine on the node that was lost")


class RankElsewhere(OnNodes):
    """The head has room for nobody: engine and second rank are each on a node of its own."""

    def __init__(self, path: Path, changes: dict[str, dict[str, Any]]) -> None:
        nodes = Nodes(path.parent, head_cpus=0)
        for _ in range(2):
            nodes.add()
        super().__init__(nodes, path, changes | {"runtime": changes["runtime"] | {"address": nodes.address}})

    def after(self, step: int) -> None:
        if step == 1:
            import ray

            others: Any = self.parts.learner.ranks._others  # type: ignore[union-attr]
            nodes = {ray.get_runtime_context().get_node_id(), others._ranks[0].hello.node}
            self.told.notices.append(f"nodes: {len(nodes)}")
            self.told.notices += [f"listens: {address}" for address, _ in listening([os.getpid()])[os.getpid()]]
