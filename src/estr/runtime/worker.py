"""An engine process: episodes on a local engine, weights from shared memory, results through a pipe."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from estr.config import Config
from estr.errors import EstrError
from estr.runtime.calls import SharedCalls
from estr.runtime.channels import Channel, Weights
from estr.runtime.kernel import end_with_parent, limit_memory, take_name
from estr.runtime.messages import Activity, Alive, Died, Event, Interval, Job, Ready, Synced, Work

if TYPE_CHECKING:
    from estr.engines.interface import EngineCounters

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the parent alone decides what they mean
_REPORT_EVERY = 0.2  # seconds between activity reports
_ALIVE_EVERY = 1.0  # seconds of silence after which a worker says that it lives
_JOIN_GAP = 0.005  # seconds; shorter pauses do not break an interval of the timeline
_TOOL_POLL = 0.001  # seconds between looks at tools when nothing can be decoded
_IDLE_POLL = 0.02  # seconds between looks at the pipe when there is no work


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker needs to start; plain data."""

    name: str
    config: dict[str, Any]
    model_path: str
    manifest: str
    reader: int
    threads: int
    calls_path: str


@dataclass(frozen=True)
class CancelGroup:
    group: int


@dataclass(frozen=True)
class Stop:
    pass


def end_with_learner() -> None:
    """Make this process end when the learner's ends, whatever this one is doing.

    A thread waits for the learner; the process this one was forked from ends with the learner too, and the kernel then
    kills this one.
    """
    learner = multiprocessing.parent_process()
    assert learner is not None
    end_with_parent()
    threading.Thread(target=lambda: (wait([learner.sentinel]), os._exit(1)), daemon=True).start()


def worker_main(spec: WorkerSpec, connection: Connection) -> None:
    """Entry point of the process."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    end_with_learner()
    take_name(spec.name)
    limit_memory(spec.config["runtime"]["engine_memory"])
    try:
        EngineProcess(spec, connection).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except EstrError as error:
        _last_words(connection, str(error))
    except Exception as error:
        if os.environ.get("ESTR_DEBUG"):
            raise
        _last_words(connection, f"{type(error).__name__}: {error}")


def _last_words(connection: Connection, reason: str) -> None:
    with contextlib.suppress(OSError):
        connection.send(Died(reason, said=True))


class Timeline:
    """Intervals of one actor, short pauses joined, and exact busy seconds."""

    def __init__(self, actor: str) -> None:
        self.actor = actor
        self._kind, self._start, self._end, self._version = "", 0.0, 0.0, -1
        self._work: Work | None = None
        self._done: list[Interval] = []

    def add(self, kind: str, start: float, end: float, version: int, work: Work | None = None) -> None:
        if kind == self._kind and version == self._version and start - self._end < _JOIN_GAP:
            self._end = end
            if self._work is not None and work is not None:
                self._work.add(work)
            return
        self._close()
        self._kind, self._start, self._end, self._version, self._work = kind, start, end, version, work

    def _close(self) -> None:
        if self._end > self._start:
            self._done.append(Interval(self.actor, self._kind, self._start, self._end, self._version, self._work))
        self._kind, self._start = "", self._end

    def take(self) -> list[Interval]:
        self._close()
        done, self._done = self._done, []
        return done


class EngineProcess:
    """The worker's loop: take messages, take weights, tick, send results."""

    def __init__(self, spec: WorkerSpec, connection: Channel, weights: Weights | None = None) -> None:
        """``weights``: where they come from; by default the shared memory that ``spec`` names."""
        import torch

        from estr.runtime.builders import build_engine_worker, build_task, canary_tokens
        from estr.transport import WeightReader

        torch.set_num_threads(spec.threads)
        config = Config.model_validate(spec.config)
        calls = SharedCalls(Path(spec.calls_path))
        self._worker, vocabulary = build_engine_worker(config, build_task(config), spec.model_path, calls)
        self._engine = self._worker.engine
        self._reader: Weights = weights or WeightReader(spec.manifest, spec.reader)
        self._own = config.rollout.dtype != "float32" or config.rollout.engine == "vllm"
        self._canary = canary_tokens(vocabulary)
        self._connection = connection
        self._held: list[Job] = []  # jobs that wait for their version
        self._timeline = Timeline(spec.name)
        self._reported, self._sampled = time.monotonic(), 0
        self._sent = self._reported
        self._alive_every = min(_ALIVE_EVERY, config.runtime.engine_timeout / 4)
        self.stopped = False

    def run(self) -> None:
        try:
            self._send(Ready())
            while not self.stopped:
                self.turn()
        finally:
            self.close()

    def close(self) -> None:
        """Let go of what the engine holds beside this process."""
        self._engine.close()

    def turn(self) -> None:
        """Once round: what came in, new weights, one engine step, what goes out."""
        self._receive()
        self._take_weights()
        self._submit_held()
        self._tick()
        self._report()

    def _receive(self) -> None:
        wait = 0.0
        if self._worker.idle:
            wait = _TOOL_POLL if self._worker.running or self._held else _IDLE_POLL
        while self._connection.poll(wait):
            message = self._connection.recv()
            if isinstance(message, Job):
                self._held.append(message)
            elif isinstance(message, CancelGroup):
                self._worker.cancel_group(message.group)
                self._held = [job for job in self._held if job.group != message.group]
            elif isinstance(message, Stop):
                self.stopped = True
            wait = 0.0

    def _take_weights(self) -> None:
        if self._reader.latest in (self._reader.version, -1):
            return
        start = time.monotonic()
        publication = self._reader.poll()
        if publication is None:
            return
        self._engine.set_weights(publication.version, publication.tensors, own=self._own)
        if self._own:
            self._reader.leave()
        error = np.abs(self._engine.canary(self._canary) - publication.canary).max()
        self._timeline.add("sync", start, time.monotonic(), publication.version)
        self._send(Synced(publication.version, float(error)))

    def _submit_held(self) -> None:
        ready = [job for job in self._held if job.min_version <= self._engine.version]
        if ready:
            self._held = [job for job in self._held if job.min_version > self._engine.version]
            for job in ready:
                self._worker.submit(job)

    def _tick(self) -> None:
        if self._worker.idle and not self._worker.running:
            return
        start, before = time.monotonic(), dataclasses.replace(self._engine.counters)
        results = self._worker.tick()
        for result in results:
            self._send(result)
        work = self._work_since(before)
        if work.sampled_tokens or work.prefilled_tokens:
            self._timeline.add("generate", start, time.monotonic(), self._engine.version, work)

    def _work_since(self, before: EngineCounters) -> Work:
        now = self._engine.counters
        return Work(
            now.decode_steps - before.decode_steps,
            now.sampled_tokens - before.sampled_tokens,
            now.prefilled_tokens - before.prefilled_tokens,
            self._worker.take_tool_seconds(),
        )

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported < _REPORT_EVERY:
            return
        sampled = self._engine.counters.sampled_tokens
        intervals = self._timeline.take()
        if intervals or sampled != self._sampled:
            self._send(Activity(intervals, sampled - self._sampled))
        elif now - self._sent >= self._alive_every:
            self._send(Alive())
        self._reported, self._sampled = now, sampled

    def _send(self, event: Event) -> None:
        self._connection.send(event)
        self._sent = time.monotonic()
