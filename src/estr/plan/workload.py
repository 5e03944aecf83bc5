"""What is to be generated: lengths of prompts, turns and replies, and how long tools take.

A trajectory depends on (seed, group, sibling, attempt) alone, so that two plans with one seed see the same work.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from estr.environments.latency import Latency
from estr.plan.sections import Distribution, ToolsSection, WorkloadSection

_Z99 = 2.3263478740408408  # 99 % quantile of the normal distribution


@dataclass(frozen=True)
class Profile:
    """The lengths of one trajectory: ``turns`` are action tokens; a reply stands between two turns."""

    prompt: int
    turns: tuple[int, ...]
    replies: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.turns or min(self.turns) < 1 or len(self.replies) != len(self.turns) - 1:
            raise ValueError("a profile has turns of at least one token and a reply between any two of them")

    @property
    def action_tokens(self) -> int:
        return sum(self.turns)

    @property
    def tokens(self) -> int:
        """What the learner reads: prompt, actions and replies."""
        return self.prompt + sum(self.turns) + sum(self.replies)


class Workload(Protocol):
    def profiles(self, group: int, size: int) -> Sequence[Profile]:
        """The trajectories of group ``group``."""
        ...

    def waits(self, group: int, sibling: int, attempt: int, calls: int) -> Sequence[float]:
        """Seconds of each of its ``calls`` tool calls."""
        ...


def draw(spread: Distribution, generator: random.Random) -> float:
    """A number from ``spread``."""
    if spread.kind == "fixed":
        return spread.value
    sigma = math.log(spread.p99 / spread.median) / _Z99
    return min(spread.cap, spread.median * math.exp(sigma * generator.gauss(0.0, 1.0)))


def tool_latency(tools: ToolsSection) -> Latency:
    """The task's own class for artificial latency, from a plan's section."""
    names = ("seconds", "median", "p99", "cap")
    return Latency(tools.latency, *(getattr(tools, f"latency_{name}") for name in names))


class ToolWaits:
    """Tool latency by distribution, or drawn from seconds that a run recorded."""

    def __init__(self, seed: int, latency: Latency, recorded: Sequence[float] = ()) -> None:
        self._seed, self._latency, self._recorded = seed, latency, recorded
        self._sigma = math.log(latency.p99 / latency.median) / _Z99 if latency.kind == "lognormal" else 0.0

    def __call__(self, group: int, sibling: int, attempt: int, calls: int) -> Sequence[float]:
        latency = self._latency
        if self._recorded:
            generator = random.Random(f"{self._seed}/{group}/{sibling}/{attempt}/waits")
            return [self._recorded[generator.randrange(len(self._recorded))] for _ in range(calls)]
        if latency.kind != "lognormal":
            return [latency.seconds if latency.kind == "fixed" else 0.0] * calls
        normal = random.Random(f"{self._seed}/{group}/{sibling}/{attempt}/waits").gauss
        return [min(latency.cap, latency.median * math.exp(self._sigma * normal(0.0, 1.0))) for _ in range(calls)]


class DrawnWorkload:
    """Lengths from the distributions of ``[workload]``."""

    def __init__(self, section: WorkloadSection, seed: int, waits: Callable[..., Sequence[float]]) -> None:
        self._section, self._seed, self.waits = section, seed, waits

    def profiles(self, group: int, size: int) -> Sequence[Profile]:
        section, generator = self._section, random.Random(f"{self._seed}/{group}/lengths")
        prompt = max(1, round(draw(section.prompt_tokens, generator)))
        return [self._profile(prompt, generator) for _ in range(size)]

    def _profile(self, prompt: int, generator: random.Random) -> Profile:
        section = self._section
        count = max(1, round(draw(section.turns, generator)))
        turns = tuple(max(1, round(draw(section.turn_tokens, generator))) for _ in range(count))
        replies = tuple(max(0, round(draw(section.reply_tokens, generator))) for _ in range(count - 1))
        return Profile(prompt, turns, replies)


class RecordedWorkload:
    """Whole groups drawn from those that a run has trained, so that siblings stay as alike as they were."""

    def __init__(self, groups: Sequence[Sequence[Profile]], seed: int, waits: Callable[..., Sequence[float]]) -> None:
        if not groups:
            raise ValueError("a recorded workload needs at least one group")
        self.groups, self._seed, self.waits = groups, seed, waits

    def profiles(self, group: int, size: int) -> Sequence[Profile]:
        generator = random.Random(f"{self._seed}/{group}/lengths")
        chosen = self.groups[generator.randrange(len(self.groups))]
        if len(chosen) == size:
            return chosen
        return [chosen[generator.randrange(len(chosen))] for _ in range(size)]
