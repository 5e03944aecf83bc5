"""Checks across sections: combinations that cannot work are refused, those that do nothing are warned about."""

from __future__ import annotations

import importlib.util
import re

from estr.config.combinations import check_combinations
from estr.config.objective_section import build_objective
from estr.config.sections import Config, ObjectiveConfig, RolloutConfig, RuntimeConfig
from estr.errors import MissingExtraError, UsageError, nearest

DTYPES = ("float32", "bfloat16", *(f"int{bits}" for bits in range(8, 1, -1)))

_TOPK = frozenset({"topk_ids", "behavior_topk_logprob", "topk_logprob"})


def validate_config(config: Config, *, training: bool = True) -> list[str]:
    """Warnings about ``config``; with ``training`` False only what concerns generating and scoring is checked.

    Raises:
        UsageError: a combination that cannot work, in one sentence.
    """
    check_rollout_dtype(config.rollout)
    _check_evaluation(config)
    if not training:
        return []
    _check_ray(config.runtime)
    check_sampling(config.rollout)
    _check_vllm(config)
    _check_recorded(config)
    _check_batch(config)
    _check_schedule(config)
    warnings = [*_ray_warnings(config.runtime), *_vllm_warnings(config.rollout), *_schedule_warnings(config)]
    return [*warnings, *check_combinations(config)]


def check_rollout_dtype(rollout: RolloutConfig) -> None:
    """Refuse an engine precision that is not float32, bfloat16 or int2 to int8."""
    if rollout.dtype not in DTYPES:
        raise UsageError(
            f"rollout.dtype: there is no engine precision {rollout.dtype!r}{_nearest_dtype(rollout.dtype)}"
        )


def _check_evaluation(config: Config) -> None:
    temperature, least = config.run.eval_temperature, 0.01
    if 0 < temperature < least:
        raise UsageError(
            f"run.eval_temperature must be 0 (the most likely token) or at least {least:g}, got {temperature:g}"
        )


def _nearest_dtype(name: str) -> str:
    if re.fullmatch(r"u?int\d+", name):
        return "; whole-number precisions are int2 to int8"
    return nearest(name, DTYPES)


def _check_vllm(config: Config) -> None:
    """Refuse what only the local engine can do, and a run with vLLM where it is not installed."""
    rollout = config.rollout
    if rollout.engine != "vllm":
        return
    impossible = {
        'schedule.mode = "lockstep"': config.schedule.mode == "lockstep",
        f'rollout.dtype = "{rollout.dtype}"': rollout.dtype.startswith("int"),
        f'objective.selection = "{config.objective.selection}"': config.objective.selection == "aepo",
    }
    for words in (words for words, wrong in impossible.items() if wrong):
        raise UsageError(f'{words} needs rollout.engine = "local", got "vllm"')
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError("vllm", "vllm")


def _vllm_warnings(rollout: RolloutConfig) -> list[str]:
    """One line that names keys for vLLM that were given and are not used."""
    defaults = RolloutConfig()
    keys = [] if rollout.engine == "vllm" else ["entropy", "entropy_topk", "vllm_server", "vllm"]
    unused = [f"rollout.{key}" for key in keys if getattr(rollout, key) != getattr(defaults, key)]
    return [f'rollout.engine = "{rollout.engine}" does not use {", ".join(unused)}'] if unused else []


def _check_ray(runtime: RuntimeConfig) -> None:
    """Refuse a run under Ray where it is not installed, and addresses that no driver can join."""
    if runtime.kind == "ray":
        if importlib.util.find_spec("ray") is None:
            raise MissingExtraError("ray", "ray")
        if "://" in runtime.address:
            raise UsageError(
                f"runtime.address = {runtime.address!r} is refused: the learner runs where the command runs, which "
                'must be a node of the cluster; start it there with the address of the head, host:port, or "auto"'
            )


def _ray_warnings(runtime: RuntimeConfig) -> list[str]:
    """One line that names keys for Ray that were given and are not used."""
    defaults = RuntimeConfig()
    keys = ("address", "engine_gpus", "learner_gpus", "engine_resources", "object_store")
    unused = [key for key in keys if getattr(runtime, key) != getattr(defaults, key)]
    where = f'runtime.kind = "{runtime.kind}"'
    if runtime.kind == "ray":
        unused = [key for key in unused if key == "object_store" and runtime.address]
        where = "a cluster that is joined"
    return [f"{where} does not use {', '.join(f'runtime.{key}' for key in unused)}"] if unused else []


def check_sampling(rollout: RolloutConfig) -> None:
    """Refuse samplers whose settings contradict each other or whose distribution the engine cannot record.

    Where tokens are left out, the learner has to normalize over the same ones (FAULTS A3).
    """
    cuts = rollout.sampler != "standard"
    for key, default in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
        value = getattr(rollout, key)
        if value == default:
            continue
        if cuts:
            raise UsageError(
                f'rollout.{key} = {value:g} does not go with rollout.sampler = "{rollout.sampler}", which chooses its '
                f"own tokens; use {key} = {default}"
            )
        if rollout.engine == "vllm" and not rollout.top_k:
            raise UsageError(
                f'rollout.{key} = {value:g} is refused in training with rollout.engine = "vllm" and top_k = 0: which '
                "tokens were kept is read from as many log-probabilities as top_k says, and without them the learner "
                f"would normalize over others and every ratio would be wrong; set top_k, or use {key} = {default}"
            )
    if rollout.engine == "vllm" and cuts:
        raise UsageError(f'rollout.sampler = "{rollout.sampler}" needs rollout.engine = "local", got "vllm"')
    if rollout.sampler == "mixed_cuts" and rollout.group_size < 2:
        raise UsageError(
            'rollout.sampler = "mixed_cuts" splits each group between two samplers, but rollout.group_size is 1; '
            'raise it to 2 or more, or use "cuts"'
        )


def _check_recorded(config: Config) -> None:
    """Refuse a recipe that reads the sampler's most likely tokens where the engine does not record them."""
    section = config.objective
    needs = build_objective(section.recipe, section.hyperparameters()).needs
    if config.rollout.topk_logprobs == 0 and not needs.isdisjoint(_TOPK):
        raise UsageError(
            f"objective.recipe: the recipe {section.recipe!r} reads the most likely tokens of the sampler, which are "
            "not recorded with rollout.topk_logprobs = 0; set it to their number, for instance 128"
        )


def _check_batch(config: Config) -> None:
    learner = config.learner
    if learner.minibatches > learner.prompts_per_step:
        raise UsageError(
            f"learner.minibatches = {learner.minibatches} is more than learner.prompts_per_step = "
            f"{learner.prompts_per_step}: groups stay whole, so a minibatch needs at least one; lower minibatches"
        )


def _check_schedule(config: Config) -> None:
    updates = config.learner.minibatches * config.learner.epochs
    schedule = config.schedule
    if schedule.mode == "async" and schedule.max_staleness < updates - 1:
        raise UsageError(
            f"schedule.max_staleness = {schedule.max_staleness} cannot hold: a rollout batch takes {updates} optimizer "
            f"steps (minibatches × epochs) and the last is {updates - 1} behind; set it to {updates - 1} or more"
        )
    if schedule.mode == "lockstep" and config.runtime.engines > 1 and config.runtime.kind == "local":
        raise UsageError(
            f"runtime.engines = {config.runtime.engines} is refused in lockstep, which keeps one engine inside the "
            "learner's process; use 1 or 0"
        )


def _schedule_warnings(config: Config) -> list[str]:
    inter, last = config.schedule.inter, config.learner.minibatches - 1
    if config.schedule.mode != "lockstep" or inter >= last:
        return _group_warnings(config)
    return [
        f"schedule.inter = {inter} cannot be held: the last of {last + 1} minibatches is trained {last} steps after "
        f"the newest weights that can have sampled it, so its tokens are {last} steps old; use inter = {last} or more",
        *_group_warnings(config),
    ]


def _group_warnings(config: Config) -> list[str]:
    if config.rollout.group_size > 1 or not _zero_for_singletons(config.objective):
        return []
    return [
        f"rollout.group_size = 1 with the advantage {config.objective.advantage!r}: a group of one has no baseline, "
        "every advantage is 0 and nothing is learned"
    ]


def _zero_for_singletons(section: ObjectiveConfig) -> bool:
    """Whether the estimator gives groups of one the advantage 0 whatever their rewards."""
    import torch

    from estr.advantages import advantage

    estimator = advantage(section.advantage, **section.advantage_options)
    rewards, groups = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.arange(4)
    try:
        values = estimator(rewards, groups, length=torch.ones(4))
    except ValueError:  # it needs more than rewards, so it is no plain group baseline
        return False
    return not values.any().item()
