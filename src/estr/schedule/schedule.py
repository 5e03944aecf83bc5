"""Paced admission with reserved training steps.

A group's life: admitted (it reserves a rollout batch that starts no later than its deadline) → its trajectories finish,
a failed one being issued again a bounded number of times → taken by the learner as a whole, or dropped with a reason.
Pure logic over version numbers: no clock, no process, no model.

Let S be the optimizer steps of one rollout batch and P its groups. A batch that starts at version V trains its last
minibatch at V + S - 1, so a group whose first token was sampled at v must be in a batch that starts at
v + max_staleness - (S - 1) or earlier: its deadline. From version V, batch j (0, 1, …) starts at V + jS at the latest.
The reservations can be kept as long as, for every j, at most P·(j + 1) outstanding groups have to be in one of the
batches 0..j. Admission keeps that true, and taking a batch is allowed only if it stays true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from estr.trajectory import Trajectory, trajectory_id


@dataclass(frozen=True)
class ScheduleRules:
    prompts_per_step: int  # P, groups of a rollout batch
    group_size: int
    steps_per_batch: int = 1  # S = minibatches * epochs
    max_staleness: int = 0  # v_target - v_first, inclusive
    attempts: int = 3
    max_failed_groups: int = 8
    doubled: int = 0  # so many of every P groups have twice as many trajectories (AEPO's second rollouts)

    def __post_init__(self) -> None:
        if self.max_staleness < self.steps_per_batch - 1:
            raise ValueError(
                f"max_staleness {self.max_staleness} cannot hold with {self.steps_per_batch} optimizer steps a rollout "
                f"batch: the last one is {self.steps_per_batch - 1} versions behind; use at least that"
            )

    def size(self, number: int) -> int:
        """Trajectories of group ``number``."""
        return self.group_size * (2 if number % self.prompts_per_step < self.doubled else 1)

    @property
    def lag(self) -> int:
        """How many optimizer steps may pass between a group's first token and the start of its rollout batch."""
        return self.max_staleness - (self.steps_per_batch - 1)


@dataclass(frozen=True)
class Ticket:
    """One trajectory to be generated."""

    group: int
    sibling: int
    attempt: int

    @property
    def trajectory_id(self) -> str:
        return trajectory_id(self.group, self.sibling, self.attempt)


@dataclass
class Group:
    """The trajectories of one prompt on their way to the learner."""

    number: int
    size: int
    admitted_version: int
    deadline: int  # newest version at which its rollout batch may start
    finished: dict[int, Trajectory] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    finish_order: int = -1
    held: bool = False  # taken up by a resume, its unfinished trajectories not issued yet

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.size

    def forget(self, settled: Container[str]) -> bool:
        """Leave out trajectories whose ids are in ``settled``; whether any is left."""
        self.finished = {s: t for s, t in self.finished.items() if t.trajectory_id not in settled}
        return bool(self.finished)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [self.finished[sibling] for sibling in sorted(self.finished)]


@dataclass(frozen=True)
class Waiting:
    """What the learner waits for, for a message to a person."""

    complete: int
    needed: int
    due: tuple[int, ...]  # groups that must be in this batch and are not finished

    def __str__(self) -> str:
        if self.due:
            names = ", ".join(map(str, self.due[:5]))
            return f"group {names} that this step was reserved for"
        return f"{self.needed - self.complete} more finished groups ({self.complete} of {self.needed} are there)"


class Schedule:
    """Groups in flight and finished, under :class:`ScheduleRules`; ``version`` arguments are the learner's."""

    def __init__(self, rules: ScheduleRules, *, next_group: int = 0, total_groups: int | None = None) -> None:
        self.rules = rules
        self.next_group = next_group
        self.remaining = total_groups  # groups still to be trained, in flight ones included; None: no end
        self.failed_in_a_row = 0
        self._groups: dict[int, Group] = {}
        self._complete: dict[int, Group] = {}  # those of them that are finished whole
        self._deadlines: Counter[int] = Counter()  # how many of them have which deadline
        self._held = 0  # how many of them are held
        self._finished_count = 0

    # ------------------------------------------------------------------ admission

    def admissible(self, version: int) -> int:
        """How many groups may be admitted at ``version``; none while groups of an earlier process are held."""
        if self._held:
            return 0
        room = self._room(version, version + self.rules.lag)
        if self.remaining is not None:
            room = min(room, self.remaining - len(self._groups))
        return max(0, room)

    def admit(self, version: int) -> list[Ticket]:
        """Admit one group; its tickets are the work to issue."""
        number, self.next_group = self.next_group, self.next_group + 1
        return self.readmit(number, version)

    def readmit(self, number: int, version: int, attempts: dict[int, int] | None = None) -> list[Ticket]:
        """Admit group ``number`` again (after a resume) under the same number, so with the same seeds."""
        return self._tickets(self._enter(number, version, attempts))

    def take_up(self, number: int, first: int, attempts: dict[int, int], finished: Iterable[Trajectory]) -> None:
        """Admit, after a resume, a group of which something is there already, sampled from version ``first`` on.

        What is missing of it is held back until :meth:`release`: a trajectory that starts anew at an older version
        than ``first`` brings the deadline forward, which the reservations of the others may not allow yet.
        """
        group = self._enter(number, first, attempts)
        for trajectory in finished:
            self.finish(trajectory)
        group.held = not group.complete
        self._held += group.held

    def release(self, version: int) -> list[list[Ticket]]:
        """Tickets for what is missing of held groups, oldest first, as far as they may be issued at ``version``."""
        released = []
        for group in self.outstanding:
            if not group.held:
                continue
            first = min(group.admitted_version, version)
            if first < group.admitted_version and self._room(version, first + self.rules.lag, group.number) < 1:
                break
            self._held -= 1
            self._deadlines[group.deadline] -= 1
            group.held, group.admitted_version, group.deadline = False, first, first + self.rules.lag
            self._deadlines[group.deadline] += 1
            released.append([ticket for ticket in self._tickets(group) if ticket.sibling not in group.finished])
        return released

    def _enter(self, number: int, version: int, attempts: dict[int, int] | None) -> Group:
        group = Group(number, self.rules.size(number), version, version + self.rules.lag, attempts=dict(attempts or {}))
        self._leave(number)
        self._groups[number] = group
        self._deadlines[group.deadline] += 1
        return group

    def _leave(self, number: int) -> Group | None:
        """Take a group out of every count."""
        group = self._groups.pop(number, None)
        if group is not None:
            self._complete.pop(number, None)
            self._deadlines[group.deadline] -= 1
            self._deadlines += Counter()  # forget deadlines that nobody has
            self._held -= group.held
        return group

    def _tickets(self, group: Group) -> list[Ticket]:
        return [Ticket(group.number, sibling, group.attempts.get(sibling, 0)) for sibling in range(group.size)]

    def _room(self, version: int, deadline: int, without: int = -1) -> int:
        """Groups that could still be added with ``deadline`` while all reservations can be kept."""
        last = self._batch_of(version, deadline)
        due = self._due_counts(version, [self._groups[without]] if without in self._groups else ())
        room = self.rules.prompts_per_step * (last + 1) - sum(due.values())
        beyond = [j for j in due if j > last]
        if not beyond:
            return room
        return min(
            self.rules.prompts_per_step * (j + 1) - sum(n for i, n in due.items() if i <= j) for j in [last, *beyond]
        )

    def _batch_of(self, version: int, deadline: int) -> int:
        """Last batch (0 is the next one) that starts by ``deadline`` if the next one starts at ``version``."""
        return (deadline - version) // self.rules.steps_per_batch

    def _due_counts(self, version: int, without: Iterable[Group] = ()) -> dict[int, int]:
        skip = Counter(group.deadline for group in without)
        due: dict[int, int] = {}
        for deadline, count in self._deadlines.items():
            if left := count - skip[deadline]:
                batch = self._batch_of(version, deadline)
                due[batch] = due.get(batch, 0) + left
        return due

    # ------------------------------------------------------------------ results

    def finish(self, trajectory: Trajectory) -> bool:
        """File a finished trajectory; False where it is not expected (its group was dropped, or it came twice)."""
        group = self._groups.get(trajectory.group)
        if group is None or trajectory.sibling in group.finished:
            return False
        group.finished[trajectory.sibling] = trajectory
        if group.complete:
            group.finish_order, self._finished_count = self._finished_count, self._finished_count + 1
            self._complete[group.number] = group
            self.failed_in_a_row = 0
        return True

    def awaits(self, ticket: Ticket) -> bool:
        """Whether it is the attempt that is in flight."""
        group = self._groups.get(ticket.group)
        return (
            group is not None
            and ticket.sibling not in group.finished
            and group.attempts.get(ticket.sibling, 0) == ticket.attempt
        )

    def fail(self, number: int, sibling: int, *, final: bool = False) -> Ticket | Group | None:
        """A trajectory failed: a Ticket to try it again, or the Group that is dropped because it failed too often (or
        ``final``: trying again cannot help); None where the group is already gone."""
        group = self._groups.get(number)
        if group is None:
            return None
        attempt = group.attempts.get(sibling, 0) + 1
        if attempt < self.rules.attempts and not final:
            group.attempts[sibling] = attempt
            return Ticket(number, sibling, attempt)
        self.failed_in_a_row += 1
        return self._leave(number)

    @property
    def hopeless(self) -> bool:
        """Whether so many groups failed in a row that going on makes no sense."""
        return self.failed_in_a_row >= self.rules.max_failed_groups

    # ------------------------------------------------------------------ the learner's side

    def take(self, version: int) -> list[Group] | Waiting:
        """The next rollout batch, or what it waits for.

        Finished groups go by deadline, then by order of finishing; a group may be overtaken by others as long as the
        reservations of those left behind can be kept.
        """
        ready = sorted(self._complete.values(), key=lambda group: (group.deadline, group.finish_order))
        size = self.rules.prompts_per_step
        chosen = ready[:size]
        late = self._left_too_late(version, chosen)
        if len(chosen) < size or late:
            return Waiting(len(chosen), size, late)
        for group in chosen:
            self._leave(group.number)
        if self.remaining is not None:
            self.remaining -= len(chosen)
        return chosen

    def _left_too_late(self, version: int, chosen: list[Group]) -> tuple[int, ...]:
        """Groups whose reservation would be broken if ``chosen`` were the batch that starts at ``version``."""
        due = self._due_counts(version, chosen)
        total = 0
        for batch in sorted(due):
            total += due[batch]
            if total > self.rules.prompts_per_step * max(batch, 0):
                last = version + (batch + 1) * self.rules.steps_per_batch  # the first deadline of the next batch
                late = [g for g in self._groups.values() if g.deadline < last and not g.complete]
                return tuple(group.number for group in sorted(late, key=lambda group: group.deadline))
        return ()

    # ------------------------------------------------------------------ state

    @property
    def outstanding(self) -> list[Group]:
        """Groups admitted and not yet taken, by number."""
        return [self._groups[number] for number in sorted(self._groups)]

    def group(self, number: int) -> Group | None:
        """The group of this number, where it is admitted and not yet taken or dropped."""
        return self._groups.get(number)

    def drop(self, number: int) -> Group | None:
        """Forget a group."""
        return self._leave(number)

    def state(self) -> dict[str, int | None]:
        return {"next_group": self.next_group, "remaining": self.remaining}
