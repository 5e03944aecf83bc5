"""From columns as they are stored to a Dump: lists aligned with the action mask, padding and prompts gone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from estr.errors import UsageError
from estr.inspect.dump import Dump, Floats, Ints, Stream
from estr.inspect.table import Ragged, Table, numbers

_LOGPROBS = ("logprob", "learner_logprob", "proximal_logprob")
_ENTROPIES = ("entropy", "entropy_upper", "learner_entropy")
_NUMBERS = (
    "reward",
    "advantage",
    "version",
    "version_first",
    "version_last",
    "target_version",
    "trained_step",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
)
_KINDS = ("exact", "bounded", "proxy")


def assemble(table: Table, source: str, preset: str) -> Dump:
    """One Dump of all rows.

    Lists may cover the whole row (prompt and actions), only what follows the prompt, or only the action tokens; which
    of these is seen from their lengths. Raises UsageError, naming the row, where a length fits none of them.
    """
    frame = _Frame.of(table)
    misplaced: list[str] = []
    columns: dict[str, Floats] = {}
    for name in (*_LOGPROBS, *_ENTROPIES, "version", "advantage", "token_advantage"):
        column = table.lists.get(name)
        columns[name] = frame.align(name, column, misplaced) if column is not None else frame.nothing()
    row, stream, position = frame.row, *frame.stream()
    scalar = {name: _scalar(table, name) for name in _NUMBERS}
    _ends_of_calls(table.lists.get("versions"), scalar)
    version = _versions(columns["version"], scalar, row)
    by_token = np.where(np.isnan(columns["token_advantage"]), columns["advantage"], columns["token_advantage"])
    advantage = np.where(np.isnan(by_token), scalar["advantage"][row], by_token)
    return Dump(
        source=source,
        preset=preset,
        row=row,
        position=position,
        **{name: columns[name] for name in (*_LOGPROBS, *_ENTROPIES)},
        version=version,
        advantage=advantage,
        trajectory=_trajectories(table),
        group=_groups(table),
        reward=scalar["reward"],
        row_advantage=_row_advantage(scalar["advantage"], columns["advantage"], row),
        target_version=np.where(scalar["target_version"] >= 0, scalar["target_version"], np.nan),
        trained_step=scalar["trained_step"],
        temperature=scalar["temperature"],
        top_p=scalar["top_p"],
        top_k=scalar["top_k"],
        min_p=scalar["min_p"],
        standard=_standard(table),
        entropy_kind=_entropy_kind(table, columns["entropy"], columns["entropy_upper"], columns["learner_entropy"]),
        name=_texts(table, "trajectory_id", numbered=True),
        text=_texts(table, "text"),
        stream=stream,
        misplaced=tuple(misplaced),
        notes=tuple(table.notes),
    )


class _Frame:
    """The stretch of each row that its mask covers: F entries a row, of which A are action tokens."""

    def __init__(self, table: Table, lengths: Ints, mask: NDArray[np.bool_]) -> None:
        self._table = table
        self.lengths = lengths  # [R] F
        self.mask = mask  # [sum F]
        owner = np.repeat(np.arange(table.rows), lengths)
        self.row = owner[mask]  # [N]
        self.actions = np.bincount(self.row, minlength=table.rows).astype(np.int64)  # [R] A
        self.within = (np.arange(len(mask)) - np.repeat(np.cumsum(lengths) - lengths, lengths))[mask]  # [N] in F

    @classmethod
    def of(cls, table: Table) -> _Frame:
        base = next((table.lists[n] for n in (*_LOGPROBS, "learner_entropy") if n in table.lists), None)
        action, tool = table.lists.get("action"), table.lists.get("tool_mask")
        if base is None:
            return cls(table, np.zeros(table.rows, np.int64), np.zeros(0, bool))
        lengths = base.lengths if action is None else np.where(action.present, action.lengths, base.lengths)
        mask = np.ones(int(lengths.sum()), bool)
        for column in (action, tool):
            if column is None:
                continue
            bad = np.flatnonzero(column.present & (column.lengths != lengths))
            if len(bad):
                raise _misfit(table, "tool_mask", int(bad[0]), column.lengths, lengths)
            mask[np.repeat(column.present, lengths)] &= _kept(column) > 0
        return cls(table, lengths, mask)

    def nothing(self) -> Floats:
        return np.full(len(self.row), np.nan)

    def align(self, name: str, column: Ragged, misplaced: list[str]) -> Floats:
        """The column's values at the action tokens [N]; NaN for rows without it."""
        total = self._stream_lengths()
        own = column.lengths
        whole, acted = own == self.lengths, own == self.actions
        head = np.where(whole, 0, total - self.lengths)  # entries of the column before the frame
        prompted = (own == total) & (total > self.lengths)
        response = own < self.lengths
        shift = np.where(whole, 0, np.where(prompted, head, own - self.lengths))
        fits = whole | acted | prompted | (response & (self._first_action() >= self.lengths - own))
        bad = np.flatnonzero(column.present & ~fits)
        if len(bad):
            if name in _ENTROPIES and _same_lengths(own[column.present], self, column.present):
                misplaced.append(name)
                return self.nothing()
            raise _misfit(self._table, name, int(bad[0]), own, self.lengths)
        index = self.within + shift[self.row]
        compact = (acted & ~whole)[self.row]
        index = np.where(compact, self._rank(), index) + (np.cumsum(own) - own)[self.row]
        out = self.nothing()
        there = column.present[self.row]
        out[there] = column.values[index[there]]
        return out

    def stream(self) -> tuple[Stream | None, Ints]:
        """The token ids of every row, and where each action token stands in its row's."""
        tokens = self._tokens()
        if tokens is None:
            return None, self._rank()
        if not np.isfinite(tokens.values).all():
            entry = np.flatnonzero(~np.isfinite(tokens.values))[0]
            row = int(np.searchsorted(tokens.offsets, entry, side="right")) - 1
            raise UsageError(f"{self._table.place(row)}: tokens must be whole numbers, one of them is missing")
        position = self.within + (tokens.lengths - self.lengths)[self.row]
        compact = (tokens.lengths == self.actions) & (tokens.lengths != self.lengths)
        position = np.where(compact[self.row], self._rank(), position)
        bad = np.flatnonzero((tokens.lengths < self.lengths) & ~compact & (self.actions > 0))
        if len(bad):
            raise _misfit(self._table, "tokens", int(bad[0]), tokens.lengths, self.lengths)
        return Stream(tokens.values.astype(np.int64), tokens.offsets), position

    def _rank(self) -> Ints:
        """Number of each action token among those of its row [N]."""
        begin = np.cumsum(self.actions) - self.actions
        return np.arange(len(self.row)) - begin[self.row]

    def _first_action(self) -> Ints:
        first = self.lengths.copy()
        np.minimum.at(first, self.row, self.within)
        return first

    def _stream_lengths(self) -> Ints:
        tokens = self._tokens()
        return self.lengths if tokens is None else tokens.lengths

    def _tokens(self) -> Ragged | None:
        lists = self._table.lists
        if "tokens" in lists:
            return lists["tokens"]
        if "response_tokens" not in lists:
            return None
        response, prompt = lists["response_tokens"], lists.get("prompt_tokens")
        return response if prompt is None else _joined(_unpadded(prompt, lists.get("prompt_mask")), response)


def _kept(column: Ragged) -> Floats:
    return np.nan_to_num(column.values)


def _same_lengths(own: Ints, frame: _Frame, present: NDArray[np.bool_]) -> bool:
    """Whether the rows' lengths are those of the frame, or of the actions, in another order."""
    ordered = np.sort(own)
    return any((ordered == np.sort(lengths[present])).all() for lengths in (frame.lengths, frame.actions))


def _unpadded(prompt: Ragged, mask: Ragged | None) -> Ragged:
    if mask is None or (mask.lengths != prompt.lengths).any():
        return prompt
    keep = mask.values > 0
    owner = np.repeat(np.arange(len(prompt.lengths)), prompt.lengths)
    lengths = np.bincount(owner[keep], minlength=len(prompt.lengths)).astype(np.int64)
    return Ragged(prompt.values[keep], lengths, prompt.present)


def _joined(first: Ragged, second: Ragged) -> Ragged:
    """Two ragged columns row by row, one after the other."""
    lengths = first.lengths + second.lengths
    begin = np.cumsum(lengths) - lengths
    values = np.empty(int(lengths.sum()))
    for column, offset in ((first, begin), (second, begin + first.lengths)):
        within = np.arange(len(column.values)) - np.repeat(column.offsets[:-1], column.lengths)
        values[np.repeat(offset, column.lengths) + within] = column.values
    return Ragged(values, lengths, second.present)


def _misfit(table: Table, name: str, row: int, own: Ints, expected: Ints) -> UsageError:
    return UsageError(
        f"{table.place(row)}: {name} has {int(own[row])} entries where {int(expected[row])} are expected (one a token)"
    )


def _scalar(table: Table, name: str) -> Floats:
    values = table.scalars.get(name)
    if values is None:
        return np.full(table.rows, np.nan)
    if name in ("version", "version_first", "version_last", "reward"):
        values = [_number(value) for value in values]
    try:
        return np.asarray([np.nan if value is None else value for value in values], np.float64).reshape(table.rows)
    except (TypeError, ValueError):
        bad = next(i for i, value in enumerate(values) if value is not None and _number(value) is None)
        numbers(values[bad], name, table.place(bad))
        raise UsageError(f"{table.place(bad)}: {name} must be a number") from None


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _ends_of_calls(calls: Ragged | None, scalar: dict[str, Floats]) -> None:
    """First and last version of rows that tell one version a generation call."""
    if calls is None or not len(calls.values):
        return
    there = calls.lengths > 0
    begin: Ints = calls.offsets[:-1][there]
    scalar["version_first"][there] = calls.values[begin]
    scalar["version_last"][there] = calls.values[begin + calls.lengths[there] - 1]


def _versions(by_token: Floats, scalar: dict[str, Floats], row: Ints) -> Floats:
    """Versions [N]; known only at both ends of a row where the file tells its first and last."""
    whole = scalar["version"][row]
    version = np.where(np.isnan(by_token), whole, by_token)
    first, last = scalar["version_first"][row], scalar["version_last"][row]
    if len(row):
        edge = np.concatenate([[True], row[1:] != row[:-1]])
        end = np.concatenate([row[1:] != row[:-1], [True]])
        ends = np.where(edge, first, np.where(end, last, np.where(first == last, first, np.nan)))
        version = np.where(np.isnan(version), ends, version)
    return np.where(version >= 0, version, np.nan)


def _row_advantage(scalar: Floats, by_token: Floats, row: Ints) -> Floats:
    """One advantage a row [R]: as stored, or that of its tokens where all have one."""
    out = scalar.copy()
    known = np.isfinite(by_token)
    if known.any():
        low, high = np.full(len(out), np.inf), np.full(len(out), -np.inf)
        np.minimum.at(low, row[known], by_token[known])
        np.maximum.at(high, row[known], by_token[known])
        out = np.where(np.isnan(out) & (low == high), low, out)
    return out


def _trajectories(table: Table) -> Ints:
    """Rows of one trajectory share a number: a fork's parent, or its id up to ``#``."""
    names = table.scalars.get("trajectory_id")
    if names is None:
        return np.arange(table.rows)
    parents = table.scalars.get("parent_id") or [None] * table.rows
    numbered: dict[str, int] = {}
    roots = [
        str(parent or name).split("#")[0] if parent is not None or name is not None else f"row {index}"
        for index, (name, parent) in enumerate(zip(names, parents, strict=True))
    ]
    return np.array([numbered.setdefault(root, len(numbered)) for root in roots], np.int64)


def _groups(table: Table) -> Ints:
    """Numbers of the groups [R]: by group id, else by step and prompt; -1 where neither is known."""
    ids = table.scalars.get("group_id")
    if ids is None and (prompts := table.scalars.get("prompt")) is not None:
        steps = table.scalars.get("trained_step") or [None] * table.rows
        ids = [None if prompt is None else f"{step}\0{prompt}" for prompt, step in zip(prompts, steps, strict=True)]
    if ids is None:
        return np.full(table.rows, -1, np.int64)
    numbered: dict[str, int] = {}
    return np.array([-1 if i is None else numbered.setdefault(str(i), len(numbered)) for i in ids], np.int64)


def _entropy_kind(table: Table, entropy: Floats, upper: Floats, learner: Floats) -> str:
    if not np.isfinite(entropy).any():
        return "proxy" if np.isfinite(learner).any() else "absent"
    kinds = {str(kind) for kind in table.scalars.get("entropy_kind") or [] if kind is not None}
    for kind in sorted(kinds - set(_KINDS)):
        table.notes.append(f"entropy_kind {kind!r} is not known here (known are {', '.join(_KINDS)}), read as proxy.")
    kinds = {kind if kind in _KINDS else "proxy" for kind in kinds}
    if not kinds:
        return "bounded" if np.isfinite(upper).any() else "exact"
    return kinds.pop() if len(kinds) == 1 else "mixed"


def _standard(table: Table) -> NDArray[np.bool_]:
    """Rows whose tokens were drawn from the distribution that log μ and H belong to [R]."""
    samplers = table.scalars.get("sampler") or [None] * table.rows
    return np.array([sampler in (None, "standard") for sampler in samplers], bool)


def _texts(table: Table, name: str, *, numbered: bool = False) -> NDArray[Any]:
    values = table.scalars.get(name) or [None] * table.rows
    return np.array(
        [str(value) if value is not None else (f"row {i + 1}" if numbered else "") for i, value in enumerate(values)],
        dtype=object,
    )
