"""The parent's view of engine processes: pipes, jobs, signs of life, and which calls a dead one had been making."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from estr.runtime.calls import read_calls
from estr.runtime.messages import Died, Event, Job, Ready
from estr.runtime.worker import SIGNALS, WorkerSpec, worker_main

STOP_TIMEOUT = 5.0
_LONGEST_TICK = 1.0  # seconds


class WorkerHandle:
    """One engine process: its pipe, drained by a thread and filled by another, and the jobs it has.

    ``silence`` is the time in seconds since it was last heard of, as :class:`Watch` counts it.
    """

    def __init__(self, index: int, spec: WorkerSpec, inbox: queue.SimpleQueue[tuple[WorkerHandle, Event]]) -> None:
        self.index, self.spec, self.ready, self.silence = index, spec, False, 0.0
        self.jobs: dict[str, Job] = {}
        self._inbox, self._given_up = inbox, ""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=worker_main, args=(spec, theirs), name=spec.name)
        with _signals_held():
            self.process.start()
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

    def _ending(self) -> str:
        self.process.join(STOP_TIMEOUT)
        code = self.process.exitcode
        if code is not None and code < 0:
            cause = " (out of memory, or by hand)" if code == -signal.SIGKILL else ""
            return f"{self.spec.name} was killed by {signal.Signals(-code).name}{cause}"
        return f"{self.spec.name} ended without a word (exit status {code})"

    def _feed(self) -> None:
        """Sending may block while the worker is busy; the learner must not wait for that."""
        with contextlib.suppress(OSError, ValueError):
            while (message := self._outbox.get()) is not None:
                self._connection.send(message)

    def send_job(self, job: Job) -> None:
        self.jobs[job.key] = job
        self.send(job)

    def send(self, message: object) -> None:
        self._outbox.put(message)

    def give_up(self, reason: str) -> None:
        """Kill a process that does not answer; its end then carries this reason."""
        self._given_up = reason
        self.process.kill()

    def retire(self) -> None:
        """Kill the process if it still runs and let go of everything that belonged to it."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(STOP_TIMEOUT)
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(STOP_TIMEOUT)
        if not any(thread.is_alive() for thread in self._threads):
            self._connection.close()

    def calls(self) -> set[str]:
        """Keys of the jobs whose environments were at work when the process was last heard of."""
        return read_calls(Path(self.spec.calls_path))


class Watch:
    """A thread that gives up engine processes which show no sign of life for ``limit`` seconds, or are not ready after
    ``start`` seconds.

    Only time in which this thread itself ran is counted, so that a machine or a process group that was put to sleep
    does not make everything look dead.
    """

    def __init__(self, workers: Callable[[], Sequence[WorkerHandle]], limit: float, start: float) -> None:
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


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """A process started inside begins with signals blocked, so that a Ctrl-C cannot reach it before it ignores them."""
    resource_tracker.ensure_running()  # starting it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
