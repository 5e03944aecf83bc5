"""Where an engine's rows stand: which place of cache and store each has, and the active ones together at the front."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from estr.engines.cache import SlotCache
from estr.engines.prompts import Prompt
from estr.engines.rows import RowStore

VersionRule = Callable[[int], int]
"""Action index of a trajectory → version that must sample it (lockstep)."""


@dataclass(eq=False)
class Row:
    """One conversation that has a place; its tokens are in the store."""

    key: str
    index: int
    limit: int = 0
    turn_start: int = 0
    rule: VersionRule | None = None
    actions: int = 0  # sampled in this trajectory, over all its rows and turns; kept where there is a rule
    cached_under: int = -1  # version its cache was last computed under; kept where there is a rule
    prompt: Prompt | None = None  # what its cache begins with, for siblings to copy
    state: Literal["pending", "active", "parked"] = "pending"


class Seats:
    """Places of ``count`` rows. Active rows are brought to the front just before they are decoded, each with at most
    one exchange, so that a row which ends while another begins costs nothing where the new one takes its place."""

    def __init__(self, count: int, cache: SlotCache, store: RowStore) -> None:
        self.rows: dict[str, Row] = {}
        self.at: list[Row | None] = [None] * count
        self.active = 0
        self.ruled = 0  # rows that have a rule
        self._cache, self._store = cache, store
        self._free = list(range(count))
        self._scattered = False

    @property
    def room(self) -> bool:
        """Whether another row has a place."""
        return bool(self._free)

    def take(self, key: str, rule: VersionRule | None, actions: int) -> Row:
        """Give a conversation the first free place."""
        row = Row(key, heapq.heappop(self._free), rule=rule, actions=actions)
        self.rows[key] = self.at[row.index] = row
        self.ruled += rule is not None
        self._store.clear(row.index)
        return row

    def free(self, row: Row) -> None:
        """Let go of a row that is not active."""
        del self.rows[row.key]
        self.at[row.index] = None
        self.ruled -= row.rule is not None
        row.prompt = None
        heapq.heappush(self._free, row.index)

    def activate(self, row: Row) -> None:
        row.state = "active"
        self.active += 1
        self._scattered = True

    def deactivate(self, row: Row, state: Literal["pending", "parked"]) -> None:
        if row.state == "active":
            self.active -= 1
            self._scattered = True
        row.state = state

    def gather(self) -> list[Row]:
        """Bring the active rows to places 0, 1, …; returns them in that order."""
        front = self.active
        if self._scattered:
            holes = [i for i, row in enumerate(self.at[:front]) if row is None or row.state != "active"]
            movers = [row for row in self.at[front:] if row is not None and row.state == "active"]
            for index, row in zip(holes, movers, strict=True):
                self._exchange(row, index)
            if holes:
                self._free = [i for i, row in enumerate(self.at) if row is None]
            self._scattered = False
        return [row for row in self.at[:front] if row is not None]

    def _exchange(self, row: Row, index: int) -> None:
        other, old = self.at[index], row.index
        length = int(self._store.length[old])
        if other is None:
            self._cache.move(old, index, length)
            self._store.move(old, index)
        else:
            self._cache.swap(old, index, max(length, int(self._store.length[index])))
            self._store.swap(old, index)
            other.index = old
        row.index = index
        self.at[index], self.at[old] = row, other
