"""One rollout batch as the learner keeps it: trajectories, their advantages, and the frozen policies' values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from estr.advantages import AdvantageEstimator
from estr.config.sections import LearnerConfig
from estr.learner.packing import Columns
from estr.shaping import RewardShaping
from estr.trajectory import Segment, Trajectory, derive_seed

ByTrajectory = dict[int, list[NDArray[np.float32]]]
"""By index of the trajectory in the rollout batch: one float32 array [actions] per segment."""

TRUNCATED = ("length", "turns")


@dataclass
class Rollouts:
    """S trajectories of one rollout batch, in order of their groups.

    ``learns`` is False where a trajectory takes no part in the loss: it has no action token, or the rule ``mask`` drops
    it because it was cut off. A cut-off trajectory still counts in every denominator and in its group's baseline.
    """

    trajectories: list[Trajectory]
    group: Tensor  # int64 [S], index of the group in the batch
    reward: Tensor  # float64 [S], after the penalty for cut-off trajectories
    lengths: list[int]  # action tokens
    learns: list[bool]
    advantage: Tensor | None = None  # [S]
    token_advantage: Columns | None = None  # where advantages differ by token
    proximal_logprob: Columns | None = None
    proximal_entropy: Columns | None = None
    reference_logprob: Columns | None = None

    @classmethod
    def of(cls, groups: Sequence[Sequence[Trajectory]], config: LearnerConfig) -> Rollouts:
        """The batch of these groups under ``learner.truncated``; raises ValueError where it is empty."""
        trajectories = [trajectory for group in groups for trajectory in group]
        if not trajectories:
            raise ValueError("a rollout batch needs at least one trajectory")
        index = [number for number, group in enumerate(groups) for _ in group]
        penalty = config.truncation_penalty if config.truncated == "penalize" else 0.0
        reward = [t.reward - penalty * (t.finish_reason in TRUNCATED) for t in trajectories]
        lengths = [t.action_count for t in trajectories]
        masked = TRUNCATED if config.truncated == "mask" else ()
        learns = [n > 0 and t.finish_reason not in masked for t, n in zip(trajectories, lengths, strict=True)]
        return cls(trajectories, torch.tensor(index), torch.tensor(reward, dtype=torch.float64), lengths, learns)

    def units(self, chosen: Iterable[int]) -> list[list[Segment]]:
        """The rows of the chosen trajectories."""
        return [self.trajectories[i].segments for i in chosen]

    def learning(self, chosen: Iterable[int] | None = None) -> list[int]:
        """Which of the chosen trajectories (default: all) take part in the loss."""
        return [i for i in (range(len(self.trajectories)) if chosen is None else chosen) if self.learns[i]]

    def of_groups(self, groups: Iterable[int]) -> list[int]:
        """The trajectories of some groups, in the order of the batch."""
        wanted = set(groups)
        return [i for i, group in enumerate(self.group.tolist()) if group in wanted]

    @property
    def sequence(self) -> Tensor:
        """Which trajectory each action token of the batch belongs to, int64 [N], rows in order."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))

    def shape_rewards(self, shaping: RewardShaping, think_end: int | None = None) -> None:
        """Change the rewards that advantages are estimated from; ``reward/mean`` stays that of the verifier.

        ``think_end`` is the token ``</think>``: what is sampled before its first occurrence was thinking, all of a
        trajectory where it does not occur.
        """
        entropies = [s.entropy[s.action] for t in self.trajectories for s in t.segments]
        available = {
            "length": torch.tensor(self.lengths),
            "group": self.group,
            "sequence": self.sequence,
            "entropy": torch.from_numpy(np.concatenate([*entropies, np.zeros(0, np.float32)])),
            "thinking": None if think_end is None else self._thinking(think_end),
        }
        self.reward = shaping.shape(self.reward, **{name: available[name] for name in shaping.needs})

    def _thinking(self, think_end: int) -> Tensor:
        parts = [np.zeros(0, np.bool_)]
        for trajectory in self.trajectories:
            tokens = np.concatenate([np.zeros(0, np.int32), *(s.tokens[s.action] for s in trajectory.segments)])
            found = np.flatnonzero(tokens == think_end)
            parts.append(np.arange(len(tokens)) < (found[0] if len(found) else len(tokens)))
        return torch.from_numpy(np.concatenate(parts))

    def estimate(self, estimator: AdvantageEstimator, **fields: Tensor) -> None:
        """Advantages of the whole batch; ``fields`` are what ``estimator.needs`` names."""
        if not estimator.token_level:
            length = torch.tensor(self.lengths)
            self.advantage = estimator(self.reward, self.group, length=length, **fields).float()
            return
        sequence = self.sequence
        values = estimator.tokens(self.reward, self.group, sequence).float()
        total = torch.zeros(len(self.lengths)).index_add_(0, sequence, values)
        self.advantage = total / torch.tensor(self.lengths).clamp(min=1)
        self.token_advantage = self._by_segment(values.numpy())

    def _by_segment(self, flat: NDArray[np.float32]) -> Columns:
        columns, start = [], 0
        for trajectory in self.trajectories:
            rows = []
            for segment in trajectory.segments:
                rows.append(flat[start : start + segment.action_count])
                start += segment.action_count
            columns.append(rows)
        return columns

    def replace(self, i: int, other: Rollouts, j: int, advantage: float) -> None:
        """Trajectory j of ``other`` takes the place of trajectory i, with this advantage at every token."""
        assert self.advantage is not None
        self.trajectories[i] = trajectory = other.trajectories[j]
        self.lengths[i], self.learns[i] = other.lengths[j], other.learns[j]
        self.reward[i], self.advantage[i] = other.reward[j], advantage
        if self.token_advantage is not None:
            self.token_advantage[i] = [np.full(s.action_count, advantage, np.float32) for s in trajectory.segments]

    def advantage_of(self, i: int) -> float:
        """The advantage of one trajectory; the mean over its action tokens where they differ."""
        assert self.advantage is not None
        return float(self.advantage[i])

    def set_proximal(self, logprob: ByTrajectory, entropy: ByTrajectory) -> None:
        """Record q of some trajectories."""
        assert self.proximal_logprob is not None
        assert self.proximal_entropy is not None
        for i in logprob:
            self.proximal_logprob[i], self.proximal_entropy[i] = logprob[i], entropy[i]

    def advantage_columns(self) -> Columns:
        """One advantage per action token of every row."""
        if self.token_advantage is not None:
            return self.token_advantage
        assert self.advantage is not None
        return [
            [np.full(segment.action_count, value, np.float32) for segment in trajectory.segments]
            for trajectory, value in zip(self.trajectories, self.advantage.tolist(), strict=True)
        ]


def minibatch_plan(groups: int, minibatches: int, epochs: int, seed: int) -> list[list[int]]:
    """Groups of each optimizer step of a rollout batch: whole, in order in the first epoch, then shuffled by ``seed``.

    Every epoch takes ``min(minibatches, groups)`` steps of nearly equal size.
    """
    plan = []
    for epoch in range(epochs):
        order = np.arange(groups)
        if epoch:
            order = np.random.default_rng(derive_seed(seed, "epoch", epoch)).permutation(groups)
        plan += [part.tolist() for part in np.array_split(order, min(minibatches, groups))]
    return plan
