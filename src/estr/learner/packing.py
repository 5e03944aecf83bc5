"""Rows to micro-batches and back.

A unit is what must stay together: the rows (segments) of one trajectory, or a single row. Units are packed end to end
under a token budget; a packed row knows its boundaries, so no label crosses one. Only action tokens are predicted, each
from the hidden state one position earlier, and a row is read no further than its last prediction needs. Rows with the
same prompt, the tokens before their first action, can share it: it then stands in the micro-batch once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from estr.errors import RunError
from estr.models.ragged import Ragged
from estr.trajectory import Segment, Support

Unit = Sequence[Segment]
Columns = list[list[NDArray[np.float32]]]
"""One value per action token: for each unit, for each of its rows, float32 ``[actions]``."""

_TOKEN_BYTES = 8


@dataclass(frozen=True)
class MicroBatch:
    """R rows of S units end to end: V positions that read T ≤ V tokens, N action tokens predicted."""

    tokens: Tensor  # int64 [T]
    cu_seqlens: Tensor  # int64 [R + 1], boundaries of the rows, from 0 to V
    predict: Tensor  # int64 [N], position whose hidden state predicts the action token
    target: Tensor  # int64 [N], the action token
    sequence: Tensor  # int64 [N], 0..S-1 in the order of ``units``, non-decreasing
    behavior_logprob: Tensor  # float32 [N]
    behavior_entropy: Tensor  # float32 [N]
    version: Tensor  # int64 [N]
    units: tuple[int, ...]  # index of each unit in the list that was packed
    rows: tuple[tuple[int, int, int], ...]  # (unit, segment, action tokens) of each row, in order
    rank: int = 0  # which rank of the learner works on it
    support: Ragged | None = None  # the ids each action token was drawn from, where they are not the whole vocabulary
    topk_ids: Tensor | None = None  # int64 [N, K], the sampler's most likely tokens, where all rows have them
    topk_logprob: Tensor | None = None  # float32 [N, K], log μ of those
    read: Tensor | None = None  # int64 [V], the token at each position, where rows share their prompts; else V = T
    behavior_entropy_upper: Tensor | None = None  # float32 [N], where H of some token that was packed is an interval

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with its tensors on ``device``."""
        names = (name for name, value in vars(self).items() if isinstance(value, Tensor | Ragged))
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def gather(self, columns: Sequence[Sequence[NDArray[np.float32]]]) -> Tensor:
        """Per-row values of the packed units as one float32 ``[N]`` in the order of this micro-batch."""
        parts = [columns[unit][segment] for unit, segment, _ in self.rows]
        flat = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        return torch.from_numpy(flat.astype(np.float32, copy=False)).to(self.target.device)


def pack(units: Sequence[Unit], tokens_per_microbatch: int, *, share: bool = False, ranks: int = 1) -> list[MicroBatch]:
    """Micro-batches of at most ``tokens_per_microbatch`` tokens read, the longest units placed first.

    With ``share`` the rows of a micro-batch that have the same prompt read it once, and units with the same prompt are
    placed one after the other. Deterministic. A unit that is longer than the budget gets a micro-batch of its own; a
    unit without action tokens is in none. Each rank gets units of nearly as many tokens, as far as whole units allow.
    Raises RunError where the first token of a row is an action, which nothing predicts.
    """
    lengths = [sum(_read_length(row, unit, place) for place, row in enumerate(rows)) for unit, rows in enumerate(units)]
    prompts = [_prompts(rows) if share and length else [] for rows, length in zip(units, lengths, strict=True)]
    bins: list[_Bin] = []
    for rank, shared in enumerate(_shares(_order(lengths, prompts), lengths, ranks)):
        own: list[_Bin] = []
        for unit in shared:
            found = next((one for one in own if one.cost(lengths[unit], prompts[unit]) <= one.room), None)
            if found is None:
                found = _Bin(tokens_per_microbatch, rank)
                own.append(found)
            found.put(unit, lengths[unit], prompts[unit])
        bins += own
    bounded = any(row.entropy_upper is not None for rows in units for row in rows)
    ordered = sorted(bins, key=lambda one: min(one.members))
    return [_microbatch(units, one, share, bounded) for one in ordered]


def _shares(order: list[int], lengths: list[int], ranks: int) -> list[list[int]]:
    """The units of each rank: consecutive ones, so that those with the same prompt stay together."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    total, before = sum(lengths[unit] for unit in order), 0
    for unit in order:
        shares[(2 * before + lengths[unit]) * ranks // (2 * total)].append(unit)
        before += lengths[unit]
    return shares


def _order(lengths: list[int], prompts: list[list[bytes]]) -> list[int]:
    """Units with action tokens, the longest first, those that begin with the same prompt right after each other."""
    clusters: dict[bytes | int, list[int]] = {}
    for unit in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i)):
        clusters.setdefault(prompts[unit][0] if prompts[unit] else unit, []).append(unit)
    return [unit for cluster in clusters.values() for unit in cluster]


@dataclass
class _Bin:
    """A micro-batch that is being filled: what room is left, and which prompts it has."""

    room: int
    rank: int
    members: list[int] = field(default_factory=list)
    prompts: set[bytes] = field(default_factory=set)

    def cost(self, length: int, prompts: Iterable[bytes]) -> int:
        """Tokens that a unit of ``length`` tokens adds, of which it shares the prompts that are there."""
        return length - sum(len(prompt) for prompt in self.prompts.intersection(prompts)) // _TOKEN_BYTES

    def put(self, unit: int, length: int, prompts: Iterable[bytes]) -> None:
        self.room -= self.cost(length, prompts)
        self.members.append(unit)
        self.prompts.update(prompts)


def _prompts(rows: Unit) -> list[bytes]:
    """The tokens before the first action of each row that has one."""
    return [_prompt(row).tobytes() for row in rows if row.action.any()]


def _prompt(row: Segment) -> NDArray[np.int64]:
    return row.tokens[: int(row.action.argmax())].astype(np.int64)


def _read_length(row: Segment, unit: int, place: int) -> int:
    """Tokens the model has to read to predict every action of ``row``: all before the last one."""
    actions = np.flatnonzero(row.action)
    if len(actions) == 0:
        return 0
    if actions[0] == 0:
        raise RunError(
            f"row {place} of trajectory {unit} starts with an action token, which no earlier token predicts; "
            "give the prompt at least one token (for instance a beginning-of-sequence token)"
        )
    return int(actions[-1])


def _microbatch(units: Sequence[Unit], filled: _Bin, share: bool, bounded: bool) -> MicroBatch:
    store, members = _Tokens(share), sorted(filled.members)
    predict, chosen, sequence, rows, bounds = [], [], [], [], [0]
    for local, unit in enumerate(members):
        for place, row in enumerate(units[unit]):
            actions = np.flatnonzero(row.action)
            if len(actions) == 0:
                continue
            read = store.add(row, int(actions[-1]))
            predict.append(read[actions - 1])
            chosen.append((row.tokens[actions], row.logprob[actions], row.entropy[actions], row.version[actions]))
            sequence.append(np.full(len(actions), local))
            rows.append((unit, place, len(actions)))
            bounds.append(bounds[-1] + len(read))
    target, logprob, entropy, version = (np.concatenate(column) for column in zip(*chosen, strict=True))
    return MicroBatch(
        tokens=_long(np.concatenate(store.tokens)),
        cu_seqlens=torch.tensor(bounds),
        predict=_long(np.concatenate(predict)),
        target=_long(target),
        sequence=_long(np.concatenate(sequence)),
        behavior_logprob=torch.from_numpy(logprob.astype(np.float32)),
        behavior_entropy=torch.from_numpy(entropy.astype(np.float32)),
        version=_long(version),
        units=tuple(members),
        rows=tuple(rows),
        rank=filled.rank,
        read=_long(np.concatenate(store.read)) if store.count < bounds[-1] else None,
        **_optional([units[unit][place] for unit, place, _ in rows], bounded),
    )


class _Tokens:
    """The tokens of a micro-batch in the order in which they were first read."""

    def __init__(self, share: bool) -> None:
        self.tokens: list[NDArray[np.int64]] = []
        self.read: list[NDArray[np.int64]] = []
        self.count = 0
        self._share, self._prompts = share, dict[bytes, NDArray[np.int64]]()

    def add(self, row: Segment, length: int) -> NDArray[np.int64]:
        """Where the first ``length`` tokens of ``row`` stand."""
        prompt = _prompt(row)
        place = self._prompts.get(prompt.tobytes()) if self._share else None
        if place is None:
            place = self._put(prompt)
            self._prompts[prompt.tobytes()] = place
        read = np.concatenate([place, self._put(row.tokens[len(prompt) : length].astype(np.int64))])
        self.read.append(read)
        return read

    def _put(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        self.tokens.append(tokens)
        self.count += len(tokens)
        return np.arange(self.count - len(tokens), self.count)


def _optional(segments: list[Segment], bounded: bool) -> dict[str, Any]:
    """The optional columns of the rows of a micro-batch; with ``bounded`` an exact entropy is an interval of one
    point."""
    columns: dict[str, Any] = {}
    if bounded:
        upper = [row.entropy if row.entropy_upper is None else row.entropy_upper for row in segments]
        columns["behavior_entropy_upper"] = torch.from_numpy(
            np.concatenate([values[row.action] for values, row in zip(upper, segments, strict=True)]).astype(np.float32)
        )
    support = Support.join((row.support for row in segments), (row.action_count for row in segments))
    if support is not None:
        columns["support"] = Ragged(_long(support.ids), torch.from_numpy(support.offsets))
    ids = [row.topk_ids for row in segments if row.topk_ids is not None]
    if ids and len(ids) == len(segments):
        logprobs = [row.topk_logprob for row in segments if row.topk_logprob is not None]
        columns["topk_ids"] = _long(np.concatenate(ids))
        columns["topk_logprob"] = torch.from_numpy(np.concatenate(logprobs).astype(np.float32))
    return columns


def _long(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def unpack(units: Sequence[Unit], microbatches: Sequence[MicroBatch], *outputs: Iterable[Tensor]) -> list[Columns]:
    """Outputs ``[N]`` of each micro-batch back to the rows they belong to, every kind of output by the same way.

    ``outputs`` are one or more series with one tensor per micro-batch; the result has one entry per series. Rows
    without action tokens get empty arrays.
    """
    results: list[Columns] = []
    for series in outputs:
        columns: Columns = [[np.zeros(0, np.float32) for _ in rows] for rows in units]
        for microbatch, values in zip(microbatches, series, strict=True):
            flat = values.detach().float().cpu().numpy()
            stops = np.cumsum([count for _, _, count in microbatch.rows])
            for (unit, place, count), stop in zip(microbatch.rows, stops, strict=True):
                columns[unit][place] = flat[stop - count : stop].copy()
        results.append(columns)
    return results
