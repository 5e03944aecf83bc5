"""Conversations of an engine that works by requests: each turn is one request for tokens after tokens.

What is known of a conversation is kept here, token by token; the engine behind only ever sees a prompt of ids and gives
ids, log μ and what came with it. A turn that ended is parked until the conversation goes on, as in the local engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from estr.engines.interface import EngineCounters, Turn, TurnEnd
from estr.engines.seats import VersionRule
from estr.models.stops import StopTexts
from estr.trajectory import Segment, Support


@dataclass(frozen=True)
class SampledToken:
    """One token as an engine behind requests gives it."""

    token: int
    logprob: float  # log μ
    entropy: float  # H in nats, or the lower end of its interval
    version: int
    entropy_upper: float | None = None  # the upper end, where H is an interval
    support: NDArray[np.int32] | None = None  # ids that could have been drawn, where they are not all
    topk: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None  # most likely ids and their log μ


@dataclass
class Row:
    """One conversation: its tokens, and of each what the optional columns of a Segment hold."""

    key: str
    tokens: list[int] = field(default_factory=list)
    known: dict[int, SampledToken] = field(default_factory=dict)  # by place of the token
    seed: int = 0
    limit: int = 0
    turn_start: int = 0
    request: str = ""  # of the turn that runs
    state: Literal["waiting", "running", "parked"] = "waiting"

    @property
    def turn(self) -> list[int]:
        """Tokens of the running or last turn."""
        return self.tokens[self.turn_start :]

    def add(self, sampled: SampledToken) -> None:
        self.known[len(self.tokens)] = sampled
        self.tokens.append(sampled.token)

    def take_over(self, segment: Segment) -> None:
        """Begin with a row that another engine produced."""
        topk_ids, topk_logprob = segment.topk_ids, segment.topk_logprob
        for number, place in enumerate(np.flatnonzero(segment.action).tolist()):
            upper = segment.entropy_upper
            self.known[place] = SampledToken(
                int(segment.tokens[place]),
                float(segment.logprob[place]),
                float(segment.entropy[place]),
                int(segment.version[place]),
                None if upper is None else float(upper[place]),
                None if segment.support is None else segment.support[number],
                None if topk_ids is None or topk_logprob is None else (topk_ids[number], topk_logprob[number]),
            )
        self.tokens = segment.tokens.tolist()

    def segment(self) -> Segment:
        """A copy of the row as the model read it."""
        places = sorted(self.known)
        sampled = [self.known[place] for place in places]
        action = np.zeros(len(self.tokens), np.bool_)
        action[places] = True

        def column(values: Sequence[float], missing: float, kind: type) -> NDArray[Any]:
            filled: NDArray[Any] = np.full(len(self.tokens), missing, kind)
            filled[places] = values
            return filled

        return Segment(
            tokens=np.array(self.tokens, np.int32),
            action=action,
            logprob=column([s.logprob for s in sampled], np.nan, np.float32),
            entropy=column([s.entropy for s in sampled], np.nan, np.float32),
            version=column([s.version for s in sampled], -1, np.int32),
            **self._optional(sampled, column),
        )

    def _optional(self, sampled: list[SampledToken], column: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if any(s.entropy_upper is not None for s in sampled):
            upper = [s.entropy if s.entropy_upper is None else s.entropy_upper for s in sampled]
            found["entropy_upper"] = column(upper, np.nan, np.float32)
        if any(s.support is not None for s in sampled):
            found["support"] = Support.of([np.zeros(0, np.int32) if s.support is None else s.support for s in sampled])
        topk = [s.topk for s in sampled if s.topk is not None]
        if topk and len(topk) == len(sampled):
            found |= {"topk_ids": np.stack([ids for ids, _ in topk]), "topk_logprob": np.stack([p for _, p in topk])}
        return found


class RequestEngine(ABC):
    """The bookkeeping half of an engine whose turns are requests; see :class:`estr.engines.interface.Engine`.

    A subclass sends requests, collects tokens and takes weights. At most ``slots`` turns run at a time, so that a turn
    is computed as soon as it is sent: what a prefix cache may hold for it is decided by the version at that moment.
    """

    def __init__(self, *, slots: int, max_context: int, end_ids: Sequence[int], stops: StopTexts | None = None) -> None:
        self.counters = EngineCounters()
        self.max_context = max_context
        self._slots, self._stops, self._end_ids = slots, stops, frozenset(end_ids)
        self._rows: dict[str, Row] = {}
        self._requests: dict[str, Row] = {}
        self._waiting: deque[Row] = deque()
        self._sent = 0

    # ------------------------------------------------------------------ what a subclass does

    @abstractmethod
    def _send(self, row: Row) -> None:
        """Ask for a turn of at most ``_room(row)`` tokens after ``row.tokens``, as the request ``row.request``."""

    @abstractmethod
    def _abort(self, request: str) -> None:
        """Forget a request that runs."""

    @abstractmethod
    def _collect(self) -> list[tuple[str, list[SampledToken]]]:
        """Go on by about a token; what requests have got since."""

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
        """Begin a conversation; see :meth:`estr.engines.local.LocalEngine.start`.

        Raises:
            ValueError: the key is in use, there is no room for the row, or it asks for what only the local engine can.
        """
        if key in self._rows:
            raise ValueError(f"the engine already runs {key!r}")
        if rule is not None or explore or heat:
            raise ValueError(
                "imposed versions, exploring samplers and temperatures of single rows need the local engine"
            )
        row = Row(key)
        if history is not None:
            row.take_over(history)
        row.tokens += [int(token) for token in tokens]
        if len(row.tokens) >= self.max_context:
            raise ValueError(
                f"a prompt of {len(row.tokens)} tokens leaves no room in a context of {self.max_context}; "
                "shorten it or raise rollout.max_context"
            )
        self._rows[key] = row
        self._begin_turn(row, seed, limit)

    def extend(self, key: str, tokens: Sequence[int], *, seed: int, limit: int) -> bool:
        """Append text and let a parked conversation act again; False, with nothing changed, where there is no room."""
        row = self._parked(key)
        if len(row.tokens) + len(tokens) >= self.max_context:
            return False
        row.tokens += [int(token) for token in tokens]
        self._begin_turn(row, seed, limit)
        return True

    def fork(self, key: str, tokens: Sequence[int], *, seed: int, limit: int) -> Segment | None:
        """Close a parked row and go on from a new history; None, with nothing changed, where it does not fit."""
        if len(tokens) >= self.max_context:
            return None
        old = self._parked(key)
        row = self._rows[key] = Row(key, [int(token) for token in tokens])
        self._begin_turn(row, seed, limit)
        return old.segment()

    def peek(self, key: str) -> Segment:
        """A copy of a parked conversation's row."""
        return self._parked(key).segment()

    def release(self, key: str) -> Segment:
        """End a parked conversation."""
        segment = self._parked(key).segment()
        del self._rows[key]
        return segment

    def cancel(self, key: str) -> None:
        """Forget a conversation in whatever state it is; unknown keys are fine."""
        row = self._rows.pop(key, None)
        if row is None:
            return
        if row.state == "waiting":
            self._waiting.remove(row)
        elif row.state == "running":
            self._abort(row.request)
            del self._requests[row.request]

    @property
    def busy(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._requests or self._waiting)

    @property
    def running(self) -> int:
        """Conversations it holds."""
        return len(self._rows)

    def _parked(self, key: str) -> Row:
        row = self._rows[key]
        if row.state != "parked":
            raise ValueError(f"{key!r} is {row.state}, not parked")
        return row

    # ------------------------------------------------------------------ turns

    def step(self) -> list[Turn]:
        """Send what waits, take what came; the turns that ended."""
        self._send_waiting()
        ended = []
        for request, sampled in self._collect():
            row = self._requests.get(request)
            if row is not None and (turn := self._accept(row, sampled)) is not None:
                ended.append(turn)
        return ended

    def _begin_turn(self, row: Row, seed: int, limit: int) -> None:
        row.seed, row.limit, row.turn_start, row.state = seed, limit, len(row.tokens), "waiting"
        self._waiting.append(row)

    def _send_waiting(self) -> None:
        while self._waiting and len(self._requests) < self._slots:
            row = self._waiting.popleft()
            self._sent += 1
            row.request, row.state = f"{row.key}@{self._sent}", "running"
            self._requests[row.request] = row
            self.counters.prefilled_tokens += len(row.tokens)
            self._send(row)

    def _send_again(self) -> None:
        """Withdraw turns that have no token yet, so that they are computed as a new version's requests."""
        for row in [row for row in self._requests.values() if len(row.tokens) == row.turn_start]:
            self._abort(row.request)
            del self._requests[row.request]
            self.counters.prefilled_tokens -= len(row.tokens)
            row.state = "waiting"
            self._waiting.appendleft(row)

    def _room(self, row: Row) -> int:
        return min(row.limit, self.max_context - row.turn_start)

    def _accept(self, row: Row, sampled: Sequence[SampledToken]) -> Turn | None:
        """File tokens up to the end of the turn; what lies beyond it never happened."""
        for token in sampled:
            row.add(token)
            self.counters.sampled_tokens += 1
            end = self._end(row)
            if end is not None:
                self._abort(row.request)
                del self._requests[row.request]
                row.state = "parked"
                return Turn(row.key, row.turn, end)
        return None

    def _end(self, row: Row) -> TurnEnd | None:
        last = row.tokens[-1]
        if last in self._end_ids or (self._stops is not None and self._stops.ends(row.turn)):
            return "stop"
        if len(row.tokens) >= self.max_context:
            return "context"
        return "length" if len(row.tokens) - row.turn_start >= row.limit else None
