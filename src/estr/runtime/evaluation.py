"""Held-out evaluation: the policy's weights in an engine of this process, artificial latency left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from estr.config import Config
from estr.environments.base import Task
from estr.runtime.builders import build_rollout_worker, held_out_problems
from estr.runtime.messages import Finished, Job
from estr.trajectory import Trajectory, derive_seed


@dataclass(frozen=True)
class Evaluation:
    """Rewards [problems, samples] of held-out problems, in the task's order."""

    rewards: NDArray[np.float64]
    trajectories: list[Trajectory]
    failed: int
    temperature: float

    @property
    def mean(self) -> float:
        """avg@k: the mean reward over all samples."""
        return float(self.rewards.mean()) if self.rewards.size else float("nan")

    def pass_at(self, k: int) -> float:
        """Unbiased pass@k (Chen et al. 2021, arXiv 2107.03374, eq. 1) with reward 1 as success, from n >= k samples."""
        n = self.rewards.shape[1]
        if not 1 <= k <= n:
            raise ValueError(f"pass@{k} needs at least {k} samples a problem, there are {n}")
        correct = (self.rewards >= 1.0).sum(1)
        failures = np.ones(len(correct))
        for i in range(k):
            failures *= np.clip(n - correct - i, 0, None) / (n - i)
        return float((1.0 - failures).mean())


class Evaluator:
    """Evaluates weights on the task's held-out problems.

    Every evaluation of a run uses the same problems and the same random numbers. A failed episode scores 0 and is
    counted.
    """

    def __init__(
        self, config: Config, task: Task, model: Any, tokenizer: Any, *, problems: int, samples: int = 1
    ) -> None:
        self._problems = held_out_problems(task, problems)
        self._samples, self._temperature = samples, config.run.eval_temperature
        self._seed = derive_seed(config.run.seed, "evaluation")
        self._worker = build_rollout_worker(
            config, task, model, tokenizer, temperature=self._temperature, dtype="float32", wait_for_tools=False
        )
        self._version = 0

    @property
    def problems(self) -> int:
        return len(self._problems)

    def evaluate(self, tensors: Mapping[str, Tensor], check: Callable[[], None] = lambda: None) -> Evaluation:
        """Score the policy whose weights are ``tensors`` (used where they lie, until the next call)."""
        self._version += 1
        self._worker.engine.set_weights(self._version, tensors)
        for index, problem in enumerate(self._problems):
            for sample in range(self._samples):
                self._worker.submit(Job(index, sample, 0, problem, self._seed))
        rewards = np.zeros((len(self._problems), self._samples))
        trajectories, failed = [], 0
        while self._worker.running or not self._worker.idle:
            check()
            for result in self._worker.tick():
                if not isinstance(result, Finished):
                    failed += 1
                    continue
                trajectory = result.trajectory
                rewards[trajectory.group, trajectory.sibling] = trajectory.reward
                trajectories.append(trajectory)
        return Evaluation(rewards, trajectories, failed, self._temperature)
