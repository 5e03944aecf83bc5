"""Made-up rollouts that every learner trains on: prompts, ragged completions, rewards; log μ is the model's own."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.common.workload import ENDS, prompts


@dataclass(frozen=True)
class Rollout:
    group: int
    prompt: list[int]
    completion: list[int]
    advantage: float


def rollouts(
    groups: int, group_size: int, limit: int, vocabulary: int, seed: int = 0, *, ragged: bool = True
) -> list[Rollout]:
    """Completions end at random after 32 tokens on average, or at ``limit``, as they do early in training; or all have
    ``limit`` tokens."""
    source = random.Random(seed)
    made = []
    for number, prompt in enumerate(prompts(groups, group_size, vocabulary, seed)):
        length = min(limit, 1 + int(source.expovariate(1 / 32))) if ragged else limit
        completion = [source.randrange(ENDS, vocabulary) for _ in range(length)]
        made.append(Rollout(number // group_size, prompt, completion, 1.0 if number % 2 else -1.0))
    return made
