"""An exponential average of the weights, for recipes whose proximal policy it is (PPO-EWMA)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from estr.errors import RunError
from estr.learner.sharding import own_part


class AveragedWeights:
    """θ_e ← θ_e·beta·tot/tot' + θ/tot' with tot' = beta·tot + 1 and tot = 1 at the start, after every optimizer step.

    This is the debiased average of openai/ppo-ewma (arXiv 2110.00641): each step's weights count beta times as much as
    the next one's, and all of them together 1. One float32 copy of the trainable weights is kept.
    """

    def __init__(self, model: nn.Module, beta: float) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._average = {name: own_part(p).float().clone() for name, p in self._parameters.items()}
        self.beta, self.total = beta, 1.0

    @torch.no_grad()
    def update(self) -> None:
        """Take in the current weights."""
        total = self.beta * self.total + 1
        kept, new = self.beta * self.total / total, 1 / total
        for name, average in self._average.items():
            average.mul_(kept).add_(own_part(self._parameters[name]).float(), alpha=new)
        self.total = total

    @contextmanager
    def weights(self) -> Iterator[None]:
        """The model has the averaged weights in here, and its own again outside."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """In place, one weight after the other: FSDP gathers from where a shard lies."""
        for name, average in self._average.items():
            weight = own_part(self._parameters[name])
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps as JSON."""
        return {"total": self.total}

    def state_tensors(self) -> dict[str, Tensor]:
        """The averaged weights by parameter name, of a sharded model this rank's part; no copies."""
        return dict(self._average)

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`state` and :meth:`state_tensors` gave; RunError where they are of another model."""
        if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in self._average.items()}:
            raise RunError("the averaged weights of the checkpoint are those of another model; resume the same run")
        self.total = float(state["total"])
        for name, average in self._average.items():
            average.copy_(tensors[name])
