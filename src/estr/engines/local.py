"""The local engine: continuous batching of any Hugging Face causal LM, weights taken between two decode steps.

A row's life: queued → pending (tokens to prefill) → active (decoded with the others, one token a step) → parked (its
turn ended; the cache stays) → pending again when the conversation goes on, or released as a Segment. Active rows are
kept at the front of the cache, so that a decode step reads it without copying.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from estr.engines.cache import SlotCache
from estr.engines.forward import EngineModel
from estr.engines.interface import EngineCounters, Turn, TurnEnd
from estr.engines.prompts import Prompt, Prompts
from estr.engines.rows import RowStore
from estr.engines.sampler import Sampled, sample, uniforms
from estr.engines.samplers import Sampler, Standard, draw
from estr.engines.seats import Row, Seats, VersionRule
from estr.engines.weights import EngineWeights
from estr.models.stops import StopTexts
from estr.trajectory import Segment


@dataclass
class _Start:
    key: str
    tokens: Sequence[int]
    seed: int
    limit: int
    rule: VersionRule | None = None
    explore: bool = False
    heat: float = 0.0
    history: Segment | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) + (len(self.history.tokens) if self.history is not None else 0)

    @property
    def actions(self) -> int:
        return self.history.action_count if self.history is not None else 0


@dataclass
class EngineSettings:
    slots: int = 64
    parked: int = 64
    temperature: float = 1.0
    dtype: str = "float32"
    kv: Literal["keep", "recompute"] = "keep"
    max_context: int = 1024
    prefill_tokens: int = 8192  # padded tokens prefilled between two decode steps
    prefill_rows: int = 4  # rows that are worth a prefill while others are decoded; fewer wait for more to come, but
    prefill_wait: int = 4  # no longer than so many decode steps
    end_ids: Sequence[int] = field(default_factory=tuple)
    sampler: Sampler | None = None  # None: temperature alone; unused at temperature 0
    topk: int = 0  # most likely tokens recorded with their log μ; 0 or more


class LocalEngine:
    """Generates turns for many conversations at once; see the module's head for a row's life."""

    def __init__(self, model: torch.nn.Module, settings: EngineSettings, stops: StopTexts | None = None) -> None:
        self.settings = settings
        self.weights = EngineWeights(model, settings.dtype)
        self.counters = EngineCounters()
        self._model = EngineModel(model, dtype=settings.dtype, max_context=settings.max_context)
        self._device = self._model.device
        self._stops = stops
        self._sampler = _needed_sampler(settings)
        self._heated = False  # whether a row with a temperature of its own was ever started
        vocabulary = self._model.head.weight.shape[0]
        self._end = torch.zeros(vocabulary, dtype=torch.bool)
        self._end[[i for i in settings.end_ids if 0 <= i < vocabulary]] = True
        self._maybe_stop = stops.candidates[:vocabulary] if stops is not None else torch.zeros_like(self._end)
        self._check = (self._end | self._maybe_stop).to(self._device)
        rows, columns = settings.slots + settings.parked, min(256, settings.max_context)
        self._cache = SlotCache(rows, columns, self._model.layers)
        self._store = RowStore(rows, columns, self._device)
        self._seats = Seats(rows, self._cache, self._store)
        self._prompts = Prompts()
        self._queue: deque[_Start] = deque()
        self._pending: deque[Row] = deque()
        self._waited = 0  # decode steps that pending rows have waited for others

    # ------------------------------------------------------------------ weights

    @property
    def version(self) -> int:
        return self.weights.active

    def set_weights(self, version: int, tensors: Mapping[str, Tensor], *, own: bool = False) -> None:
        """Take new weights; running generations go on under them with their next token (``own``: as a copy)."""
        self.weights.add(version, tensors, own=own)
        self.weights.activate(version)
        self.weights.drop_before(version)
        self.counters.syncs += 1
        self._prompts.forget()
        if self.settings.kv == "recompute":
            self._forget_cache()

    def _forget_cache(self) -> None:
        for row in self._rows.values():
            self._forget(row)

    def _forget(self, row: Row) -> None:
        """Have a row's keys and values computed anew."""
        row.prompt = None
        self._store.cached[row.index] = 0
        if row.state == "active":
            self._seats.deactivate(row, "pending")
            self._pending.append(row)

    @property
    def _rows(self) -> dict[str, Row]:
        return self._seats.rows

    # ------------------------------------------------------------------ conversations

    def start(
        self,
        key: str,
        tokens: Sequence[int],
        *,
        seed: int,
        limit: int,
        rule: VersionRule | None = None,
        explore: bool = False,
        heat: float = 0.0,
        history: Segment | None = None,
    ) -> None:
        """Begin a conversation whose prompt is ``tokens``; its first turn has at most ``limit`` tokens.

        ``explore``: an exploring sampler (CUTS) treats this row. ``heat``: a temperature of its own to draw tokens at
        (0: none), while log μ and H stay those of the engine's sampler. ``history``: the row as another engine left it,
        which ``tokens`` continue; it is read again under the weights of now, and what is known of its tokens is kept.

        Raises:
            ValueError: the key is in use, or there is no room for the row.
        """
        if key in self._rows or any(start.key == key for start in self._queue):
            raise ValueError(f"the engine already runs {key!r}")
        start = _Start(key, tokens, seed, limit, rule, explore, heat, history)
        self._check_room(start.length)
        self._queue.append(start)

    def extend(self, key: str, tokens: Sequence[int], *, seed: int, limit: int) -> bool:
        """Append text that the policy did not sample to a parked conversation and let it act again; False, with
        nothing changed, where the row has no room for it."""
        row = self._parked(key)
        length = int(self._store.length[row.index])
        if length + len(tokens) >= self.settings.max_context:
            return False
        self._reserve(length + len(tokens) + 1)
        self._store.append(row.index, tokens)
        self._begin_turn(row, seed, limit)
        return True

    def fork(self, key: str, tokens: Sequence[int], *, seed: int, limit: int) -> Segment | None:
        """Close a parked conversation's row as a Segment and go on from the new history ``tokens``; None, with nothing
        changed, where they do not fit."""
        if len(tokens) >= self.settings.max_context:
            return None
        row = self._parked(key)
        segment = self._store.segment(row.index)
        self._reserve(len(tokens) + 1)
        row.prompt = None
        self._store.clear(row.index)
        self._store.append(row.index, tokens)
        self._begin_turn(row, seed, limit)
        return segment

    def peek(self, key: str) -> Segment:
        """A copy of a parked conversation's row."""
        return self._store.segment(self._parked(key).index)

    def release(self, key: str) -> Segment:
        """End a parked conversation and free its row."""
        row = self._parked(key)
        segment = self._store.segment(row.index)
        self._seats.free(row)
        return segment

    def cancel(self, key: str) -> None:
        """Forget a conversation in whatever state it is; unknown keys are fine."""
        self._queue = deque(start for start in self._queue if start.key != key)
        row = self._rows.get(key)
        if row is None:
            return
        if row.state == "pending":
            self._pending.remove(row)
        self._seats.deactivate(row, "parked")
        self._seats.free(row)

    @property
    def busy(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._seats.active or self._pending or (self._queue and self._seats.room))

    @property
    def running(self) -> int:
        """Conversations it holds: queued, pending, active and parked."""
        return len(self._rows) + len(self._queue)

    # ------------------------------------------------------------------ one step

    @torch.no_grad()
    def step(self) -> list[Turn]:
        """Prefill what waits (bounded), then sample one token for every active row; returns the turns that ended."""
        ended: list[Turn] = []
        self._seat()
        for row_group in self._pending_groups():
            ended += self._prefill(row_group)
        ended += self._decode()
        return ended

    def _seat(self) -> None:
        while self._queue and self._seats.room:
            start = self._queue.popleft()
            row = self._seats.take(start.key, start.rule, start.actions)
            self._reserve(start.length + 1)
            if start.history is not None:
                self._store.append_segment(row.index, start.history)
            self._store.append(row.index, start.tokens)
            self._store.explore[row.index], self._store.heat[row.index] = start.explore, start.heat
            self._heated |= start.heat > 0
            self._begin_turn(row, start.seed, start.limit)

    def _pending_groups(self) -> list[list[Row]]:
        """Rows to prefill now, in groups that share a version and fit the budget together."""
        self._forget_outdated()
        groups: dict[int, list[Row]] = {}
        budget, seats = self.settings.prefill_tokens, self.settings.slots - self._seats.active
        if self._worth_waiting(seats):
            return []
        while self._pending and seats > 0 and budget > 0:
            row = self._pending.popleft()
            budget -= int(self._store.length[row.index] - self._store.cached[row.index])
            seats -= 1
            groups.setdefault(self._version_for(row), []).append(row)
        return [groups[version] for version in sorted(groups)]

    def _worth_waiting(self, seats: int) -> bool:
        """Whether a prefill had better wait, because a pass for very few rows costs nearly as much as for many."""
        few = min(len(self._pending), seats) < self.settings.prefill_rows
        waits = few and self._seats.active > 0 and self._waited < self.settings.prefill_wait
        self._waited = self._waited + 1 if waits and self._pending else 0
        return waits

    def _forget_outdated(self) -> None:
        """With imposed versions and kv = "recompute": rows whose version has changed are read again."""
        if self.settings.kv != "recompute" or not self._seats.ruled:
            return
        for row in list(self._rows.values()):
            if row.rule is not None and row.state != "parked" and row.cached_under not in (-1, self._version_for(row)):
                self._forget(row)

    def _version_for(self, row: Row) -> int:
        return self.weights.active if row.rule is None else row.rule(row.actions)

    def _prefill(self, rows: list[Row]) -> list[Turn]:
        version = self._version_for(rows[0])
        self.weights.activate(version)
        computed, copied = self._siblings(rows, version)
        hidden: dict[str, Tensor] = {}
        if computed:
            for row, last in zip(computed, self._compute(computed), strict=True):
                hidden[row.key] = last
                if row.prompt is not None and row.prompt.hidden is None:
                    row.prompt.hidden = last
        for prompt, siblings in copied.items():
            self._copy(prompt, siblings)
            hidden |= {row.key: prompt.last for row in siblings}
        index = self._long([row.index for row in rows])
        self._store.cached[index] = self._store.length[index]
        return self._accept(rows, index, torch.stack([hidden[row.key] for row in rows]))

    def _siblings(self, rows: list[Row], version: int) -> tuple[list[Row], dict[Prompt, list[Row]]]:
        """Rows that are computed, and those whose tokens are, one for one, what another row holds or will hold."""
        computed: list[Row] = []
        copied: dict[Prompt, list[Row]] = {}
        for row in rows:
            if int(self._store.cached[row.index]):
                computed.append(row)
                continue
            tokens = self._store.row_tokens(row.index)
            prompt = self._prompts.find(version, tokens.tobytes())
            if prompt is None:
                computed.append(row)
                self._prompts.add(version, tokens.tobytes(), Prompt(len(tokens), row))
            else:
                copied.setdefault(prompt, []).append(row)
        return computed, copied

    def _compute(self, rows: list[Row]) -> Tensor:
        """Read what is not in the cache yet; the last hidden state [n, D] of each row."""
        store, index = self._store, self._long([row.index for row in rows])
        cached, length = store.cached[index], store.length[index]
        need = length - cached
        offset = torch.arange(int(need.max()), device=self._device)
        real = offset < need[:, None]
        positions = torch.where(real, cached[:, None] + offset, self._cache.columns)
        tokens = store.tokens[index[:, None], torch.where(real, positions, 0)]
        hidden = self._model(self._cache, index, tokens, positions, real, int(length.max()))
        self.counters.prefilled_tokens += int(need.sum())
        return hidden[torch.arange(len(rows), device=self._device), need - 1]

    def _copy(self, prompt: Prompt, rows: list[Row]) -> None:
        source = prompt.source()
        assert source is not None
        self._cache.copy(source.index, self._long([row.index for row in rows]), prompt.length)
        for row in rows:
            prompt.add(row)
        self.counters.shared_tokens += prompt.length * len(rows)

    def _decode(self) -> list[Turn]:
        self._forget_outdated()
        if not self._seats.active:
            return []
        rows = self._seats.gather()
        self.counters.decode_steps += 1
        if not self._seats.ruled:
            return self._decode_rows(rows, whole=True)
        by_version: dict[int, list[Row]] = {}
        for row in rows:
            by_version.setdefault(self._version_for(row), []).append(row)
        ended: list[Turn] = []
        for version in sorted(by_version):
            self.weights.activate(version)
            ended += self._decode_rows(by_version[version], whole=len(by_version) == 1)
        return ended

    def _decode_rows(self, rows: list[Row], *, whole: bool) -> list[Turn]:
        store, count = self._store, len(rows)
        index = torch.arange(count, device=self._device) if whole else self._long([row.index for row in rows])
        length = store.length[:count] if whole else store.length[index]
        positions = length - 1
        tokens = store.tokens[index, positions]
        hidden = self._model(
            self._cache, count if whole else index, tokens[:, None], positions[:, None], None, int(length.max())
        )
        store.cached[index] = length
        return self._accept(rows, index, hidden[:, 0])

    def _accept(self, rows: list[Row], index: Tensor, hidden: Tensor) -> list[Turn]:
        """Sample from the hidden states [n, D] of ``rows`` and file the tokens; returns the turns that ended."""
        store = self._store
        length, turn = store.length[index], store.turn_start[index]
        sampled = self._sample(index, self._model.head.logits(hidden), length - turn)
        self._reserve(int(length.max()) + 1)
        store.put(index, length, sampled, self.weights.active)
        self.counters.sampled_tokens += len(rows)
        if self._seats.ruled:
            for row in rows:
                row.actions += 1
                row.cached_under = self.weights.active
        full = (length + 1 - turn >= store.limit[index]) | (length + 1 >= self.settings.max_context)
        flagged = (self._check[sampled.token] | full).nonzero()[:, 0].tolist()
        for row in rows:
            if row.state == "pending":
                self._seats.activate(row)
        return [end for i in flagged if (end := self._ended(rows[i])) is not None]

    def _sample(self, index: Tensor, logits: Tensor, position: Tensor) -> Sampled:
        uniform = self._store.uniform[index, position]
        if self._sampler is None and not self._heated:
            return sample(logits, self.settings.temperature, uniform)
        sampler = self._sampler or Standard(self.settings.temperature)
        heat = self._store.heat[index] if self._heated else None
        return draw(sampler, logits, position, self._store.explore[index], uniform, self.settings.topk, heat)

    def _long(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self._device)

    def _ended(self, row: Row) -> Turn | None:
        store = self._store
        length = int(store.length[row.index])
        tokens = store.tokens[row.index, row.turn_start : length].tolist()
        if bool(self._end[tokens[-1]]) or (
            self._stops is not None and bool(self._maybe_stop[tokens[-1]]) and self._stops.ends(tokens)
        ):
            end: TurnEnd = "stop"
        elif length >= self.settings.max_context:
            end = "context"
        elif length - row.turn_start >= row.limit:
            end = "length"
        else:
            return None
        self._seats.deactivate(row, "parked")
        return Turn(row.key, tokens, end)

    # ------------------------------------------------------------------ rows

    def _begin_turn(self, row: Row, seed: int, limit: int) -> None:
        row.turn_start = int(self._store.length[row.index])
        row.limit = limit
        self._store.begin_turn(row.index, limit, uniforms(seed, limit))
        row.state = "pending"
        self._pending.append(row)

    def _parked(self, key: str) -> Row:
        row = self._rows[key]
        if row.state != "parked":
            raise ValueError(f"{key!r} is {row.state}, not parked")
        return row

    def _reserve(self, columns: int) -> None:
        if columns > self._cache.columns:
            wanted = min(max(columns, 2 * self._cache.columns), self.settings.max_context)
            self._cache.grow(wanted)
            self._store.grow(wanted)

    def _check_room(self, prompt: int) -> None:
        if prompt >= self.settings.max_context:
            raise ValueError(
                f"a prompt of {prompt} tokens leaves no room in a context of {self.settings.max_context}; "
                "shorten it or raise rollout.max_context"
            )

    # ------------------------------------------------------------------ canary

    @torch.no_grad()
    def canary(self, tokens: Sequence[int]) -> np.ndarray:
        """log μ of ``tokens[1:]`` under the active weights, computed without the cache, float32 [len - 1]."""
        ids = self._long(list(tokens))
        logits = self._model.logits_of(ids) / (self.settings.temperature or 1.0)
        logprob = torch.log_softmax(logits.float(), -1)
        picked: np.ndarray = logprob.gather(-1, ids[1:, None])[:, 0].cpu().numpy()
        return picked

    def close(self) -> None:
        """Nothing is held beyond this process's memory."""


def _needed_sampler(settings: EngineSettings) -> Sampler | None:
    """The sampler, or None where temperature alone does the same and nothing more is recorded."""
    if settings.temperature == 0:
        return None
    sampler = settings.sampler or Standard(settings.temperature)
    if sampler.temperature != settings.temperature:
        raise ValueError(f"the sampler's temperature {sampler.temperature} is not the engine's {settings.temperature}")
    return None if sampler.plain and not settings.topk else sampler
