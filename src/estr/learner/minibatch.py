"""The trajectories of one optimizer step as micro-batches, and the token batches an objective sees of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from estr.batch import TokenBatch
from estr.learner.packing import Columns, MicroBatch, pack, unpack
from estr.learner.rollouts import ByTrajectory, Rollouts
from estr.models.head import HeadValues
from estr.trajectory import Trajectory


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
    ) -> Minibatch:
        """The minibatch of some groups of a rollout batch; ``share``: siblings read their prompt once."""
        members = rollouts.of_groups(groups)
        learning = rollouts.learning(members)
        packed = pack(rollouts.units(learning), tokens_per_microbatch, share=share)
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

    def token_batch(
        self,
        microbatch: MicroBatch,
        now: HeadValues,
        advantage: Tensor,
        target_version: int,
        fresh: bool = False,
    ) -> TokenBatch:
        """What the objective sees of one micro-batch, whose values under π are ``now``. ``fresh``: the weights are
        still those of q, so q is π itself."""
        rollouts = self.rollouts
        chosen = torch.tensor([self.learning[unit] for unit in microbatch.units], dtype=torch.int64)
        device = now.logprob.device
        topk = now.other_logprob is not None
        proximal: Tensor | None
        proximal_entropy: Tensor | None
        if fresh:
            proximal, proximal_entropy = now.logprob.detach(), now.entropy.detach()
        else:
            proximal = self._gather(microbatch, rollouts.proximal_logprob)
            proximal_entropy = self._gather(microbatch, rollouts.proximal_entropy)
        return TokenBatch(
            logprob=now.logprob,
            behavior_logprob=microbatch.behavior_logprob,
            advantage=advantage,
            advantage_scope="token",
            sequence=microbatch.sequence,
            sequences=len(microbatch.units),
            behavior_entropy=microbatch.behavior_entropy,
            behavior_entropy_upper=microbatch.behavior_entropy_upper,
            proximal_logprob=proximal,
            proximal_entropy=proximal_entropy,
            reference_logprob=self._gather(microbatch, rollouts.reference_logprob),
            entropy=now.entropy,
            version=microbatch.version,
            target_version=target_version,
            group=rollouts.group[chosen].to(device),
            reward=rollouts.reward[chosen].to(device),
            topk_ids=microbatch.topk_ids if topk else None,
            behavior_topk_logprob=microbatch.topk_logprob if topk else None,
            topk_logprob=now.other_logprob,
        )

    def by_trajectory(self, *series: list[Tensor]) -> list[ByTrajectory]:
        """Outputs [N] of each micro-batch by index of the trajectory in the rollout batch, one array per segment."""
        columns = unpack(self.rollouts.units(self.learning), self.microbatches, *series)
        return [dict(zip(self.learning, column, strict=True)) for column in columns]

    def _gather(self, microbatch: MicroBatch, columns: Columns | None) -> Tensor | None:
        return None if columns is None else microbatch.gather(self._select(columns))

    def _select(self, columns: Columns) -> Columns:
        return [columns[i] for i in self.learning]
