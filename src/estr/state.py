"""State of small methods that live across optimizer steps, in forms a checkpoint can hold without pickling."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


class Stateful:
    """Base of methods with memory: ``state_dict`` is plain JSON, ``state_tensors`` goes into a safetensors file.

    ``state_fields`` names the attributes that make up the JSON part. Most methods have no tensors.
    """

    state_fields: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """The memory as numbers, strings, booleans, lists and None."""
        return {name: copy.deepcopy(getattr(self, name)) for name in self.state_fields}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave. Raises ``ValueError`` where the names differ from this method's."""
        if set(state) != set(self.state_fields):
            raise ValueError(
                f"the state of {type(self).__name__} consists of {sorted(self.state_fields)}, not {sorted(state)}; "
                "load it into the method that saved it"
            )
        for name in self.state_fields:
            setattr(self, name, copy.deepcopy(state[name]))

    def state_tensors(self) -> dict[str, Tensor]:
        """The part of the memory that is tensors, by name; empty for most methods."""
        return {}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take back what ``state_tensors`` gave. Raises ``ValueError`` where this method keeps no tensors."""
        if tensors:
            raise ValueError(f"{type(self).__name__} keeps no tensors, but {sorted(tensors)} were given")


def finite_mean(value: Tensor) -> float:
    """Mean of the finite entries in float64, NaN where there are none."""
    finite = value.detach().double()
    finite = finite[finite.isfinite()]
    return float(finite.mean()) if finite.numel() else math.nan
