"""Where a process is killed: at the n-th passage of a function of the product, before or after it, or in a file call.

Nothing in the product knows of this: the harness wraps the functions before it forks.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Role = Literal["learner", "engine"]


@dataclass(frozen=True)
class Point:
    """``target`` is ``module:attribute.path``; ``modes`` are those in which it is passed."""

    phase: str
    target: str
    when: Literal["before", "after"]
    role: Role = "learner"
    modes: tuple[str, ...] = ("async", "sync", "lockstep")
    most: int = 4  # highest passage that is drawn

    @property
    def name(self) -> str:
        return f"{self.phase}: {self.when} {self.target.partition(':')[2]}"


PROCESSES = ("async", "sync")
POINTS = (
    Point("start", "estr.storage.run_record:RunRecord.begin", "after", most=1),
    Point("issuing", "estr.storage.ledger:Ledger.issue_group", "after", most=12),
    Point("issuing", "estr.runtime.pools:ProcessPool.submit", "before", modes=PROCESSES, most=6),
    Point("issuing", "estr.runtime.pools:ProcessPool.submit", "after", modes=PROCESSES, most=6),
    Point("generating", "estr.engines.local:LocalEngine.step", "before", "engine", PROCESSES, most=40),
    Point("generating", "estr.engines.local:LocalEngine.step", "after", modes=("lockstep",), most=40),
    Point("waiting for a tool", "torture.parts:TortureEnvironment.step", "after", "engine", PROCESSES, most=12),
    Point("waiting for a tool", "torture.parts:TortureEnvironment.step", "before", "engine", PROCESSES, most=12),
    Point("waiting for a tool", "torture.parts:TortureEnvironment.step", "before", modes=("lockstep",), most=12),
    Point("finished, not sent", "estr.runtime.rollout:RolloutWorker._finish", "after", "engine", PROCESSES, most=6),
    Point("finished, not filed", "estr.storage.ledger:Ledger.finish_packed", "before", most=8),
    Point("finished, not taken", "estr.storage.ledger:Ledger.finish_packed", "after", most=8),
    Point("finished, not taken", "estr.runtime.collector:Collector._absorb", "after", most=20),
    Point("a turn kept", "estr.storage.ledger:Ledger.keep_packed_turns", "after", modes=PROCESSES, most=4),
    Point("a failed attempt", "estr.runtime.journal:RunJournal.failed", "after", most=2),
    Point("a dropped group", "estr.runtime.journal:RunJournal.dropped", "after", most=1),
    Point("taken", "estr.runtime.collector:Collector.next_batch", "after", most=5),
    Point("in the learner", "torture.parts:applying", "before", most=6),
    Point("in the learner", "torture.parts:applying", "after", most=6),
    Point("publishing", "estr.transport.shared_weights:WeightPublisher._wait_until_left", "before", modes=PROCESSES),
    Point("publishing", "estr.transport.shared_weights:WeightPublisher._wait_until_left", "after", modes=PROCESSES),
    Point("publishing", "estr.transport.shared_weights:WeightPublisher.publish", "after", modes=PROCESSES, most=6),
    Point("taking weights", "estr.transport.shared_weights:WeightReader.poll", "after", "engine", PROCESSES, most=5),
    Point("settling", "estr.storage.ledger:Ledger.settle", "before", most=6),
    Point("settling", "estr.storage.ledger:Ledger.settle", "after", most=6),
    Point("settling", "estr.runtime.journal:RunJournal.trained", "after", most=6),
    Point("storing rows", "estr.storage.rollout_files:write_atomic", "before", most=6),
    Point("storing rows", "estr.storage.rollout_files:write_atomic", "after", most=6),
    Point("moving the log", "estr.storage.ledger_database:LedgerDatabase.move_log", "before", most=4),
    Point("moving the log", "estr.storage.ledger_database:LedgerDatabase.move_log", "after", most=4),
    Point("metrics", "estr.storage.metrics:write_all", "before", most=10),
    Point("metrics", "estr.storage.metrics:write_all", "after", most=10),
    Point("writing a checkpoint", "estr.storage.checkpoints:_write_content", "before", most=3),
    Point("writing a checkpoint", "estr.storage.checkpoints:_write_content", "after", most=3),
    Point("writing a checkpoint", "estr.storage.checkpoints:_write_manifest", "after", most=3),
    Point("writing a checkpoint", "estr.storage.checkpoints:_sync_tree", "after", most=3),
    Point("renaming a checkpoint", "estr.storage.checkpoints:_publish", "before", most=3),
    Point("renaming a checkpoint", "estr.storage.checkpoints:_publish", "after", most=3),
    Point("retention", "estr.storage.checkpoints:_remove", "before", most=3),
    Point("retention", "estr.storage.checkpoints:_remove", "after", most=3),
    Point("committing", "estr.storage.ledger:Ledger.commit", "before", most=3),
    Point("committing", "estr.storage.ledger:Ledger.commit", "after", most=3),
    Point("resuming", "estr.storage.metrics:MetricsWriter.withdraw_after", "after", most=1),
    Point("resuming", "estr.storage.rollout_files:RolloutWriter.withdraw_after", "before", most=1),
    Point("resuming", "estr.storage.rollout_files:RolloutWriter.withdraw_after", "after", most=1),
    Point("resuming", "estr.storage.checkpoints:withdraw_checkpoints_after", "after", most=1),
    Point("resuming", "estr.storage.ledger:Ledger.rewind_to", "before", most=1),
    Point("resuming", "estr.storage.ledger:Ledger.rewind_to", "after", most=1),
    Point("resuming", "estr.runtime.collector:Collector.take_up", "after", most=1),
    Point("starting an engine", "estr.runtime.worker:EngineProcess.__init__", "after", "engine", PROCESSES, most=1),
    Point("ending", "estr.runtime.journal:RunJournal.unfinished", "before", most=1),
    Point("ending", "estr.runtime.journal:RunJournal.unfinished", "after", most=1),
)

FILE_CALLS = ("write", "fsync", "rename", "unlink", "ftruncate")
"""Of these the n-th call of the run process is killed in the middle: half a write, no rename."""


class Trap:
    """Kills the process that passes ``point`` (None: a file call) for the ``nth`` time, once: ``latch`` then exists."""

    def __init__(self, point: Point | None, nth: int, latch: Path) -> None:
        self.point, self.nth, self.latch = point, nth, latch
        self._passed = 0
        self._run_process = 0

    def __str__(self) -> str:
        name = "a file call" if self.point is None else self.point.name
        return f"{name}, passage {self.nth}"

    def arm(self) -> None:
        """In the run process, before it starts its engines."""
        self._run_process = os.getpid()
        if self.point is None:
            for name in FILE_CALLS:
                setattr(os, name, self._half(name, getattr(os, name)))
            return
        holder, name = _resolve(self.point.target)
        setattr(holder, name, self._wrapped(getattr(holder, name)))

    def _here(self) -> bool:
        role = "learner" if os.getpid() == self._run_process else "engine"
        if self.point is not None and self.point.role != role:
            return False
        if self.point is None and role != "learner":
            return False
        self._passed += 1
        return self._passed == self.nth

    def _spring(self) -> None:
        try:
            os.close(os.open(self.latch, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        assert self.point is not None
        before = self.point.when == "before"

        def passing(*arguments: Any, **named: Any) -> Any:
            here = self._here()
            if here and before:
                self._spring()
            result = real(*arguments, **named)
            if here and not before:
                self._spring()
            return result

        return passing

    def _half(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def passing(*arguments: Any, **named: Any) -> Any:
            if self._here():
                if name == "write":
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                self._spring()
            return real(*arguments, **named)

        return passing


def _resolve(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    *holders, name = path.split(".")
    found: Any = importlib.import_module(module)
    for holder in holders:
        found = getattr(found, holder)
    return found, name
