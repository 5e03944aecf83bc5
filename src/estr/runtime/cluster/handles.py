"""The driver's view of one engine actor: its place, the stream of its events, and what is sent to it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from estr.runtime.calls import read_calls
from estr.runtime.cluster.engine import EngineActor, Hello, Home, wall_offset
from estr.runtime.cluster.placement import Reservation, on_node
from estr.runtime.messages import Activity, Died, Event, Job, Ready
from estr.runtime.worker import WorkerSpec

STOP_TIMEOUT = 5.0
_LOOK = 1.0  # seconds between looks whether a place is still wanted
_WEIGHTS = "weights"


@dataclasses.dataclass(frozen=True)
class Published:
    """One version in the object store."""

    version: int
    stored: Any  # a reference to weights in the object store
    canary: NDArray[np.float32]


class EngineHandle:
    """One engine from the moment at which it is wanted: it waits for room in the cluster, starts, works and ends.

    A thread of its own does that and puts its events into ``inbox``; another feeds the actor. ``silence`` is counted by
    :class:`estr.runtime.handles.Watch`.
    """

    def __init__(
        self,
        index: int,
        spec: WorkerSpec,
        needs: Mapping[str, float],
        node: str,
        inbox: queue.SimpleQueue[tuple[EngineHandle, Event]],
    ) -> None:
        self.index, self.spec, self.silence = index, spec, 0.0
        self.placed = self.ready = False
        self.jobs: dict[str, Job] = {}
        self._here, self._inbox, self._given_up = node, inbox, ""
        self._hello: Hello | None = None
        self._calls: set[str] | None = None  # what they were when it was retired
        self._actor: Any = None
        self._closed = threading.Event()
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._latest: Published | None = None
        self._reservation = Reservation([needs])
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._live, self._feed)]
        self._threads[0].start()

    # ------------------------------------------------------------------ its life

    def _live(self) -> None:
        try:
            while not self._reservation.wait(_LOOK):
                if self._closed.is_set():
                    return
            self._start()
            self._listen()
        except Exception as error:
            self._inbox.put((self, Died(self._given_up or self._ending(error))))

    def _start(self) -> None:
        remote = ray.remote(concurrency_groups={"beside": 2})(EngineActor)
        self._actor = remote.options(**self._reservation.options()).remote(self.spec, Home.here())
        self.placed = True
        self._threads[1].start()

    def _listen(self) -> None:
        for reference in self._actor.run.options(num_returns="streaming").remote():
            said = ray.get(reference)
            self.silence = 0.0
            if isinstance(said, Hello):
                self._hello = said
                continue
            for event in said:
                self.ready |= isinstance(event, Ready)
                self._inbox.put((self, self._in_our_time(event)))

    def _in_our_time(self, event: Event) -> Event:
        """Intervals by the monotonic clock of this machine."""
        if not isinstance(event, Activity) or self._hello is None or self._hello.node == self._here:
            return event
        shift = self._hello.clock - wall_offset()
        intervals = [
            dataclasses.replace(interval, start=interval.start + shift, end=interval.end + shift)
            for interval in event.intervals
        ]
        return dataclasses.replace(event, intervals=intervals)

    def _ending(self, error: Exception) -> str:
        return actor_ending(self.spec.name, self._hello, error)

    @property
    def pid(self) -> int:
        """Process id on its node, 0 while it starts."""
        return self._hello.pid if self._hello is not None else 0

    # ------------------------------------------------------------------ what is sent

    def _feed(self) -> None:
        """Sending waits for the actor; the learner must not."""
        with contextlib.suppress(ray.exceptions.RayError):  # the other thread says what happened
            while (messages := self._next_messages()) is not None:
                if jobs := [message for message in messages if message is not _WEIGHTS]:
                    ray.get(self._actor.put.remote(jobs))
                latest, self._latest = self._latest, None
                if latest is not None:
                    ray.get(self._actor.publish.remote(latest.version, latest.stored, latest.canary))

    def _next_messages(self) -> list[object] | None:
        messages = [self._outbox.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._outbox.get_nowait())
        return None if None in messages else messages

    def publish(self, publication: Published) -> None:
        """Give it the newest weights; an engine that is slow misses some, and the store need not hold them."""
        self._latest = publication
        self._outbox.put(_WEIGHTS)

    def send_job(self, job: Job) -> None:
        self.jobs[job.key] = job
        self.send(job)

    def send(self, message: object) -> None:
        self._outbox.put(message)

    # ------------------------------------------------------------------ its end

    def calls(self) -> set[str]:
        """Keys of the jobs whose environments were at work when its process ended; none where its node is lost."""
        if self._hello is None or self._calls is not None:
            return self._calls or set()
        return on_node(self._hello.node, self._here, read_calls, Path(self.spec.calls_path)) or set()

    def give_up(self, reason: str) -> None:
        """Kill an actor that does not answer; its end then carries this reason."""
        self._given_up = reason
        self._kill()

    def _kill(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(self._actor)
        if self._hello is not None:  # Ray leaves a process alone that is stopped
            on_node(self._hello.node, self._here, end_process, self._hello.pid)

    def join(self, timeout: float) -> None:
        """Wait until it has ended after it was asked to stop."""
        if self.placed:
            self._threads[0].join(timeout)

    def retire(self) -> None:
        """End it if it still lives, and give its place back."""
        self._closed.set()
        if self._threads[0].is_alive():
            self._kill()
        self._outbox.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(STOP_TIMEOUT)
        self._reservation.free()
        if self._hello is not None:
            self._calls = self.calls()
            on_node(self._hello.node, self._here, _forget, self.spec.calls_path)


def actor_ending(name: str, hello: Hello | None, error: Exception) -> str:
    """How an actor ended, by what Ray says of it."""
    where = f" (process {hello.pid})" if hello is not None else ""
    detail = str(error).partition("Worker exit detail: ")[2] or str(error).strip().rpartition("\n")[2]
    return f"{name}{where} died: {' '.join(detail.split('. Some common causes')[0].split())}"


def end_process(pid: int) -> None:
    """Kill an actor's process, not another that has its number by now."""
    with contextlib.suppress(OSError):
        if b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def _forget(path: str) -> None:
    Path(path).unlink(missing_ok=True)
