"""Schedule, ledger and storage with scripted engines: trajectories a second, and whether each costs the same for ever.

    python -m benchmarks.bookkeeping [--trajectories 10000000] [--durable 60000] [--short] [--json PATH]

1,000 engines that finish what they are given in random order, 100,000 trajectories in flight, rollout batches of 500
groups of 8. In memory: admission, finishing, batches. Durable: the same with every transition in the ledger (SQLite,
synchronous = FULL, one commit for 512 results), then also with every row in Parquet, written by the background thread.
A run is cut into ten parts; the mean cost of the last three over that of the second to fourth says whether cost is flat
(the first has caches to warm and arrays to fill).
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.common import results
from benchmarks.common.timing import Spread
from estr.config import Config
from estr.environments.base import Problem
from estr.runtime.journal import RunJournal
from estr.runtime.messages import Finished
from estr.schedule import Group, Schedule, ScheduleRules, Ticket
from estr.storage.ledger import Ledger
from estr.storage.rollout_files import RolloutWriter
from estr.storage.rollouts import Settlement
from estr.trajectory import Segment, Trajectory

GROUP_SIZE = 8
RESULTS_PER_COMMIT = 512
PARTS = 10
COMMIT_EVERY = 5  # optimizer steps between checkpoints, after which settled rows may leave the spool


class Journal(Protocol):
    """What a run writes down."""

    def batch(self) -> AbstractContextManager[None]: ...

    def issued(self, tickets: Sequence[Ticket], problem: Problem, version: int) -> None: ...

    def finished(self, trajectories: Sequence[Trajectory]) -> None: ...


class Nowhere:
    """Nothing is written down."""

    def batch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def issued(self, tickets: Sequence[Ticket], problem: Problem, version: int) -> None:
        pass

    def finished(self, trajectories: Sequence[Trajectory]) -> None:
        pass

    def trained(self, groups: list[Group], step: int) -> None:
        pass


class LedgerAlone:
    """Every transition in the ledger; with ``rows`` also every trajectory in rollouts/."""

    def __init__(self, directory: Path, *, rows: bool) -> None:
        self._ledger = Ledger(directory / "ledger.sqlite")
        self._rollouts = RolloutWriter(directory / "rollouts", background=True) if rows else None
        if self._rollouts is not None:
            self._rollouts.after_store = self._ledger.move_log
        config = Config.model_validate({"rollout": {"group_size": GROUP_SIZE}})
        self._journal = RunJournal(config, self._ledger, self._rollouts)  # type: ignore[arg-type]
        self.batch, self.issued = self._journal.batch, self._journal.issued

    def finished(self, trajectories: Sequence[Trajectory]) -> None:
        """Packed here, which an engine process does in a run."""
        self._journal.finished([Finished(trajectory) for trajectory in trajectories])

    def trained(self, groups: list[Group], step: int) -> None:
        trajectories = [t for group in groups for t in group.trajectories]
        if self._rollouts is None:
            self._ledger.settle((t.trajectory_id for t in trajectories), step)
        else:
            settlement = Settlement("trained", trained_step=step, target_version=step - 1, advantage=0.0)
            self._journal.trained([(t, settlement) for t in trajectories], step)
            self._journal.store_rows()
        if step % COMMIT_EVERY == 0:
            self._ledger.commit(step)

    def close(self) -> None:
        if self._rollouts is not None:
            self._rollouts.close()
        self._ledger.close()


class Engines:
    """Scripted engines: each has a queue, and one of them at random finishes what it began first."""

    def __init__(self, count: int, tokens: int) -> None:
        self._queues: list[deque[Ticket]] = [deque() for _ in range(count)]
        self._busy: list[int] = []
        self._next = 0
        self._random = random.Random(0)
        self._segment = _segment(tokens)

    def submit(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            queue = self._queues[self._next]
            queue.append(ticket)
            self._busy.append(self._next)
            self._next = (self._next + 1) % len(self._queues)

    def finish(self, count: int) -> Iterator[Trajectory]:
        for _ in range(min(count, len(self._busy))):
            place = self._random.randrange(len(self._busy))
            engine, self._busy[place] = self._busy[place], self._busy[-1]
            self._busy.pop()
            ticket = self._queues[engine].popleft()
            yield Trajectory(
                group=ticket.group,
                sibling=ticket.sibling,
                attempt=ticket.attempt,
                task_id="scripted",
                prompt="",
                seed=0,
                segments=[self._segment],
                reward=1.0,
                finish_reason="stop",
            )


def _segment(tokens: int) -> Segment:
    action = np.arange(tokens) >= tokens // 3
    column = np.where(action, np.float32(-0.5), np.float32("nan"))
    return Segment(np.arange(tokens, dtype=np.int32), action, column, column, np.where(action, 0, -1).astype(np.int32))


def drive(
    journal: Nowhere | LedgerAlone, total: int, flight: int, engines: int, batch: int, tokens: int
) -> list[float]:
    """Seconds per trajectory in each of ten equal parts of a run that trains ``total`` trajectories."""
    steps = max(PARTS, total // (batch * GROUP_SIZE))
    rules = ScheduleRules(
        prompts_per_step=batch, group_size=GROUP_SIZE, max_staleness=flight // (batch * GROUP_SIZE) - 1
    )
    schedule, pool, problem = Schedule(rules), Engines(engines, tokens), Problem("scripted", "")
    marks, version, start = [], 0, 0.0
    while version < steps:
        with journal.batch():
            for _ in range(schedule.admissible(version)):
                tickets = schedule.admit(version)
                journal.issued(tickets, problem, version)
                pool.submit(tickets)
        if not start:
            start = time.perf_counter()  # the first fill is the only time when nothing finishes
        groups = schedule.take(version)
        if not isinstance(groups, list):
            with journal.batch():
                finished = list(pool.finish(RESULTS_PER_COMMIT))
                journal.finished(finished)
                for trajectory in finished:
                    schedule.finish(trajectory)
            continue
        version += 1
        journal.trained(groups, version)
        if version * PARTS // steps > len(marks):
            marks.append(time.perf_counter())
    bounds = [start, *marks]
    return [(b - a) / (steps / PARTS * batch * GROUP_SIZE) for a, b in zip(bounds, marks, strict=False)]


def measure(result: results.Result, name: str, journal: Nowhere | LedgerAlone, aim: float | None, **sizes: int) -> None:
    costs = drive(journal, **sizes)
    rate = len(costs) / sum(costs)
    result.measured(f"{name}: rate", Spread((rate,)), "trajectories/s", aim)
    result.measured(f"{name}: cost by tenth of the run", Spread(tuple(1e6 * cost for cost in costs)), "µs a trajectory")
    flat = statistics.mean(costs[-3:]) / statistics.mean(costs[1:4])
    result.ratio(f"{name}: cost late / early", Spread((flat,)), None if aim is None else 1.25, higher=False)


def main() -> None:
    options = results.parser(__doc__, repeats=1)
    options.add_argument("--trajectories", type=int, default=10_000_000, help="trained in memory")
    options.add_argument("--durable", type=int, default=60_000, help="trained with the ledger")
    arguments = options.parse_args()
    memory = {"total": arguments.trajectories, "flight": 100_000, "engines": 1000, "batch": 500, "tokens": 8}
    durable = {"total": arguments.durable, "flight": 8_000, "engines": 1000, "batch": 100, "tokens": 150}
    if arguments.short:
        memory = {"total": 8_000, "flight": 1_600, "engines": 20, "batch": 10, "tokens": 8}
        durable = {"total": 800, "flight": 320, "engines": 20, "batch": 10, "tokens": 20}
    result = results.begin("bookkeeping", arguments, group_size=GROUP_SIZE, memory=memory, durable=durable)
    aims = (None, None, None) if arguments.short else (20_000.0, 2_000.0, None)
    measure(result, "in memory", Nowhere(), aims[0], **memory)
    for name, rows, aim in (("durable ledger", False, aims[1]), ("ledger and Parquet", True, aims[2])):
        with tempfile.TemporaryDirectory() as folder:
            journal = LedgerAlone(Path(folder), rows=rows)
            measure(result, name, journal, aim, **durable)
            journal.close()
    results.finish(result, arguments.json)


if __name__ == "__main__":
    main()
