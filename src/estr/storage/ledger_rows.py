"""Many rows of the ledger in one statement: what a trajectory costs is then the database's work alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from estr.storage import encoding
from estr.storage.ledger_schema import key_of
from estr.storage.spool import encode_trajectory
from estr.trajectory import Trajectory

_MOST_BYTES = 8 << 20  # of payloads in one statement


@dataclass(frozen=True)
class Packed:
    """A trajectory, and what it takes to go on with it, as the ledger keeps them.

    ``name``: its id; ``context``: JSON text, empty where it is whole.
    """

    name: str
    key: int
    payload: bytes
    context: str = ""


def _from_json(*columns: str) -> str:
    return f"SELECT {', '.join(columns)} FROM json_each(?1)"


_KEY = "json_extract(value, '$[0]')"
_PAYLOAD = "substr(?2, json_extract(value, '$[1]'), json_extract(value, '$[2]'))"
_CONTEXT = "json_extract(value, '$[3]')"

_INTO = "INSERT INTO trajectories (key, id, number, sibling, attempt, seed)"
_AGAIN = "ON CONFLICT (key) DO UPDATE SET issues = issues + 1 WHERE state = 'issued' AND seed = excluded.seed"
_COLUMNS = [f"json_extract(value, '$[{place}]')" for place in range(6)]

GROUP = (
    "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (number) DO UPDATE SET size = size "
    "WHERE size = excluded.size AND task_id = excluded.task_id"
)
ISSUE = f"{_INTO} VALUES (?, ?, ?, ?, ?, ?)"
ISSUE_AGAIN = f"{ISSUE} {_AGAIN}"
ISSUES = f"{_INTO} {_from_json(*_COLUMNS)} WHERE true {_AGAIN}"
RESULTS = f"INSERT INTO results {_from_json(_KEY, _PAYLOAD)}"
RESULT = "INSERT INTO results VALUES (?1, ?2)"
TURNS = f"INSERT OR REPLACE INTO turns {_from_json(_KEY, _PAYLOAD, _CONTEXT)}"
TURN = "INSERT OR REPLACE INTO turns VALUES (?1, ?2, ?3)"
TRAINED = "UPDATE trajectories SET state = 'trained', step = ? WHERE key IN (SELECT value FROM json_each(?))"
TRAINED_ONE = "UPDATE trajectories SET state = 'trained', step = ? WHERE key = ?"
UNKNOWN = "SELECT value FROM json_each(?) WHERE value NOT IN (SELECT key FROM trajectories)"


def packed(trajectory: Trajectory, context: Mapping[str, Any] | None = None) -> Packed:
    """``trajectory`` as the ledger keeps it.

    Raises:
        RunError: its numbers are beyond what the ledger can hold.
        TypeError: something in ``context`` that JSON cannot hold.
    """
    key = key_of(trajectory.group, trajectory.sibling, trajectory.attempt)
    text = "" if context is None else encoding.quick_dumps(context)
    return Packed(trajectory.trajectory_id, key, encode_trajectory(trajectory), text)


def arguments(rows: Sequence[Packed]) -> tuple[str, bytes]:
    """What ``RESULTS`` and ``TURNS`` are run with: where each row's payload lies among all, and all of them."""
    places, begin = [], 1
    for row in rows:
        places.append((row.key, begin, len(row.payload), row.context))
        begin += len(row.payload)
    return json.dumps(places), b"".join(row.payload for row in rows)


def portions(rows: Sequence[Packed]) -> Iterator[Sequence[Packed]]:
    """``rows`` in parts that are small enough for one statement."""
    first, size = 0, 0
    for index, row in enumerate(rows):
        if size and size + len(row.payload) > _MOST_BYTES:
            yield rows[first:index]
            first, size = index, 0
        size += len(row.payload)
    if rows[first:]:
        yield rows[first:]
