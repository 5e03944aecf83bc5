"""AdamW over the trainable weights, its gradient norm, and its state as named tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from estr.config.sections import LearnerConfig
from estr.errors import RunError
from estr.learner.sharding import Shards, own_part, placed_like

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Optimizer:
    """AdamW; weight decay acts on matrices only. Frozen parameters are no part of it.

    Of weights that are sharded, each rank has its part of gradients and moments; norms are those of the whole.
    """

    def __init__(self, model: nn.Module, config: LearnerConfig, shards: Shards | None = None) -> None:
        """``shards``: how the weights are shared out between ranks, where they are."""
        self._shards = shards
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices = [p for p in self.parameters.values() if p.ndim >= 2]
        others = [p for p in self.parameters.values() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            fused=True,
        )

    @property
    def gradients(self) -> list[Tensor]:
        """Gradients of all trainable weights that have one, this rank's part of them."""
        return [own_part(p.grad) for p in self.parameters.values() if p.grad is not None]

    def gradient_norm(self) -> float:
        """Euclidean norm over all gradients; not finite where one of them is not."""
        norm = torch.nn.utils.get_total_norm(self.gradients)
        return float(norm if self._shards is None else self._shards.sum(norm.double().square()).sqrt())

    def finite(self) -> bool:
        """Whether every trainable weight is a finite number."""
        parts = [part for part in map(own_part, self.parameters.values()) if part.numel()]
        largest = torch.nn.utils.get_total_norm(parts, math.inf) if parts else torch.zeros(())
        return math.isfinite(float(largest if self._shards is None else self._shards.sum(largest.double())))

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale gradients of global norm ``norm`` down to ``max_norm``; 0 never scales."""
        if 0 < max_norm < norm:
            torch._foreach_mul_(self.gradients, max_norm / norm)

    def step(self, learning_rate: float) -> None:
        """One update, then no gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments and step counts by ``<moment>.<parameter name>``; no copies. Sharded moments are DTensors."""
        return {
            f"{moment}.{name}": self._adamw.state[parameter][moment]
            for name, parameter in self.parameters.items()
            if parameter in self._adamw.state
            for moment in _MOMENTS
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`state_tensors` gave, of sharded moments this rank's part. Raises RunError where it
        belongs to other weights."""
        known = {f"{moment}.{name}" for name in self.parameters for moment in _MOMENTS}
        for name in tensors:
            if name not in known:
                raise RunError(f"the optimizer state holds {name!r}, which the model does not train")
        for name, parameter in self.parameters.items():
            if f"step.{name}" in tensors:
                self._adamw.state[parameter] = self._restored(name, parameter, tensors)

    def _restored(self, name: str, parameter: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        state = {}
        for moment in _MOMENTS:
            value = tensors.get(f"{moment}.{name}")
            shape = torch.Size([]) if moment == "step" else own_part(parameter).shape
            if value is None or value.shape != shape:
                got = "nothing" if value is None else list(value.shape)
                raise RunError(f"the optimizer state {moment}.{name} should have shape {list(shape)}, got {got}")
            own = value.detach().to(parameter.device, torch.float32, copy=True)
            state[moment] = own if moment == "step" else placed_like(parameter, own)
        return state


def make_trainable_weights_wide(model: nn.Module) -> None:
    """Make them float32: an update of a bfloat16 weight would mostly be rounded away."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
