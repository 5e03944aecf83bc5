"""The ledger's tables. What must never happen is refused by the database itself, whatever the program does."""

FORMAT = "2"

PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA busy_timeout = 10000",
)

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO meta VALUES ('pruned_through', '0');

CREATE TABLE groups (
    number INTEGER PRIMARY KEY CHECK (number >= 0),
    size INTEGER NOT NULL CHECK (size >= 1),
    task_id TEXT NOT NULL,
    prompt TEXT NOT NULL,
    group_key TEXT NOT NULL,
    version INTEGER NOT NULL
);

CREATE TABLE trajectories (
    id TEXT PRIMARY KEY,
    number INTEGER NOT NULL REFERENCES groups (number),
    sibling INTEGER NOT NULL CHECK (sibling >= 0),
    attempt INTEGER NOT NULL CHECK (attempt >= 0),
    seed INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'issued' CHECK (state IN ('issued', 'finished', 'trained', 'dropped')),
    issues INTEGER NOT NULL DEFAULT 1,
    step INTEGER,
    reason TEXT,
    UNIQUE (number, sibling, attempt),
    CHECK ((state IN ('trained', 'dropped')) = (step IS NOT NULL)),
    CHECK ((state = 'dropped') = (reason IS NOT NULL))
);
CREATE INDEX by_state ON trajectories (state, step);
CREATE UNIQUE INDEX one_live_attempt ON trajectories (number, sibling) WHERE state != 'dropped';

CREATE TABLE spool (id TEXT PRIMARY KEY REFERENCES trajectories (id), payload BLOB NOT NULL);

-- a multi-turn trajectory in flight as it stood when its last turn had ended
CREATE TABLE turns (
    id TEXT PRIMARY KEY REFERENCES trajectories (id),
    payload BLOB NOT NULL,
    context TEXT NOT NULL
);

CREATE TRIGGER turns_are_of_what_is_in_flight BEFORE INSERT ON turns
WHEN NOT EXISTS (SELECT 1 FROM trajectories WHERE id = NEW.id AND state = 'issued')
BEGIN SELECT RAISE(ABORT, 'only what is in flight has turns to come'); END;

CREATE TRIGGER turns_end_with_the_flight AFTER UPDATE OF state ON trajectories WHEN NEW.state != 'issued'
BEGIN DELETE FROM turns WHERE id = NEW.id; END;

CREATE TABLE checkpoints (step INTEGER PRIMARY KEY, next_group INTEGER NOT NULL, trained INTEGER NOT NULL);

CREATE TRIGGER sibling_fits BEFORE INSERT ON trajectories
WHEN NEW.sibling >= (SELECT size FROM groups WHERE number = NEW.number)
BEGIN SELECT RAISE(ABORT, 'its sibling number is beyond the size of its group'); END;

CREATE TRIGGER starts_as_issued BEFORE INSERT ON trajectories WHEN NEW.state != 'issued'
BEGIN SELECT RAISE(ABORT, 'a trajectory must be issued first'); END;

CREATE TRIGGER allowed_transition BEFORE UPDATE OF state ON trajectories
WHEN NOT (
    (OLD.state = 'issued' AND NEW.state IN ('finished', 'dropped'))
    OR (OLD.state = 'finished' AND NEW.state IN ('trained', 'dropped'))
    OR (OLD.state = 'trained' AND NEW.state = 'finished' AND EXISTS (SELECT 1 FROM meta WHERE key = 'rewinding'))
)
BEGIN SELECT RAISE(ABORT, 'this transition is not allowed'); END;

CREATE TRIGGER finished_is_spooled BEFORE UPDATE OF state ON trajectories
WHEN NEW.state = 'finished' AND NOT EXISTS (SELECT 1 FROM spool WHERE id = NEW.id)
BEGIN SELECT RAISE(ABORT, 'its tokens are not in the spool'); END;

CREATE TRIGGER nothing_is_forgotten BEFORE DELETE ON trajectories
WHEN NOT EXISTS (SELECT 1 FROM meta WHERE key = 'rewinding')
BEGIN SELECT RAISE(ABORT, 'the ledger forgets nothing'); END;

CREATE TRIGGER only_settled_are_pruned BEFORE DELETE ON spool
WHEN NOT EXISTS (SELECT 1 FROM meta WHERE key = 'rewinding') AND NOT EXISTS (
    SELECT 1 FROM trajectories WHERE id = OLD.id AND state IN ('trained', 'dropped')
    AND step <= CAST((SELECT value FROM meta WHERE key = 'pruned_through') AS INTEGER)
)
BEGIN SELECT RAISE(ABORT, 'a resume may need it'); END;
"""
