"""The ledger's database: its connection, its transactions, and what goes wrong with it in words."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from estr.errors import RunError
from estr.storage.files import disk_errors
from estr.storage.ledger_schema import FORMAT, PRAGMAS, SCHEMA

_LONG_LOG = 16384  # pages, 64 MiB


class LedgerDatabase:
    """A SQLite file with the ledger's tables; safe to use from several threads of one process.

    Raises:
        RunError: from every method, where the disk fails or the file is damaged; nothing has changed then.
    """

    def __init__(self, run: Any) -> None:
        self.path = Path(getattr(run, "ledger_path", run))
        self._lock = threading.RLock()
        self._depth = 0
        self._begun = False  # whether the outermost batch has begun its transaction
        self._closed = False
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
            level = f"level_{self._depth}" if self._depth else None
            if level is not None:
                self._run(f"SAVEPOINT {level}")
            self._depth += 1
            try:
                yield
                if self._begun:
                    self._run("COMMIT" if level is None else f"RELEASE {level}")
            except BaseException:
                self._undo(level)
                raise
            finally:
                self._depth -= 1
                self._begun = self._begun and self._depth > 0

    def _undo(self, level: str | None) -> None:
        if not self._connection.in_transaction:
            return
        if level is None:
            self._run("ROLLBACK")
        else:
            self._run(f"ROLLBACK TO {level}")
            self._run(f"RELEASE {level}")

    def _begin(self) -> None:
        """Begin the transaction of a batch, if it has not begun: one in which nothing happens costs nothing."""
        if not self._begun:
            self._connection.execute("BEGIN IMMEDIATE")
            self._begun = True
        elif not self._connection.in_transaction:
            raise RunError(f"the ledger {self.path} has undone this batch after an earlier failure")

    def move_log(self) -> None:
        """Move what the write-ahead log holds into the database, between two batches: for another thread than the one
        that commits, which from the first call on does it itself only where the log has grown very long.

        A log that cannot be moved stays where it is, and nothing is lost: what the disk has to say, commits tell. There
        is one connection, as a second one could meet the WAL-reset race of SQLite before 3.51.3.
        """
        with self._lock, contextlib.suppress(sqlite3.Error):
            if not self._closed:
                self._connection.execute(f"PRAGMA wal_autocheckpoint = {_LONG_LOG}")
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def check_whole(self) -> None:
        """Read all of it: RunError where bits have changed that can be told by their structure, or a row holds what no
        row may."""
        (said,) = self._query("PRAGMA quick_check(1)")[0]
        if said != "ok":
            raise RunError(f"the ledger {self.path} is damaged ({said}): put it back from a copy")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ statements

    def _prepare(self) -> None:
        for pragma in PRAGMAS:
            self._connection.execute(pragma)
        if not self._connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            self._connection.executescript(
                f"BEGIN IMMEDIATE; {SCHEMA} INSERT INTO meta VALUES ('format', '{FORMAT}'), "
                f"('identity', '{1 + secrets.randbits(60)}'); COMMIT;"
            )
        (found,) = self._connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone() or (None,)
        if found != FORMAT:
            raise RunError(
                f"the ledger {self.path} was written by another version of estr (its format is {found}, this one reads "
                f"{FORMAT}): go on with that version, or start a new run with model.path = the last checkpoint"
            )

    def _run(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if self._depth:
            self._begin()
        return self._connection.execute(sql, values)

    def _query(self, sql: str, *values: Any) -> list[Any]:
        with self._lock, self._errors():
            return self._run(sql, *values).fetchall()

    def _one(self, sql: str, *values: Any) -> int:
        rows = self._query(sql, *values)
        try:
            return int(rows[0][0])
        except (IndexError, TypeError, ValueError) as error:
            raise RunError(f"the ledger {self.path} failed: {CAUSES['SQLITE_CORRUPT']}") from error

    def _failure(self, error: sqlite3.Error) -> RunError:
        return RunError(f"the ledger {os.fspath(self.path)} failed: {_cause(error)}")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._failure(error) from error
        except UnicodeDecodeError as error:
            raise RunError(f"the ledger {os.fspath(self.path)} failed: {CAUSES['SQLITE_CORRUPT']}") from error


CAUSES = {
    "SQLITE_FULL": "the disk is full; free some space and resume the run",
    "SQLITE_READONLY": "it is read-only; make the run directory writable and resume",
    "SQLITE_CANTOPEN": "it cannot be opened; is the run directory writable, and the disk neither full nor failing?",
    "SQLITE_IOERR": "the disk reported an input/output error; check it before you resume",
    "SQLITE_BUSY": "another process keeps it locked; end that process and resume",
    "SQLITE_CORRUPT": "it is damaged; restore it from a copy, or start a new run from a checkpoint",
    "SQLITE_NOTADB": "it is not a ledger; restore it from a copy, or start a new run from a checkpoint",
}


def _cause(error: sqlite3.Error) -> str:
    name = getattr(error, "sqlite_errorname", "") or ""
    return next((text for prefix, text in CAUSES.items() if name.startswith(prefix)), str(error))
