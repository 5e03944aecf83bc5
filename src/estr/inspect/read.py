"""Reading rollouts: our run directories, Parquet, JSON lines; nothing is executed, mistakes name file and place."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from estr.errors import UsageError
from estr.inspect.assemble import assemble
from estr.inspect.dump import Dump
from estr.inspect.formats import ROW_FIELDS, Fields, resolve
from estr.inspect.table import LISTED, Builder, Ragged, Table, group_tokens
from estr.storage.rollout_files import rollout_files

PICKLED = (".pt", ".pth", ".pkl", ".pickle", ".bin")
PARQUET = (".parquet", ".pq")
JSON_LINES = (".jsonl", ".ndjson", ".json")


def read_dump(path: Path, preset: str | None = None, mapping: Mapping[str, str] | None = None) -> Dump:
    """The rollouts at ``path``: a run directory, a directory of Parquet or JSONL files, or one such file.

    ``preset`` names the trainer that wrote it (default: seen from the columns); ``mapping`` gives columns by hand,
    ours → theirs.

    Raises:
        UsageError: nothing is there, it is not such a file, a line or row is malformed, or no column is known.
    """
    source = _Source.of(path)
    used, fields = resolve(preset, mapping or {}, source.names(), str(path))
    table = source.table(fields)
    return assemble(table, str(path), used)


@dataclass(frozen=True)
class _Source:
    files: list[Path]
    parquet: bool

    @classmethod
    def of(cls, path: Path) -> _Source:
        if path.is_file():
            return cls([path], _is_parquet(path))
        if not path.is_dir():
            raise UsageError(f"{path} does not exist; give a run directory, a Parquet file or a JSONL file")
        stored = rollout_files(path)
        if stored or (path / "config.toml").is_file():
            return cls(stored, True)
        lines = sorted(file for file in path.glob("**/*.jsonl") if not file.name.startswith("."))
        if not lines:
            raise UsageError(f"{path} holds neither Parquet nor JSONL files; give a run directory or a file")
        return cls(lines, False)

    def names(self) -> list[str]:
        if not self.files:
            return ["logprob"]  # a run without rollouts yet: an empty dump of our own columns
        per_file = (_parquet_names if self.parquet else _json_names)(self.files)
        return list(dict.fromkeys(name for names in per_file for name in names))

    def table(self, fields: Fields) -> Table:
        return (_parquet_table if self.parquet else _json_table)(self.files, fields)


def _is_parquet(path: Path) -> bool:
    if path.suffix.lower() in PICKLED:
        raise UsageError(
            f"{path} is a pickle, which can run code and is never loaded here; write its samples as JSON lines, "
            "one object a sample with its lists as plain lists, and give that file"
        )
    if path.suffix.lower() in PARQUET:
        return True
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


# --- JSON lines ------------------------------------------------------------------------------------------------------


def _json_records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = str(error).split("\n")[0]
                raise UsageError(f"{file} line {number}: not a JSON object ({reason})") from None
            if not isinstance(record, dict):
                raise UsageError(f"{file} line {number}: not a JSON object but {type(record).__name__}")
            yield number, record


def _json_names(files: Sequence[Path]) -> list[list[str]]:
    """Names in the first lines of each file; a column may be missing in the very first."""
    names = [[name for _, record in itertools.islice(_json_records(file), 3) for name in record] for file in files[:32]]
    if not any(names):
        raise UsageError(f"{files[0]} is empty; it should hold one JSON object a line")
    return names


def _json_table(files: Sequence[Path], fields: Fields) -> Table:
    builder = Builder()
    for file in files:
        for number, record in _json_records(file):
            row = {ours: record[theirs] for ours, theirs in fields.items() if record.get(theirs) is not None}
            builder.add(row, str(file), number, "line")
    return builder.table()


# --- Parquet ---------------------------------------------------------------------------------------------------------


def _parquet_names(files: Sequence[Path]) -> list[list[str]]:
    return [list(_schema(file).names) for file in files]


def _schema(file: Path) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read as Parquet: {_first_line(error)}") from None


def _parquet_table(files: Sequence[Path], fields: Fields) -> Table:
    tables = [_read(file, fields) for file in files]
    places = _Places([str(file) for file in files], [table.num_rows for table in tables])
    shapes = {_shape(table, fields) for table in tables}
    if len(shapes) > 1:
        raise UsageError(f"{files[0]} and its neighbors store tokens in different ways; inspect them one by one")
    shape = shapes.pop() if shapes else "rows"
    if shape == "nested":
        return _nested_table(tables, files)
    if shape == "tokens":
        columns: dict[str, list[Any]] = {}
        for name in fields:
            columns[name] = [x for table in tables for x in _objects(table, name)]
        return group_tokens(columns, places)
    lists = {name: _ragged(tables, name, places) for name in fields if name in LISTED and _any_list(tables, name)}
    scalars = {
        name: [value for table in tables for value in _scalar(table, name)] for name in fields if name in ROW_FIELDS
    }
    return Table(places.total, lists, scalars, places)


class _Places:
    """Row number of all files → "FILE row 12" (1-based)."""

    def __init__(self, files: list[str], rows: list[int]) -> None:
        self._files, self._ends = files, np.cumsum([0, *rows])
        self.total = int(self._ends[-1])

    def __call__(self, row: int) -> str:
        file = int(np.searchsorted(self._ends, row, side="right")) - 1
        return f"{self._files[file]} row {row - int(self._ends[file]) + 1}"


def _read(file: Path, fields: Fields) -> pa.Table:
    """The wanted columns under our names."""
    present = [name for name in dict.fromkeys(fields.values()) if name in _schema(file).names]
    try:
        with pq.ParquetFile(file) as opened:
            table = opened.read(columns=present)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read as Parquet: {_first_line(error)}") from None
    ours = {name: theirs for name, theirs in fields.items() if theirs in present}
    return pa.table({name: table.column(theirs) for name, theirs in ours.items()})


def _shape(table: pa.Table, fields: Fields) -> str:
    types = {name: table.schema.field(name).type for name in table.column_names}
    if any(_is_list(kind) and _is_list(kind.value_type) for name, kind in types.items() if name in LISTED):
        return "nested"
    if "sequence" in types and _is_list(types["sequence"]):
        return "nested"
    tokenwise = "logprob" in types and not _is_list(types["logprob"]) and not pa.types.is_null(types["logprob"])
    return "tokens" if tokenwise else "rows"


def _nested_table(tables: Sequence[pa.Table], files: Sequence[Path]) -> Table:
    builder = Builder()
    for file, table in zip(files, tables, strict=True):
        for number, record in enumerate(table.to_pylist(), start=1):
            row = {name: value for name, value in record.items() if value is not None}
            builder.add(row, str(file), number, "row")
    return builder.table()


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _any_list(tables: Sequence[pa.Table], name: str) -> bool:
    return any(name in table.column_names and _is_list(table.schema.field(name).type) for table in tables)


def _ragged(tables: Sequence[pa.Table], name: str, places: _Places) -> Ragged:
    parts = [_flatten(table, name, places) for table in tables]
    return Ragged(
        np.concatenate([np.zeros(0), *(values for values, _, _ in parts)]),
        np.concatenate([np.zeros(0, np.int64), *(lengths for _, lengths, _ in parts)]),
        np.concatenate([np.zeros(0, bool), *(present for _, _, present in parts)]),
    )


def _flatten(table: pa.Table, name: str, places: _Places) -> tuple[Any, Any, Any]:
    """Values of a list column one after the other, each row's length, and where there is a list at all."""
    if name not in table.column_names or not _is_list(table.schema.field(name).type):
        absent = np.zeros(table.num_rows, bool)
        return np.zeros(0), np.zeros(table.num_rows, np.int64), absent
    column = table.column(name)
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    chunks = column.chunks
    lengths = [chunk.value_lengths().fill_null(0).to_numpy(zero_copy_only=False) for chunk in chunks]
    try:
        values = [_numeric(chunk.flatten()) for chunk in chunks]
    except (pa.ArrowException, TypeError, ValueError):
        raise UsageError(f"{places(0)}: {name} must hold numbers, its type is {column.type}") from None
    present = [chunk.is_valid().to_numpy(zero_copy_only=False) for chunk in chunks]
    return (
        np.concatenate([np.zeros(0), *values]),
        np.concatenate([np.zeros(0, np.int64), *lengths]).astype(np.int64),
        np.concatenate([np.zeros(0, bool), *present]),
    )


def _numeric(values: pa.Array) -> Any:
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return np.array([_number_or_nan(value) for value in values.to_pylist()], np.float64)
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    return values.cast(pa.float64()).to_numpy(zero_copy_only=False)


def _number_or_nan(text: str | None) -> float:
    try:
        return float(text) if text is not None else float("nan")
    except ValueError:
        return float("nan")


def _scalar(table: pa.Table, name: str) -> list[Any]:
    """One value a row; a list stands for its sum where it is a reward, else for its only value."""
    if name not in table.column_names:
        return [None] * table.num_rows
    kind = table.schema.field(name).type
    if not _is_list(kind):
        return _objects(table, name)
    if name in LISTED:
        return [None] * table.num_rows
    values = _objects(table, name)
    if name == "reward":
        return [None if value is None else float(np.nansum(np.asarray(value, np.float64))) for value in values]
    if not pa.types.is_floating(kind.value_type) and not pa.types.is_integer(kind.value_type):
        return [None if value is None else str(value) for value in values]
    return [value[0] if value and len(set(value)) == 1 else None for value in values]


def _objects(table: pa.Table, name: str) -> list[Any]:
    return list(table.column(name).to_pylist()) if name in table.column_names else [None] * table.num_rows


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]
