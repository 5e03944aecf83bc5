"""Where a run stands, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from estr.storage.checkpoints import Checkpoint

_WINDOW, _ADAPTER = "window/", "adapter/"


@dataclass
class Position:
    """A fresh run stands at step 0; a resumed one where its checkpoint says."""

    step: int = 0
    elapsed: float = 0.0
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    next_group: int = 0
    ledger: dict[str, int] | None = None
    dropped_groups: int = 0
    learner: dict[str, Any] | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Position:
        """The position that ``checkpoint`` holds."""
        state = checkpoint.state
        return cls(
            step=checkpoint.step,
            elapsed=float(state["elapsed"]),
            evaluations=[(int(step), float(reward)) for step, reward in state["evaluations"]],
            next_group=int(state["next_group"]),
            ledger=state["ledger"],
            dropped_groups=int(state["dropped_groups"]),
            learner=state["learner"],
            tensors=checkpoint.tensors(),
        )

    @property
    def learner_tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if not name.startswith(_WINDOW)}

    @property
    def adapters(self) -> dict[str, Tensor]:
        """The trained adapters by parameter; the model in the checkpoint has them merged into its weights."""
        return {name.removeprefix(_ADAPTER): t for name, t in self.tensors.items() if name.startswith(_ADAPTER)}

    @property
    def window(self) -> dict[int, dict[str, Tensor]]:
        """Older weights that lockstep still samples from, by version, in engine precision."""
        versions: dict[int, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            if name.startswith(_WINDOW):
                version, _, parameter = name.removeprefix(_WINDOW).partition("/")
                versions.setdefault(int(version), {})[parameter] = tensor
        return versions


def adapter_tensors(trainable: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :attr:`Position.adapters`."""
    return {_ADAPTER + name: parameter for name, parameter in trainable.items()}


def window_tensors(versions: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The inverse of :attr:`Position.window`."""
    return {f"{_WINDOW}{v}/{name}": tensor for v, named in versions.items() for name, tensor in named.items()}
