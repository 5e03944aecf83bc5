"""The parent's view of engine processes: pipes, jobs, signs of life, and which calls a dead one had been making."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Protocol

from estr.errors import RunError
from estr.runtime.calls import read_calls
from estr.runtime.messages import Died, Event, Job, Ready
from estr.runtime.worker import SIGNALS, WorkerSpec, worker_main

STOP_TIMEOUT = 5.0
_LONGEST_TICK = 1.0  # seconds
_PRELOADED = (
    "estr.runtime.helper",
    "torch",
    "transformers",
    "estr.runtime.worker",
    "estr.runtime.builders",
    "estr.models.load",
    "estr.transport",
    "estr.runtime.warm",
)


class WorkerHandle:
    """One engine process: its pipe, drained by a thread and filled by another, and the jobs it has.

    ``silence`` is the time in seconds since it was last heard of, as :class:`Watch` counts it.
    """

    def __init__(self, index: int, spec: WorkerSpec, inbox: queue.SimpleQueue[tuple[WorkerHandle, Event]]) -> None:
        self.index, self.spec, self.ready, self.silence = index, spec, False, 0.0
        self.jobs: dict[str, Job] = {}
        self._inbox, self._given_up = inbox, ""
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=worker_main, args=(spec, theirs), name=spec.name)
        self._status = threading.Lock()  # only one thread at a time may ask how the process ended
        with signals_held():
            self._process.start()
        self.pid = self._process.pid or 0
        theirs.close()
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._drain, self._feed)]
        for thread in self._threads:
            thread.start()

    def _drain(self) -> None:
        try:
            while True:
                event = self._connection.recv()
                self.silence = 0.0
                self.ready |= isinstance(event, Ready)
                self._inbox.put((self, event))
                if isinstance(event, Died):
                    return
        except (EOFError, OSError):
            self._inbox.put((self, Died(self._given_up or self._ending())))

    @property
    def alive(self) -> bool:
        with self._status:
            return self._process.is_alive()

    def join(self, timeout: float) -> int | None:
        """Wait for the end of the process; its exit status, None while it runs."""
        with self._status:
            self._process.join(timeout)
            return self._process.exitcode

    def _ending(self) -> str:
        return how_it_ended(self.spec.name, self.join(STOP_TIMEOUT))

    def _feed(self) -> None:
        """Sending may block while the worker is busy; the learner must not wait for that."""
        with contextlib.suppress(OSError, ValueError):
            while (message := self._outbox.get()) is not None:
                self._connection.send(message)

    def send_job(self, job: Job) -> None:
        """Hand a job over; raises RunError where its problem cannot be sent to another process."""
        try:
            ForkingPickler.dumps(job)
        except Exception as error:
            raise RunError(
                f"problem {job.problem.task_id} cannot be sent to an engine process ({type(error).__name__}: {error}); "
                "its answer and info must be plain data"
            ) from error
        self.jobs[job.key] = job
        self.send(job)

    def send(self, message: object) -> None:
        self._outbox.put(message)

    def give_up(self, reason: str) -> None:
        """Kill a process that does not answer; its end then carries this reason."""
        self._given_up = reason
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def retire(self) -> None:
        """Kill the process if it still runs and let go of everything that belonged to it."""
        if self.alive:
            self._kill()
        self.join(STOP_TIMEOUT)
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(STOP_TIMEOUT)
        if not any(thread.is_alive() for thread in self._threads):
            self._connection.close()

    def calls(self) -> set[str]:
        """Keys of the jobs whose environments were at work when the process was last heard of."""
        return read_calls(Path(self.spec.calls_path))


def how_it_ended(name: str, code: int | None) -> str:
    """What is said of a process that ended with this exit status."""
    if code is not None and code < 0:
        cause = " (out of memory, or by hand)" if code == -signal.SIGKILL else ""
        return f"{name} was killed by {signal.Signals(-code).name}{cause}"
    return f"{name} ended without a word (exit status {code})"


class Watched(Protocol):
    """An engine of which signs of life are expected; ``silence`` is set back to 0 when one comes."""

    spec: WorkerSpec
    ready: bool
    silence: float

    def give_up(self, reason: str) -> None: ...


class Watch:
    """A thread that gives up engine processes which show no sign of life for ``limit`` seconds, or are not ready after
    ``start`` seconds.

    Only time in which this thread itself ran is counted, so that a machine or a process group that was put to sleep
    does not make everything look dead.
    """

    def __init__(self, workers: Callable[[], Sequence[Watched]], limit: float, start: float) -> None:
        self._workers, self._limit, self._start = workers, limit, start
        self._tick = min(_LONGEST_TICK, limit / 4)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(self._tick):
            now = time.monotonic()
            self._count(min(now - before, 2 * self._tick))
            before = now

    def _count(self, seconds: float) -> None:
        for worker in self._workers():
            worker.silence += seconds
            limit, key = (self._limit, "engine_timeout") if worker.ready else (self._start, "start_timeout")
            if worker.silence > limit:
                worker.silence = 0.0
                worker.give_up(f"{worker.spec.name} gave no sign of life for {limit:g} s (runtime.{key})")

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(STOP_TIMEOUT)


def preload(modules: Sequence[str]) -> None:
    """Start the helper that engine processes are forked from: it has imported what they need, and has no threads.

    An engine so starts in a fraction of a second, also in the place of one that died. Modules that cannot be imported
    are left to the engine, which will say so.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *modules])
    with signals_held(), environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"):
        multiprocessing.forkserver.ensure_running()


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """These environment variables in here, those of before outside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """A process started inside begins with signals blocked, so that a Ctrl-C cannot reach it before it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # the tracker ignores the others by itself,
    resource_tracker.ensure_running()  # and starting it would unblock them
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
