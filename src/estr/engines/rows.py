"""What the engine knows of its rows, token by token, in preallocated tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from estr.engines.sampler import Sampled
from estr.trajectory import Segment, Support


@dataclass
class Extra:
    """What a sampler records of a row's action tokens beside log μ and H, one array a token; all empty where nothing is
    asked for."""

    support: list[NDArray[np.int32]] = field(default_factory=list)
    topk_ids: list[NDArray[np.int32]] = field(default_factory=list)
    topk_logprob: list[NDArray[np.float32]] = field(default_factory=list)

    def extend(self, segment: Segment) -> None:
        """Add what a segment holds."""
        if segment.support is not None:
            self.support += [segment.support[i] for i in range(len(segment.support))]
        if segment.topk_ids is not None and segment.topk_logprob is not None:
            self.topk_ids += list(segment.topk_ids)
            self.topk_logprob += list(segment.topk_logprob)

    def columns(self) -> dict[str, Support | NDArray[np.int32] | NDArray[np.float32]]:
        """The optional columns of a Segment."""
        found: dict[str, Support | NDArray[np.int32] | NDArray[np.float32]] = {}
        if any(len(ids) for ids in self.support):
            found["support"] = Support.of(self.support)
        if self.topk_ids:
            found |= {"topk_ids": np.stack(self.topk_ids), "topk_logprob": np.stack(self.topk_logprob)}
        return found


class RowStore:
    """Tokens, log μ, H, versions of every row, [rows, columns]; lengths and the running turn's limits, [rows]."""

    _WIDE = ("tokens", "action", "logprob", "entropy", "version", "uniform")
    _NARROW = ("length", "cached", "turn_start", "limit", "explore", "heat")

    def __init__(self, rows: int, columns: int, device: torch.device | str = "cpu") -> None:
        nan = float("nan")
        self.tokens = torch.zeros(rows, columns, dtype=torch.int64)
        self.action = torch.zeros(rows, columns, dtype=torch.bool)
        self.logprob = torch.full((rows, columns), nan, dtype=torch.float32)
        self.entropy = torch.full((rows, columns), nan, dtype=torch.float32)
        self.version = torch.full((rows, columns), -1, dtype=torch.int32)
        self.uniform = torch.zeros(rows, columns, dtype=torch.float64)
        self.length = torch.zeros(rows, dtype=torch.int64)
        self.cached = torch.zeros(rows, dtype=torch.int64)  # positions whose keys and values are in the cache
        self.turn_start = torch.zeros(rows, dtype=torch.int64)
        self.limit = torch.zeros(rows, dtype=torch.int64)
        self.explore = torch.zeros(rows, dtype=torch.bool)
        self.heat = torch.zeros(rows, dtype=torch.float32)
        for name in self._WIDE + self._NARROW:
            setattr(self, name, getattr(self, name).to(device))
        self._extra = [Extra() for _ in range(rows)]

    def clear(self, row: int) -> None:
        self.action[row] = False
        self.logprob[row] = float("nan")
        self.entropy[row] = float("nan")
        self.version[row] = -1
        self.length[row] = 0
        self.cached[row] = 0
        self._extra[row] = Extra()

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        start = int(self.length[row])
        self.tokens[row, start : start + len(tokens)] = torch.as_tensor(list(tokens), dtype=torch.int64)
        self.length[row] = start + len(tokens)

    def append_segment(self, row: int, segment: Segment) -> None:
        """Append a row that another engine produced, with all that is known of its tokens."""
        start = int(self.length[row])
        span = slice(start, start + len(segment.tokens))
        for name in ("tokens", "action", "logprob", "entropy", "version"):
            column: Tensor = getattr(self, name)
            column[row, span] = torch.from_numpy(getattr(segment, name)).to(column.dtype)
        self.length[row] = span.stop
        self._extra[row].extend(segment)

    def begin_turn(self, row: int, limit: int, uniform: NDArray[np.float64]) -> None:
        self.turn_start[row] = self.length[row]
        self.limit[row] = limit
        if limit > self.uniform.shape[1]:
            self.uniform = torch.nn.functional.pad(self.uniform, (0, limit - self.uniform.shape[1]))
        self.uniform[row, :limit] = torch.from_numpy(uniform)

    def put(self, rows: Tensor, positions: Tensor, sampled: Sampled, version: int) -> None:
        """File one sampled token a row at ``positions``."""
        self.tokens[rows, positions] = sampled.token
        self.action[rows, positions] = True
        self.logprob[rows, positions] = sampled.logprob
        self.entropy[rows, positions] = sampled.entropy
        self.version[rows, positions] = version
        self.length[rows] = positions + 1
        if sampled.support is not None or sampled.topk is not None:
            self._put_extra(rows.tolist(), sampled)

    def _put_extra(self, rows: list[int], sampled: Sampled) -> None:
        if sampled.support is not None:
            ids, sizes = sampled.support
            for row, part in zip(rows, ids.split(sizes.tolist()), strict=True):
                self._extra[row].support.append(part.cpu().numpy().copy())
        if sampled.topk is not None:
            for row, ids, logprob in zip(rows, *sampled.topk, strict=True):
                self._extra[row].topk_ids.append(ids.cpu().numpy().copy())
                self._extra[row].topk_logprob.append(logprob.cpu().numpy().copy())

    def row_tokens(self, row: int) -> NDArray[np.int64]:
        tokens: NDArray[np.int64] = self.tokens[row, : int(self.length[row])].cpu().numpy()
        return tokens

    def segment(self, row: int) -> Segment:
        """A copy of the row as the model read it."""
        span = slice(0, int(self.length[row]))
        columns = {name: getattr(self, name)[row, span].cpu().numpy() for name in self._WIDE if name != "uniform"}
        return Segment(
            tokens=columns.pop("tokens").astype(np.int32),
            **{name: column.copy() for name, column in columns.items()},
            **self._extra[row].columns(),  # type: ignore[arg-type]
        )

    def move(self, source: int, row: int) -> None:
        """What ``source`` knows goes to ``row``, whose own is lost."""
        for name in self._WIDE + self._NARROW:
            store: Tensor = getattr(self, name)
            store[row] = store[source]
        self._extra[row], self._extra[source] = self._extra[source], Extra()

    def swap(self, a: int, b: int) -> None:
        for name in self._WIDE + self._NARROW:
            store: Tensor = getattr(self, name)
            held = store[a].clone()
            store[a] = store[b]
            store[b] = held
        self._extra[a], self._extra[b] = self._extra[b], self._extra[a]

    def grow(self, columns: int) -> None:
        """Widen every [rows, columns] tensor, keeping what is there."""
        fill = {"logprob": float("nan"), "entropy": float("nan"), "version": -1}
        for name in self._WIDE:
            old: Tensor = getattr(self, name)
            if old.shape[1] < columns:
                padding = (0, columns - old.shape[1])
                setattr(self, name, torch.nn.functional.pad(old, padding, value=fill.get(name, 0)))
