"""From configuration to tasks, models, engines and episodes; the same in every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from estr.config import Config, RolloutConfig
from estr.engines.local import EngineSettings, LocalEngine
from estr.engines.samplers import Sampler, samplers
from estr.environments.base import Problem, Task
from estr.environments.registry import make_task
from estr.environments.runner import is_unicode
from estr.errors import RunError, UsageError, asked_to_stop
from estr.models.conversation import chat_format
from estr.models.forward import check_head
from estr.models.load import LoadedModel, apply_lora, load_model
from estr.models.stops import StopTexts
from estr.runtime.calls import Calls
from estr.runtime.rollout import EpisodeLimits, RolloutWorker

CANARY_LENGTH = 16


def build_task(config: Config) -> Task:
    """The configured task; its seed is the run's unless the task section gives one."""
    return make_task(config.task.name, path=config.task.path, default_seed=config.run.seed, **config.task.options())


def training_problem(task: Task, number: int) -> Problem:
    """The problem of a group; RunError where the task raises or returns something else."""
    try:
        problem = task.train_problem(number)
    except BaseException as error:
        if asked_to_stop(error):
            raise
        raise RunError(f"the task raised {type(error).__name__} for problem {number}: {error}") from error
    return _checked(problem, f"problem {number}")


def held_out_problems(task: Task, count: int) -> list[Problem]:
    """Problems to evaluate on; RunError where the task raises or has none."""
    try:
        problems = list(task.eval_problems(count))
    except BaseException as error:
        if asked_to_stop(error):
            raise
        raise RunError(f"the task raised {type(error).__name__} for its held-out problems: {error}") from error
    if not problems:
        raise RunError(f"task {task.name!r} has no held-out problems to evaluate on")
    return [_checked(problem, f"held-out problem {number}") for number, problem in enumerate(problems)]


def _checked(problem: Problem, what: str) -> Problem:
    if not all(hasattr(problem, field) for field in ("task_id", "prompt", "answer", "info")):
        raise RunError(f"the task returned {type(problem).__name__} for {what}, not an estr.environments.Problem")
    for field in ("task_id", "prompt"):
        text = getattr(problem, field)
        if not isinstance(text, str) or not is_unicode(text):
            wrong = "half a surrogate pair in it" if isinstance(text, str) else f"the type {type(text).__name__}"
            raise RunError(f"the task returned {what} whose {field} has {wrong}; it must be text")
    return problem


def load_policy(config: Config, path: Path) -> LoadedModel:
    """The policy in float32 master weights (or what model.dtype says), with adapters where they are configured."""
    loaded = load_model(path, config.model.dtype, config.model.trust_remote_code)
    for name, weight in loaded.model.named_parameters():
        if not weight.isfinite().all():
            raise UsageError(f"the model {path} cannot be trained: its weights {name} are not all finite; use another")
    check_head(loaded.model)
    if config.model.lora_rank:
        loaded.model = apply_lora(loaded.model, config.model.lora_rank, config.model.lora_alpha, config.run.seed)
    return loaded


def context_length(config: Config, model: Any) -> int:
    """Tokens one row may have: what the model was made for, or less where the configuration says so."""
    return context_limit(config, model.config)


def context_limit(config: Config, model_config: Any) -> int:
    """:func:`context_length` of a model of which only the configuration is known."""
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None) or 4096
    return min(limit, config.rollout.max_context) if config.rollout.max_context else int(limit)


def build_rollout_worker(
    config: Config,
    task: Task,
    model: Any,
    tokenizer: Any,
    *,
    temperature: float | None = None,
    dtype: str | None = None,
    wait_for_tools: bool = True,
    calls: Calls | None = None,
    keep_progress: bool = False,
) -> RolloutWorker[LocalEngine]:
    """Episodes on a local engine around ``model``; the engine has no weights until it is given some.

    With a ``temperature`` of its own it is for evaluation: tokens are left out as in training, but nothing explores and
    no top-k is recorded.
    """
    rollout, evaluation = config.rollout, temperature is not None
    stops = tuple(getattr(task.environment(), "stop", ()))
    heat = rollout.temperature if temperature is None else temperature
    settings = EngineSettings(
        slots=rollout.slots,
        parked=rollout.slots if rollout.parked < 0 else rollout.parked,
        temperature=heat,
        dtype=dtype or rollout.dtype,
        kv=rollout.kv,
        max_context=context_length(config, model),
        end_ids=tuple(sorted(chat_format(tokenizer).end_ids)),
        sampler=build_sampler(rollout, "standard" if evaluation else rollout.sampler, heat) if heat > 0 else None,
        topk=0 if evaluation else rollout.topk_logprobs,
    )
    engine = LocalEngine(model, settings, StopTexts(tokenizer, stops) if stops else None)
    limits = EpisodeLimits(rollout.max_new_tokens, rollout.max_turns, config.task.tool_timeout)
    return RolloutWorker(
        engine, task, tokenizer, limits, wait_for_tools=wait_for_tools, calls=calls, keep_progress=keep_progress
    )


def build_engine_worker(config: Config, task: Task, path: str | Path, calls: Calls) -> tuple[RolloutWorker[Any], int]:
    """Episodes on the configured engine for the model at ``path``, and the size of that model's vocabulary."""
    if config.rollout.engine == "vllm":
        from estr.runtime.vllm import build_vllm_worker

        return build_vllm_worker(config, task, path, calls)
    dtype = "bfloat16" if config.rollout.dtype == "bfloat16" else "float32"
    loaded = load_model(path, dtype, config.model.trust_remote_code)
    worker = build_rollout_worker(config, task, loaded.model, loaded.tokenizer, calls=calls, keep_progress=True)
    return worker, int(loaded.model.get_input_embeddings().weight.shape[0])


def build_sampler(rollout: RolloutConfig, name: str, temperature: float) -> Sampler:
    """The sampler ``name`` with its settings from the configuration."""
    if name == "standard":
        options = {name: getattr(rollout, name) for name in ("top_k", "top_p", "min_p", "max_support")}
    else:
        options = {name: getattr(rollout, f"cuts_{name}") for name in ("k", "delta", "warm", "empty")}
        options["record"] = rollout.cuts_logprob
    return samplers.make(name, {"temperature": temperature, **options})


def canary_tokens(vocabulary: int) -> list[int]:
    """Fixed tokens whose log-probabilities engine and learner compare after every sync."""
    return [(7 * i + 3) % vocabulary for i in range(CANARY_LENGTH)]


def think_end(tokenizer: Any) -> int | None:
    """The token that ends thinking, where the tokenizer has ``</think>`` as a single one."""
    ids = tokenizer.encode("</think>", add_special_tokens=False)
    return int(ids[0]) if len(ids) == 1 else None


def default_output(config: Config, stamp: str) -> Path:
    """Where a run goes when nobody said."""
    return (
        Path("runs")
        / f"{config.task.name.replace(':', '-')}-{config.objective.recipe.replace('/', '-').replace(':', '-')}-{stamp}"
    )
