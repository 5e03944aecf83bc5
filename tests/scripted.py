"""A scripted engine: turns come from a script instead of a model; everything else is as with the local engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from estr.engines.local import Turn
from estr.trajectory import Segment

Script = Callable[[str, int], str]
"""(conversation key, turn number) → text of the assistant turn."""


class ScriptedEngine:
    """Finishes one turn of every running conversation a step; log μ = -0.5, H = 1 for every scripted token."""

    def __init__(self, tokenizer: Any, script: Script, *, end: str = "stop") -> None:
        self._tokenizer, self._script, self._end = tokenizer, script, end
        self._rows: dict[str, list[tuple[int, bool]]] = {}
        self._turns: dict[str, int] = {}
        self._running: list[str] = []
        self.version = 0
        self.max_context = 10_000

    def start(
        self,
        key: str,
        tokens: Sequence[int],
        *,
        seed: int,
        limit: int,
        rule: Any = None,
        explore: bool = False,
        heat: float = 0.0,
        history: Any = None,
    ) -> None:
        if len(tokens) >= self.max_context:
            raise ValueError(f"a prompt of {len(tokens)} tokens leaves no room in a context of {self.max_context}")
        before = [] if history is None else list(zip(history.tokens.tolist(), history.action.tolist(), strict=True))
        self._rows[key] = before + [(token, False) for token in tokens]
        self._turns[key] = sum(b and not a for a, b in pairwise([False, *(action for _, action in before)]))
        self._running.append(key)

    def extend(self, key: str, tokens: Sequence[int], *, seed: int, limit: int) -> bool:
        self._rows[key] += [(token, False) for token in tokens]
        self._running.append(key)
        return True

    def fork(self, key: str, tokens: Sequence[int], *, seed: int, limit: int) -> Segment:
        segment = self._segment(key)
        self._rows[key] = [(token, False) for token in tokens]
        self._running.append(key)
        return segment

    def peek(self, key: str) -> Segment:
        return self._segment(key)

    def release(self, key: str) -> Segment:
        segment = self._segment(key)
        del self._rows[key]
        return segment

    def cancel(self, key: str) -> None:
        self._rows.pop(key, None)
        self._running = [other for other in self._running if other != key]

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def step(self) -> list[Turn]:
        running, self._running = self._running, []
        turns = []
        for key in running:
            text = self._script(key, self._turns[key])
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
            self._turns[key] += 1
            self._rows[key] += [(token, True) for token in tokens]
            turns.append(Turn(key, tokens, self._end))  # type: ignore[arg-type]
        return turns

    def _segment(self, key: str) -> Segment:
        tokens, action = (np.array(column) for column in zip(*self._rows[key], strict=True))
        nan = np.float32("nan")
        return Segment(
            tokens.astype(np.int32),
            action.astype(np.bool_),
            np.where(action, np.float32(-0.5), nan),
            np.where(action, np.float32(1.0), nan),
            np.where(action, self.version, -1).astype(np.int32),
        )
