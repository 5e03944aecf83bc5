"""What reward shaping and selection share: interfaces and tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from estr.registry import Registry

shapings: Registry[RewardShaping] = Registry("reward shaping", operator="reward")


@dataclass
class RewardShaping(ABC):
    """Changes rewards after the verifier and before advantages.

    ``shape(reward, **fields)`` takes ``reward`` float [S] and those fields by keyword that ``needs`` names, and returns
    float [S] without graph. A reward that is NaN stays NaN.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the fields ``shape`` must be given, besides the reward."""
        return ()

    @abstractmethod
    def shape(self, reward: Tensor, **fields: Any) -> Tensor:
        """New rewards [S] in the type of the old ones (float32 where those are not floating point)."""


def floating(reward: Tensor) -> torch.dtype:
    """The type shaped rewards come back in."""
    return torch.float64 if reward.dtype == torch.float64 else torch.float32
