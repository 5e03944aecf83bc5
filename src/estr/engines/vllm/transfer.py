"""The weights' way into a vLLM worker, as a backend of vLLM's own weight transfer.

One update is ``start_weight_update``, ``update_weights`` with a version and either tensors of this process or the path
of a safetensors file, ``finish_weight_update``. The worker does them between two decode steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from estr.engines.vllm.plugin import STAMP


@dataclass
class Nothing(WeightTransferInitInfo):
    """There is nothing to agree on beforehand."""


@dataclass
class Version(WeightTransferUpdateInfo):
    """A whole version of the weights, under the names of the Hugging Face model."""

    version: int
    path: str = ""
    tensors: Mapping[str, Tensor] | None = None  # only within one process

    def items(self) -> Iterator[tuple[str, Tensor]]:
        if self.tensors is not None:
            yield from self.tensors.items()
            return
        with safe_open(self.path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


class VersionedWeights(WeightTransferEngine[Nothing, Version]):
    """Loads a version and stamps what is sampled from then on with its number."""

    init_info_cls = Nothing
    update_info_cls = Version

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._received = -1

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Version) -> None:
        expected = {name for name, _ in self.model.named_parameters()}
        if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            expected -= {"lm_head.weight"}
        loaded = self.model.load_weights(update_info.items())
        missing = sorted(expected - set(loaded)) if loaded is not None else []
        if missing:
            raise ValueError(f"version {update_info.version} lacks weights of the engine's model: {missing[:3]}")
        self._received = update_info.version

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_head(self.model)
        STAMP.version = self._received

    def shutdown(self) -> None:
        pass


def pack_tied_head(model: nn.Module) -> None:
    """Let a head that shares the embeddings' weight follow it.

    On a CPU vLLM multiplies by a packed copy of the head. Reloading makes a new one for every layer it loads, but a
    tied head is not loaded, and would silently keep the old weights.
    """
    head: Any = getattr(model, "lm_head", None)
    if not isinstance(head, nn.Module) or not hasattr(head, "cpu_linear"):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    weight = getattr(head, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.numel():
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
