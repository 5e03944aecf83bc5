"""Stored trajectories as flat arrays: action tokens of rollouts/*.parquet, read within a budget, and whole rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Floats = NDArray[np.float32]

ROW_COLUMNS = (
    "trajectory_id",
    "parent_id",
    "segment",
    "reward",
    "advantage",
    "state",
    "trained_step",
    "target_version",
)
TOKEN_COLUMNS = ("logprob", "entropy", "version", "learner_logprob", "proximal_logprob", "token_advantage")
SAMPLE_COLUMNS = ("group_id", "task_id", "prompt", "tokens", "finish_reason", "turns", "drop_reason", "text")


@dataclass
class Rollouts:
    """R stored rows (one a trajectory, more where a history forked) and their N action tokens.

    ``trajectory`` [R] numbers the trajectories 0..S-1; rows of one trajectory are neighbors, in order of ``segment``.
    Token arrays are [N], ordered by row; NaN where a column is missing.
    """

    source: list[tuple[Path, int, int]] = field(default_factory=list)  # [R] file, row group, row within it
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)  # [R] each
    trajectory: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [R]
    row: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [N]
    tokens: dict[str, NDArray[Any]] = field(default_factory=dict)  # [N] each
    groups_read: int = 0
    groups_total: int = 0

    def __len__(self) -> int:
        return len(self.source)

    @property
    def token_count(self) -> int:
        return len(self.row)

    @property
    def trajectories(self) -> int:
        return int(self.trajectory.max()) + 1 if len(self) else 0

    @property
    def delta(self) -> Floats:
        """log π − log μ [N]; NaN where the learner never saw the token."""
        if not self.token_count:
            return np.zeros(0, np.float32)
        return np.asarray(self.tokens["learner_logprob"] - self.tokens["logprob"], np.float32)

    @property
    def advantage(self) -> Floats:
        """Advantage of each token [N]: by token where stored, else its row's."""
        if not self.token_count:
            return np.zeros(0, np.float32)
        own = self.tokens["token_advantage"]
        return np.asarray(np.where(np.isnan(own), self.columns["advantage"][self.row], own), np.float32)

    def first_rows(self) -> NDArray[np.int64]:
        """Index of each trajectory's first row [S]."""
        return np.searchsorted(self.trajectory, np.arange(self.trajectories))


def read_rollout_tokens(directory: Path, token_budget: int, notes: list[str]) -> Rollouts:
    """Read the action tokens of ``directory``/*.parquet; beyond about ``token_budget`` stored tokens, an evenly spaced
    choice of row groups. Files that cannot be read are left out and noted."""
    groups, bad = _row_groups(directory)
    chosen = _spread(groups, token_budget)
    parts: list[_Part] = []
    for path, index, _ in chosen:
        try:
            parts.append(_read_part(path, index))
        except (OSError, pa.ArrowException, KeyError, ValueError, TypeError):
            bad.append(path)
    if bad:
        notes.append(f"rollouts: {len(set(bad))} file(s) could not be read, for example {bad[0].name}.")
    rollouts = _join(parts)
    rollouts.groups_read, rollouts.groups_total = len(parts), len(groups)
    return rollouts


def read_rows(rollouts: Rollouts, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Whole rows as Python values, in the order of ``rows``; lists are numpy arrays or None."""
    return [_read_row(*rollouts.source[index]) for index in rows]


@dataclass
class _Part:
    source: list[tuple[Path, int, int]]
    columns: dict[str, NDArray[Any]]
    lengths: NDArray[np.int64]  # [R] action tokens of a row
    tokens: dict[str, NDArray[Any]]


def _row_groups(directory: Path) -> tuple[list[tuple[Path, int, int]], list[Path]]:
    """(file, row group, stored tokens) of every readable file, and the unreadable files."""
    groups, bad = [], []
    for path in sorted(directory.glob("*.parquet")) if directory.is_dir() else []:
        try:
            groups += [(path, index, tokens) for index, tokens in enumerate(_token_counts(path))]
        except (OSError, pa.ArrowException, ValueError):
            bad.append(path)
    return groups, bad


def _token_counts(path: Path) -> list[int]:
    """Stored tokens of each row group, by its smallest column: asking a damaged file's metadata can end the process."""
    with pq.ParquetFile(path) as file:
        wanted = [name for name in ("action",) if name in file.schema_arrow.names]
        parts = [file.read_row_group(i, columns=wanted) for i in range(file.num_row_groups)]
    return [int(_flat(part["action"])[1].sum()) if wanted else part.num_rows for part in parts]


def _spread(groups: list[tuple[Path, int, int]], budget: int) -> list[tuple[Path, int, int]]:
    """Every k-th row group, the newest always among them, so that about ``budget`` tokens are read."""
    total = sum(tokens for _, _, tokens in groups)
    if total <= budget or not groups:
        return groups
    count = max(1, min(len(groups), int(len(groups) * budget / total)))
    picks = np.unique(np.linspace(len(groups) - 1, 0, count).round().astype(int))
    return [groups[index] for index in picks]


def _read_part(path: Path, index: int) -> _Part:
    file = pq.ParquetFile(path)
    present = set(file.schema_arrow.names)
    wanted = [name for name in (*ROW_COLUMNS, *TOKEN_COLUMNS, "action") if name in present]
    table = file.read_row_group(index, columns=wanted)
    table.validate(full=True)
    action, lengths = _flat(table["action"])
    action = action.astype(bool)
    row_of_token = np.repeat(np.arange(table.num_rows), lengths)
    tokens = {name: _token_column(table, name, lengths)[action] for name in TOKEN_COLUMNS}
    tokens["version"] = np.where(np.isnan(tokens["version"]), -1, tokens["version"]).astype(np.int32)
    return _Part(
        source=[(path, index, row) for row in range(table.num_rows)],
        columns={name: _row_column(table, name) for name in ROW_COLUMNS},
        lengths=np.bincount(row_of_token[action], minlength=table.num_rows).astype(np.int64),
        tokens=tokens,
    )


def _flat(column: pa.ChunkedArray) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Values of a list column one after the other, and each row's length (0 where null)."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return array.flatten().to_numpy(zero_copy_only=False), lengths


def _token_column(table: pa.Table, name: str, lengths: NDArray[np.int64]) -> NDArray[Any]:
    """One value a token of the action column, NaN for rows whose list is null or of another length."""
    out: NDArray[Any] = np.full(int(lengths.sum()), np.nan, np.float64 if name == "version" else np.float32)
    if name not in table.column_names:
        return out
    values, own = _flat(table[name])
    fits = own == lengths
    out[np.repeat(fits, lengths)] = values[np.repeat(fits, own)]
    return out


def _row_column(table: pa.Table, name: str) -> NDArray[Any]:
    values = table[name].to_pylist() if name in table.column_names else [None] * table.num_rows
    if name in ("trajectory_id", "parent_id", "state"):
        return np.asarray([value or "" for value in values], dtype=object)
    return np.asarray([np.nan if value is None else float(value) for value in values], np.float64)


def _join(parts: list[_Part]) -> Rollouts:
    """All parts in one, rows ordered by trajectory (in order of first appearance), then segment."""
    if not parts:
        return Rollouts()
    source = [place for part in parts for place in part.source]
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in ROW_COLUMNS}
    lengths = np.concatenate([part.lengths for part in parts])
    tokens = {name: np.concatenate([part.tokens[name] for part in parts]) for name in TOKEN_COLUMNS}
    trajectory = _trajectory_numbers(columns["trajectory_id"], columns["parent_id"])
    order = np.lexsort((np.nan_to_num(columns["segment"]), trajectory))
    token_order = _token_order(lengths, order)
    return Rollouts(
        source=[source[index] for index in order],
        columns={name: column[order] for name, column in columns.items()},
        trajectory=trajectory[order],
        row=np.repeat(np.arange(len(order)), lengths[order]),
        tokens={name: column[token_order] for name, column in tokens.items()},
    )


def _trajectory_numbers(identity: NDArray[Any], parent: NDArray[Any]) -> NDArray[np.int64]:
    """Rows of one trajectory share a number: a fork's parent, or its id up to ``#``."""
    numbers: dict[str, int] = {}
    roots = [str(one).split("#")[0] or str(own).split("#")[0] for own, one in zip(identity, parent, strict=True)]
    return np.array([numbers.setdefault(root, len(numbers)) for root in roots], np.int64)


def _token_order(lengths: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    begin = np.cumsum(lengths) - lengths
    shuffled = lengths[order]
    within = np.arange(int(shuffled.sum())) - np.repeat(np.cumsum(shuffled) - shuffled, shuffled)
    return np.repeat(begin[order], shuffled) + within


def _read_row(path: Path, group: int, row: int) -> dict[str, Any]:
    file = pq.ParquetFile(path)
    names = (*ROW_COLUMNS, *TOKEN_COLUMNS, *SAMPLE_COLUMNS, "action")
    wanted = [name for name in names if name in file.schema_arrow.names]
    found = file.read_row_group(group, columns=wanted).slice(row, 1).to_pylist()[0]
    return {name: found.get(name) for name in names}
