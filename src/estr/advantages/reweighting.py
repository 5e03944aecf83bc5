"""What every token re-weighting shares: a rule that changes the advantages of single tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from estr.registry import Registry
from estr.state import Stateful

rules: Registry[Reweighting] = Registry("token re-weighting", operator="advantage weight")


@dataclass
class Reweighting(Stateful, ABC):
    """Changes advantages token by token, before the loss and without graph.

    Once per optimizer step: ``observe(entropy)`` with the mean entropy of the batch in nats, then
    ``reweight(advantage, **fields)`` with ``advantage`` float [N] and those fields by keyword that ``needs`` names.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the fields ``reweight`` must be given, besides the advantage."""
        return ()

    def observe(self, entropy: float) -> dict[str, float]:
        """Let the controller see the mean entropy of this batch, before its update; returns metrics."""
        return {}

    @abstractmethod
    def reweight(self, advantage: Tensor, **fields: Any) -> Tensor:
        """New advantages [N] in the type of the old ones."""


def same_shape(reference: Tensor, **fields: Tensor) -> None:
    """Raise ``ValueError`` naming the first field whose shape is not that of ``reference`` [N]."""
    for name, value in fields.items():
        if value.shape != reference.shape:
            raise ValueError(f"{name} must have shape {list(reference.shape)} like advantage, not {list(value.shape)}")
