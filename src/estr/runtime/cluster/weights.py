"""Weights through the object store: written once by the learner, read in place by every engine of a node."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from estr.errors import RunError
from estr.transport import Publication

warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # and nobody writes to it

Stored = dict[str, tuple[str, tuple[int, ...], NDArray[np.uint8]]]
"""Name → data type, shape and bytes: NumPy knows no bfloat16."""


def put(tensors: Mapping[str, Tensor]) -> Any:
    """A reference to a copy of ``tensors`` in the object store; RunError where it has no room."""
    import ray

    try:
        return ray.put(to_store(tensors))
    except (ray.exceptions.RayError, OSError) as error:
        sentence = " ".join(str(error).split())
        raise RunError(f"the weights could not be put into Ray's object store: {sentence}") from error


def to_store(tensors: Mapping[str, Tensor]) -> Stored:
    """Views of ``tensors`` that the object store copies as they are."""
    return {name: _bytes_of(tensor.detach().cpu().contiguous()) for name, tensor in tensors.items()}


def _bytes_of(tensor: Tensor) -> tuple[str, tuple[int, ...], NDArray[np.uint8]]:
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat


def from_store(stored: Stored) -> dict[str, Tensor]:
    """The tensors, in the memory of ``stored``, which nobody may write to."""
    return {
        name: torch.from_numpy(flat).view(getattr(torch, dtype)).view(shape)
        for name, (dtype, shape, flat) in stored.items()
    }


class LatestWeights:
    """An engine's end: one thread offers the newest publication, another takes it between two decode steps."""

    def __init__(self) -> None:
        self.version = self.latest = -1
        self._offered: Publication | None = None
        self._lock = threading.Lock()

    def offer(self, publication: Publication) -> None:
        with self._lock:
            self._offered, self.latest = publication, publication.version

    def poll(self) -> Publication | None:
        """The newest publication where it has not been taken yet."""
        with self._lock:
            publication, self._offered = self._offered, None
        if publication is not None:
            self.version = publication.version
        return publication

    def leave(self) -> None:
        """Nothing to do: an object is freed when nothing uses its memory any more."""
