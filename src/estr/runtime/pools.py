"""Where trajectories are generated: engine processes on this machine, or an engine inside this process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from estr.config import Config
from estr.errors import RunError
from estr.runtime.messages import Activity, Died, Event, Failed, Finished, Interval, Job, Ready, Synced
from estr.runtime.rollout import RolloutWorker
from estr.runtime.worker import SIGNALS, CancelGroup, Stop, WorkerSpec, worker_main
from estr.transport import WeightPublisher, remove_leftovers
from estr.transport.shared_weights import shared_directory

Canary = NDArray[np.float32]
_START_TIMEOUT = 120.0
_STOP_TIMEOUT = 5.0


class Pool(Protocol):
    """What generates; jobs go in, events come out, weights are published between them."""

    def publish(self, version: int, tensors: Mapping[str, Tensor], canary: Canary) -> None: ...

    def submit(self, jobs: Sequence[Job]) -> None: ...

    def events(self, timeout: float) -> list[Event]:
        """What happened; waits up to ``timeout`` seconds for the first event."""
        ...

    def cancel_group(self, group: int) -> None: ...

    def close(self) -> None: ...


class InlinePool:
    """One engine in this process; jobs run to their end inside ``events``. For schedules on a logical clock.

    Keeps the versions that jobs may still ask for: ``window`` of them behind the newest.
    """

    def __init__(self, worker: RolloutWorker, canary_tokens: Sequence[int], *, window: int) -> None:
        self._worker, self._canary_tokens, self._window = worker, canary_tokens, window
        self._events: deque[Event] = deque()
        self._jobs: list[Job] = []

    def publish(self, version: int, tensors: Mapping[str, Tensor], canary: Canary) -> None:
        start = time.monotonic()
        weights = self._worker.engine.weights
        weights.add(version, {name: tensor.detach() for name, tensor in tensors.items()}, own=True)
        weights.activate(version)
        weights.drop_before(version - self._window)
        error = float(np.abs(self._worker.engine.canary(self._canary_tokens) - canary).max())
        self._events.append(Activity([Interval("engine-0", "sync", start, time.monotonic(), version)]))
        self._events.append(Synced(version, error))

    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Make an older version available again (after a resume)."""
        self._worker.engine.weights.add(version, tensors, own=True)

    @property
    def versions(self) -> dict[int, dict[str, Tensor]]:
        """The versions held, in engine precision."""
        weights = self._worker.engine.weights
        return {version: weights.tensors(version) for version in weights.held}

    def submit(self, jobs: Sequence[Job]) -> None:
        self._jobs += jobs

    def events(self, timeout: float) -> list[Event]:
        if self._jobs:
            start, before = time.monotonic(), self._worker.engine.counters.sampled_tokens
            jobs, self._jobs = self._jobs, []
            for job in jobs:
                self._worker.submit(job)
            self._events.extend(self._worker.run_all())
            sampled = self._worker.engine.counters.sampled_tokens - before
            interval = Interval("engine-0", "generate", start, time.monotonic(), self._worker.engine.version)
            self._events.append(Activity([interval], sampled))
        events, self._events = list(self._events), deque()
        return events

    def cancel_group(self, group: int) -> None:
        self._jobs = [job for job in self._jobs if job.group != group]
        self._worker.cancel_group(group)

    def close(self) -> None:
        self._worker.cancel_all()


class ProcessPool:
    """Engine processes that share the learner's weights through memory; one that dies is replaced, its jobs are issued
    again under the same seeds, and the others go on meanwhile."""

    def __init__(
        self,
        config: Config,
        model_path: str | Path,
        tensors: Mapping[str, Tensor],
        spool: Path,
        *,
        engines: int,
        threads: int,
    ) -> None:
        remove_leftovers()
        remove_leftovers(spool)
        size = 2 * sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self._publisher = WeightPublisher(tensors, shared_directory(size, spool), readers=engines)
        self._config, self._model_path, self._threads = config.model_dump(), str(model_path), threads
        self._inbox: queue.SimpleQueue[tuple[_Worker, Event]] = queue.SimpleQueue()
        self._deaths_in_a_row = 0
        self._workers = [self._spawn(index) for index in range(engines)]
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def _spawn(self, index: int) -> _Worker:
        spec = WorkerSpec(
            name=f"engine-{index}",
            config=self._config,
            model_path=self._model_path,
            manifest=self._publisher.manifest,
            reader=index,
            threads=self._threads,
            parent=os.getpid(),
        )
        return _Worker(index, spec, self._inbox)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT
        missing = set(self._workers)
        while missing:
            try:
                worker, event = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                names = ", ".join(sorted(worker.spec.name for worker in missing))
                raise RunError(f"{names} did not start within {_START_TIMEOUT:.0f} s") from None
            if isinstance(event, Died):
                raise RunError(f"{worker.spec.name} could not start: {event.reason}")
            if isinstance(event, Ready):
                worker.ready = True
                missing.discard(worker)

    @property
    def pids(self) -> list[int]:
        """Process ids of the engines."""
        return [worker.process.pid or 0 for worker in self._workers]

    def publish(self, version: int, tensors: Mapping[str, Tensor], canary: Canary) -> None:
        self._publisher.publish(version, tensors, canary, gone=self._dead)

    def _dead(self) -> list[int]:
        return [worker.index for worker in self._workers if not worker.process.is_alive()]

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            worker = min(self._workers, key=lambda worker: len(worker.jobs))
            worker.send_job(job)

    def events(self, timeout: float) -> list[Event]:
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            worker, event = self._inbox.get(timeout=timeout)
            while True:
                events += self._handle(worker, event)
                worker, event = self._inbox.get_nowait()
        return events

    def _handle(self, worker: _Worker, event: Event) -> list[Event]:
        if worker is not self._workers[worker.index]:
            return []
        if isinstance(event, Finished):
            trajectory = event.trajectory
            worker.jobs.pop(f"{trajectory.group}/{trajectory.sibling}/{trajectory.attempt}", None)
            self._deaths_in_a_row = 0
        elif isinstance(event, Failed):
            worker.jobs.pop(event.job.key, None)
        elif isinstance(event, Died):
            self._replace(worker, event.reason)
        return [event]

    def _replace(self, worker: _Worker, reason: str) -> None:
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > 3 * len(self._workers):
            raise RunError(f"engine processes keep dying without finishing anything; the last one said: {reason}")
        worker.kill()
        self._publisher.forget_reader(worker.index)
        self._workers[worker.index] = self._spawn(worker.index)
        for job in worker.jobs.values():
            self._workers[worker.index].send_job(job)

    def cancel_group(self, group: int) -> None:
        for worker in self._workers:
            worker.jobs = {key: job for key, job in worker.jobs.items() if job.group != group}
            worker.send(CancelGroup(group))

    def close(self) -> None:
        for worker in getattr(self, "_workers", []):
            worker.send(Stop())
        deadline = time.monotonic() + _STOP_TIMEOUT
        for worker in getattr(self, "_workers", []):
            worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.kill()
        self._publisher.close()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """A process started inside begins with signals blocked, so that a Ctrl-C cannot reach it before it ignores them."""
    resource_tracker.ensure_running()  # starting it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """The parent's view of one engine process: its pipe, drained by a thread, and the jobs it has."""

    def __init__(self, index: int, spec: WorkerSpec, inbox: queue.SimpleQueue[tuple[_Worker, Event]]) -> None:
        self.index, self.spec, self.ready = index, spec, False
        self.jobs: dict[str, Job] = {}
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=worker_main, args=(spec, theirs), name=spec.name)
        with _signals_held():
            self.process.start()
        theirs.close()
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=self._drain, args=(self._connection, inbox), daemon=True).start()
        threading.Thread(target=self._feed, daemon=True).start()

    def _drain(self, connection: Connection, inbox: queue.SimpleQueue[tuple[_Worker, Event]]) -> None:
        try:
            while True:
                event = connection.recv()
                inbox.put((self, event))
                if isinstance(event, Died):
                    return
        except (EOFError, OSError):
            inbox.put((self, Died(f"{self.spec.name} ended without a word (killed, or out of memory)")))

    def _feed(self) -> None:
        """Sending may block while the worker is busy; the learner must not wait for that."""
        with contextlib.suppress(OSError, ValueError):
            while True:
                self._connection.send(self._outbox.get())

    def send_job(self, job: Job) -> None:
        self.jobs[job.key] = job
        self.send(job)

    def send(self, message: object) -> None:
        self._outbox.put(message)

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(_STOP_TIMEOUT)
