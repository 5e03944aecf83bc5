"""Weights that several ranks share out between them with PyTorch's FSDP2, and the parts of them.

``fully_shard`` leaves each rank a slice of every parameter along its first dimension, as a DTensor: equal slices, the
last ones shorter or empty. A pass gathers a block's weights before it is used and lets go of them after; its gradients
are added up over the ranks and cut into slices again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from estr.learner.policy import Policy
from estr.models.load import merged_state, parameter_names


class Shards:
    """The ranks of the process group this process is in, which share out weights on ``device``."""

    def __init__(self, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.device = device
        self._mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        self.rank, self.count = self._mesh.get_local_rank(), self._mesh.size()

    def share_out(self, policy: Policy) -> None:
        """Keep this rank's slices of the weights of ``policy``: each block a group of its own, the rest another."""
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        for module in [*blocks(policy.model), policy]:
            sharded = fully_shard(module, mesh=self._mesh)
            # The sum over ranks, by nothing but sums: gloo has no other way to reduce. FSDP's default is the mean.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            # A rank in whose tokens some weights had no part (an expert) still takes part in their reduction.
            sharded.set_reduce_scatter_unused_params(True, recurse=False)
        register_fsdp_forward_method(policy, "polarity")

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor of scalars over the ranks, the same bits on all of them."""
        total = value.detach().to(self.device).clone()
        torch.distributed.all_reduce(total, group=self._mesh.get_group())
        return total.to(value.device)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers that a transformer repeats, outermost ones only."""
    found: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and not any(
            module in set(block.modules()) for block in found
        ):
            found.append(module)
    return found


def release(policy: Policy) -> None:
    """Let go of the weights that a pass without backward left gathered."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(policy, FSDPModule):
        policy.reshard()


def own_part(tensor: Tensor) -> Tensor:
    """The slice of a sharded tensor that this process has, where it lies; a plain tensor itself. Without graph."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def placed_like(parameter: Tensor, part: Tensor) -> Tensor:
    """``part`` as this rank's slice of a tensor sharded as ``parameter`` is; itself where that is not sharded."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, on the CPU; called on all ranks at once. Of a plain tensor its values."""
    with torch.no_grad():
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()).cpu()


def part_of(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """The slice of a whole tensor that belongs to ``rank``; a scalar belongs to everyone."""
    if tensor.ndim == 0:
        return tensor
    size = -(-tensor.shape[0] // ranks)
    return tensor[min(rank * size, tensor.shape[0]) : min((rank + 1) * size, tensor.shape[0])]


@torch.no_grad()
def gathered_state(policy: Policy, keep: bool) -> Mapping[str, Tensor]:
    """What ``merged_state`` gives of the whole model, on the CPU; called on all ranks at once, one block at a time is
    whole. Empty without ``keep``."""
    found: dict[str, Tensor] = {}
    for module in [*blocks(policy.model), policy]:
        module.unshard()  # type: ignore[operator]
        if keep:
            state = merged_state(policy.model, lambda weight: not isinstance(weight, DTensor))
            found |= {name: weight.cpu().clone() for name, weight in state.items()}
        module.reshard()  # type: ignore[operator]
    return {name: found[name] for name in parameter_names(policy.model) if name in found}
