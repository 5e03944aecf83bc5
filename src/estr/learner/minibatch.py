"""The trajectories of one optimizer step as micro-batches, and the token batches an objective sees of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from estr.batch import TokenBatch
from estr.learner.packing import Columns, MicroBatch, pack, unpack
from estr.learner.rollouts import ByTrajectory, Rollouts
from estr.models.head import HeadValues
from estr.objectives import Statistics
from estr.trajectory import Trajectory


@dataclass(frozen=True)
class Task:
    """One micro-batch of an optimizer step with all that is known of its N action tokens before its forward pass."""

    microbatch: MicroBatch
    advantage: Tensor  # float32 [N]
    group: Tensor  # int64 [S]
    reward: Tensor  # float64 [S]
    target_version: int
    fresh: bool  # the weights are still those of q, so q is π itself
    proximal_logprob: Tensor | None = None  # [N]
    proximal_entropy: Tensor | None = None  # [N]
    reference_logprob: Tensor | None = None  # [N]
    entropy_weight: Tensor | None = None  # float64 [N], what each token's entropy is worth in the loss
    statistics: Statistics | None = None  # what the recipe must know of all micro-batches
    now: HeadValues | None = None  # its forward pass, with graph, where there was one already

    def to(self, device: torch.device) -> Task:
        """The same with its tensors on ``device``."""
        names = (name for name, value in vars(self).items() if isinstance(value, Tensor | MicroBatch | Statistics))
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def token_batch(self, now: HeadValues) -> TokenBatch:
        """What the objective sees of it, where its values under π are ``now``."""
        microbatch, device = self.microbatch, now.logprob.device
        topk = now.other_logprob is not None
        return TokenBatch(
            logprob=now.logprob,
            behavior_logprob=microbatch.behavior_logprob,
            advantage=self.advantage,
            advantage_scope="token",
            sequence=microbatch.sequence,
            sequences=len(microbatch.units),
            behavior_entropy=microbatch.behavior_entropy,
            behavior_entropy_upper=microbatch.behavior_entropy_upper,
            proximal_logprob=now.logprob.detach() if self.fresh else self.proximal_logprob,
            proximal_entropy=now.entropy.detach() if self.fresh else self.proximal_entropy,
            reference_logprob=self.reference_logprob,
            entropy=now.entropy,
            version=microbatch.version,
            target_version=self.target_version,
            group=self.group.to(device),
            reward=self.reward.to(device),
            topk_ids=microbatch.topk_ids if topk else None,
            behavior_topk_logprob=microbatch.topk_logprob if topk else None,
            topk_logprob=now.other_logprob,
        )


@dataclass
class Minibatch:
    """``members`` are all its trajectories, ``learning`` those that take part in the loss (packed as units 0, 1, …).

    The denominators count the action tokens of all members and all members that have one, so that they depend neither
    on the split into micro-batches nor on which trajectories the truncation rule masks.
    """

    rollouts: Rollouts
    members: list[int]
    learning: list[int]
    microbatches: list[MicroBatch]
    token_count: int
    sequence_count: int

    @property
    def trajectories(self) -> list[Trajectory]:
        """All its trajectories."""
        return [self.rollouts.trajectories[i] for i in self.members]

    @property
    def learning_tokens(self) -> int:
        """Action tokens that take part in the loss."""
        return sum(self.rollouts.lengths[i] for i in self.learning)

    @classmethod
    def of(
        cls,
        rollouts: Rollouts,
        groups: list[int],
        tokens_per_microbatch: int,
        device: torch.device,
        *,
        share: bool = False,
        ranks: int = 1,
    ) -> Minibatch:
        """The minibatch of some groups of a rollout batch; ``share``: siblings read their prompt once."""
        members = rollouts.of_groups(groups)
        learning = rollouts.learning(members)
        packed = pack(rollouts.units(learning), tokens_per_microbatch, share=share, ranks=ranks)
        lengths = [rollouts.lengths[i] for i in members]
        moved = [microbatch.to(device) for microbatch in packed]
        return cls(rollouts, members, learning, moved, sum(lengths), sum(n > 0 for n in lengths))

    def advantages(self) -> list[Tensor]:
        """The advantage of each action token, float32 [N], for each micro-batch."""
        columns = self._select(self.rollouts.advantage_columns())
        return [microbatch.gather(columns) for microbatch in self.microbatches]

    def proximal_logprob(self) -> list[Tensor]:
        """log q of each action token, float32 [N], for each micro-batch."""
        assert self.rollouts.proximal_logprob is not None
        columns = self._select(self.rollouts.proximal_logprob)
        return [microbatch.gather(columns) for microbatch in self.microbatches]

    def task(self, place: int, advantage: Tensor, target_version: int, fresh: bool) -> Task:
        """Micro-batch ``place`` with what this rollout batch knows of it. ``fresh``: see ``Task``."""
        microbatch, rollouts = self.microbatches[place], self.rollouts
        chosen = torch.tensor([self.learning[unit] for unit in microbatch.units], dtype=torch.int64)
        return Task(
            microbatch=microbatch,
            advantage=advantage,
            group=rollouts.group[chosen],
            reward=rollouts.reward[chosen],
            target_version=target_version,
            fresh=fresh,
            proximal_logprob=None if fresh else self._gather(microbatch, rollouts.proximal_logprob),
            proximal_entropy=None if fresh else self._gather(microbatch, rollouts.proximal_entropy),
            reference_logprob=self._gather(microbatch, rollouts.reference_logprob),
        )

    def by_trajectory(self, *series: list[Tensor]) -> list[ByTrajectory]:
        """Outputs [N] of each micro-batch by index of the trajectory in the rollout batch, one array per segment."""
        columns = unpack(self.rollouts.units(self.learning), self.microbatches, *series)
        return [dict(zip(self.learning, column, strict=True)) for column in columns]

    def _gather(self, microbatch: MicroBatch, columns: Columns | None) -> Tensor | None:
        return None if columns is None else microbatch.gather(self._select(columns))

    def _select(self, columns: Columns) -> Columns:
        return [columns[i] for i in self.learning]
