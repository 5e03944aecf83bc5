"""What episodes ask of an engine; :class:`estr.engines.local.LocalEngine` says what each call does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from estr.engines.seats import VersionRule
from estr.trajectory import Segment

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


class Engine(Protocol):
    """Generates turns of many conversations at once; weights change between two calls of ``step``."""

    counters: EngineCounters

    @property
    def version(self) -> int: ...

    def set_weights(self, version: int, tensors: Mapping[str, Tensor], *, own: bool = False) -> None: ...

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
    ) -> None: ...

    def extend(self, key: str, tokens: Sequence[int], *, seed: int, limit: int) -> bool: ...

    def fork(self, key: str, tokens: Sequence[int], *, seed: int, limit: int) -> Segment | None: ...

    def peek(self, key: str) -> Segment: ...

    def release(self, key: str) -> Segment: ...

    def cancel(self, key: str) -> None: ...

    @property
    def busy(self) -> bool: ...

    def step(self) -> list[Turn]: ...

    def canary(self, tokens: Sequence[int]) -> np.ndarray: ...

    def close(self) -> None: ...
