"""What runs in the actors: the engine of a local engine process behind a mailbox, and an inline pool for lockstep."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from estr.config import Config
from estr.errors import EstrError
from estr.runtime.cluster.weights import LatestWeights, Stored, from_store
from estr.runtime.kernel import end_with_parent, limit_memory
from estr.runtime.messages import Died, Event, Job
from estr.runtime.worker import WorkerSpec
from estr.transport import Publication


@dataclass(frozen=True)
class Hello:
    """The first thing an actor says: where it runs, and how far its monotonic clock is behind the wall clock."""

    node: str
    pid: int
    clock: float


@dataclass(frozen=True)
class Home:
    """Where the driver runs and where it finds Python code; taken over by actors as far as their node has it."""

    directory: str
    path: tuple[str, ...]

    @classmethod
    def here(cls) -> Home:
        return cls(os.getcwd(), tuple(entry for entry in sys.path if entry))

    def move_in(self) -> None:
        if os.path.isdir(self.directory):
            os.chdir(self.directory)
        sys.path += [entry for entry in self.path if entry not in sys.path and os.path.exists(entry)]


def hello() -> Hello:
    return Hello(ray.get_runtime_context().get_node_id(), os.getpid(), wall_offset())


def wall_offset() -> float:
    """Seconds that the wall clock is ahead of the monotonic clock, which differs between machines."""
    return time.time() - time.monotonic()


def prepare(home: Home) -> None:
    """Settle in a worker process of Ray."""
    end_with_parent()
    home.move_in()


class Mailbox:
    """Messages put in by one thread for another, which collects events on the way out."""

    def __init__(self) -> None:
        self._messages: deque[object] = deque()
        self._came = threading.Event()
        self._events: list[Event] = []

    def put(self, messages: Sequence[object]) -> None:
        self._messages.extend(messages)
        self._came.set()

    def poll(self, timeout: float | None = 0.0, /) -> bool:
        if not self._messages and timeout != 0:
            self._came.wait(timeout)
            self._came.clear()
        return bool(self._messages)

    def recv(self) -> object:
        return self._messages.popleft()

    def send(self, event: Event, /) -> None:
        self._events.append(event)

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


class EngineActor:
    """One engine: ``run`` is called once and gives events as they happen; the other methods are called beside it."""

    def __init__(self, spec: WorkerSpec, home: Home) -> None:
        self._spec, self._home = spec, home
        self._mailbox, self._weights = Mailbox(), LatestWeights()

    def run(self) -> Iterator[Hello | list[Event]]:
        """Lists of events, after a :class:`Hello`; ends when it was asked to stop or cannot go on."""
        prepare(self._home)
        yield hello()
        limit_memory(self._spec.config["runtime"]["engine_memory"])
        try:
            yield from self._events()
        except EstrError as error:
            yield [Died(str(error), said=True)]
        except Exception as error:
            if os.environ.get("ESTR_DEBUG"):
                raise
            yield [Died(f"{type(error).__name__}: {error}", said=True)]

    def _events(self) -> Iterator[list[Event]]:
        from estr.runtime.messages import Ready
        from estr.runtime.worker import EngineProcess

        process = EngineProcess(self._spec, self._mailbox, self._weights)
        try:
            yield [Ready()]
            while not process.stopped:
                process.turn()
                if events := self._mailbox.take():
                    yield events
        finally:
            process.close()

    @ray.method(concurrency_group="beside")  # type: ignore[untyped-decorator, unused-ignore]
    def put(self, messages: Sequence[object]) -> None:
        """Jobs and other messages, taken between two decode steps."""
        self._mailbox.put(messages)

    @ray.method(concurrency_group="beside")  # type: ignore[untyped-decorator, unused-ignore]
    def publish(self, version: int, stored: Stored, canary: NDArray[np.float32]) -> None:
        """New weights, taken between two decode steps; those that were not taken yet are forgotten."""
        self._weights.offer(Publication(version, from_store(stored), canary))


class LockstepActor:
    """One engine on a logical clock, which holds a window of versions and runs whole cohorts of jobs."""

    def __init__(self, config: Mapping[str, Any], model_path: str, threads: int, window: int, home: Home) -> None:
        from estr.models.load import load_model
        from estr.runtime.builders import build_rollout_worker, build_task, canary_tokens
        from estr.runtime.pools import InlinePool

        prepare(home)
        torch.set_num_threads(threads)
        settings = Config.model_validate(config)
        dtype = "bfloat16" if settings.rollout.dtype == "bfloat16" else "float32"
        loaded = load_model(model_path, dtype, settings.model.trust_remote_code)
        worker = build_rollout_worker(
            settings, build_task(settings), loaded.model, loaded.tokenizer, wait_for_tools=False
        )
        tokens = canary_tokens(loaded.model.get_input_embeddings().weight.shape[0])
        self._pool = InlinePool(worker, tokens, window=window)

    def hello(self) -> Hello:
        return hello()

    def publish(self, version: int, stored: Stored, canary: NDArray[np.float32]) -> list[Event]:
        """Take a version and drop those that the window leaves."""
        self._pool.publish(version, from_store(stored), canary)
        return self._pool.events(0.0)

    def restore(self, version: int, stored: Stored) -> None:
        """Take a version that is not the newest."""
        self._pool.restore(version, from_store(stored))

    def generate(self, jobs: Sequence[Job]) -> list[Event]:
        """Run a cohort to its end."""
        self._pool.submit(jobs)
        return self._pool.events(0.0)

    def versions(self) -> dict[int, Stored]:
        """What the engine holds, in its precision."""
        from estr.runtime.cluster.weights import to_store

        return {version: to_store(tensors) for version, tensors in self._pool.versions.items()}
