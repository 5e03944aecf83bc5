"""The weights an engine computes with: one or several versions, in the engine's precision."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from estr.models.precision import to_engine


class EngineWeights:
    """Swaps whole versions of a model's parameters between two forward passes.

    Tensors that already have the engine's precision are used where they lie (shared memory, for example); others are
    converted once per version. A tied parameter has one name and follows everywhere.
    """

    def __init__(self, model: nn.Module, dtype: str) -> None:
        self.dtype = dtype
        self._parameters = dict(model.named_parameters())
        self._versions: dict[int, dict[str, Tensor]] = {}
        self.active = -1

    @property
    def names(self) -> set[str]:
        return set(self._parameters)

    def add(self, version: int, tensors: Mapping[str, Tensor], *, own: bool = False) -> None:
        """Make ``version`` available; ``tensors`` must name exactly the model's parameters. With ``own`` nothing of
        them is used after the call: what needs no conversion is copied."""
        if set(tensors) != self.names:
            odd = sorted(set(tensors) ^ self.names)[:3]
            raise ValueError(f"weights of version {version} and the engine's model differ in {', '.join(odd)}")
        with torch.no_grad():
            held = {name: to_engine(tensor, name, self.dtype) for name, tensor in tensors.items()}
            if own:
                held = {name: t.clone() if t.data_ptr() == tensors[name].data_ptr() else t for name, t in held.items()}
            self._versions[version] = held

    def activate(self, version: int) -> None:
        if version == self.active:
            return
        if version not in self._versions:
            raise KeyError(f"the engine does not hold version {version}; it holds {sorted(self._versions)}")
        for name, tensor in self._versions[version].items():
            self._parameters[name].data = tensor
        self.active = version

    def drop_before(self, version: int) -> None:
        """Forget versions older than ``version``, except the active one."""
        for old in [v for v in self._versions if v < version and v != self.active]:
            del self._versions[old]

    def tensors(self, version: int) -> dict[str, Tensor]:
        """The tensors of a version that is held, in engine precision."""
        return self._versions[version]

    @property
    def held(self) -> list[int]:
        return sorted(self._versions)
