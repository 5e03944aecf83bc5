"""Many conversations at once on anything that generates turns, with tools that take their time."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class TurnEngine(Protocol):
    """Turns in flight: begin one with the conversation so far, step until some have ended."""

    def begin(self, key: str, tokens: list[int], fresh: int, seed: int, limit: int) -> None:
        """``tokens``: the whole conversation; the last ``fresh`` of them are new since the key's last turn."""
        ...

    def step(self) -> list[tuple[str, list[int]]]:
        """Advance; (key, tokens of the turn) of those that ended."""
        ...

    def end(self, key: str) -> None: ...

    @property
    def busy(self) -> bool: ...


@dataclass(frozen=True)
class Script:
    """What happens around the turns, the same for every contestant."""

    prompts: Sequence[list[int]]
    turns: int = 1
    limit: int = 96
    wait: float = 0.0  # median seconds of a tool, exponential
    reply: int = 8  # tokens of its answer
    seed: int = 0

    def delay(self, number: int, turn: int) -> float:
        return random.Random(f"{self.seed}/{number}/{turn}").expovariate(0.6931 / self.wait) if self.wait else 0.0

    def answer(self, number: int, turn: int) -> list[int]:
        source = random.Random(f"{self.seed}/{number}/{turn}/answer")
        return [source.randrange(8, 500) for _ in range(self.reply)]


def run(engine: TurnEngine, script: Script) -> tuple[int, float]:
    """Sampled tokens and seconds of all conversations; each goes on as soon as its own tool has answered."""
    histories = [list(prompt) for prompt in script.prompts]
    turns, sampled = [0] * len(histories), 0
    sleeping: list[tuple[float, int]] = []
    left, start = len(histories), time.perf_counter()
    for number, tokens in enumerate(histories):
        engine.begin(str(number), tokens, len(tokens), script.seed * 100_000 + number, script.limit)
    while left:
        now = time.perf_counter()
        for _, number in [entry for entry in sleeping if entry[0] <= now]:
            answer = script.answer(number, turns[number])
            histories[number] += answer
            seed = (script.seed * 10 + turns[number]) * 10_000_000 + number
            engine.begin(str(number), histories[number], len(answer), seed, script.limit)
        sleeping = [entry for entry in sleeping if entry[0] > now]
        if not engine.busy:
            time.sleep(0.001)
            continue
        for key, tokens in engine.step():
            number = int(key)
            sampled += len(tokens)
            turns[number] += 1
            histories[number] += tokens
            if turns[number] < script.turns:
                sleeping.append((time.perf_counter() + script.delay(number, turns[number]), number))
            else:
                engine.end(key)
                left -= 1
    return sampled, time.perf_counter() - start
