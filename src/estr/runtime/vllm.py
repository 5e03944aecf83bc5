"""Episodes on vLLM: from the configuration to its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

from estr.config import Config
from estr.engines.vllm.engine import VllmEngine, VllmSettings
from estr.environments.base import Task
from estr.models.conversation import chat_format
from estr.models.load import load_config, load_tokenizer, locate
from estr.models.stops import StopTexts
from estr.runtime.builders import context_limit
from estr.runtime.calls import Calls
from estr.runtime.rollout import EpisodeLimits, RolloutWorker


def build_vllm_worker(config: Config, task: Task, path: str | Path, calls: Calls) -> tuple[RolloutWorker[Any], int]:
    """Episodes on vLLM for the model at ``path``, and the size of its vocabulary."""
    rollout, trust = config.rollout, config.model.trust_remote_code
    directory = locate(path, trust)
    model_config, tokenizer = load_config(directory, trust), load_tokenizer(directory, trust)
    vocabulary = int(model_config.get_text_config().vocab_size)
    settings = VllmSettings(
        path=directory,
        vocabulary=vocabulary,
        max_context=context_limit(config, model_config),
        slots=rollout.slots,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        dtype=cast(Literal["float32", "bfloat16"], rollout.dtype),
        kv=rollout.kv,
        end_ids=tuple(sorted(chat_format(tokenizer).end_ids)),
        exact=rollout.entropy == "exact",
        entropy_topk=rollout.entropy_topk,
        topk=rollout.topk_logprobs,
        trust_remote_code=trust,
        server=rollout.vllm_server,
        arguments=rollout.vllm,
    )
    stops = tuple(getattr(task.environment(), "stop", ()))
    engine = _engine(settings, StopTexts(tokenizer, stops) if stops else None, config.runtime.start_timeout)
    limits = EpisodeLimits(rollout.max_new_tokens, rollout.max_turns, config.task.tool_timeout)
    return RolloutWorker(engine, task, tokenizer, limits, calls=calls, keep_progress=True), vocabulary


def _engine(settings: VllmSettings, stops: StopTexts | None, timeout: float) -> Any:
    if not settings.server:
        return VllmEngine(settings, stops)
    from estr.engines.vllm.client import VllmClient
    from estr.engines.vllm.server import VllmServer

    return VllmClient(settings, VllmServer(settings, timeout=timeout), stops)
