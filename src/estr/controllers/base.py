"""What step controllers share: rules on the learning rate and the gradient of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from estr.registry import Registry
from estr.state import Stateful

steps: Registry[StepController] = Registry("step controller", operator="gradient")

AllReduce = Callable[[Tensor], Tensor]


@dataclass
class StepController(Stateful):
    """Acts between backward and the optimizer, once per optimizer step, on the gradients of all micro-batches together.

    In this order: ``transform(gradients)``, which works in place and returns metrics; if ``skip`` is now True, the
    optimizer must not step; else ``scale_learning_rate(statistics)``, a factor on this step's learning rate only.
    ``needs`` names the statistics. Where ranks hold different shards of the gradients, ``all_reduce`` must sum a
    tensor of scalars over them, so that every rank decides alike.
    """

    skip: bool = field(default=False, init=False)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the statistics ``scale_learning_rate`` must be given."""
        return ()

    def transform(self, gradients: Sequence[Tensor], all_reduce: AllReduce | None = None) -> dict[str, float]:
        """Change the gradients in place; returns metrics. The default changes nothing."""
        return {}

    def scale_learning_rate(self, statistics: Mapping[str, float]) -> float:
        """Factor on the learning rate of this step; 1 by default."""
        return 1.0


def inner_products(left: Sequence[Tensor], right: Sequence[Tensor], all_reduce: AllReduce | None = None) -> float:
    """Sum of products over two lists of tensors of equal shapes, accumulated in float64 from float32 or wider."""
    parts = [_product(a, b) for a, b in zip(left, right, strict=True)]
    total = torch.stack(parts).sum().reshape(1) if parts else torch.zeros(1, dtype=torch.float64)
    return float(all_reduce(total) if all_reduce else total)


def global_norm(gradients: Sequence[Tensor], all_reduce: AllReduce | None = None) -> float:
    """Euclidean norm over a whole list of gradients."""
    return inner_products(gradients, gradients, all_reduce) ** 0.5


def scale_(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply all gradients by ``factor`` in place; a factor of 1 leaves every bit as it is."""
    if factor != 1.0:
        for gradient in gradients:
            gradient.mul_(factor)


def _product(left: Tensor, right: Tensor) -> Tensor:
    wide = torch.float64 if left.dtype == torch.float64 else torch.float32
    return torch.dot(left.detach().to(wide).reshape(-1), right.detach().to(wide).reshape(-1)).double()
