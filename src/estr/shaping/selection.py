"""Rules that decide which trajectories train."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from estr.advantages.base import group_rewards
from estr.registry import Registry, choose, within
from estr.state import Stateful

selections: Registry[DynamicSampling | ArbitraryEntropy] = Registry("selection rule", operator="selection")


@selections.register(
    "dapo",
    description="Keep only groups whose rewards differ; the rest have no gradient and are sampled again.",
    formula="keep a group <=> std of its rewards > 0; a group of one is kept",
    source="DAPO, arXiv 2503.14476, equation 11; verl recipe/dapo",
    confidence="framework code",
    scope="group",
)
@dataclass
class DynamicSampling:
    """``keep(reward, group)``: whether each trajectory's group trains, bool [S].

    Invalid rewards are left out; a group that holds nothing else is not kept, one with a single valid reward counts as
    a group of one. ``keep_singletons`` False drops groups of one too. ``max_num_gen_batches`` bounds what is
    dropped for one batch that trains, in batches (0: no bound); whoever samples keeps to it.
    """

    keep_singletons: bool = True
    max_num_gen_batches: int = 10

    def __post_init__(self) -> None:
        within("max_num_gen_batches", self.max_num_gen_batches, 0)

    def keep(self, reward: Any, group: Any) -> Tensor:
        """bool [S] for ``reward`` [S] and ``group`` int64 [S]; never splits a group."""
        groups = group_rewards(reward, group)
        differ = ~groups.equal
        return differ | ((groups.count == 1) if self.keep_singletons else torch.zeros_like(differ))


@dataclass(frozen=True)
class Replacement:
    """Which extra trajectories train, as int64 indices into them, and with which advantage.

    They take the place of the first ``len(indices)`` trajectories of the batch, whose size stays the same.
    """

    indices: Tensor
    advantage: float


@selections.register(
    "aepo",
    description="Steer entropy to a target: good trajectories of extra rollouts at a hotter or colder temperature.",
    formula="T = high if H <= target else low; the first n of {A > threshold} join with A = 1, n halved at high H",
    source="Arbitrary Entropy Policy Optimization, arXiv 2510.08141; 597358816/AEPO ray_trainer.py",
    confidence="official code",
    scope="sequence",
)
@dataclass
class ArbitraryEntropy(Stateful):
    """Per optimizer step: sample the batch, and ``prompt_share`` of its prompts again at ``temperature``; ``select``
    from the group advantages of those; put them in place of the batch's first; ``observe`` the step's entropy.

    ``strict`` compares H < target (README) in place of H <= target (code). Before the first observation H is 0.
    """

    state_fields: ClassVar[tuple[str, ...]] = ("entropy",)

    target_entropy: float = 0.5
    temperature_high: float = 1.2
    temperature_low: float = 0.8
    threshold: float = 0.05
    max_selected: int = 60
    prompt_share: float = 0.25
    strict: bool = False
    entropy: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        within("temperature_high", self.temperature_high, 0.0, open_low=True)
        within("temperature_low", self.temperature_low, 0.0, open_low=True)
        within("prompt_share", self.prompt_share, 0.0, 1.0)
        within("max_selected", self.max_selected, 0)
        choose("strict", self.strict, (True, False))

    @property
    def too_low(self) -> bool:
        """Whether the last observed entropy calls for more of it."""
        return self.entropy < self.target_entropy if self.strict else self.entropy <= self.target_entropy

    @property
    def temperature(self) -> float:
        """Sampling temperature of the extra rollouts."""
        return self.temperature_high if self.too_low else self.temperature_low

    def extra_prompts(self, prompts: int) -> int:
        """How many of the batch's first ``prompts`` are sampled a second time."""
        return int(prompts * self.prompt_share)

    def observe(self, entropy: float) -> dict[str, float]:
        """Take the entropy of the step just done (mean of -log pi at temperature 1); not finite: keep the last."""
        if math.isfinite(entropy):
            self.entropy = entropy
        return {"aepo/temperature": self.temperature}

    def select(self, advantage: Tensor) -> Replacement:
        """Choose from the extra trajectories' group advantages [M]; none above the threshold gives none."""
        kept = (advantage > self.threshold).nonzero().squeeze(1)
        count = min(self.max_selected, kept.numel())
        return Replacement(kept[: count if self.too_low else count // 2], advantage=1.0)
