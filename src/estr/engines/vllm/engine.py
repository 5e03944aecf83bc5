"""vLLM inside this process: its engine takes a step when it is told to, and new weights between two steps.

Nothing is running between two steps, so that an update pauses nobody: the next token of every generation is sampled by
the new weights, from the keys and values there are (``kv = "keep"``) or from new ones (``"recompute"``). vLLM does not
clear its prefix cache while requests hold blocks of it. Each request therefore carries its version as a cache salt, and
no other version ever reads what was computed for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from estr.engines.vllm.reading import Reading
from estr.engines.vllm.rows import RequestEngine, Row, SampledToken
from estr.errors import RunError
from estr.models.stops import StopTexts

_CANARY = "canary@"
_CANARY_ROWS = 16
_CPU_CACHE = 1 << 30  # bytes of keys and values on a CPU, where vLLM would take most of the memory
_CPU_BLOCK = 32  # tokens; prompts of small models seldom fill one of vLLM's 128

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the plugin reads the sampler of the first one
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all engines of a machine are bound to the same cores
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""What vLLM reads when it is imported."""


def prepare_environment() -> None:
    """Set what has to be set before vLLM is imported; what is set already stays."""
    chosen = dict(ENVIRONMENT)
    if not torch.cuda.is_available():
        chosen["TORCHDYNAMO_DISABLE"] = "1"  # on a CPU compiling costs more than it saves
    for name, value in chosen.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class VllmSettings:
    """How the engine samples and what it is made of."""

    path: str | Path
    vocabulary: int
    max_context: int
    slots: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv: Literal["keep", "recompute"] = "keep"
    end_ids: Sequence[int] = ()
    exact: bool = True  # entropies from the plugin; else intervals from entropy_topk log-probabilities
    entropy_topk: int = 64
    topk: int = 0  # most likely tokens recorded with their log μ
    trust_remote_code: bool = False
    server: bool = False  # a process of its own behind a socket
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further arguments of vLLM's engine

    @property
    def reading(self) -> Reading:
        stamped = self.exact or self.server
        return Reading(self.vocabulary, self.exact, stamped, self.entropy_topk, self.top_k, self.topk)


class VllmEngine(RequestEngine):
    """See the module's head; the interface is :class:`estr.engines.interface.Engine`."""

    def __init__(self, settings: VllmSettings, stops: StopTexts | None = None) -> None:
        super().__init__(slots=settings.slots, max_context=settings.max_context, end_ids=settings.end_ids, stops=stops)
        self.settings, self._reading = settings, settings.reading
        self._version = -1
        self._live: set[str] = set()
        self._early: list[tuple[str, list[SampledToken]]] = []  # came while a canary was read
        self._canary: dict[int, float] = {}
        prepare_environment()
        self._engine: Any = _make(settings)
        self._core: Any = self._engine.engine_core

    # ------------------------------------------------------------------ weights

    @property
    def version(self) -> int:
        return self._version

    def set_weights(self, version: int, tensors: Mapping[str, Tensor], *, own: bool = False) -> None:
        """Take new weights; running generations go on under them with their next token. They are always copied."""
        info = {"version": version, "tensors": dict(tensors)}
        try:
            self._core.collective_rpc("start_weight_update")
            self._core.collective_rpc("update_weights", kwargs={"update_info": info})
            self._core.collective_rpc("finish_weight_update")
        except Exception as error:
            raise RunError(f"vLLM did not take the weights of version {version}: {error}") from error
        self._core.set_weight_version(str(version))
        self._version = version
        self.counters.syncs += 1
        self._send_again()
        if self.settings.kv == "recompute" or not self._live:
            self._engine.reset_prefix_cache(reset_running_requests=self.settings.kv == "recompute")

    # ------------------------------------------------------------------ requests

    def _send(self, row: Row) -> None:
        settings = self.settings
        self._add(
            row.request,
            row.tokens,
            max_tokens=self._room(row),
            stop_token_ids=list(settings.end_ids),
            logprobs=self._reading.logprobs,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=row.seed,
            extra_args={"estr": "entropy"} if settings.exact else None,
        )

    def _add(self, request: str, tokens: Sequence[int], **sampling: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=self.settings.temperature,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,  # what ends a turn are the ids of stop_token_ids
            output_kind=RequestOutputKind.DELTA,
            **sampling,
        )
        prompt = {"prompt_token_ids": list(tokens), "cache_salt": str(self._version)}
        self._engine.add_request(request, prompt, params)
        self._live.add(request)

    def _abort(self, request: str) -> None:
        if request in self._live:
            self._live.discard(request)
            self._engine.abort_request([request])

    def _collect(self) -> list[tuple[str, list[SampledToken]]]:
        early, self._early = self._early, []
        return early or self._advance()

    def _advance(self) -> list[tuple[str, list[SampledToken]]]:
        """One step of vLLM; what the turns have got. What canaries have got is kept aside."""
        self.counters.decode_steps += 1
        found = []
        for output in self._engine.step():
            self._count_shared(output)
            if output.finished:
                self._live.discard(output.request_id)
            completion = output.outputs[0]
            positions = list(_positions(completion.logprobs)) if completion.token_ids else []
            if output.request_id.startswith(_CANARY):
                if positions:
                    self._canary[int(output.request_id.removeprefix(_CANARY))] = positions[0][1][1]
                continue
            sampled = [self._reading.read(ids, values, self._version) for ids, values in positions]
            if sampled:
                self._check(sampled)
                found.append((output.request_id, sampled))
        return found

    def _count_shared(self, output: Any) -> None:
        row = self._requests.get(output.request_id)
        if row is not None and len(row.tokens) == row.turn_start and output.num_cached_tokens:
            self.counters.shared_tokens += output.num_cached_tokens
            self.counters.prefilled_tokens -= output.num_cached_tokens

    def _check(self, sampled: Iterable[SampledToken]) -> None:
        if any(token.version != self._version for token in sampled):
            raise RunError(
                f"vLLM stamped a token with a version that is not {self._version}, the engine's; "
                "async_scheduling and speculative decoding must be off"
            )

    # ------------------------------------------------------------------ canary

    def canary(self, tokens: Sequence[int]) -> np.ndarray:
        """log μ of ``tokens[1:]`` under the active weights, float32 [len - 1], read where tokens are sampled: one
        request a token. Turns that run go on meanwhile."""
        self._canary = {}
        for place in range(1, len(tokens)):
            wanted = {"estr": int(tokens[place])}
            self._add(f"{_CANARY}{place}", tokens[:place], max_tokens=1, logprobs=1, seed=place, extra_args=wanted)
        while len(self._canary) < len(tokens) - 1:
            self._early += self._advance()
        return np.array([self._canary[place] for place in range(1, len(tokens))], np.float32)

    def close(self) -> None:
        """Let go of vLLM's engine."""
        self._core.shutdown()


def _positions(logprobs: Any) -> Iterable[tuple[list[int], list[float]]]:
    """Ids and log-probabilities of each position of vLLM's flat lists."""
    for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True):
        yield logprobs.token_ids[start:end], logprobs.logprobs[start:end]


def engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Arguments of vLLM's engine, by name, those of ``settings.arguments`` last."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.platforms import current_platform

    from estr.engines.vllm import plugin

    arguments: dict[str, Any] = {
        "model": str(settings.path),
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # nothing hidden in the model's own defaults
        "max_model_len": settings.max_context,
        "max_num_seqs": settings.slots + _CANARY_ROWS,
        "max_num_batched_tokens": max(settings.max_context, 8192),
        "enable_chunked_prefill": False,  # a seed of one's own ends vLLM where a prompt is read in parts on a CPU
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "logprobs_mode": plugin.MODE,
        "max_logprobs": max(1, settings.reading.logprobs),
        "logits_processors": plugin.processors(),
        "weight_transfer_config": WeightTransferConfig(backend=plugin.BACKEND),
        "disable_log_stats": True,
    }
    if current_platform.is_cpu():
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": _CPU_CACHE, "block_size": _CPU_BLOCK}
    return arguments | dict(settings.arguments)


def _make(settings: VllmSettings) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from estr.engines.vllm import plugin

    plugin.register()
    try:
        return LLMEngine.from_engine_args(EngineArgs(**engine_arguments(settings)))
    except Exception as error:
        raise RunError(f"vLLM could not be started on {settings.path}: {error}") from error
