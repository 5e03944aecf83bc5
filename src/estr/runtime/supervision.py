"""What every pool of engines that may die keeps of them: who has which job, and which jobs they died of."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from estr.runtime.messages import Died, Event, Failed, Finished, Job, KeptTurn, job_key
from estr.runtime.worker import CancelGroup


class Engine(Protocol):
    """One engine as its pool sees it; ``jobs`` are those it has been given and has not settled."""

    jobs: dict[str, Job]

    def send(self, message: object) -> None: ...

    def calls(self) -> set[str]:
        """Keys of the jobs whose environments were at work when it was last heard of."""
        ...


EngineT = TypeVar("EngineT", bound=Engine)


class Supervision(ABC, Generic[EngineT]):
    """Events of engines that are replaced when they die; a subclass says how (``_replace``).

    A job whose environment was at work in ``attempts`` engines that died is given up.
    """

    def __init__(self, attempts: int) -> None:
        self._inbox: queue.SimpleQueue[tuple[EngineT, Event]] = queue.SimpleQueue()
        self._workers: list[EngineT] = []
        self._attempts = attempts
        self._deaths_in_a_row, self._deaths = 0, dict[str, int]()

    def events(self, timeout: float) -> list[Event]:
        """What happened; waits up to ``timeout`` seconds for the first event."""
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            worker, event = self._inbox.get(timeout=timeout)
            while True:
                events += self._handle(worker, event)
                worker, event = self._inbox.get_nowait()
        return events

    def _handle(self, worker: EngineT, event: Event) -> list[Event]:
        if worker not in self._workers:
            return []
        if isinstance(event, Finished):
            self._settled(worker, job_key(event.trajectory))
            self._deaths_in_a_row = 0
        elif isinstance(event, KeptTurn):
            self._went_on(worker, event)
        elif isinstance(event, Failed):
            self._settled(worker, event.job.key)
        elif isinstance(event, Died):
            return [event, *self._replace(worker, event.reason)]
        return [event]

    @abstractmethod
    def _replace(self, worker: EngineT, reason: str) -> list[Event]:
        """Put another engine in the place of a dead one; what its jobs come to."""

    def _went_on(self, worker: EngineT, turn: KeptTurn) -> None:
        key = job_key(turn.ticket)
        if key in worker.jobs:
            worker.jobs[key] = dataclasses.replace(worker.jobs[key], kept=turn)

    def _settled(self, worker: EngineT, key: str) -> None:
        worker.jobs.pop(key, None)
        self._deaths.pop(key, None)

    def _poisonous(self, worker: EngineT, reason: str) -> list[Event]:
        """Take from ``worker`` the jobs whose environments were at work in ``attempts`` engines that died."""
        failed: list[Event] = []
        for key in worker.calls() & worker.jobs.keys():
            self._deaths[key] = self._deaths.get(key, 0) + 1
            if self._deaths[key] >= self._attempts:
                job, count = worker.jobs.pop(key), self._deaths.pop(key)
                sentence = f"its environment was at work in {count} engine processes that died; the last one: {reason}"
                failed.append(Failed(job, f"problem {job.problem.task_id}: {sentence}", final=True))
        return failed

    def _by_suspicion(self, worker: EngineT) -> list[Job]:
        """The jobs of a dead engine, those last whose environments were at work in more of the dead."""
        return sorted(worker.jobs.values(), key=lambda job: self._deaths.get(job.key, 0))

    def cancel_group(self, group: int) -> None:
        """Forget the trajectories of a group that was dropped."""
        for worker in self._workers:
            worker.jobs = {key: job for key, job in worker.jobs.items() if job.group != group}
            worker.send(CancelGroup(group))
