"""The simulated cluster: the run's own loop and schedule on simulated engines, tools, learner and clock (SimPy).

    admit ─▶ wait for a rollout batch ─▶ optimizer steps ─▶ publish ─▶ again

Which group is admitted, waited for and trained is decided by ``estr.schedule.Schedule`` itself, so that a plan's
staleness follows the very rule that a run's does. All engines may wait for tools at once; the learner's ranks share the
tokens of a step evenly.
"""

from __future__ import annotations

import gc
import heapq
import random
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from estr.errors import MissingExtraError, RunError
from estr.plan.engine import Engine, Job
from estr.plan.outcome import Outcome, StepRecord, summarize
from estr.plan.sections import PlanConfig
from estr.plan.workload import DrawnWorkload, Profile, ToolWaits, Workload, tool_latency
from estr.schedule import Group, Schedule, ScheduleRules, Ticket, Waiting

try:
    import simpy
except ModuleNotFoundError as error:
    raise MissingExtraError("simpy", "plan") from error


def simulate(plan: PlanConfig, workload: Workload | None = None) -> Outcome:
    """Run ``plan`` for its steps. ``workload``: what to generate; the distributions of the plan by default.

    Raises:
        RunError: so many groups fail in a row that a run would have given up.
    """
    return Cluster(plan, workload or drawn_workload(plan)).run()


def drawn_workload(plan: PlanConfig) -> Workload:
    """Lengths and tool waits from the plan's distributions."""
    seed = plan.simulation.seed
    return DrawnWorkload(plan.workload, seed, ToolWaits(seed, tool_latency(plan.tools)))


@dataclass
class Counts:
    """Trajectories: what was issued is trained, dropped, failed or still there at the end."""

    issued: int = 0
    trained: int = 0
    dropped: int = 0
    failed: int = 0


@dataclass
class _Open:
    """A group that was admitted: what is known of its jobs."""

    jobs: list[Job] = field(default_factory=list)
    issued: int = 0


class Cluster:
    """One simulation; ``run`` it once."""

    def __init__(self, plan: PlanConfig, workload: Workload) -> None:
        self._plan, self._workload = plan, workload
        self.environment = simpy.Environment()
        section = plan.workload
        rules = ScheduleRules(
            prompts_per_step=section.prompts_per_step,
            group_size=section.group_size,
            steps_per_batch=plan.steps_per_batch,
            max_staleness=plan.staleness_bound,
            attempts=section.attempts,
        )
        self.schedule = Schedule(rules)
        self.engines = [
            Engine(
                self.environment,
                index,
                plan.cluster,
                plan.engine,
                plan.weights.sync_seconds,
                self._turn_ended,
                self._synced,
            )
            for index in range(plan.cluster.engines)
        ]
        self.counts = Counts()
        self.records: list[StepRecord] = []
        self._open: dict[int, _Open] = {}
        self._loads = [(0, index) for index in range(len(self.engines))]
        self._homeless: list[Job] = []
        self._complete = 0
        self._due: tuple[int, ...] = ()
        self._version = 0
        self._behind = 0
        self._published = -1
        self._arrived = self.environment.event()
        self._caught_up: simpy.Event | None = None
        self._dice = random.Random(f"{plan.simulation.seed}/failures")

    def run(self) -> Outcome:
        """Simulate until the last step is trained."""
        plan = self._plan
        if plan.cluster.failure_hours:
            for engine in self.engines:
                self._fail_later(engine)
        done = self.environment.process(self._learner())
        with _without_collections():
            self.environment.run(until=done)
        return summarize(plan, self)

    # ------------------------------------------------------------------ the learner

    @property
    def warm_steps(self) -> int:
        warm = self._plan.simulation.warm_steps
        return self._plan.staleness_bound + 4 if warm < 0 else warm

    def _learner(self) -> Generator[simpy.Event, None, None]:
        last = self.warm_steps + self._plan.simulation.steps
        yield from self._publish()
        while len(self.records) < last:
            before = self.environment.now
            groups = yield from self._next_batch()
            waited = self.environment.now - before
            yield from self._train(groups, waited)

    def _next_batch(self) -> Generator[simpy.Event, None, list[Group]]:
        while True:
            self._admit()
            if self._complete >= self.schedule.rules.prompts_per_step and not self._due:
                batch = self.schedule.take(self._version)
                if not isinstance(batch, Waiting):
                    self._complete -= len(batch)
                    return batch
                self._due = batch.due
            self._arrived = self.environment.event()
            yield self._arrived

    def _train(self, groups: list[Group], waited: float) -> Generator[simpy.Event, None, None]:
        plan, learner = self._plan, self._plan.learner
        parts = _split(sorted(groups, key=lambda group: group.number), plan.workload.minibatches)
        opened = {group.number: self._open.pop(group.number) for group in groups}
        for epoch in range(plan.workload.epochs):
            for part in parts:
                jobs = [job for group in part for job in opened[group.number].jobs]
                tokens = sum(job.profile.tokens for job in jobs)
                yield self.environment.timeout(
                    learner.seconds_per_step + learner.seconds_per_token * tokens / plan.cluster.learner_ranks
                )
                target, self._version = self._version, self._version + 1
                yield from self._publish()
                yield self.environment.timeout(learner.overhead_seconds)
                self._record(jobs, target, waited, tokens, fresh=epoch == 0)
                waited = 0.0

    def _publish(self) -> Generator[simpy.Event, None, None]:
        """Two buffers: the one before the last is written when every engine has left it."""
        if self._behind:
            self._caught_up = self.environment.event()
            yield self._caught_up
            self._caught_up = None
        yield self.environment.timeout(self._plan.weights.publish_seconds)
        self._published = self._version
        self._behind = sum(engine.up for engine in self.engines)
        for engine in self.engines:
            engine.take(self._published)

    def _synced(self, engine: Engine) -> None:
        if engine.version == self._published:
            self._one_less_behind()

    def _one_less_behind(self) -> None:
        self._behind -= 1
        if self._behind == 0 and self._caught_up is not None and not self._caught_up.triggered:
            self._caught_up.succeed()

    def _record(self, jobs: list[Job], target: int, waited: float, tokens: int, *, fresh: bool) -> None:
        self.counts.trained += len(jobs) if fresh else 0
        self.records.append(
            StepRecord(
                ended=self.environment.now,
                waited=waited,
                action_tokens=sum(job.profile.action_tokens for job in jobs),
                tokens=tokens,
                busy=sum(engine.busy_until_now() for engine in self.engines),
                generated=sum(engine.totals.tokens for engine in self.engines),
                intra=[job.last_version - job.first_version for job in jobs] if fresh else [],
                inter=[target - job.last_version for job in jobs] if fresh else [],
            )
        )

    # ------------------------------------------------------------------ admission and results

    def _admit(self) -> None:
        for _ in range(self.schedule.admissible(self._version)):
            tickets = self.schedule.admit(self._version)
            number = tickets[0].group
            self._open[number] = _Open()
            for ticket, profile in zip(tickets, self._workload.profiles(number, len(tickets)), strict=True):
                self._issue(ticket, self._job(ticket, profile))

    def _job(self, ticket: Ticket, profile: Profile) -> Job:
        waits = self._workload.waits(ticket.group, ticket.sibling, ticket.attempt, len(profile.replies))
        rate = self._plan.tools.failure_rate
        seed = f"{self._plan.simulation.seed}/{ticket.group}/{ticket.sibling}/{ticket.attempt}/fails"
        fails = rate > 0 and random.Random(seed).random() < rate
        return Job(ticket.group, ticket.sibling, ticket.attempt, profile, tuple(waits), fails)

    def _issue(self, ticket: Ticket, job: Job) -> None:
        self.counts.issued += 1
        opened = self._open[ticket.group]
        opened.jobs = [other for other in opened.jobs if other.sibling != job.sibling] + [job]
        self._place(job)

    def _place(self, job: Job) -> None:
        """Give a job to the engine that has the fewest, as the run's pool does."""
        while self._loads:
            load, index = self._loads[0]
            engine = self.engines[index]
            if engine.up and load == engine.jobs:
                heapq.heapreplace(self._loads, (load + 1, index))
                engine.submit(job)
                return
            if engine.up and load > engine.jobs:
                heapq.heapreplace(self._loads, (engine.jobs, index))
            else:
                heapq.heappop(self._loads)
        self._homeless.append(job)

    def _lighter(self, engine: Engine) -> None:
        """An engine has a job less."""
        if engine.up:
            heapq.heappush(self._loads, (engine.jobs, engine.index))

    def _turn_ended(self, engine: Engine, job: Job) -> None:
        if job.turn == len(job.profile.turns) - 1:
            engine.release(job)
            self._lighter(engine)
            self._finished(job)
            return
        seconds = job.waits[job.turn]
        if seconds <= 0:
            self._replied(job)
            return
        timer = self.environment.timeout(seconds)
        timer.callbacks.append(lambda _: self._replied(job))

    def _replied(self, job: Job) -> None:
        if not job.live:
            return
        job.unread = job.profile.replies[job.turn] + 1  # the last token of the turn is not in the cache
        job.turn += 1
        if job.engine < 0:
            self._place(job)
        else:
            self.engines[job.engine].reply(job)

    def _finished(self, job: Job) -> None:
        if job.fails:
            self._failed(job)
        else:
            self.schedule.finish(job.trajectory())
            group = self.schedule.group(job.group)
            if group is not None and group.complete:
                self._complete += 1
                if job.group in self._due:
                    self._due = ()
                if self._complete >= self.schedule.rules.prompts_per_step and not self._due:
                    self._tell()

    def _failed(self, job: Job) -> None:
        outcome = self.schedule.fail(job.group, job.sibling)
        self.counts.failed += 1
        if isinstance(outcome, Ticket):
            self._issue(outcome, self._job(outcome, job.profile))
        elif outcome is not None:
            opened = self._open.pop(job.group)
            self.counts.dropped += len(opened.jobs) - 1
            for other in opened.jobs:
                other.live = False
            for engine in {other.engine for other in opened.jobs if other.engine >= 0}:
                self.engines[engine].cancel(job.group)
                self._lighter(self.engines[engine])
            self._due = ()
            if self.schedule.hopeless:
                raise RunError(
                    f"{self.schedule.failed_in_a_row} groups in a row fail with tools.failure_rate = "
                    f"{self._plan.tools.failure_rate:g}; a run would give up: lower it or raise workload.attempts"
                )
            self._tell()

    def _tell(self) -> None:
        if not self._arrived.triggered:
            self._arrived.succeed()

    # ------------------------------------------------------------------ engines that fail

    def _fail_later(self, engine: Engine) -> None:
        delay = self._dice.expovariate(1.0 / (3600.0 * self._plan.cluster.failure_hours))
        timer = self.environment.timeout(delay)
        timer.callbacks.append(lambda _: self._engine_failed(engine))

    def _engine_failed(self, engine: Engine) -> None:
        if engine.version != self._published:
            self._one_less_behind()
        for job in engine.fail():
            self._place(job)
        timer = self.environment.timeout(self._plan.cluster.restart_seconds)
        timer.callbacks.append(lambda _: self._engine_back(engine))

    def _engine_back(self, engine: Engine) -> None:
        engine.restart()
        self._lighter(engine)
        homeless, self._homeless = self._homeless, []
        for job in homeless:
            self._place(job)
        self._fail_later(engine)


@contextmanager
def _without_collections() -> Iterator[None]:
    """No cyclic garbage collection: it would look through millions of jobs that are all in use."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _split(groups: list[Group], parts: int) -> list[list[Group]]:
    """Contiguous minibatches of nearly one size."""
    edges = [round(i * len(groups) / parts) for i in range(parts + 1)]
    return [groups[a:b] for a, b in pairwise(edges)]
