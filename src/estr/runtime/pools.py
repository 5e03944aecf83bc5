"""Where trajectories are generated: engine processes on this machine, or an engine inside this process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from estr.config import Config
from estr.engines.local import LocalEngine
from estr.errors import RunError
from estr.runtime.handles import STOP_TIMEOUT, Watch, WorkerHandle, preload
from estr.runtime.messages import Activity, Died, Event, Interval, Job, Ready, Synced
from estr.runtime.rollout import RolloutWorker
from estr.runtime.supervision import Supervision
from estr.runtime.worker import Stop, WorkerSpec
from estr.transport import WeightPublisher, remove_leftovers
from estr.transport.shared_weights import shared_directory

Canary = NDArray[np.float32]
_TRIES, _PAUSE = 3, 0.1  # how often an engine process is started, and seconds between


class Pool(Protocol):
    """What generates; jobs go in, events come out, weights are published between them."""

    def publish(self, version: int, tensors: Mapping[str, Tensor], canary: Canary) -> None: ...

    def submit(self, jobs: Sequence[Job]) -> None: ...

    def events(self, timeout: float) -> list[Event]:
        """What happened; waits up to ``timeout`` seconds for the first event."""
        ...

    def cancel_group(self, group: int) -> None: ...

    @property
    def versions(self) -> dict[int, dict[str, Tensor]]:
        """The versions that a resume has to make available again (lockstep), in engine precision."""
        ...

    def close(self) -> None: ...


class InlinePool:
    """One engine in this process; jobs run to their end inside ``events``. For schedules on a logical clock.

    Keeps the versions that jobs may still ask for: ``window`` of them behind the newest.
    """

    def __init__(self, worker: RolloutWorker[LocalEngine], canary_tokens: Sequence[int], *, window: int) -> None:
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


class ProcessPool(Supervision[WorkerHandle]):
    """Engine processes that share the learner's weights through memory.

    One that dies, or gives no sign of life for runtime.engine_timeout seconds, is replaced, its jobs are issued again
    under the same seeds, and everything else goes on meanwhile. A job whose environment was at work in
    schedule.attempts processes that died is given up.
    """

    def __init__(
        self,
        config: Config,
        model_path: str | Path,
        tensors: Mapping[str, Tensor],
        spool: Path,
        *,
        engines: int,
        threads: int,
        preloaded: Sequence[str] = (),
    ) -> None:
        remove_leftovers()
        remove_leftovers(spool)
        size = 2 * sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self._publisher = WeightPublisher(tensors, shared_directory(size, spool), readers=engines)
        self._config, self._model_path, self._threads = config.model_dump(), str(model_path), threads
        super().__init__(config.schedule.attempts)
        self._preloaded, self._spool = tuple(preloaded), spool
        self._workers = [self._spawn(index) for index in range(engines)]
        limits = config.runtime.engine_timeout, config.runtime.start_timeout
        self._watch = Watch(lambda: self._workers, *limits)
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def _spawn(self, index: int) -> WorkerHandle:
        spec = WorkerSpec(
            name=f"engine-{index}",
            config=self._config,
            model_path=self._model_path,
            manifest=self._publisher.manifest,
            reader=index,
            threads=self._threads,
            calls_path=str(self._spool / f"engine-{index}.calls"),
        )
        for _ in range(_TRIES):
            try:
                preload(self._preloaded)
                return WorkerHandle(index, spec, self._inbox)
            except (OSError, EOFError) as error:  # EOFError: the helper was killed while it was asked
                cause = getattr(error, "strerror", None) or "its helper process ended"
                time.sleep(_PAUSE)
        raise RunError(f"{spec.name} could not be started in {_TRIES} attempts: {cause}")

    def _wait_ready(self) -> None:
        missing = set(self._workers)
        while missing:
            worker, event = self._inbox.get()
            if worker not in missing:
                continue
            if isinstance(event, Died):
                missing.add(self._start_again(worker, event))
            if isinstance(event, Ready | Died):
                missing.discard(worker)

    def _start_again(self, worker: WorkerHandle, death: Died) -> WorkerHandle:
        """Another process for one that was killed while it started; one that says why it cannot start ends the run."""
        self._deaths_in_a_row += 1
        if death.said or self._deaths_in_a_row > self._attempts:
            raise RunError(f"{worker.spec.name} could not start: {death.reason}")
        worker.retire()
        self._workers[worker.index] = self._spawn(worker.index)
        return self._workers[worker.index]

    @property
    def pids(self) -> list[int]:
        """Process ids of the engines."""
        return [worker.pid for worker in self._workers]

    @property
    def versions(self) -> dict[int, dict[str, Tensor]]:
        return {}

    def publish(self, version: int, tensors: Mapping[str, Tensor], canary: Canary) -> None:
        self._publisher.publish(version, tensors, canary, gone=self._dead)

    def _dead(self) -> list[int]:
        return [worker.index for worker in self._workers if not worker.alive]

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            worker = min(self._workers, key=lambda worker: len(worker.jobs))
            worker.send_job(job)

    def _replace(self, worker: WorkerHandle, reason: str) -> list[Event]:
        """Start another process in the place of a dead one; what its jobs come to: most are given to the new one."""
        worker.retire()
        self._publisher.forget_reader(worker.index)
        poisonous = self._poisonous(worker, reason)
        self._deaths_in_a_row = 0 if poisonous else self._deaths_in_a_row + 1
        if self._deaths_in_a_row > 3 * len(self._workers) + self._attempts:
            raise RunError(f"engine processes keep dying without finishing anything; the last one said: {reason}")
        self._workers[worker.index] = self._spawn(worker.index)
        for job in self._by_suspicion(worker):
            self._workers[worker.index].send_job(job)
        return poisonous

    def close(self) -> None:
        self._watch.stop()
        for worker in self._workers:
            worker.send(Stop())
        deadline = time.monotonic() + STOP_TIMEOUT
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
            worker.retire()
            Path(worker.spec.calls_path).unlink(missing_ok=True)
        self._publisher.close()
