"""The ledger's tables. What must never happen is refused by the database itself, whatever the program does.

A trajectory's rows are found by one integer, ``key``: group, sibling and attempt side by side. What every transition
would have to keep up to date is left out: no index beside the keys, as only a resume asks for states and steps.
"""

from __future__ import annotations

from estr.errors import RunError
from estr.trajectory import trajectory_id

FORMAT = "3"

PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA busy_timeout = 10000",
    "PRAGMA temp_store = MEMORY",
)

_ATTEMPTS, _SIBLINGS, _GROUPS = 1 << 12, 1 << 20, 1 << 31
SPAN = _ATTEMPTS * _SIBLINGS  # keys of one group


def key_of(group: int, sibling: int, attempt: int) -> int:
    """The key of a trajectory; those of a group, and the attempts at a sibling, are neighbours.

    Raises:
        RunError: a number beyond what a key can hold.
    """
    if not (0 <= attempt < _ATTEMPTS and 0 <= sibling < _SIBLINGS and 0 <= group < _GROUPS):
        raise RunError(
            f"the ledger cannot number trajectory {trajectory_id(group, sibling, attempt)}: it holds {_GROUPS} groups "
            f"of {_SIBLINGS} trajectories with {_ATTEMPTS} attempts each"
        )
    return (group * _SIBLINGS + sibling) * _ATTEMPTS + attempt


def key_of_id(name: str) -> int | None:
    """The key of a trajectory id; None where it is none."""
    try:
        group, _, rest = name.partition("-")
        sibling, _, attempt = rest.partition(".")
        return key_of(int(group), int(sibling), int(attempt or 0))
    except (ValueError, RunError):
        return None


SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO meta VALUES ('pruned_through', '0'), ('trained', '0');

CREATE TABLE groups (
    number INTEGER PRIMARY KEY CHECK (number >= 0),
    size INTEGER NOT NULL CHECK (size >= 1),
    task_id TEXT NOT NULL,
    prompt TEXT NOT NULL,
    group_key TEXT NOT NULL,
    version INTEGER NOT NULL
);

CREATE TABLE trajectories (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    number INTEGER NOT NULL REFERENCES groups (number),
    sibling INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'issued' CHECK (state IN ('issued', 'finished', 'trained', 'dropped')),
    issues INTEGER NOT NULL DEFAULT 1,
    step INTEGER,
    reason TEXT,
    CHECK (sibling BETWEEN 0 AND {_SIBLINGS - 1} AND attempt BETWEEN 0 AND {_ATTEMPTS - 1}),
    CHECK (key = (number * {_SIBLINGS} + sibling) * {_ATTEMPTS} + attempt),
    CHECK ((state IN ('trained', 'dropped')) = (step IS NOT NULL)),
    CHECK ((state = 'dropped') = (reason IS NOT NULL))
);

CREATE TABLE spool (key INTEGER PRIMARY KEY REFERENCES trajectories (key), payload BLOB NOT NULL);

-- a multi-turn trajectory in flight as it stood when its last turn had ended
CREATE TABLE turns (
    key INTEGER PRIMARY KEY REFERENCES trajectories (key),
    payload BLOB NOT NULL,
    context TEXT NOT NULL
);

CREATE TABLE checkpoints (step INTEGER PRIMARY KEY, next_group INTEGER NOT NULL, trained INTEGER NOT NULL);

-- tokens into the spool and the new state, as one statement
CREATE VIEW results AS SELECT key, payload FROM spool;

CREATE TRIGGER result_finishes INSTEAD OF INSERT ON results
BEGIN
    INSERT INTO spool VALUES (NEW.key, NEW.payload);
    UPDATE trajectories SET state = 'finished' WHERE key = NEW.key;
END;

CREATE TRIGGER turns_are_of_what_is_in_flight BEFORE INSERT ON turns
WHEN NOT EXISTS (SELECT 1 FROM trajectories WHERE key = NEW.key AND state = 'issued')
BEGIN SELECT RAISE(ABORT, 'only what is in flight has turns to come'); END;

CREATE TRIGGER turns_end_with_the_flight AFTER UPDATE OF state ON trajectories WHEN NEW.state != 'issued'
BEGIN DELETE FROM turns WHERE key = NEW.key; END;

CREATE TRIGGER sibling_fits BEFORE INSERT ON trajectories
WHEN NEW.sibling >= (SELECT size FROM groups WHERE number = NEW.number)
BEGIN SELECT RAISE(ABORT, 'its sibling number is beyond the size of its group'); END;

CREATE TRIGGER one_live_attempt BEFORE INSERT ON trajectories
WHEN EXISTS (
    SELECT 1 FROM trajectories WHERE key BETWEEN NEW.key - NEW.attempt AND NEW.key - NEW.attempt + {_ATTEMPTS - 1}
    AND key != NEW.key AND state != 'dropped'
)
BEGIN SELECT RAISE(ABORT, 'another attempt at it is not dropped'); END;

CREATE TRIGGER starts_as_issued BEFORE INSERT ON trajectories WHEN NEW.state != 'issued'
BEGIN SELECT RAISE(ABORT, 'a trajectory must be issued first'); END;

CREATE TRIGGER allowed_transition BEFORE UPDATE OF state ON trajectories
WHEN NOT (
    (OLD.state = 'issued' AND NEW.state IN ('finished', 'dropped'))
    OR (OLD.state = 'finished' AND NEW.state IN ('trained', 'dropped'))
    OR (OLD.state = 'trained' AND NEW.state = 'finished' AND EXISTS (SELECT 1 FROM meta WHERE key = 'rewinding'))
)
BEGIN SELECT RAISE(ABORT, 'this transition is not allowed'); END;

CREATE TRIGGER stays_itself BEFORE UPDATE OF key, id, number, sibling, attempt, seed ON trajectories
BEGIN SELECT RAISE(ABORT, 'a trajectory stays what it is'); END;

CREATE TRIGGER finished_is_spooled BEFORE UPDATE OF state ON trajectories
WHEN NEW.state = 'finished' AND NOT EXISTS (SELECT 1 FROM spool WHERE key = NEW.key)
BEGIN SELECT RAISE(ABORT, 'its tokens are not in the spool'); END;

CREATE TRIGGER nothing_is_forgotten BEFORE DELETE ON trajectories
WHEN NOT EXISTS (SELECT 1 FROM meta WHERE key = 'rewinding')
BEGIN SELECT RAISE(ABORT, 'the ledger forgets nothing'); END;

CREATE TRIGGER only_settled_are_pruned BEFORE DELETE ON spool
WHEN NOT EXISTS (SELECT 1 FROM meta WHERE key = 'rewinding') AND NOT EXISTS (
    SELECT 1 FROM trajectories WHERE key = OLD.key AND state IN ('trained', 'dropped')
    AND step <= CAST((SELECT value FROM meta WHERE key = 'pruned_through') AS INTEGER)
)
BEGIN SELECT RAISE(ABORT, 'a resume may need it'); END;
"""
