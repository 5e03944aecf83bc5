"""Selection where groups come in: DAPO drops one whose rewards do not differ, AEPO samples some a second time."""

from __future__ import annotations

import torch

from estr.config import Config
from estr.errors import RunError
from estr.schedule import Group
from estr.shaping import ArbitraryEntropy, DynamicSampling, selection

NO_SPREAD = "no reward spread"


def doubled_groups(config: Config) -> int:
    """How many groups of a rollout batch are sampled a second time."""
    section = config.objective
    if section.selection != "aepo":
        return 0
    rule = selection(section.selection, **section.selection_options)
    assert isinstance(rule, ArbitraryEntropy)
    return rule.extra_prompts(config.learner.prompts_per_step)


def group_size(config: Config, number: int) -> int:
    """Trajectories of group ``number``, second rollouts included."""
    twice = number % config.learner.prompts_per_step < doubled_groups(config)
    return config.rollout.group_size * (2 if twice else 1)


class SpreadFilter:
    """Says which finished groups do not train; ``rule`` None keeps all.

    Rewards are the verifier's, before shaping and penalties. At most ``max_num_gen_batches`` rollout batches' worth of
    groups may be dropped for one that trains.
    """

    def __init__(self, rule: DynamicSampling | None, prompts_per_step: int) -> None:
        self._rule, self._prompts = rule, prompts_per_step
        self._since_batch = self._since_line = 0

    @classmethod
    def of(cls, config: Config) -> SpreadFilter:
        """What ``objective.selection`` asks for."""
        section = config.objective
        rule = selection(section.selection, **section.selection_options) if section.selection == "dapo" else None
        return cls(rule if isinstance(rule, DynamicSampling) else None, config.learner.prompts_per_step)

    def drops(self, group: Group) -> bool:
        """Whether this finished group is dropped; counts it."""
        if self._rule is None:
            return False
        rewards = torch.tensor([t.reward for t in group.trajectories], dtype=torch.float64)
        if bool(self._rule.keep(rewards, torch.zeros(len(rewards), dtype=torch.int64)).all()):
            return False
        self._since_batch += 1
        self._since_line += 1
        return True

    def check(self) -> None:
        """Raises RunError where too many groups were dropped since the last rollout batch."""
        limit = 0 if self._rule is None else self._rule.max_num_gen_batches
        if 0 < limit * self._prompts < self._since_batch:
            raise RunError(
                f"{self._since_batch} groups in whose rewards nothing differs were dropped for one rollout batch of "
                f"{self._prompts} (objective.selection_options.max_num_gen_batches = {limit}): the task is too hard or "
                "too easy for the model as it is; change it, raise rollout.group_size, or raise that limit"
            )

    def batch_taken(self) -> None:
        """A rollout batch is complete."""
        self._since_batch = 0

    def metrics(self) -> dict[str, float]:
        """Groups dropped since the last call."""
        if self._rule is None:
            return {}
        dropped, self._since_line = self._since_line, 0
        return {"selection/dropped_groups": float(dropped)}
