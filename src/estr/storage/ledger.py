"""The ledger: what became of every trajectory, durable before anyone acts on it.

A trajectory's life: ``issue`` → (``keep_turn``)* → ``finish`` (its tokens are then in the spool, in the same database)
→ ``settle`` once it was trained, or ``drop`` with a reason. A checkpoint of step s is followed by ``commit``, which
lets go of what no resume can need. A resume calls ``rewind_to(s)``: what had been trained after s counts as finished
again, what was in flight is to be issued again under the same number and seed, what was dropped stays dropped.

Every call is one transaction (SQLite, WAL, synchronous = FULL); ``batch()`` makes one of several. What happens to every
trajectory is one statement, which the database does whole or not at all.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from estr.errors import RunError
from estr.storage import encoding
from estr.storage.encoding import clean_text
from estr.storage.ledger_database import LedgerDatabase
from estr.storage.ledger_rows import (
    GROUP,
    ISSUE,
    ISSUE_AGAIN,
    ISSUES,
    RESULT,
    RESULTS,
    TRAINED,
    TRAINED_ONE,
    TURN,
    TURNS,
    UNKNOWN,
    Packed,
    arguments,
    packed,
    portions,
)
from estr.storage.ledger_schema import SPAN, key_of, key_of_id
from estr.storage.spool import decode_trajectory, encode_trajectory
from estr.trajectory import Trajectory, trajectory_id


@dataclass(frozen=True)
class Issued:
    """A trajectory in flight: everything that is needed to issue it again."""

    group: int
    sibling: int
    attempt: int
    seed: int
    group_size: int
    task_id: str
    prompt: str
    group_key: str
    version: int  # the learner's version when its group was admitted
    issues: int  # how often it was issued: 1, and 1 more after each resume

    @property
    def trajectory_id(self) -> str:
        return trajectory_id(self.group, self.sibling, self.attempt)

    def trajectory(self) -> Trajectory:
        """The trajectory before its first token."""
        return Trajectory(
            self.group, self.sibling, self.attempt, self.task_id, self.prompt, self.seed, group_key=self.group_key
        )


@dataclass(frozen=True)
class Dropped:
    """A dropped trajectory whose rollout row was withdrawn by a rewind, to be written again."""

    trajectory: Trajectory
    reason: str


@dataclass(frozen=True)
class Rewind:
    """What a resume has to know: see ``Ledger.rewind_to``."""

    finished_again: list[str]  # trajectory ids
    dropped: list[Dropped]
    in_flight: list[Issued]


class Ledger(LedgerDatabase):
    """The ledger and spool of a run (``spool/ledger.sqlite``); safe to call from several threads of one process.

    Raises:
        RunError: from every method, where the disk fails, the file is damaged or a call contradicts the ledger; nothing
            has changed then.
    """

    # ------------------------------------------------------------------ a trajectory's life

    def issue(
        self,
        group: int,
        sibling: int,
        attempt: int = 0,
        *,
        seed: int,
        group_size: int,
        task_id: str = "",
        prompt: str = "",
        group_key: str = "",
        version: int = 0,
    ) -> str:
        """Record that a trajectory is about to be generated; returns its id.

        One that is in flight may be issued again with the same seed (after a resume); a further attempt needs the one
        before to be dropped.
        """
        self.issue_group(
            group,
            [(sibling, attempt, seed)],
            group_size=group_size,
            task_id=task_id,
            prompt=prompt,
            group_key=group_key,
            version=version,
        )
        return trajectory_id(group, sibling, attempt)

    def issue_group(
        self,
        group: int,
        siblings: Sequence[tuple[int, int, int]],
        *,
        group_size: int,
        task_id: str = "",
        prompt: str = "",
        group_key: str = "",
        version: int = 0,
    ) -> None:
        """``issue`` for several (sibling, attempt, seed) of a group."""
        about = (group, group_size, clean_text(task_id), clean_text(prompt), clean_text(group_key), version)
        rows = [
            (key_of(group, sibling, attempt), trajectory_id(group, sibling, attempt), group, sibling, attempt, seed)
            for sibling, attempt, seed in siblings
        ]
        with self.batch():
            name = trajectory_id(group, *siblings[0][:2])
            if not self._change(name, GROUP, *about):
                self.check_group(*about[:3])
            if len(rows) == 1 or not self._issue_together(rows):
                for row in rows:
                    self._issue(*row)

    def _issue_together(self, rows: Sequence[tuple[int, str, int, int, int, int]]) -> bool:
        """Whether one statement could do it. Where not, one of them is neither new nor in flight: the database refuses
        it when it is issued by itself, and the batch is undone."""
        try:
            return self._run(ISSUES, json.dumps(rows)).rowcount == len(rows)
        except sqlite3.IntegrityError:
            return False

    def _issue(self, key: int, name: str, *values: int) -> None:
        if not self._change(name, ISSUE_AGAIN, key, name, *values):
            self._change(name, ISSUE, key, name, *values)  # refused, with the reason

    def finish(self, *trajectories: Trajectory) -> None:
        """Put trajectories that were in flight into the spool; only after this may the learner see them."""
        self.finish_packed([packed(trajectory) for trajectory in trajectories])

    def finish_packed(self, results: Sequence[Packed]) -> None:
        """``finish`` for trajectories that are ``packed`` already."""
        self._put(results, RESULTS, lambda row: self._change(row.name, RESULT, row.key, row.payload))

    def keep_turn(self, trajectory: Trajectory, context: Mapping[str, Any]) -> None:
        """Remember a trajectory in flight as it stood when a turn had ended, in the place of the turn before.

        Args:
            context: what it takes beside its rows to go on, as JSON can hold it.
        """
        self.keep_packed_turns([packed(trajectory, context)])

    def keep_packed_turns(self, turns: Sequence[Packed]) -> None:
        """``keep_turn`` for several trajectories that are ``packed`` already."""
        self._put(turns, TURNS, lambda row: self._change(row.name, TURN, row.key, row.payload, row.context))

    def _put(self, rows: Sequence[Packed], many: str, one: Callable[[Packed], int]) -> None:
        """Write all of ``rows`` or none."""
        if len(rows) == 1:
            one(rows[0])
        elif rows:
            with self.batch():
                for portion in portions(rows):
                    self._put_together(portion, many, one)

    def _put_together(self, rows: Sequence[Packed], many: str, one: Callable[[Packed], int]) -> None:
        try:
            self._run(many, *arguments(rows))
        except sqlite3.IntegrityError:  # one of them is refused; which, only one at a time tells
            for row in rows:
                one(row)

    def turns(self) -> list[tuple[Trajectory, dict[str, Any]]]:
        """What is in flight and had ended a turn, with what ``keep_turn`` was given, by group and sibling."""
        rows = self._query("SELECT payload, context FROM turns ORDER BY key")
        return [(self._decode(payload), self._context(text)) for payload, text in rows]

    def settle(self, trained: Iterable[str], step: int) -> None:
        """Record that these trajectories were trained in optimizer step ``step``; groups must be whole."""
        names = list(trained)
        keys = [self._key(name) for name in names]
        with self.batch():
            if not self._train_together(names, keys, step):
                for name, key in zip(names, keys, strict=True):
                    self._change_known(name, TRAINED_ONE, step, key)
            self._run("UPDATE meta SET value = CAST(value AS INTEGER) + ? WHERE key = 'trained'", len(names))
            self._check_whole({key // SPAN for key in keys})

    def _train_together(self, names: Sequence[str], keys: Sequence[int], step: int) -> bool:
        """Whether one statement could do it; where not, it has changed nothing."""
        if len(set(keys)) < len(keys):
            return False
        try:
            changed = self._run(TRAINED, step, json.dumps(keys)).rowcount
        except sqlite3.IntegrityError:
            return False
        if changed < len(keys):
            unknown = self._run(UNKNOWN, json.dumps(keys)).fetchone()[0]
            raise self._unknown(names[keys.index(unknown)])
        return True

    def drop(self, trajectory_id: str, reason: str, step: int, trajectory: Trajectory | None = None) -> None:
        """Record that a trajectory will not be trained.

        Args:
            step: the optimizer step under which its rollout row is stored (the learner's version + 1).
            trajectory: what there is of it, where it did not finish, so that its row can be written again.
        """
        key = self._key(trajectory_id)
        with self.batch():
            self._change_known(
                trajectory_id,
                "UPDATE trajectories SET state = 'dropped', step = ?, reason = ? WHERE key = ?",
                *(step, clean_text(reason), key),
            )
            if trajectory is not None:
                self._run("INSERT OR IGNORE INTO spool VALUES (?, ?)", key, encode_trajectory(trajectory))

    def drop_group(self, group: int, reason: str, step: int) -> list[Trajectory]:
        """Drop every trajectory of a group that is in flight or finished; returns them for their rollout rows."""
        with self.batch():
            live = self._run(
                f"SELECT id FROM trajectories WHERE {_OF_GROUP} AND state IN ('issued', 'finished') ORDER BY key",
                group,
            ).fetchall()
            for (name,) in live:
                self.drop(name, reason, step)
            return [self.load(name) for (name,) in live]

    def check_group(self, number: int, size: int, task_id: str) -> None:
        """Raises RunError where a group that was issued is of another size or of another problem."""
        ((known_size, known_id),) = self._query("SELECT size, task_id FROM groups WHERE number = ?", number)
        if (known_size, known_id) != (size, clean_text(task_id)):
            raise RunError(
                f"the ledger {self.path} has group {number} as {known_size} trajectories of problem {known_id!r}, "
                f"not {size} of {task_id!r}; were the task or rollout.group_size changed?"
            )

    # ------------------------------------------------------------------ questions

    @property
    def next_group(self) -> int:
        """The number after the highest that was ever issued."""
        return self._one("SELECT COALESCE(MAX(number) + 1, 0) FROM groups")

    def in_flight(self) -> list[Issued]:
        """What is issued and neither finished nor dropped, by group and sibling."""
        rows = self._query(f"{_ISSUED} WHERE state = 'issued' ORDER BY key")
        return [Issued(*row) for row in rows]

    def finished(self) -> list[Trajectory]:
        """What is finished and not settled, by group and sibling."""
        rows = self._query(
            "SELECT payload FROM spool JOIN trajectories USING (key) WHERE state = 'finished' ORDER BY key"
        )
        return [self._decode(payload) for (payload,) in rows]

    def load(self, trajectory_id: str) -> Trajectory:
        """A trajectory from the spool; without tokens where none are (or no more) there."""
        key = self._key(trajectory_id)
        rows = self._query("SELECT payload FROM spool WHERE key = ?", key)
        if rows:
            return self._decode(rows[0][0])
        issued = self._query(f"{_ISSUED} WHERE key = ?", key)
        if not issued:
            raise RunError(f"the ledger {self.path} does not know the trajectory {trajectory_id}")
        return Issued(*issued[0]).trajectory()

    def attempts(self, group: int) -> dict[int, int]:
        """The newest attempt of each sibling of a group."""
        rows = self._query(f"SELECT sibling, MAX(attempt) FROM trajectories WHERE {_OF_GROUP} GROUP BY sibling", group)
        return {int(sibling): int(attempt) for sibling, attempt in rows}

    def trained_steps(self, through: int) -> list[int]:
        """The optimizer steps up to ``through`` that were the first to train something, ascending."""
        rows = self._query(
            "SELECT DISTINCT step FROM trajectories WHERE state = 'trained' AND step <= ? ORDER BY step", through
        )
        return [int(step) for (step,) in rows]

    def counts(self) -> dict[str, int]:
        """How many trajectories are in each state."""
        found = dict(self._query("SELECT state, COUNT(*) FROM trajectories GROUP BY state"))
        return {state: int(found.get(state, 0)) for state in ("issued", "finished", "trained", "dropped")}

    def history(self) -> list[tuple[str, str, int | None, str | None]]:
        """(trajectory id, state, step in which it was settled, reason) of every trajectory ever issued."""
        return self._query("SELECT id, state, step, reason FROM trajectories ORDER BY key")

    # ------------------------------------------------------------------ checkpoints

    def position(self) -> dict[str, int]:
        """Where the ledger stands and which one it is: stored in the checkpoint, given back to ``rewind_to``."""
        trained = self._one("SELECT value FROM meta WHERE key = 'trained'")
        return {"next_group": self.next_group, "trained": trained, "ledger": self._identity()}

    def commit(self, step: int, *, prune_through: int | None = None) -> None:
        """Called when the checkpoint of ``step`` is whole: let go of what was settled up to ``prune_through``.

        Args:
            prune_through: the oldest checkpoint that a resume may go back to (default: ``step``).
        """
        oldest = step if prune_through is None else min(prune_through, step)
        with self.batch():
            position = self.position()
            about = step, position["next_group"], position["trained"]
            self._run("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", *about)
            self._run(
                "UPDATE meta SET value = MAX(CAST(value AS INTEGER), ?) WHERE key = 'pruned_through'", max(oldest, 0)
            )
            self._run(
                "DELETE FROM spool WHERE key IN (SELECT key FROM spool JOIN trajectories USING (key) "
                "WHERE state IN ('trained', 'dropped') "
                "AND step <= (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'pruned_through'))"
            )

    def rewind_to(self, step: int, position: dict[str, int] | None = None) -> Rewind:
        """Go back to the checkpoint of ``step`` (0: the start), in one transaction.

        What was trained after it counts as finished again. What was dropped stays dropped, and is listed where its
        rollout row was withdrawn: the row is to be written again under step ``step`` + 1. What is in flight is listed
        to be issued again.

        Args:
            position: what ``position`` said when the checkpoint was written; checked.

        Raises:
            RunError: what was settled after ``step`` is no longer in the spool, or the checkpoint does not fit.
        """
        with self.batch():
            self._check_there(step, position)
            self._check_identity(step, position)
            self._check_reachable(step)
            after = "state = ? AND step > ? ORDER BY key"
            again = [name for (name,) in self._run(f"SELECT id FROM trajectories WHERE {after}", "trained", step)]
            dropped = self._run(f"SELECT id, reason FROM trajectories WHERE {after}", "dropped", step).fetchall()
            with self._rewinding():
                self._run(
                    "UPDATE trajectories SET state = 'finished', step = NULL WHERE state = 'trained' AND step > ?", step
                )
            self._run(
                "UPDATE meta SET value = (SELECT COUNT(*) FROM trajectories WHERE state = 'trained') "
                "WHERE key = 'trained'"
            )
            self._run("UPDATE trajectories SET step = ? WHERE state = 'dropped' AND step > ?", step + 1, step)
            self._run("DELETE FROM checkpoints WHERE step > ?", step)
            self._check_position(step, position)
            return Rewind(again, [Dropped(self.load(name), reason) for name, reason in dropped], self.in_flight())

    def forget_groups(self, first: int) -> None:
        """Forget groups ``first`` and later as if they had never been issued, so that their numbers are given again
        (lockstep redoes whole cohorts). Refused where one of them was trained."""
        with self.batch():
            trained = self._one("SELECT COUNT(*) FROM trajectories WHERE key >= ? AND state = 'trained'", first * SPAN)
            if trained:
                raise RunError(f"the ledger {self.path} cannot forget group {first} and later: {trained} were trained")
            with self._rewinding():
                for table in ("spool", "turns", "trajectories"):
                    self._run(f"DELETE FROM {table} WHERE key >= ?", first * SPAN)
            self._run("DELETE FROM groups WHERE number >= ?", first)

    # ------------------------------------------------------------------ inside

    def _change(self, name: str, sql: str, *values: Any) -> int:
        """Run one statement about a trajectory; how many rows it changed. What the database refuses names the
        trajectory and the state it is in."""
        with self._lock:
            try:
                return self._run(sql, *values).rowcount
            except sqlite3.IntegrityError as error:
                raise self._refusal(name, error) from error
            except sqlite3.Error as error:
                raise self._failure(error) from error

    def _change_known(self, name: str, sql: str, *values: Any) -> None:
        if not self._change(name, sql, *values):
            raise self._unknown(name)

    def _key(self, name: str) -> int:
        key = key_of_id(name)
        if key is None:
            raise self._unknown(name)
        return key

    def _unknown(self, name: str) -> RunError:
        return RunError(f"the ledger {self.path} does not know the trajectory {name}: it was never issued")

    def _check_whole(self, groups: set[int]) -> None:
        short = self._run(_SHORT_GROUP, json.dumps(sorted(groups))).fetchone()
        if short:
            raise RunError(f"group {short[0]} would be trained with {short[2]} of its {short[1]} trajectories")

    def _check_there(self, step: int, position: dict[str, int] | None) -> None:
        if position is not None and position["next_group"] > 0 and self.next_group == 0:
            raise RunError(
                f"the ledger {self.path} is empty, but up to step {step} {position['next_group']} groups were issued: "
                "it was removed or emptied. Put it back from a copy, or start a new run with model.path = that "
                "checkpoint"
            )

    def _identity(self) -> int:
        """A number that no other ledger has; 0 where a version of estr without them made it."""
        return self._one("SELECT COALESCE(MAX(CAST(value AS INTEGER)), 0) FROM meta WHERE key = 'identity'")

    def _check_identity(self, step: int, position: dict[str, int] | None) -> None:
        if position is not None and position.get("ledger", self._identity()) != self._identity():
            raise RunError(
                f"the ledger {self.path} is not the one that the checkpoint of step {step} was written beside: one of "
                "them was copied from another run. Put the run's own back"
            )

    def _check_reachable(self, step: int) -> None:
        pruned = self._one("SELECT value FROM meta WHERE key = 'pruned_through'")
        if step < pruned:
            raise RunError(
                f"the ledger {self.path} cannot go back to step {step}: trajectories settled up to step {pruned} are "
                f"no longer in the spool; resume from a checkpoint of step {pruned} or later"
            )

    def _check_position(self, step: int, position: dict[str, int] | None) -> None:
        trained = self.counts()["trained"]
        if position is not None and position["trained"] != trained:
            raise RunError(
                f"the ledger {self.path} and the checkpoint of step {step} do not fit: {trained} trajectories were "
                f"trained up to it, the checkpoint says {position['trained']}; was one of them copied from another run?"
            )

    @contextmanager
    def _rewinding(self) -> Iterator[None]:
        self._run("INSERT INTO meta VALUES ('rewinding', '1')")
        yield
        self._run("DELETE FROM meta WHERE key = 'rewinding'")

    def _decode(self, payload: bytes) -> Trajectory:
        try:
            return decode_trajectory(payload)
        except ValueError as error:
            raise RunError(f"the ledger {self.path} is damaged: {error}") from error

    def _context(self, text: str) -> dict[str, Any]:
        try:
            return dict(encoding.loads(text))
        except (ValueError, TypeError) as error:
            raise RunError(f"the ledger {self.path} is damaged: {error}") from error

    def _refusal(self, name: str, error: sqlite3.IntegrityError) -> RunError:
        known = self._query("SELECT state, step FROM trajectories WHERE key = ?", key_of_id(name))
        if not known and any(words in str(error) for words in ("FOREIGN KEY", "in flight")):
            return self._unknown(name)
        state = f" (it is {known[0][0]}{'' if known[0][1] is None else f' in step {known[0][1]}'})" if known else ""
        return RunError(f"the ledger refuses a change of trajectory {name}{state}: {error}")


_OF_GROUP = f"key BETWEEN ?1 * {SPAN} AND ?1 * {SPAN} + {SPAN - 1}"

_ISSUED = (
    "SELECT number, sibling, attempt, seed, size, task_id, prompt, group_key, version, issues "
    "FROM trajectories JOIN groups USING (number)"
)

_SHORT_GROUP = f"""
SELECT number, size, trained FROM (
    SELECT number, size, (
        SELECT COUNT(*) FROM trajectories
        WHERE key BETWEEN g.number * {SPAN} AND g.number * {SPAN} + {SPAN - 1} AND state = 'trained'
    ) AS trained
    FROM groups g WHERE number IN (SELECT value FROM json_each(?))
) WHERE trained NOT IN (0, size)
"""
