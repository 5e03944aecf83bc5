"""Between schedule and pool: tickets become jobs, events become groups for the learner."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from estr.config import Config
from estr.environments.base import Problem, Task
from estr.errors import RunError
from estr.runtime.accounting import Accounting
from estr.runtime.builders import training_problem
from estr.runtime.journal import Backlog
from estr.runtime.messages import (
    Activity,
    Alive,
    Died,
    Event,
    Failed,
    Finished,
    Job,
    KeptTurn,
    Members,
    Progress,
    Synced,
    VersionWindow,
)
from estr.runtime.pools import Pool
from estr.runtime.selecting import NO_SPREAD, SpreadFilter
from estr.schedule import Group, Schedule, Ticket, Waiting

CANARY_TOLERANCE = 1e-3
_POLL = 0.25
_PAUSE, _PAUSES = 0.01, 10  # seconds between looks at what else came, before what came is made durable together


class Journal(Protocol):
    """Where each transition is made durable before anyone acts on it."""

    def batch(self) -> AbstractContextManager[None]: ...

    def issued(self, tickets: Sequence[Ticket], problem: Problem, version: int) -> None: ...

    def finished(self, results: Sequence[Finished]) -> None: ...

    def went_on(self, turns: Sequence[KeptTurn]) -> None: ...

    def failed(self, ticket: Ticket, reason: str) -> None: ...

    def dropped(self, group: int, reason: str) -> None: ...


class Collector:
    """Keeps the pool supplied and hands whole groups to the learner.

    ``minibatch_of`` maps a group's place in its rollout batch to the minibatch that trains it (lockstep needs to know
    at which version that is). ``check`` is called while waiting and may raise (an interrupt). ``extra_temperature`` is
    what the second half of a group with twice as many trajectories is sampled at (AEPO).
    """

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        pool: Pool,
        task: Task,
        journal: Journal,
        accounting: Accounting,
        *,
        notice: Callable[[str], None],
        minibatch_of: Callable[[int], int],
        check: Callable[[], None] = lambda: None,
        extra_temperature: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._extra_temperature = extra_temperature
        self._config, self._schedule, self._pool, self._task = config, schedule, pool, task
        self._journal, self._accounting = journal, accounting
        self._notice, self._minibatch_of, self._check = notice, minibatch_of, check
        self._lockstep = config.schedule.mode == "lockstep"
        self._problems: dict[int, Problem] = {}
        self._places: dict[int, int] = {}
        self._free_places: list[int] = []
        self._progress: dict[str, Progress] = {}
        self._backlog: list[tuple[int, dict[int, int]]] = []
        self._version = 0
        self._refusal: RunError | None = None
        self.selection = SpreadFilter.of(config)
        self.canary_error = float("nan")

    # ------------------------------------------------------------------ supply

    def fill(self, version: int) -> None:
        """Admit what the schedule allows at ``version`` and issue it; what a resumed run left behind goes first."""
        self._issue(self._admitted(version))

    def _placed(self, version: int) -> list[list[Ticket]]:
        """Admitted groups that have their problem. Where the task has none, the step before is filed all the same, and
        the loop is told when it asks for the next batch."""
        try:
            groups = self._admitted(version)
            self._place_all(groups)
        except RunError as error:
            self._refusal = error
            return []
        return groups

    def _admitted(self, version: int) -> list[list[Ticket]]:
        self._version = version
        groups = self._schedule.release(version)
        for _ in range(self._schedule.admissible(version)):
            if self._backlog:
                number, attempts = self._backlog.pop(0)
                groups.append(self._schedule.readmit(number, version, attempts))
            else:
                groups.append(self._schedule.admit(version))
        return groups

    def take_up(self, backlog: Backlog, version: int) -> None:
        """Go on with what an earlier process of this run had issued."""
        self._version, self._progress = version, dict(backlog.progress)
        begun = [progress.trajectory for progress in self._progress.values()]
        for number, finished in sorted(backlog.partial.items()):
            rows = finished + [trajectory for trajectory in begun if trajectory.group == number]
            first = min(int(t.action_versions[0]) if t.action_count else version for t in rows)
            self._schedule.take_up(number, first, backlog.attempts[number], finished)
            self._places[number] = len(self._places)
        self._issue(self._schedule.release(version))
        self._backlog = [(number, backlog.attempts[number]) for number in backlog.unstarted]

    def _issue(self, groups: Sequence[Sequence[Ticket]]) -> None:
        """Issue trajectories of admitted groups: durable together, and only then given to the pool."""
        with self._journal.batch():
            self._place_all(groups)
            jobs = self._issued(groups)
        if jobs:
            self._pool.submit(jobs)

    def _issued(self, groups: Sequence[Sequence[Ticket]]) -> list[Job]:
        """Write groups into the ledger as issued; their jobs may be submitted once that is durable."""
        return [job for tickets in groups if tickets for job in self._jobs(tickets)]

    def _place_all(self, groups: Sequence[Sequence[Ticket]]) -> None:
        for tickets in groups:
            if tickets:
                self._place(tickets[0].group)

    def _place(self, number: int) -> None:
        """Give a group its problem and its place in the rollout batch."""
        self._problems[number] = training_problem(self._task, number)
        if number not in self._places:
            self._places[number] = self._free_places.pop(0) if self._free_places else len(self._places)

    def _jobs(self, tickets: Sequence[Ticket]) -> list[Job]:
        """Write trajectories of a group into the ledger as issued, and what an engine is told of them."""
        problem = self._problems[tickets[0].group]
        self._journal.issued(tickets, problem, self._version)
        return [self._job(ticket, problem) for ticket in tickets]

    def _job(self, ticket: Ticket, problem: Problem) -> Job:
        begun = self._progress.pop(ticket.trajectory_id, None)
        return Job(
            group=ticket.group,
            sibling=ticket.sibling,
            attempt=ticket.attempt,
            problem=problem,
            run_seed=self._config.run.seed,
            kept=None if begun is None else KeptTurn.of(begun),
            min_version=self._version,
            window=self._window(ticket.group) if self._lockstep else None,
            explore=self._config.rollout.explores(ticket.sibling),
            heat=self._extra_temperature() if ticket.sibling >= self._config.rollout.group_size else 0.0,
        )

    def _window(self, number: int) -> VersionWindow:
        schedule = self._config.schedule
        target = self._version + self._minibatch_of(self._places[number])
        return VersionWindow(self._version, target, schedule.inter, schedule.intra, schedule.intra_every)

    # ------------------------------------------------------------------ demand

    def next_batch(self, version: int) -> list[Group]:
        """The next rollout batch, groups in order; waits for it, with a limit on time without progress.

        Raises:
            RunError: nothing moved for schedule.wait_timeout seconds, too many groups failed in a row, or an engine has
                wrong weights.
        """
        if self._refusal is not None:
            raise self._refusal
        last_progress = time.monotonic()
        while True:
            self._check()
            self.fill(version)
            batch = self._schedule.take(version)
            if not isinstance(batch, Waiting):
                self.selection.batch_taken()
                return self._in_order(batch)
            if self._absorb(self._gather(batch)):
                last_progress = time.monotonic()
            self._give_up_after(last_progress, batch)

    def absorb_waiting(self) -> None:
        """Take the events that are there, without waiting."""
        self._absorb(self._pool.events(0.0))

    def turn_over(self, file_step: Callable[[], None], version: int | None) -> None:
        """A step has ended: what ``file_step`` files of it, the events that are there, and the groups that may be
        issued at ``version`` (None: no group) become durable in one transaction."""
        events = self._pool.events(0.0)
        with self._journal.batch():
            file_step()
            self._make_durable(events)
            jobs = [] if version is None else self._issued(self._placed(version))
        if jobs:
            self._pool.submit(jobs)
        self._file_all(events)

    def _gather(self, waiting: Waiting) -> list[Event]:
        """Wait for events; those that cannot be the last ones of the rollout batch wait for others to come."""
        events = self._pool.events(_POLL)
        missing = max(1, waiting.needed - waiting.complete)  # trajectories, at least
        for _ in range(0 if self._lockstep or not events else _PAUSES):
            if any(isinstance(event, Failed | Died) for event in events):
                break
            if sum(isinstance(event, Finished) for event in events) >= missing:
                break
            time.sleep(_PAUSE)
            events += self._pool.events(0.0)
        return events

    def _in_order(self, groups: list[Group]) -> list[Group]:
        key = self._places.__getitem__ if self._lockstep else lambda number: number
        ordered = sorted(groups, key=lambda group: key(group.number))
        for group in ordered:
            self._problems.pop(group.number, None)
            self._places.pop(group.number, None)
        if not self._places:
            self._free_places.clear()
        return ordered

    def _give_up_after(self, last_progress: float, waiting: Waiting) -> None:
        limit = self._config.schedule.wait_timeout
        if time.monotonic() - last_progress > limit:
            raise RunError(
                f"nothing happened for {limit:.0f} s (schedule.wait_timeout) while the learner waited for {waiting}"
            )

    # ------------------------------------------------------------------ events

    def _absorb(self, events: Sequence[Event]) -> bool:
        """File events; whether any of them is progress."""
        with self._journal.batch():
            self._make_durable(events)
        return self._file_all(events)

    def _make_durable(self, events: Sequence[Event]) -> None:
        """Write results and turns into the ledger."""
        turns: dict[str, KeptTurn] = {}  # the newest of each trajectory that has not finished
        finished: list[Finished] = []
        for event in events:
            if isinstance(event, KeptTurn):
                turns[event.packed.name] = event
            elif isinstance(event, Finished):
                turns.pop(event.trajectory.trajectory_id, None)
                finished.append(event)
        self._finished(finished)
        self._journal.went_on([turn for turn in turns.values() if self._schedule.awaits(turn.ticket)])

    def _file_all(self, events: Sequence[Event]) -> bool:
        """Act on events of which the results are durable; whether any of them is progress."""
        self.selection.check()
        progress = False
        for event in events:
            progress |= self._file(event)
        return progress

    def _finished(self, results: Sequence[Finished]) -> None:
        taken: list[Finished] = []
        for result in results:
            if self._schedule.finish(result.trajectory):
                taken.append(result)
        self._journal.finished(taken)
        for number in dict.fromkeys(result.trajectory.group for result in taken):
            self._select(number)

    def _select(self, number: int) -> None:
        """Drop a group that is complete and does not train; the schedule then has room for another."""
        group = self._schedule.group(number)
        if group is not None and group.complete and self.selection.drops(group):
            self._schedule.drop(number)
            self._journal.dropped(number, NO_SPREAD)
            self._vacate(number)

    def _vacate(self, number: int) -> None:
        """A dropped group's place in the rollout batch is for the next one admitted."""
        self._free_places.append(self._places.pop(number))
        self._problems.pop(number, None)

    def _file(self, event: Event) -> bool:
        if isinstance(event, Failed):
            self._failed(event)
        elif isinstance(event, Synced):
            self._check_canary(event)
        elif isinstance(event, Activity):
            self._accounting.engine_activity(event)
            return event.sampled_tokens > 0
        elif isinstance(event, Members):
            if event.engines != self._accounting.engines:
                self._notice(f"engines at work: {event.engines}")
            self._accounting.engines = event.engines
        elif isinstance(event, Alive):
            return False
        elif isinstance(event, Died):
            self._notice(f"an engine process was replaced and its work issued again: {event.reason}")
        return True

    def _failed(self, event: Failed) -> None:
        job = event.job
        outcome = self._schedule.fail(job.group, job.sibling, final=event.final)
        if outcome is None:
            return
        again: list[Job] = []
        with self._journal.batch():
            self._journal.failed(Ticket(job.group, job.sibling, job.attempt), event.reason)
            if isinstance(outcome, Ticket):
                again += self._jobs([outcome])
            else:
                self._journal.dropped(outcome.number, f"a sibling failed: {event.reason}")
        self._pool.submit(again)
        if isinstance(outcome, Group):
            self._forget(outcome, event.reason)

    def _forget(self, group: Group, reason: str) -> None:
        self._pool.cancel_group(group.number)
        self._vacate(group.number)
        self._notice(f"group {group.number} was dropped: {reason}")
        if self._schedule.hopeless:
            raise RunError(f"{self._schedule.failed_in_a_row} groups in a row failed; the last one: {reason}")

    def _check_canary(self, event: Synced) -> None:
        self.canary_error = event.canary_error
        exact = self._config.rollout.dtype == "float32" and self._config.learner.dtype == "float32"
        if exact and not event.canary_error <= CANARY_TOLERANCE:
            raise RunError(
                f"an engine computes with wrong weights after taking version {event.version}: its canary "
                f"log-probabilities are off by {event.canary_error:.3g}"
            )
