"""What is put into vLLM: one number a token beside its log-probability, and weights of a version of ours.

A request asks with ``SamplingParams(logprobs=K + 1, extra_args={"estr": ...})``, in an engine whose ``logprobs_mode``
is ``processed_logprobs``. Its row of returned log-probabilities is then

    [ sampled token | stamp | K most likely tokens ]

where the stamp is a pair like all the others, an int32 and a float32, 8 bytes in all. With ``"estr": "entropy"`` it is
(vocabulary + version, H): the version of the weights that sampled the token and the entropy of the distribution that it
was drawn from. With ``"estr": t`` it is (t, log μ(t)), which is how canaries are read.

**Which logits are read.** vLLM's sampler turns logits into the distribution it draws from in this order: logits
processors, penalties, temperature, min-p, top-k, top-p (``vllm.v1.sample.sampler.Sampler``, steps 3 to 7). What comes
out of the last of them goes to two places: the draw, and ``log_softmax``, whose result is the tensor [rows, vocabulary]
that ``processed_logprobs`` are picked from. H and log μ are computed from that very tensor, when they are picked
(``Sampler.gather_logprobs``), so nothing can lie between them and the draw.

Rows that do not ask are left as they are, and a batch in which no row asks takes vLLM's own path.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.sampler import Sampler

KEY = "estr"
ENTROPY = "entropy"
MODE = "processed_logprobs"
BACKEND = "estr"

END_WITH_PARENT = "ESTR_END_WITH_PARENT"

_PR_SET_PDEATHSIG = 1
_LEAST = -1e4  # nats; even a log-probability of -inf has to be multiplied by its probability, 0
_CHUNK = 1 << 22  # elements of a [rows, vocabulary] tensor whose entropy is computed at once
_ENTROPY_ROW = -1


@dataclass
class Stamp:
    """The version of the weights in this process's worker."""

    version: int = 0


STAMP = Stamp()


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; may be called any number of times.

    A server of ours consists of several processes; where the environment says so each of them ends with its parent.
    """
    if os.environ.get(END_WITH_PARENT):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if getattr(Sampler, "estr_asked", None) is None:
        Sampler.estr_asked = {}
        Sampler.forward = _forward(Sampler.forward)
        Sampler.gather_logprobs = _gather(Sampler.gather_logprobs)
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "estr.engines.vllm.transfer", "VersionedWeights")


def processors() -> list[type[LogitsProcessor]]:
    """What an engine has to be given beside: nothing where the package is installed and vLLM finds it by itself."""
    installed = entry_points(group="vllm.logits_processors")
    return [] if any(point.value.startswith("estr.") for point in installed) else [AskingRows]


class AskingRows(LogitsProcessor):
    """Knows which rows of the batch ask for what; changes no logits."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        register()  # where the package is not installed, nobody else has
        self.rows: dict[int, int] = {}  # by row: the token whose log μ is wanted, or that it is the entropy

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        asked = _asked(sampling_params)
        if asked is not None and not sampling_params.logprobs:
            raise ValueError(f"extra_args[{KEY!r}] needs logprobs of at least 1, got {sampling_params.logprobs}")

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.rows, batch_update, lambda params, prompt, output: _asked(params))

    def apply(self, logits: Tensor) -> Tensor:
        return logits


def _asked(params: SamplingParams) -> int | None:
    wanted = (params.extra_args or {}).get(KEY)
    if wanted is None:
        return None
    if wanted == ENTROPY:
        return _ENTROPY_ROW
    if isinstance(wanted, int) and wanted >= 0:
        return wanted
    raise ValueError(f"extra_args[{KEY!r}] must be {ENTROPY!r} or the id of a token, got {wanted!r}")


def _forward(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: Any, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            if isinstance(processor, AskingRows) and processor.rows:
                self.estr_asked = processor.rows if self.logprobs_mode == MODE else {}
                try:
                    return original(self, logits, sampling_metadata, *args, **kwargs)
                finally:
                    self.estr_asked = {}
        return original(self, logits, sampling_metadata, *args, **kwargs)

    return forward


def _gather(original: Any) -> Any:
    def gather_logprobs(self: Any, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        asked = self.estr_asked
        if not asked or num_logprobs < 1:
            return original(logprobs, num_logprobs, token_ids)
        everyone = len(asked) == len(logprobs)
        # Who asks has asked for one more than it wants: where all do, nothing is looked for in vain.
        found = original(logprobs, num_logprobs - everyone, token_ids)
        ids, values = stamps(logprobs, asked, STAMP.version)
        if everyone:
            return found._replace(
                logprob_token_ids=_insert(found.logprob_token_ids, ids),
                logprobs=_insert(found.logprobs, values),
            )
        rows = torch.tensor(sorted(asked), device=logprobs.device)
        found.logprob_token_ids[rows] = _insert(found.logprob_token_ids[rows, :-1], ids)
        found.logprobs[rows] = _insert(found.logprobs[rows, :-1], values)
        return found

    return gather_logprobs


def _insert(columns: Tensor, second: Tensor) -> Tensor:
    """``columns`` [n, k] with another one after the first."""
    return torch.cat((columns[:, :1], second.to(columns.dtype)[:, None], columns[:, 1:]), dim=1)


def stamps(logprobs: Tensor, asked: Mapping[int, int], version: int) -> tuple[Tensor, Tensor]:
    """The pairs, int32 and float32 [n], of the rows of ``logprobs`` [rows, V] that ask, in their order."""
    order = sorted(asked)
    device, vocabulary = logprobs.device, logprobs.shape[-1]
    wanted = torch.tensor([asked[row] for row in order], device=device)
    rows = logprobs if len(order) == len(logprobs) else logprobs[torch.tensor(order, device=device)]
    about_entropy = wanted == _ENTROPY_ROW
    if bool(about_entropy.all()):
        return torch.full_like(wanted, vocabulary + version, dtype=torch.int32), entropy(rows)
    token = wanted.clamp(min=0)
    ids = torch.where(about_entropy, vocabulary + version, token).int()
    return ids, torch.where(about_entropy, entropy(rows), rows.gather(1, token[:, None])[:, 0])


def entropy(logprobs: Tensor) -> Tensor:
    """H in nats, float32 [n], of log-distributions float32 [n, V]; what has probability 0 adds nothing."""
    rows = max(1, _CHUNK // max(1, logprobs.shape[-1]))
    parts = [torch.linalg.vecdot(part.exp(), part.clamp(min=_LEAST)) for part in logprobs.split(rows)]
    return -torch.cat(parts) if parts else logprobs.new_zeros(0)
