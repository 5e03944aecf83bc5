"""The scripted parts: a task with tools, delays and failures from seeds; an engine and a learner that only pretend.

The pretended learner counts in a tensor of the checkpoint which trajectories its weights have seen; what it makes of a
batch depends on every token, so that equal weights mean equal histories.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from estr.engines.local import LocalEngine
from estr.engines.sampler import Sampled
from estr.environments.base import Message, Problem, Reply
from estr.learner.learner import Learner
from estr.learner.results import StepResult, TrainedTrajectory
from estr.learner.rollouts import minibatch_plan
from estr.trajectory import Trajectory, derive_seed

COUNTED = 512  # group numbers that the pretended weights can count


class Torture:
    """Every fifth problem fails its first attempts, every eleventh all; delays are up to ``delay`` seconds."""

    name = "torture"

    def __init__(self, *, delay: float = 0.02, turns: int = 3) -> None:
        self.delay, self.turns = delay, turns

    def train_problem(self, index: int) -> Problem:
        return Problem(f"torture-{index}", f"Go {index}", index)

    def eval_problems(self, count: int) -> Sequence[Problem]:
        return [Problem(f"torture-eval-{i}", f"Go {i}", i) for i in range(count)]

    def environment(self) -> TortureEnvironment:
        return TortureEnvironment(self)

    def demonstrations(self, seed: int) -> Iterator[list[Message]]:
        return iter(())


class TortureEnvironment:
    blocking = False
    stop = ("e", "1")

    def __init__(self, task: Torture) -> None:
        self.task = task
        self.said: list[str] = []

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        self.problem, self.seed = problem, seed
        return [{"role": "user", "content": problem.prompt}]

    def state(self) -> dict[str, Any]:
        return {"said": self.said, "seed": self.seed}

    def restore(self, problem: Problem, seed: int, state: Any) -> None:
        self.reset(problem, seed)
        assert state["seed"] == seed
        self.said = list(state["said"])

    def step(self, text: str) -> Reply:
        self.said.append(text)
        if self._fails():
            raise ConnectionError("the tool hung up")
        draw = random.Random(f"{self.seed}/{len(self.said)}")
        message = {"role": "tool", "content": f"{len(self.said)} {len(text)}"}
        return Reply((message,), done=len(self.said) >= self.task.turns, delay=draw.random() * self.task.delay)

    def _fails(self) -> bool:
        number = int(self.problem.answer)
        first_attempts = {derive_seed(0, number, sibling, 0) for sibling in range(8)}
        return number % 11 == 7 or (number % 5 == 3 and self.seed in first_attempts)

    def reward(self) -> float:
        return hashlib.blake2b("|".join(self.said).encode()).digest()[0] / 256


class PretendedEngine(LocalEngine):
    """Everything of the local engine but the model: tokens follow from the turn's random numbers alone."""

    def _forward(self, rows: Any, tokens: Tensor, positions: Tensor, real: Any, width: int) -> Tensor:
        return torch.zeros(*tokens.shape, self._head.weight.shape[1])

    def _sample(self, index: Tensor, logits: Tensor, position: Tensor) -> Sampled:
        uniform = self._store.uniform[index, position]
        token = (uniform * (logits.shape[-1] - 64)).long() + 32
        ends = self._end.nonzero()[0, 0]
        token = torch.where(uniform < 0.3, ends, token)
        value = torch.full((len(token),), -0.5)
        return Sampled(token, value, -value)


def applying(learner: PretendedLearner, batch: list[Trajectory]) -> None:
    """The pretended optimizer step (a function of its own so that it can be trapped)."""
    digest = hashlib.blake2b(digest_size=4)
    for one in batch:
        learner.counts[one.group, one.sibling] += 1
        for row in one.segments:
            digest.update(row.tokens.tobytes() + row.logprob[row.action].tobytes())
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.mul_(1 + int.from_bytes(digest.digest(), "big") / 2**32 * 1e-3)


class PretendedLearner(Learner):
    """Skips a step now and then; otherwise every trajectory it is given leaves its trace in the weights."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.counts = torch.zeros(COUNTED, self.config.rollout.group_size, dtype=torch.int32)

    def train(self, groups: Sequence[Sequence[Trajectory]]) -> Iterator[StepResult]:
        for part in minibatch_plan(len(groups), self.config.learner.minibatches, 1, 0):
            batch = [one for place in part for one in groups[place]]
            before, skipped = self.version, sum(one.group for one in batch) % 13 == 5
            if not skipped:
                applying(self, batch)
                self.version += 1
            yield StepResult(
                version_before=before,
                version=self.version,
                target_version=before,
                skipped=skipped,
                reason="it was asked to" if skipped else None,
                divergence=None,
                metrics={"loss": float(next(self.model.parameters()).detach().sum())},
                trajectories=[TrainedTrajectory(one, 0.0) for one in batch],
            )

    def state_tensors(self) -> dict[str, Tensor]:
        return super().state_tensors() | {"counts": self.counts}

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().load_state(state, tensors)
        self.counts = tensors["counts"].clone()
