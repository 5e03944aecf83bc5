"""Engine actors on a Ray cluster: as many as are wanted or have room; the work of those that leave goes to others."""

from __future__ import annotations

import contextlib
import queue
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from estr.config import Config
from estr.errors import RunError
from estr.runtime.cluster.connection import Cluster
from estr.runtime.cluster.handles import STOP_TIMEOUT, EngineHandle, Published
from estr.runtime.cluster.placement import engine_needs, no_room
from estr.runtime.cluster.weights import put
from estr.runtime.handles import Watch
from estr.runtime.messages import Died, Event, Job, Members, Ready
from estr.runtime.supervision import Supervision
from estr.runtime.worker import Stop, WorkerSpec

_SETTLE = 2.0  # seconds without a new place after which the engines that have one are all there are for now


class RayPool(Supervision[EngineHandle]):
    """Engine actors that take the learner's weights from the object store.

    With ``engines`` there are that many, each as soon as the cluster has room for it; with 0 there is always one more
    wanted than there is room for, so that their number follows the cluster. One that dies, alone or with its node, or
    gives no sign of life for runtime.engine_timeout seconds, is wanted again, and its jobs go to the others under the
    same seeds, or wait for the first that is ready.
    """

    def __init__(self, cluster: Cluster, config: Config, model_path: str | Path, *, engines: int) -> None:
        super().__init__(config.schedule.attempts)
        self._cluster, self._engines = cluster, engines
        self._config, self._model_path = config.model_dump(), str(model_path)
        self._threads, self._secret = config.runtime.engine_threads, secrets.token_hex(8)
        self._needs = engine_needs(config.runtime, self._threads)
        self._waiting: list[Job] = []
        self._latest: Published | None = None
        self._count = -1
        self._start_timeout = config.runtime.start_timeout
        self._watch = Watch(
            lambda: [worker for worker in self._workers if worker.placed],
            config.runtime.engine_timeout,
            self._start_timeout,
        )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ how many there are

    def _top_up(self) -> None:
        while len(self._workers) < self._engines or (
            not self._engines and all(worker.placed for worker in self._workers)
        ):
            taken = {worker.index for worker in self._workers}
            index = next(number for number in range(len(taken) + 1) if number not in taken)
            self._workers.append(EngineHandle(index, self._spec(index), self._needs, self._cluster.node, self._inbox))

    def _spec(self, index: int) -> WorkerSpec:
        calls = self._cluster.scratch / f"estr-{self._secret}-{index}.calls"  # on whatever node it comes to be
        return WorkerSpec(
            name=f"engine-{index}",
            config=self._config,
            model_path=self._model_path,
            manifest="",
            reader=index,
            threads=self._threads,
            calls_path=str(calls),
        )

    def _wait_ready(self) -> None:
        """Until the engines that have a place are ready; others may come later."""
        begun, settled, placed = time.monotonic(), time.monotonic(), 0
        while True:
            self._top_up()
            self._start_event()
            now, places = time.monotonic(), [worker for worker in self._workers if worker.placed]
            if len(places) != placed:
                placed, settled = len(places), now
            complete = len(places) == self._engines or now - settled > _SETTLE
            if places and complete and all(worker.ready for worker in places):
                return
            if not places and now - begun > self._start_timeout:
                raise no_room(self._needs, self._start_timeout)

    def _start_event(self) -> None:
        with contextlib.suppress(queue.Empty):
            worker, event = self._inbox.get(timeout=0.05)
            if isinstance(event, Died) and worker in self._workers:
                self._start_again(worker, event)

    def _start_again(self, worker: EngineHandle, death: Died) -> None:
        """Another actor for one that was killed while it started; one that says why it cannot start ends the run."""
        self._deaths_in_a_row += 1
        if death.said or self._deaths_in_a_row > self._attempts:
            raise RunError(f"{worker.spec.name} could not start: {death.reason}")
        worker.retire()
        self._workers.remove(worker)

    @property
    def pids(self) -> list[int]:
        """Process ids of the engines that are ready, each on its node."""
        return [worker.pid for worker in self._workers if worker.ready]

    def _ready(self) -> list[EngineHandle]:
        return [worker for worker in self._workers if worker.ready]

    # ------------------------------------------------------------------ the pool's interface

    @property
    def versions(self) -> dict[int, dict[str, Tensor]]:
        return {}

    def publish(self, version: int, tensors: Mapping[str, Tensor], canary: NDArray[np.float32]) -> None:
        """One copy into the object store, from which each node has its own; engines take it when they can."""
        self._latest = Published(version, put(tensors), canary)
        for worker in self._ready():
            worker.publish(self._latest)

    def submit(self, jobs: Sequence[Job]) -> None:
        self._waiting += jobs
        self._hand_out()

    def _hand_out(self) -> None:
        workers = self._ready()
        if workers:
            for job in self._waiting:
                min(workers, key=lambda worker: len(worker.jobs)).send_job(job)
            self._waiting = []

    def events(self, timeout: float) -> list[Event]:
        """What happened; waits up to ``timeout`` seconds for the first event."""
        self._top_up()
        events = super().events(timeout)
        if (count := len(self._ready())) != self._count:
            self._count = count
            events.append(Members(count))
        return events

    def _handle(self, worker: EngineHandle, event: Event) -> list[Event]:
        if isinstance(event, Ready) and worker in self._workers:
            if self._latest is not None:
                worker.publish(self._latest)
            self._hand_out()
        return super()._handle(worker, event)

    def _replace(self, worker: EngineHandle, reason: str) -> list[Event]:
        worker.retire()
        poisonous = self._poisonous(worker, reason)
        self._deaths_in_a_row = 0 if poisonous else self._deaths_in_a_row + 1
        if self._deaths_in_a_row > 3 * len(self._workers) + self._attempts:
            raise RunError(f"engine actors keep dying without finishing anything; the last one said: {reason}")
        self._workers.remove(worker)
        self._top_up()
        self._waiting = [*self._by_suspicion(worker), *self._waiting]
        self._hand_out()
        return poisonous

    def cancel_group(self, group: int) -> None:
        self._waiting = [job for job in self._waiting if job.group != group]
        super().cancel_group(group)

    def close(self) -> None:
        self._watch.stop()
        for worker in self._workers:
            worker.send(Stop())
        deadline = time.monotonic() + STOP_TIMEOUT
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            worker.retire()
        self._latest = None
