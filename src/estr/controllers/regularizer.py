"""What entropy regularizers share: a coefficient under control, and a term of the loss that adds over micro-batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from estr.registry import Registry
from estr.state import Stateful

regularizers: Registry[EntropyRegularizer] = Registry("entropy regularizer", operator="loss term")


@dataclass
class EntropyRegularizer(Stateful, ABC):
    """Pays for entropy, by an amount that follows the run. Once per optimizer step, on the whole optimizer batch:

    1. ``weight = token_weight(sequence=..., reward=..., group=...)`` [N], detached;
    2. ``advantage = advantage(advantage, entropy=..., sequence=..., group=...)`` [N];
    3. in each micro-batch add ``entropy_term(weight[tokens], entropy[tokens])`` to the loss, not divided further;
    4. ``observe(entropy, sequence)`` with the entropies of this batch before its update moves the coefficient.
    """

    @abstractmethod
    def token_weight(self, *, sequence: Tensor, reward: Any, group: Any) -> Tensor:
        """What each token's entropy is worth in the loss, float64 [N] >= 0, already divided by the size of its mean."""

    @abstractmethod
    def observe(self, entropy: Tensor, sequence: Tensor) -> dict[str, float]:
        """Move the coefficient by the batch's entropies [N]; returns metrics."""

    def advantage(self, advantage: Tensor, *, entropy: Tensor, sequence: Tensor, group: Any) -> Tensor:
        """Advantages [N] with what later entropy is worth; the default changes nothing."""
        return advantage


def entropy_term(weight: Tensor, entropy: Tensor) -> Tensor:
    """-sum_t weight_t H_t, a scalar to add to the loss; gradient flows through ``entropy`` [N] alone.

    Tokens with an entropy that is not finite pay nothing and get no gradient.
    """
    wide = entropy if entropy.dtype == torch.float64 else entropy.float()
    paid = torch.where(wide.isfinite(), wide, 0.0)
    return -(weight.detach().to(paid.dtype) * paid).sum()
