"""The local engine: continuous batching of any Hugging Face causal LM, weights taken between two decode steps.

A row's life: queued → pending (tokens to prefill) → active (decoded with the others, one token a step) → parked (its
turn ended; the cache stays) → pending again when the conversation goes on, or released as a Segment. Active rows are
kept at the front of the cache, so that a decode step reads it without copying.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from estr.engines.cache import SlotCache
from estr.engines.rows import RowStore
from estr.engines.sampler import Sampled, sample, uniforms
from estr.engines.samplers import Sampler, Standard, draw
from estr.engines.weights import EngineWeights
from estr.models.forward import base_model, head_of, prepare_model
from estr.models.stops import StopTexts
from estr.trajectory import Segment

VersionRule = Callable[[int], int]
"""Action index of a trajectory → version that must sample it (lockstep)."""

TurnEnd = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Turn:
    """A finished assistant turn: its sampled tokens and why it ended."""

    key: str
    tokens: list[int]
    end: TurnEnd


@dataclass
class EngineCounters:
    """What an engine has done since it was made."""

    decode_steps: int = 0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    shared_tokens: int = 0  # prompt tokens a sibling's prefill saved
    syncs: int = 0


@dataclass
class _Row:
    key: str
    index: int
    limit: int = 0
    turn_start: int = 0
    actions: int = 0  # sampled in this trajectory, over all its rows and turns
    rule: VersionRule | None = None
    cached_under: int = -1  # version that its cache was last computed under
    state: Literal["pending", "active", "parked"] = "pending"


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
    end_ids: Sequence[int] = field(default_factory=tuple)
    sampler: Sampler | None = None  # None: temperature alone; unused at temperature 0
    topk: int = 0  # most likely tokens recorded with their log μ; 0 or more


class LocalEngine:
    """Generates turns for many conversations at once; see the module's head for a row's life."""

    def __init__(self, model: torch.nn.Module, settings: EngineSettings, stops: StopTexts | None = None) -> None:
        self.settings = settings
        self.weights = EngineWeights(model, settings.dtype)
        self.counters = EngineCounters()
        prepare_model(model)
        self._decoder, self._head = base_model(model).get_decoder(), head_of(model)
        self._stops = stops
        self._sampler = _needed_sampler(settings)
        self._heated = False  # whether a row with a temperature of its own was ever started
        vocabulary = self._head.weight.shape[0]
        self._end = torch.zeros(vocabulary, dtype=torch.bool)
        self._end[[i for i in settings.end_ids if 0 <= i < vocabulary]] = True
        self._maybe_stop = stops.candidates[:vocabulary] if stops is not None else torch.zeros_like(self._end)
        self._check = self._end | self._maybe_stop
        rows, columns = settings.slots + settings.parked, min(256, settings.max_context)
        layers = base_model(model).config.get_text_config().num_hidden_layers
        self._cache = SlotCache(rows, columns, layers)
        self._store = RowStore(rows, columns)
        self._rows: dict[str, _Row] = {}
        self._at: list[_Row | None] = [None] * rows
        self._active = 0
        self._queue: deque[_Start] = deque()
        self._pending: deque[_Row] = deque()

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
        if self.settings.kv == "recompute":
            self._forget_cache()

    def _forget_cache(self) -> None:
        for row in self._rows.values():
            self._store.cached[row.index] = 0
        while self._active:
            row = self._row_at(self._active - 1)
            self._active -= 1
            row.state = "pending"
            self._pending.append(row)

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
        self._free(row)
        return segment

    def cancel(self, key: str) -> None:
        """Forget a conversation in whatever state it is; unknown keys are fine."""
        self._queue = deque(start for start in self._queue if start.key != key)
        row = self._rows.get(key)
        if row is None:
            return
        if row.state == "active":
            self._leave_front(row)
        if row in self._pending:
            self._pending.remove(row)
        self._free(row)

    @property
    def busy(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._active or self._pending or (self._queue and len(self._rows) < len(self._at)))

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
        while self._queue and len(self._rows) < len(self._at):
            start = self._queue.popleft()
            index = next(i for i in range(len(self._at) - 1, -1, -1) if self._at[i] is None)
            row = _Row(start.key, index, rule=start.rule, actions=start.actions)
            self._rows[start.key], self._at[index] = row, row
            self._reserve(start.length + 1)
            self._store.clear(index)
            if start.history is not None:
                self._store.append_segment(index, start.history)
            self._store.append(index, start.tokens)
            self._store.explore[index], self._store.heat[index] = start.explore, start.heat
            self._heated |= start.heat > 0
            self._begin_turn(row, start.seed, start.limit)

    def _pending_groups(self) -> list[list[_Row]]:
        """Rows to prefill now, in groups that share a version and fit the budget together."""
        self._forget_outdated()
        groups: dict[int, list[_Row]] = {}
        budget, seats = self.settings.prefill_tokens, self.settings.slots - self._active
        while self._pending and seats > 0 and budget > 0:
            row = self._pending.popleft()
            budget -= int(self._store.length[row.index] - self._store.cached[row.index])
            seats -= 1
            groups.setdefault(self._version_for(row), []).append(row)
        return [groups[version] for version in sorted(groups)]

    def _forget_outdated(self) -> None:
        """With imposed versions and kv = "recompute": rows whose version has changed are read again."""
        if self.settings.kv != "recompute":
            return
        for row in list(self._rows.values()):
            if row.rule is None or row.state == "parked" or row.cached_under in (-1, self._version_for(row)):
                continue
            self._store.cached[row.index] = 0
            if row.state == "active":
                self._leave_front(row)
                row.state = "pending"
                self._pending.append(row)

    def _version_for(self, row: _Row) -> int:
        return self.weights.active if row.rule is None else row.rule(row.actions)

    def _prefill(self, rows: list[_Row]) -> list[Turn]:
        self.weights.activate(self._version_for(rows[0]))
        leaders, followers = self._siblings(rows)
        index = torch.tensor([row.index for row in leaders])
        store = self._store
        cached, length = store.cached[index], store.length[index]
        need = length - cached
        width = int(need.max())
        offset = torch.arange(width)
        real = offset < need[:, None]
        positions = torch.where(real, cached[:, None] + offset, self._cache.columns)
        tokens = store.tokens[index[:, None], torch.where(real, positions, 0)]
        hidden = self._forward(index, tokens, positions, real, int(length.max()))
        last = hidden[torch.arange(len(leaders)), need - 1]
        self.counters.prefilled_tokens += int(need.sum())
        place = {row.key: i for i, row in enumerate(leaders)}
        for leader, siblings in followers.items():
            source, size = self._rows[leader], len(siblings)
            span = int(store.length[source.index])
            self._cache.copy(source.index, torch.tensor([row.index for row in siblings]), span)
            self.counters.shared_tokens += span * size
        order = [place[row.key] if row.key in place else place[self._leader_of[row.key]] for row in rows]
        every = torch.tensor([row.index for row in rows])
        store.cached[every] = store.length[every]
        return self._accept(rows, every, last[torch.tensor(order)])

    def _siblings(self, rows: list[_Row]) -> tuple[list[_Row], dict[str, list[_Row]]]:
        """Split rows into those that are computed and those whose prompt is, token for token, that of another one."""
        leaders: list[_Row] = []
        followers: dict[str, list[_Row]] = {}
        seen: dict[bytes, str] = {}
        self._leader_of: dict[str, str] = {}
        for row in rows:
            if int(self._store.cached[row.index]):
                leaders.append(row)
                continue
            prompt = self._store.row_tokens(row.index).tobytes()
            if prompt in seen:
                followers.setdefault(seen[prompt], []).append(row)
                self._leader_of[row.key] = seen[prompt]
            else:
                seen[prompt] = row.key
                leaders.append(row)
        return leaders, followers

    def _decode(self) -> list[Turn]:
        self._forget_outdated()
        if not self._active:
            return []
        self._reserve(int(self._store.length[: self._active].max()) + 1)
        rows = [self._row_at(i) for i in range(self._active)]
        by_version: dict[int, list[_Row]] = {}
        for row in rows:
            by_version.setdefault(self._version_for(row), []).append(row)
        self.counters.decode_steps += 1
        ended: list[Turn] = []
        for version in sorted(by_version):
            self.weights.activate(version)
            ended += self._decode_rows(by_version[version], whole=len(by_version) == 1)
        return ended

    def _decode_rows(self, rows: list[_Row], *, whole: bool) -> list[Turn]:
        store = self._store
        index = torch.arange(len(rows)) if whole else torch.tensor([row.index for row in rows])
        positions = store.length[index] - 1
        tokens = store.tokens[index, positions]
        hidden = self._forward(
            len(rows) if whole else index, tokens[:, None], positions[:, None], None, int(positions.max()) + 1
        )
        store.cached[index] = positions + 1
        return self._accept(rows, index, hidden[:, 0])

    def _forward(
        self, rows: Tensor | int, tokens: Tensor, positions: Tensor, real: Tensor | None, width: int
    ) -> Tensor:
        """Hidden states [n, Q, D]; padding queries (``real`` False) attend to column 0 and write to scratch."""
        self._cache.target(rows, positions, width)
        reach = positions if real is None else torch.where(real, positions, 0)
        hidden_keys = torch.arange(width) > reach[:, :, None]
        mask = torch.zeros(hidden_keys.shape, dtype=self._head.weight.dtype).masked_fill_(hidden_keys, float("-inf"))
        output = self._decoder(
            input_ids=tokens,
            position_ids=reach,
            attention_mask=mask[:, None],
            cache=self._cache,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _accept(self, rows: list[_Row], index: Tensor, hidden: Tensor) -> list[Turn]:
        """Sample from the hidden states [n, D] of ``rows`` and file the tokens; returns the turns that ended."""
        store = self._store
        length = store.length[index]
        turn = store.turn_start[index]
        sampled = self._sample(index, self._head.logits(hidden), length - turn)
        self._reserve(int(length.max()) + 1)
        store.put(index, length, sampled, self.weights.active)
        self.counters.sampled_tokens += len(rows)
        for row in rows:
            row.actions += 1
            row.cached_under = self.weights.active
        full = (length + 1 - turn >= store.limit[index]) | (length + 1 >= self.settings.max_context)
        flagged = (self._check[sampled.token] | full).nonzero()[:, 0].tolist()
        ended = [end for i in flagged if (end := self._ended(rows[i])) is not None]
        for row in rows:
            if row.state == "pending":
                self._join_front(row)
        return ended

    def _sample(self, index: Tensor, logits: Tensor, position: Tensor) -> Sampled:
        uniform = self._store.uniform[index, position]
        if self._sampler is None and not self._heated:
            return sample(logits, self.settings.temperature, uniform)
        sampler = self._sampler or Standard(self.settings.temperature)
        heat = self._store.heat[index] if self._heated else None
        return draw(sampler, logits, position, self._store.explore[index], uniform, self.settings.topk, heat)

    def _ended(self, row: _Row) -> Turn | None:
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
        if row.state == "active":
            self._leave_front(row)
        row.state = "parked"
        return Turn(row.key, tokens, end)

    # ------------------------------------------------------------------ rows

    def _begin_turn(self, row: _Row, seed: int, limit: int) -> None:
        row.turn_start = int(self._store.length[row.index])
        row.limit = limit
        self._store.begin_turn(row.index, limit, uniforms(seed, limit))
        row.state = "pending"
        self._pending.append(row)

    def _parked(self, key: str) -> _Row:
        row = self._rows[key]
        if row.state != "parked":
            raise ValueError(f"{key!r} is {row.state}, not parked")
        return row

    def _row_at(self, index: int) -> _Row:
        row = self._at[index]
        assert row is not None
        return row

    def _join_front(self, row: _Row) -> None:
        self._swap(row.index, self._active)
        self._active += 1
        row.state = "active"

    def _leave_front(self, row: _Row) -> None:
        self._active -= 1
        self._swap(row.index, self._active)

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        width = int(torch.maximum(self._store.length[a], self._store.length[b]))
        self._cache.swap(a, b, width)
        self._store.swap(a, b)
        self._at[a], self._at[b] = self._at[b], self._at[a]
        for index in (a, b):
            row = self._at[index]
            if row is not None:
                row.index = index

    def _free(self, row: _Row) -> None:
        self._at[row.index] = None
        self._store.clear(row.index)
        del self._rows[row.key]

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
        ids = torch.tensor([list(tokens)])
        hidden = self._decoder(input_ids=ids, position_ids=torch.arange(len(tokens))[None], use_cache=False)
        logits = self._head.logits(hidden.last_hidden_state[0, :-1]) / (self.settings.temperature or 1.0)
        logprob = torch.log_softmax(logits.float(), -1)
        picked: np.ndarray = logprob.gather(-1, ids[0, 1:, None])[:, 0].numpy()
        return picked


def _needed_sampler(settings: EngineSettings) -> Sampler | None:
    """The sampler, or None where temperature alone does the same and nothing more is recorded."""
    if settings.temperature == 0:
        return None
    sampler = settings.sampler or Standard(settings.temperature)
    if sampler.temperature != settings.temperature:
        raise ValueError(f"the sampler's temperature {sampler.temperature} is not the engine's {settings.temperature}")
    return None if sampler.plain and not settings.topk else sampler
