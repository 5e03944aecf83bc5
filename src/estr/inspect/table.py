"""Columns of a dump before they are aligned: ragged lists and scalars, one entry a row, and where each came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estr.errors import UsageError
from estr.inspect.dump import Floats, Ints
from estr.inspect.formats import ROW_FIELDS, TOKEN_FIELDS

LISTED = {*TOKEN_FIELDS, "advantage", "version", "versions"}
"""Fields that may hold a list with one entry a token."""
NUMERIC = {
    *LISTED,
    "reward",
    "target_version",
    "trained_step",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "version_first",
    "version_last",
}


@dataclass
class Ragged:
    """One list of numbers a row: row r holds values[offsets[r] : offsets[r + 1]]; NaN where an entry is null."""

    values: Floats
    lengths: Ints
    present: NDArray[np.bool_]

    @property
    def offsets(self) -> Ints:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])

    @classmethod
    def of(cls, parts: list[Floats | None]) -> Ragged:
        arrays = [np.zeros(0) if part is None else part for part in parts]
        return cls(
            np.concatenate([np.zeros(0), *arrays]),
            np.array([len(array) for array in arrays], np.int64),
            np.array([part is not None for part in parts], bool),
        )


@dataclass
class Table:
    """R rows; ``place(r)`` names the file and line or row that a person can look up."""

    rows: int
    lists: dict[str, Ragged]
    scalars: dict[str, list[Any]]
    place: Callable[[int], str]
    notes: list[str] = field(default_factory=list)


class Builder:
    """Collects records (our field name → value) into a Table; a record is a row, a padded batch or flat tokens."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._places: list[tuple[str, int]] = []
        self._tokenwise = False

    def add(self, record: dict[str, Any], file: str, number: int, word: str) -> None:
        """One record of ``file``; ``word`` is "line" or "row".

        Raises:
            UsageError: a value is not what its field holds; the message names the place.
        """
        place = f"{file} {word} {number}"
        if record.get("logprob") is not None and not isinstance(record["logprob"], list | tuple | np.ndarray):
            self._tokenwise = True
            self._append(_scalars_only(record, place), place, number)
            return
        for row in _split(record, place):
            self._append(row, place, number)

    def _append(self, row: dict[str, Any], place: str, number: int) -> None:
        self._rows.append(row)
        self._places.append((place, number))

    def table(self) -> Table:
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        if self._tokenwise:
            return self._by_token(names)
        lists = {
            name: Ragged.of([_list_or_none(row.get(name)) for row in self._rows]) for name in names if name in LISTED
        }
        scalars = {
            name: [None if isinstance(row.get(name), np.ndarray) else row.get(name) for row in self._rows]
            for name in names
            if name in ROW_FIELDS
        }
        return Table(len(self._rows), lists, scalars, lambda row: self._places[row][0])

    def _by_token(self, names: list[str]) -> Table:
        columns = {name: [row.get(name) for row in self._rows] for name in names}
        return group_tokens(columns, lambda row: self._places[row][0])


def group_tokens(columns: dict[str, list[Any]], place: Callable[[int], str]) -> Table:
    """A table of one token a row as a table of one trajectory a row, in order of first appearance."""
    key = next((name for name in ("sequence", "trajectory_id") if name in columns), None)
    if key is None:
        raise UsageError(
            f"{place(0)}: one token a row needs a column that says which trajectory it belongs to; "
            "name it with --map trajectory_id=…"
        )
    _, first, inverse = np.unique(np.asarray(columns[key], dtype=str), return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    owner = rank[inverse]
    order = np.argsort(owner, kind="stable")
    begin = np.sort(first)
    counts = np.bincount(owner, minlength=len(first)).astype(np.int64)
    tokens = {name for name in columns if name in LISTED} - {"advantage"}
    lists = {
        name: Ragged(numbers(columns[name], name, place(0))[order], counts, np.ones(len(counts), bool))
        for name in tokens - {"sequence"}
    }
    if "advantage" in columns:
        values = numbers(columns["advantage"], "advantage", place(0))
        lists["advantage"] = Ragged(values[order], counts, np.ones(len(counts), bool))
    scalars = {
        name: [columns[name][index] for index in begin] for name in columns if name in ROW_FIELDS and name not in LISTED
    }
    scalars.setdefault("trajectory_id", [columns[key][index] for index in begin])
    return Table(len(counts), lists, scalars, lambda row: place(int(begin[row])))


def numbers(value: Any, name: str, place: str) -> Floats:
    """A list as float64 with NaN for null; UsageError where it holds anything else, or lists of unequal length."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{place}: {name} must hold numbers, found {_short(value)}") from None
    return array


def _split(record: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """The rows of a record: itself, or the rows of a padded batch, or the sequences of flat tokens."""
    values = {name: _converted(value, name, place) if _is_list(value) else value for name, value in record.items()}
    if isinstance(values.get("sequence"), np.ndarray):
        return _by_sequence(values, place)
    sizes = {len(value.parts) for value in values.values() if isinstance(value, _Nested)}
    if not sizes:
        return [{name: _row_value(name, value) for name, value in values.items()}]
    if len(sizes) != 1:
        raise UsageError(f"{place}: the columns of a batch must have one number of rows, found {sorted(sizes)}")
    size = sizes.pop()
    return [
        {name: _row_value(name, _of_batch(name, value, index, size, place)) for name, value in values.items()}
        for index in range(size)
    ]


@dataclass(frozen=True)
class _Nested:
    """A list of lists of numbers: one list a row of a padded batch."""

    parts: list[Floats | None]


def _converted(value: Any, name: str, place: str) -> Any:
    """A list of numbers as an array [L], a list of such lists as ``_Nested``, texts and messages as they are."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    if name not in NUMERIC:
        return list(value)
    if any(map(_is_list, value)):
        return _Nested([None if entry is None else _flat(entry, name, place) for entry in value])
    if name in ("version", "versions") and not all(map(_is_numeric, value)):
        return None  # hashes and other names of weights say nothing about order
    return _flat(value, name, place)


def _flat(value: Any, name: str, place: str) -> Floats:
    array = numbers(value, name, place)
    if array.ndim != 1:
        raise UsageError(f"{place}: {name} must be a list of numbers, found {_short(value)}")
    return array


def _of_batch(name: str, value: Any, index: int, size: int, place: str) -> Any:
    parts = value.parts if isinstance(value, _Nested) else value
    if not _is_list(parts):
        return parts
    if len(parts) != size:
        raise UsageError(f"{place}: {name} has {len(parts)} entries in a batch of {size} rows")
    entry = parts[index]
    return entry.item() if isinstance(entry, np.generic) else entry


def _by_sequence(values: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """Flat tokens with a sequence index: one row a sequence; lists of one entry a sequence are its scalars."""
    sequence = values.pop("sequence")
    if not np.isfinite(sequence).all() or (np.diff(sequence) < 0).any() or (sequence < 0).any():
        raise UsageError(f"{place}: sequence must be a list of whole numbers from 0 that do not fall")
    ids, begin = np.unique(sequence.astype(np.int64), return_index=True)
    ends = [*begin[1:].tolist(), len(sequence)]
    rows = []
    for index, first, last in zip(ids.tolist(), begin.tolist(), ends, strict=True):
        row: dict[str, Any] = {"trajectory_id": f"{place}, sequence {index}"}
        for name, value in values.items():
            if isinstance(value, np.ndarray) and len(value) == len(sequence) and name in LISTED:
                row[name] = value[first:last]
            elif _is_list(value):
                row[name] = _row_value(name, _of_batch(name, value, index, max(len(value), index + 1), place))
            else:
                row[name] = value
        rows.append(row)
    return rows


def _row_value(name: str, value: Any) -> Any:
    """What one row holds of a field: an array where it may be a list, else a scalar."""
    if not _is_list(value):
        return value
    if name in LISTED:
        return value
    if name == "reward":
        return float(np.nansum(value)) if len(value) else None
    if name in ROW_FIELDS and isinstance(value, np.ndarray):
        known = np.unique(value[np.isfinite(value)])
        return float(known[0]) if len(known) == 1 else None
    return None if name in TOKEN_FIELDS else str(value)


def _scalars_only(record: dict[str, Any], place: str) -> dict[str, Any]:
    for name, value in record.items():
        if _is_list(value):
            raise UsageError(f"{place}: logprob is one number, so {name} must be one too, found a list")
    return record


def _list_or_none(value: Any) -> Floats | None:
    return value if isinstance(value, np.ndarray) else None


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


def _is_numeric(value: Any) -> bool:
    try:
        float(value if value is not None else 0)
    except (TypeError, ValueError):
        return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
