"""Each trajectory's transitions, written down before anyone acts on them: ledger first, rollouts/ when settled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from estr.config import Config
from estr.environments.base import Problem, Task
from estr.runtime.builders import training_problem
from estr.runtime.messages import Finished, KeptTurn, Progress
from estr.runtime.selecting import group_size
from estr.schedule import Group, Ticket
from estr.storage.ledger import Ledger
from estr.storage.rollout_files import RolloutWriter
from estr.storage.rollouts import Settled, Settlement
from estr.trajectory import Trajectory, derive_seed


@dataclass
class Backlog:
    """What a resumed run has to take up again.

    ``partial``: groups of which something is there, finished trajectories or ``progress`` of others, by trajectory id;
    they keep their deadlines. ``unstarted``: groups of which nothing is, to be issued again, under their old numbers,
    when there is room.
    """

    partial: dict[int, list[Trajectory]] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    unstarted: list[int] = field(default_factory=list)
    attempts: dict[int, dict[int, int]] = field(default_factory=dict)


class RunJournal:
    """The run's ledger, and the rows of settled trajectories in rollouts/."""

    def __init__(self, config: Config, ledger: Ledger, rollouts: RolloutWriter, step: int = 0) -> None:
        self._config, self._ledger, self._rollouts, self._step = config, ledger, rollouts, step
        self._settled: list[tuple[int, list[Settled]]] = []  # by step, waiting for ``store_rows``
        self._dropped: list[Settled] = []
        self.dropped_groups = 0

    def batch(self) -> AbstractContextManager[None]:
        """One durable transaction for several transitions."""
        return self._ledger.batch()

    def issued(self, tickets: Sequence[Ticket], problem: Problem, version: int) -> None:
        """Trajectories of a group are about to be given to an engine."""
        group, seed = tickets[0].group, self._config.run.seed
        self._ledger.issue_group(
            group,
            [(one.sibling, one.attempt, derive_seed(seed, group, one.sibling, one.attempt)) for one in tickets],
            group_size=group_size(self._config, group),
            task_id=problem.task_id,
            prompt=problem.prompt,
            group_key=problem.task_id,
            version=version,
        )

    def finished(self, results: Sequence[Finished]) -> None:
        """Trajectories came back whole."""
        self._ledger.finish_packed([result.packed for result in results])

    def went_on(self, turns: Sequence[KeptTurn]) -> None:
        """Trajectories have finished a turn from which they can go on after a crash."""
        self._ledger.keep_packed_turns([turn.packed for turn in turns])

    def failed(self, ticket: Ticket, reason: str) -> None:
        """One attempt failed and its trajectory will be tried again or given up."""
        name = ticket.trajectory_id
        self._ledger.drop(name, reason, self._step + 1)
        self._keep([self._ledger.load(name)], reason)

    def dropped(self, group: int, reason: str) -> None:
        """A group is given up; what there is of it is kept for people to read, with the reason."""
        self.dropped_groups += 1
        self._keep(self._ledger.drop_group(group, reason, self._step + 1), reason)

    def trained(self, settled: Sequence[tuple[Trajectory, Settlement]], step: int) -> None:
        """Trajectories were used up by optimizer step ``step``: trained, dropped because it was skipped, or passed over
        for others of their batch. Their rows wait for ``store_rows``."""
        with self.batch():
            self._ledger.settle((t.trajectory_id for t, s in settled if s.state == "trained" or s.used), step)
            for trajectory, settlement in settled:
                if settlement.drop_reason is not None and not settlement.used:
                    self._ledger.drop(trajectory.trajectory_id, settlement.drop_reason, step)
        self._step = step
        rows = [self._row(trajectory, settlement) for trajectory, settlement in settled]
        self._settled.append((step, rows + self._dropped))
        self._dropped = []

    def store_rows(self) -> None:
        """Give the rows of what ``trained`` has made durable, and of what was dropped before it, to rollouts/."""
        while self._settled:
            self._write(*self._settled[0])
            self._settled.pop(0)

    def unfinished(self, groups: Sequence[Group], step: int) -> None:
        """The run ends: what had finished and was not trained."""
        self.store_rows()
        finished = [trajectory for group in groups for trajectory in group.trajectories]
        self._write(step, [self._row(trajectory, Settlement("finished")) for trajectory in finished])
        dropped, self._dropped = self._dropped, []
        self._write(step + 1, dropped)
        self._rollouts.flush()

    # ------------------------------------------------------------------ checkpoints

    def position(self) -> dict[str, int]:
        """Where the ledger stands, for a checkpoint; the rows of what was settled before are on disk."""
        self.store_rows()
        self._rollouts.flush()
        return self._ledger.position()

    def commit(self, step: int, *, prune_through: int) -> None:
        """The checkpoint of ``step`` is whole; nothing settled up to ``prune_through`` can be asked for again."""
        self._ledger.commit(step, prune_through=prune_through)

    def rewind(self, step: int, position: dict[str, int] | None, *, redo_from: int | None) -> Backlog:
        """Go back to the checkpoint of ``step`` (0: the start).

        ``redo_from``: forget groups from this number on, so that they are issued anew (lockstep redoes whole cohorts).
        """
        rewind = self._ledger.rewind_to(step, position)
        for dropped in rewind.dropped:
            self._keep([dropped.trajectory], dropped.reason)
        if redo_from is not None:
            self._ledger.forget_groups(redo_from)
            self._dropped = [one for one in self._dropped if one.trajectory.group < redo_from]
        return self._backlog()

    def check_backlog(self, backlog: Backlog, task: Task) -> None:
        """Refuse, before anything is issued, a task or a group size that are not those of the groups in flight."""
        for number in [*backlog.partial, *backlog.unstarted]:
            task_id = training_problem(task, number).task_id
            self._ledger.check_group(number, group_size(self._config, number), task_id)

    def _backlog(self) -> Backlog:
        backlog = Backlog()
        for trajectory in self._ledger.finished():
            backlog.partial.setdefault(trajectory.group, []).append(trajectory)
        for trajectory, context in self._ledger.turns():
            backlog.progress[trajectory.trajectory_id] = Progress(trajectory, **context)
            backlog.partial.setdefault(trajectory.group, [])
        waiting = {issued.group for issued in self._ledger.in_flight()}
        backlog.unstarted = sorted(waiting - set(backlog.partial))
        backlog.attempts = {number: self._ledger.attempts(number) for number in [*backlog.partial, *backlog.unstarted]}
        return backlog

    # ------------------------------------------------------------------ rows

    def _keep(self, trajectories: Sequence[Trajectory], reason: str) -> None:
        for trajectory in trajectories:
            self._dropped.append(self._row(trajectory, Settlement("dropped", drop_reason=reason)))

    def _row(self, trajectory: Trajectory, settlement: Settlement) -> Settled:
        return Settled(trajectory, settlement, self._config.rollout)

    def _write(self, step: int, settled: Sequence[Settled]) -> None:
        if settled:
            self._rollouts.write_settled(step, settled)
