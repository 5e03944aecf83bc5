"""Each trajectory's transitions, written down: issued, finished, trained, dropped."""

from __future__ import annotations

from collections.abc import Sequence

from estr.config import Config
from estr.environments.base import Problem
from estr.schedule import Group, Ticket
from estr.storage.rollout_files import RolloutWriter
from estr.storage.rollouts import Row, Settlement, rows_from
from estr.trajectory import Trajectory


class RunJournal:
    """Files settled trajectories in rollouts/ and counts what was dropped."""

    def __init__(self, config: Config, rollouts: RolloutWriter) -> None:
        self._config, self._rollouts = config, rollouts
        self._dropped: list[Row] = []
        self.dropped_groups = 0

    def issued(self, ticket: Ticket, problem: Problem, version: int) -> None:
        """A trajectory was given to an engine."""

    def finished(self, trajectory: Trajectory) -> None:
        """A trajectory came back whole."""

    def dropped(self, trajectories: Sequence[Trajectory], group: int, reason: str) -> None:
        """A group is given up; what it had finished is kept for people to read, with the reason."""
        self.dropped_groups += 1
        for trajectory in trajectories:
            self._dropped += self._rows(trajectory, Settlement("dropped", drop_reason=reason))

    def trained(self, settled: Sequence[tuple[Trajectory, Settlement]], step: int) -> None:
        """Trajectories were trained by optimizer step ``step`` (and dropped ones waited to be filed)."""
        rows = [row for trajectory, settlement in settled for row in self._rows(trajectory, settlement)]
        self._write(step, rows)

    def unfinished(self, groups: Sequence[Group], step: int) -> None:
        """The run ends: what had finished and was not trained."""
        finished = [trajectory for group in groups for trajectory in group.trajectories]
        rows = [row for trajectory in finished for row in self._rows(trajectory, Settlement("finished"))]
        self._write(step, rows)
        self._rollouts.flush()

    def _rows(self, trajectory: Trajectory, settlement: Settlement) -> list[Row]:
        return rows_from(trajectory, settlement, self._config.rollout)

    def _write(self, step: int, rows: list[Row]) -> None:
        rows, self._dropped = rows + self._dropped, []
        if rows:
            self._rollouts.write(step, rows)
