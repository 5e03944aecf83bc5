"""Soft punishment of answers that come close to the length limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from estr.registry import choose, within
from estr.shaping.base import RewardShaping, floating, shapings


@shapings.register(
    "overlong",
    description="Take from the reward, linearly, what an answer uses of a buffer before the length limit.",
    formula="r += min(-(length - (max_length - buffer)) / buffer * factor, 0)",
    source="DAPO, arXiv 2503.14476, equation 13; verl reward manager dapo.py",
    confidence="framework code",
    scope="sequence",
)
@dataclass
class Overlong(RewardShaping):
    """``shape(reward, length=...)`` with ``length`` int64 [S], action tokens of each trajectory.

    ``beyond`` the limit the penalty goes on "linear" (verl) or stays at -factor ("flat", the paper); up to the limit
    both agree.
    """

    max_length: int = 20480
    buffer: int = 4096
    factor: float = 1.0
    beyond: str = "linear"

    def __post_init__(self) -> None:
        within("max_length", self.max_length, 1)
        within("buffer", self.buffer, 1, self.max_length)
        within("factor", self.factor, 0.0)
        choose("beyond", self.beyond, ("linear", "flat"))

    @property
    def needs(self) -> tuple[str, ...]:
        return ("length",)

    def shape(self, reward: Tensor, **fields: Any) -> Tensor:
        return (reward.detach().double() + self.penalty(**fields)).to(floating(reward))

    def penalty(self, *, length: Tensor) -> Tensor:
        """What is added to each reward, float64 [S], at most 0."""
        used = (length.double() - (self.max_length - self.buffer)) / self.buffer
        if self.beyond == "flat":
            used = used.clamp(max=1.0)
        return -self.factor * used.clamp(min=0.0)
