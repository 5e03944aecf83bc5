"""The ledger: what became of every trajectory, durable before anyone acts on it.

A trajectory's life: ``issue`` → (``keep_turn``)* → ``finish`` (its tokens are then in the spool, in the same database)
→ ``settle`` once it was trained, or ``drop`` with a reason. A checkpoint of step s is followed by ``commit``, which
lets go of what no resume can need. A resume calls ``rewind_to(s)``: what had been trained after s counts as finished
again, what was in flight is to be issued again under the same number and seed, what was dropped stays dropped.

Every call is one transaction (SQLite, WAL, synchronous = FULL); ``batch()`` makes one of several.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estr.errors import RunError
from estr.storage import encoding
from estr.storage.encoding import clean_text
from estr.storage.files import disk_errors
from estr.storage.ledger_schema import FORMAT, PRAGMAS, SCHEMA
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


class Ledger:
    """The ledger and spool of a run (``spool/ledger.sqlite``); safe to call from several threads of one process.

    Raises:
        RunError: from every method, where the disk fails, the file is damaged or a call contradicts the ledger; nothing
            has changed then.
    """

    def __init__(self, run: Any) -> None:
        self.path = Path(getattr(run, "ledger_path", run))
        self._lock = threading.RLock()
        self._depth = 0
        with disk_errors("open the ledger", self.path), self._errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    # ------------------------------------------------------------------ transactions

    @contextmanager
    def batch(self) -> Iterator[None]:
        """One transaction for all calls inside; they are durable when the block ends, or undone if it raises."""
        with self._lock, self._errors():
            nested, level = self._depth > 0, f"level_{self._depth}"
            if nested and not self._connection.in_transaction:
                raise RunError(f"the ledger {self.path} has undone this batch after an earlier failure")
            self._run(f"SAVEPOINT {level}" if nested else "BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield
                self._run(f"RELEASE {level}" if nested else "COMMIT")
            except BaseException:
                self._undo(level if nested else None)
                raise
            finally:
                self._depth -= 1

    def _undo(self, level: str | None) -> None:
        if not self._connection.in_transaction:
            return
        if level is None:
            self._run("ROLLBACK")
        else:
            self._run(f"ROLLBACK TO {level}")
            self._run(f"RELEASE {level}")

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
        name = trajectory_id(group, sibling, attempt)
        about = (group, group_size, clean_text(task_id), clean_text(prompt), clean_text(group_key), version)
        with self.batch(), self._about(name):
            self._run("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (number) DO NOTHING", *about)
            self._check_group(*about[:3])
            again = self._run(
                "UPDATE trajectories SET issues = issues + 1 WHERE id = ? AND state = 'issued' AND seed = ?", name, seed
            )
            if not again.rowcount:
                self._run(
                    "INSERT INTO trajectories (id, number, sibling, attempt, seed) VALUES (?, ?, ?, ?, ?)",
                    *(name, group, sibling, attempt, seed),
                )
        return name

    def finish(self, trajectory: Trajectory) -> None:
        """Put a trajectory that was in flight into the spool; only after this may the learner see it."""
        name = trajectory.trajectory_id
        payload = encode_trajectory(trajectory)
        with self.batch(), self._about(name):
            self._known(name)
            self._run("INSERT OR REPLACE INTO spool VALUES (?, ?)", name, payload)
            self._run("UPDATE trajectories SET state = 'finished' WHERE id = ?", name)

    def keep_turn(self, trajectory: Trajectory, context: Mapping[str, Any]) -> None:
        """Remember a trajectory in flight as it stood when a turn had ended, in the place of the turn before.

        Args:
            context: what it takes beside its rows to go on, as JSON can hold it.
        """
        name = trajectory.trajectory_id
        payload, text = encode_trajectory(trajectory), encoding.dumps(dict(context))
        with self.batch(), self._about(name):
            self._known(name)
            self._run("INSERT OR REPLACE INTO turns VALUES (?, ?, ?)", name, payload, text)

    def turns(self) -> list[tuple[Trajectory, dict[str, Any]]]:
        """What is in flight and had ended a turn, with what ``keep_turn`` was given, by group and sibling."""
        rows = self._query(
            "SELECT payload, context FROM turns JOIN trajectories USING (id) ORDER BY number, sibling, attempt"
        )
        return [(self._decode(payload), self._context(text)) for payload, text in rows]

    def settle(self, trained: Iterable[str], step: int) -> None:
        """Record that these trajectories were trained in optimizer step ``step``; groups must be whole."""
        names = list(trained)
        with self.batch():
            for name in names:
                with self._about(name):
                    self._known(name)
                    self._run("UPDATE trajectories SET state = 'trained', step = ? WHERE id = ?", step, name)
            self._check_whole(names)

    def drop(self, trajectory_id: str, reason: str, step: int, trajectory: Trajectory | None = None) -> None:
        """Record that a trajectory will not be trained.

        Args:
            step: the optimizer step under which its rollout row is stored (the learner's version + 1).
            trajectory: what there is of it, where it did not finish, so that its row can be written again.
        """
        with self.batch(), self._about(trajectory_id):
            self._known(trajectory_id)
            if trajectory is not None:
                payload = encode_trajectory(trajectory)
                self._run("INSERT OR IGNORE INTO spool VALUES (?, ?)", trajectory_id, payload)
            self._run(
                "UPDATE trajectories SET state = 'dropped', step = ?, reason = ? WHERE id = ?",
                *(step, clean_text(reason), trajectory_id),
            )

    def drop_group(self, group: int, reason: str, step: int) -> list[Trajectory]:
        """Drop every trajectory of a group that is in flight or finished; returns them for their rollout rows."""
        with self.batch():
            live = self._run(
                "SELECT id FROM trajectories WHERE number = ? AND state IN ('issued', 'finished') ORDER BY sibling",
                group,
            ).fetchall()
            for (name,) in live:
                self.drop(name, reason, step)
            return [self.load(name) for (name,) in live]

    # ------------------------------------------------------------------ questions

    @property
    def next_group(self) -> int:
        """The number after the highest that was ever issued."""
        return self._one("SELECT COALESCE(MAX(number) + 1, 0) FROM groups")

    def in_flight(self) -> list[Issued]:
        """What is issued and neither finished nor dropped, by group and sibling."""
        rows = self._query(f"{_ISSUED} WHERE state = 'issued' ORDER BY number, sibling, attempt")
        return [Issued(*row) for row in rows]

    def finished(self) -> list[Trajectory]:
        """What is finished and not settled, by group and sibling."""
        rows = self._query(
            "SELECT payload FROM spool JOIN trajectories USING (id) WHERE state = 'finished' ORDER BY number, sibling"
        )
        return [self._decode(payload) for (payload,) in rows]

    def load(self, trajectory_id: str) -> Trajectory:
        """A trajectory from the spool; without tokens where none are (or no more) there."""
        rows = self._query("SELECT payload FROM spool WHERE id = ?", trajectory_id)
        if rows:
            return self._decode(rows[0][0])
        issued = self._query(f"{_ISSUED} WHERE id = ?", trajectory_id)
        if not issued:
            raise RunError(f"the ledger {self.path} does not know the trajectory {trajectory_id}")
        return Issued(*issued[0]).trajectory()

    def attempts(self, group: int) -> dict[int, int]:
        """The newest attempt of each sibling of a group."""
        rows = self._query("SELECT sibling, MAX(attempt) FROM trajectories WHERE number = ? GROUP BY sibling", group)
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
        return self._query("SELECT id, state, step, reason FROM trajectories ORDER BY number, sibling, attempt")

    # ------------------------------------------------------------------ checkpoints

    def position(self) -> dict[str, int]:
        """Where the ledger stands, to be stored in the checkpoint and given back to ``rewind_to``."""
        return {"next_group": self.next_group, "trained": self.counts()["trained"]}

    def commit(self, step: int, *, prune_through: int | None = None) -> None:
        """Called when the checkpoint of ``step`` is whole: let go of what was settled up to ``prune_through``.

        Args:
            prune_through: the oldest checkpoint that a resume may go back to (default: ``step``).
        """
        oldest = step if prune_through is None else min(prune_through, step)
        with self.batch():
            self._run("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", step, *self.position().values())
            self._run(
                "UPDATE meta SET value = MAX(CAST(value AS INTEGER), ?) WHERE key = 'pruned_through'", max(oldest, 0)
            )
            self._run(
                "DELETE FROM spool WHERE id IN (SELECT id FROM trajectories WHERE state IN ('trained', 'dropped') "
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
            self._check_reachable(step)
            after = "state = ? AND step > ? ORDER BY number, sibling, attempt"
            again = [name for (name,) in self._run(f"SELECT id FROM trajectories WHERE {after}", "trained", step)]
            dropped = self._run(f"SELECT id, reason FROM trajectories WHERE {after}", "dropped", step).fetchall()
            with self._rewinding():
                self._run(
                    "UPDATE trajectories SET state = 'finished', step = NULL WHERE state = 'trained' AND step > ?", step
                )
            self._run("UPDATE trajectories SET step = ? WHERE state = 'dropped' AND step > ?", step + 1, step)
            self._run("DELETE FROM checkpoints WHERE step > ?", step)
            self._check_position(step, position)
            return Rewind(again, [Dropped(self.load(name), reason) for name, reason in dropped], self.in_flight())

    def forget_groups(self, first: int) -> None:
        """Forget groups ``first`` and later as if they had never been issued, so that their numbers are given again
        (lockstep redoes whole cohorts). Refused where one of them was trained."""
        with self.batch():
            trained = self._one("SELECT COUNT(*) FROM trajectories WHERE number >= ? AND state = 'trained'", first)
            if trained:
                raise RunError(f"the ledger {self.path} cannot forget group {first} and later: {trained} were trained")
            with self._rewinding():
                for table in ("spool", "turns"):
                    self._run(f"DELETE FROM {table} WHERE id IN (SELECT id FROM trajectories WHERE number >= ?)", first)
                self._run("DELETE FROM trajectories WHERE number >= ?", first)
            self._run("DELETE FROM groups WHERE number >= ?", first)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _prepare(self) -> None:
        for pragma in PRAGMAS:
            self._connection.execute(pragma)
        if not self._connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            self._connection.executescript(
                f"BEGIN IMMEDIATE; {SCHEMA} INSERT INTO meta VALUES ('format', '{FORMAT}'); COMMIT;"
            )
        (found,) = self._connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone() or (None,)
        if found != FORMAT:
            raise RunError(
                f"the ledger {self.path} was written by another version of estr (its format is {found}, this one reads "
                f"{FORMAT}): go on with that version, or start a new run with model.path = the last checkpoint"
            )

    def _run(self, sql: str, *values: Any) -> sqlite3.Cursor:
        return self._connection.execute(sql, values)

    def _query(self, sql: str, *values: Any) -> list[Any]:
        with self._lock, self._errors():
            return self._run(sql, *values).fetchall()

    def _one(self, sql: str, *values: Any) -> int:
        rows = self._query(sql, *values)
        try:
            return int(rows[0][0])
        except (IndexError, TypeError, ValueError) as error:
            raise RunError(f"the ledger {self.path} failed: {_CAUSES['SQLITE_CORRUPT']}") from error

    def _known(self, name: str) -> None:
        if not self._run("SELECT 1 FROM trajectories WHERE id = ?", name).fetchone():
            raise RunError(f"the ledger {self.path} does not know the trajectory {name}: it was never issued")

    def _check_group(self, number: int, size: int, task_id: str) -> None:
        known = self._run("SELECT size, task_id FROM groups WHERE number = ?", number).fetchone()
        if known != (size, task_id):
            raise RunError(
                f"the ledger {self.path} has group {number} as {known[0]} trajectories of problem {known[1]!r}, "
                f"not {size} of {task_id!r}; were the task or rollout.group_size changed?"
            )

    def _check_whole(self, names: list[str]) -> None:
        short = self._run(_SHORT_GROUP, json.dumps(names)).fetchone()
        if short:
            raise RunError(f"group {short[0]} would be trained with {short[2]} of its {short[1]} trajectories")

    def _check_there(self, step: int, position: dict[str, int] | None) -> None:
        if position is not None and position["next_group"] > 0 and self.next_group == 0:
            raise RunError(
                f"the ledger {self.path} is empty, but up to step {step} {position['next_group']} groups were issued: "
                "it was removed or emptied. Put it back from a copy, or start a new run with model.path = that "
                "checkpoint"
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

    @contextmanager
    def _about(self, name: str) -> Iterator[None]:
        """Name the trajectory, and the state it is in, in what the database refuses."""
        try:
            yield
        except sqlite3.IntegrityError as error:
            row = self._run("SELECT state, step FROM trajectories WHERE id = ?", name).fetchone()
            state = f" (it is {row[0]}{'' if row[1] is None else f' in step {row[1]}'})" if row else ""
            raise RunError(f"the ledger refuses a change of trajectory {name}{state}: {error}") from error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise RunError(f"the ledger {os.fspath(self.path)} failed: {_cause(error)}") from error
        except UnicodeDecodeError as error:
            raise RunError(f"the ledger {os.fspath(self.path)} failed: {_CAUSES['SQLITE_CORRUPT']}") from error


_ISSUED = (
    "SELECT number, sibling, attempt, seed, size, task_id, prompt, group_key, version, issues "
    "FROM trajectories JOIN groups USING (number)"
)

_SHORT_GROUP = """
SELECT number, size, (SELECT COUNT(*) FROM trajectories t WHERE t.number = g.number AND state = 'trained') AS trained
FROM groups g WHERE trained NOT IN (0, size)
AND number IN (SELECT number FROM trajectories WHERE id IN (SELECT value FROM json_each(?)))
"""

_CAUSES = {
    "SQLITE_FULL": "the disk is full; free some space and resume the run",
    "SQLITE_READONLY": "it is read-only; make the run directory writable and resume",
    "SQLITE_CANTOPEN": "it cannot be opened; is the run directory writable?",
    "SQLITE_IOERR": "the disk reported an input/output error; check it before you resume",
    "SQLITE_BUSY": "another process keeps it locked; end that process and resume",
    "SQLITE_CORRUPT": "it is damaged; restore it from a copy, or start a new run from a checkpoint",
    "SQLITE_NOTADB": "it is not a ledger; restore it from a copy, or start a new run from a checkpoint",
}


def _cause(error: sqlite3.Error) -> str:
    name = getattr(error, "sqlite_errorname", "") or ""
    return next((text for prefix, text in _CAUSES.items() if name.startswith(prefix)), str(error))
