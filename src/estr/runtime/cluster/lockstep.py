"""Schedules on a logical clock under Ray: whole cohorts on one engine, so that the bits are those of the local runtime.

What a forward pass computes for a row depends in its last bits on the rows beside it. A cohort therefore runs whole on
one engine; with several, they take turns. One that dies is replaced, gets the versions of the window and runs its
cohort again, under the same seeds and to the same bits.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from torch import Tensor

from estr.config import Config
from estr.errors import EstrError, RunError
from estr.runtime.cluster.engine import Home, LockstepActor
from estr.runtime.cluster.handles import Published
from estr.runtime.cluster.placement import Reservation, engine_needs
from estr.runtime.cluster.weights import from_store, put
from estr.runtime.messages import Activity, Died, Event, Job

Result = TypeVar("Result")


class _Engine:
    """One actor and its place; ``call`` raises Ray's errors."""

    def __init__(self, index: int, needs: Mapping[str, float], patience: float, *arguments: Any) -> None:
        self.name = f"engine-{index}"
        self._reservation = Reservation([needs])
        self._reservation.require(patience)
        self.actor = ray.remote(LockstepActor).options(**self._reservation.options()).remote(*arguments)

    def free(self) -> None:
        ray.kill(self.actor)
        self._reservation.free()

    def named(self, events: Sequence[Event]) -> list[Event]:
        """Events with this engine's name in their intervals."""
        return [
            dataclasses.replace(event, intervals=[dataclasses.replace(i, actor=self.name) for i in event.intervals])
            if isinstance(event, Activity)
            else event
            for event in events
        ]


class RayLockstepPool:
    """Actors that each hold the window of versions; see the module's head."""

    def __init__(self, config: Config, model_path: str | Path, *, engines: int, threads: int, window: int) -> None:
        self._window, self._attempts = window, config.schedule.attempts
        self._needs = engine_needs(config.runtime, threads)
        self._arguments = (
            config.runtime.start_timeout,
            config.model_dump(),
            str(model_path),
            threads,
            window,
            Home.here(),
        )
        self._held: dict[int, Any] = {}  # references to the versions before the newest
        self._newest: Published | None = None
        self._jobs: list[Job] = []
        self._events: deque[Event] = deque()
        self._deaths_in_a_row, self._turn = 0, 0
        self._engines = [_Engine(index, self._needs, *self._arguments) for index in range(engines)]
        try:
            for index in range(engines):
                self._call(index, lambda engine: ray.get(engine.actor.hello.remote()))
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ engines that may die

    def _call(self, index: int, call: Callable[[_Engine], Result]) -> Result:
        """``call`` on an engine, again on another in its place where it dies."""
        while True:
            try:
                result = call(self._engines[index])
            except ray.exceptions.RayActorError as error:
                self._replace(index, error)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                sentence = str(cause) if isinstance(cause, EstrError) else f"{type(cause).__name__}: {cause}"
                raise RunError(f"{self._engines[index].name} failed: {sentence}") from error
            else:
                self._deaths_in_a_row = 0
                return result

    def _replace(self, index: int, error: Exception) -> None:
        self._deaths_in_a_row += 1
        reason = f"{self._engines[index].name} died: {' '.join(str(error).strip().rpartition(chr(10))[2].split())}"
        if self._deaths_in_a_row > self._attempts:
            raise RunError(f"an engine actor keeps dying without finishing anything: {reason}")
        self._events.append(Died(reason))
        self._engines[index].free()
        engine = self._engines[index] = _Engine(index, self._needs, *self._arguments)
        for version, stored in sorted(self._held.items()):
            engine.actor.restore.remote(version, stored)
        if self._newest is not None:
            engine.actor.publish.remote(*_arguments(self._newest))

    # ------------------------------------------------------------------ the pool's interface

    def publish(self, version: int, tensors: Mapping[str, Tensor], canary: NDArray[np.float32]) -> None:
        if self._newest is not None:
            self._held[self._newest.version] = self._newest.stored
        self._held = {held: stored for held, stored in self._held.items() if held >= version - self._window}
        self._newest = newest = Published(version, put(tensors), canary)
        for index in range(len(self._engines)):
            events = self._call(index, lambda engine: ray.get(engine.actor.publish.remote(*_arguments(newest))))
            self._events.extend(self._engines[index].named(events))

    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Make an older version available again (after a resume)."""
        self._held[version] = stored = put(tensors)
        for index in range(len(self._engines)):
            self._call(index, lambda engine: ray.get(engine.actor.restore.remote(version, stored)))

    @property
    def versions(self) -> dict[int, dict[str, Tensor]]:
        stored = self._call(0, lambda engine: ray.get(engine.actor.versions.remote()))
        return {version: from_store(tensors) for version, tensors in stored.items()}

    def submit(self, jobs: Sequence[Job]) -> None:
        self._jobs += jobs

    def events(self, timeout: float) -> list[Event]:
        """Run the jobs that were submitted to their end."""
        if self._jobs:
            jobs, self._jobs = self._jobs, []
            index, self._turn = self._turn % len(self._engines), self._turn + 1
            events = self._call(index, lambda engine: ray.get(engine.actor.generate.remote(jobs)))
            self._events.extend(self._engines[index].named(events))
        found, self._events = list(self._events), deque()
        return found

    def cancel_group(self, group: int) -> None:
        self._jobs = [job for job in self._jobs if job.group != group]

    def close(self) -> None:
        for engine in self._engines:
            engine.free()
        self._held, self._newest = {}, None


def _arguments(published: Published) -> tuple[int, Any, NDArray[np.float32]]:
    return published.version, published.stored, published.canary
