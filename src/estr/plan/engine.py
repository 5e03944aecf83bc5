"""A simulated engine: continuous batching as the local engine does it, step by step but only where something changes.

Its rows go the way of ``estr.engines.local``: queued → pending (tokens to read) → active (one token a decode step) →
parked (a tool is at work; the cache stays) → pending again, or released. A decode step takes ``seconds_per_step`` plus
``seconds_per_row`` a row; what is read takes ``seconds_per_prefill_token`` a token and holds up everybody. Between two
changes (a turn that ends, work or weights that arrive) all steps are alike, so they are one event: the times are
those of a simulation of every single step.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from estr.plan.sections import ClusterSection, EngineSection
from estr.plan.workload import Profile
from estr.trajectory import Trajectory

if TYPE_CHECKING:
    import simpy

_TINY = 1e-9


@dataclass
class Job:
    """One trajectory on its way: which turn it is in, and the versions of its first and last token."""

    group: int
    sibling: int
    attempt: int
    profile: Profile
    waits: list[float] | tuple[float, ...]
    fails: bool = False  # its environment fails at the end
    turn: int = 0
    first_version: int = -1
    last_version: int = -1
    engine: int = -1
    unread: int = 0  # tokens that are not in the cache yet
    ends_at: int = 0  # the decode step at which its turn ends
    live: bool = True

    def trajectory(self) -> Trajectory:
        """As the schedule takes it."""
        return Trajectory(self.group, self.sibling, self.attempt, task_id="", prompt="", seed=0)


@dataclass
class EngineTotals:
    """What an engine has done; seconds are simulated."""

    busy: float = 0.0
    syncing: float = 0.0
    tokens: int = 0
    lost_tokens: int = 0
    decode_steps: int = 0
    failures: int = 0


@dataclass(order=True)
class _Seat:
    """An active row in order of the step at which its turn ends."""

    ends_at: int
    order: int
    job: Job = field(compare=False)


class Engine:
    """See the module's head. ``turn_ended`` is told of each turn that ends, with the job still parked here."""

    def __init__(
        self,
        environment: simpy.Environment,
        index: int,
        cluster: ClusterSection,
        costs: EngineSection,
        sync_seconds: float,
        turn_ended: Callable[[Engine, Job], None],
        synced: Callable[[Engine], None],
    ) -> None:
        self.index, self.version, self.latest = index, -1, -1
        self.totals = EngineTotals()
        self.up = True
        self.jobs = 0  # queued, pending, active or parked here
        self._env, self._costs, self._sync = environment, costs, sync_seconds
        self._slots = cluster.slots
        self._rows = cluster.slots + (cluster.slots if cluster.parked < 0 else cluster.parked)
        self._turn_ended, self._synced = turn_ended, synced
        self._seated = 0
        self._queue: deque[Job] = deque()
        self._pending: deque[Job] = deque()
        self._active: list[_Seat] = []
        self._parked: dict[int, Job] = {}
        self._step = self._order = 0
        self._run: _Run | None = None
        self._working = False  # in the middle of a boundary: what arrives is seen at its end
        self._alarm = 0  # number of the timer that counts; older ones are stale

    # ------------------------------------------------------------------ what arrives

    def submit(self, job: Job) -> None:
        """A job that begins here (or goes on here after another engine failed)."""
        job.engine, job.unread, job.live = self.index, 0, True
        self.jobs += 1
        self._queue.append(job)
        self._wake()

    def reply(self, job: Job) -> None:
        """The tool has answered a parked job."""
        del self._parked[id(job)]
        self._pending.append(job)
        self._wake()

    def release(self, job: Job) -> None:
        """A parked job is finished."""
        del self._parked[id(job)]
        self._leave()

    def cancel(self, group: int) -> None:
        """Forget the jobs of a group that was dropped, wherever they are."""
        for job in [*self._queue, *self._pending, *(seat.job for seat in self._active), *self._parked.values()]:
            if job.group == group:
                job.live = False
        gone = len(self._queue)
        self._queue = deque(job for job in self._queue if job.live)
        gone -= len(self._queue)
        self.jobs -= gone
        for parked in [job for job in self._parked.values() if not job.live]:
            self.release(parked)

    def take(self, version: int) -> None:
        """Weights of ``version`` are there; they are taken between two decode steps."""
        self.latest = version
        self._wake()

    def fail(self) -> list[Job]:
        """The engine dies; returns the jobs to be given to another one. What there is of their running turns is lost,
        finished turns are kept. Parked jobs have no engine until their tool has answered."""
        self._settle(self._env.now)
        self._alarm += 1
        self._run = None
        self.up = False
        self.totals.failures += 1
        for seat in self._active:
            turn = seat.job.profile.turns[seat.job.turn]
            self.totals.lost_tokens += turn - max(0, seat.ends_at - self._step)
            if seat.job.turn == 0:
                seat.job.first_version = -1
        for job in self._parked.values():
            job.engine = -1
        jobs = [*self._queue, *self._pending, *(seat.job for seat in self._active)]
        self._queue.clear()
        self._pending.clear()
        self._active.clear()
        self._parked.clear()
        self.jobs = self._seated = 0
        return [job for job in jobs if job.live]

    def restart(self) -> None:
        """The engine is there again, with the latest weights."""
        self.up, self.version = True, self.latest
        self._wake()

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def holding(self) -> list[Job]:
        """All jobs that are here."""
        return [*self._queue, *self._pending, *(seat.job for seat in self._active), *self._parked.values()]

    def busy_until_now(self) -> float:
        """Busy seconds, those of the steps that run now included."""
        run = self._run
        if run is None or run.syncing is not None:
            return self.totals.busy
        return self.totals.busy + min(max(0.0, self._env.now - run.start), run.end - run.start)

    # ------------------------------------------------------------------ decode steps

    def _wake(self) -> None:
        """Something arrived: the steps that run now end with the one that is running."""
        if not self.up or self._working:
            return
        if self._run is None:
            self._ring(0.0)  # what arrives at the same moment begins together
        elif (end := self._run.boundary_after(self._env.now)) < self._run.end - _TINY:
            self._run.cut(end)
            self._ring(end - self._env.now)

    def _ring(self, delay: float) -> None:
        self._alarm += 1
        number = self._alarm
        timer = self._env.timeout(max(0.0, delay))
        timer.callbacks.append(lambda _: self._rang(number))

    def _rang(self, number: int) -> None:
        if number == self._alarm and self.up:
            syncing = self._run.syncing if self._run is not None else None
            self._settle(self._env.now)
            self._run = None
            if syncing is not None:
                self.version = syncing
                self._synced(self)
            self._end_turns()
            self._begin()

    def _settle(self, now: float) -> None:
        """Count what the run that ends now (or is cut off by a failure) got done."""
        run = self._run
        if run is None:
            return
        if run.syncing is not None:
            self.totals.syncing += now - run.start
            return
        steps = run.steps if now >= run.end - _TINY else run.whole_steps(now)
        self.totals.busy += now - run.start
        self.totals.tokens += steps * len(self._active)
        self.totals.decode_steps += steps
        self._step += steps

    def _end_turns(self) -> None:
        ended = []
        while self._active and self._active[0].ends_at <= self._step:
            ended.append(heapq.heappop(self._active).job)
        self._working = True
        for job in ended:
            self._end(job)
        self._working = False

    def _end(self, job: Job) -> None:
        job.last_version = self.version
        if not job.live:
            self._leave()
            return
        self._parked[id(job)] = job
        self._turn_ended(self, job)

    def _leave(self) -> None:
        self.jobs -= 1
        self._seated -= 1
        if self._queue:
            self._wake()

    def _begin(self) -> None:
        """Weights first, then what waits is read, then decode steps until something changes."""
        if self.version != self.latest:
            if self._sync > 0:
                self._run = _Run(self._env.now, 0.0, self._sync, 1, syncing=self.latest)
                self._ring(self._sync)
                return
            self.version = self.latest
            self._synced(self)
        if self.version < 0:
            return
        self._working = True
        reading = self._read()
        self._working = False
        if not self._active:
            return
        seconds = self._costs.seconds_per_step + self._costs.seconds_per_row * len(self._active)
        steps = self._active[0].ends_at - self._step  # 0 where a turn ends with the token that reading samples
        if self._pending and len(self._active) < self._slots:
            steps = min(steps, 1)  # more to read after the next step
        self._run = _Run(self._env.now, reading, seconds, steps)
        self._ring(self._run.end - self._env.now)

    def _read(self) -> float:
        """Seat and prefill what fits, which samples its first token; returns the seconds it takes."""
        self._seat()
        budget, read, count, first = self._costs.prefill_tokens, 0, 0, set[int]()
        while self._pending and len(self._active) < self._slots and budget > 0:
            job = self._pending.popleft()
            if not job.live:
                self._leave()
                continue
            budget -= job.unread
            fresh = job.turn == 0 and job.unread == job.profile.prompt
            if not (fresh and job.group in first):  # siblings share one prefill of their prompt
                read += job.unread
            if fresh:
                first.add(job.group)
            job.unread, count = 0, count + 1
            if job.first_version < 0:
                job.first_version = self.version
            self._order += 1
            ends_at = self._step + job.profile.turns[job.turn] - 1
            heapq.heappush(self._active, _Seat(ends_at, self._order, job))
        self.totals.tokens += count
        return read * self._costs.seconds_per_prefill_token + count * self._costs.seconds_per_row

    def _seat(self) -> None:
        while self._queue and self._seated < self._rows:
            job = self._queue.popleft()
            self._seated += 1
            profile = job.profile
            job.unread = profile.prompt + sum(profile.turns[: job.turn]) + sum(profile.replies[: job.turn])
            self._pending.append(job)


class _Run:
    """``steps`` decode steps of one length after ``reading`` seconds of prefill, or a pause for new weights."""

    __slots__ = ("end", "reading", "seconds", "start", "steps", "syncing")

    def __init__(self, start: float, reading: float, seconds: float, steps: int, syncing: int | None = None) -> None:
        self.start, self.reading, self.seconds, self.steps = start, reading, seconds, steps
        self.syncing = syncing
        self.end = start + reading + seconds * steps

    def whole_steps(self, now: float) -> int:
        done = now - self.start - self.reading
        if done < 0 or self.seconds <= 0:
            return 0
        return min(self.steps, math.floor(done / self.seconds + _TINY))

    def boundary_after(self, now: float) -> float:
        """End of the decode step that is running at ``now``."""
        if self.syncing is not None or self.seconds <= 0 or self.steps == 0:
            return self.end
        steps = max(1, math.ceil((now - self.start - self.reading) / self.seconds - _TINY))
        return self.start + self.reading + steps * self.seconds

    def cut(self, end: float) -> None:
        self.steps = max(1, round((end - self.start - self.reading) / self.seconds))
        self.end = end
