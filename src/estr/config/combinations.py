"""Methods that do not go together: a ratio counted twice is refused, what has no effect as configured is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from estr.config.objective_section import build_objective
from estr.config.sections import Config
from estr.errors import UsageError

if TYPE_CHECKING:
    from estr.objectives import Objective

_RATIOS = {"B": "q/μ", "U": "π/q"}
_PROBE_TOKENS, _PROBE_SEQUENCES = 256, 16


def check_combinations(config: Config) -> list[str]:
    """Warnings about methods that have no effect beside others, each with the reason.

    Raises:
        UsageError: a combination that is wrong whatever the data.
    """
    recipe = build_objective(config.objective.recipe, config.objective.hyperparameters())
    _refuse_double_counting(recipe)
    _refuse_selection(config)
    warnings = [*_recipe_warnings(config, recipe), *_advantage_warnings(config, recipe)]
    return [*warnings, *_reward_warnings(config), *_controller_warnings(config)]


def _refuse_double_counting(recipe: Objective) -> None:
    twice = recipe.composition.counted_twice
    if not twice:
        return
    ratios = " and ".join(_RATIOS[edge] for edge in sorted(twice))
    weights = ", ".join(weight.name for weight in recipe.composition.weights)
    raise UsageError(
        f"objective.recipe: {recipe.name!r} as configured counts the ratio {ratios} twice, in its weight ({weights}) "
        f"and in its surrogate ({recipe.composition.surrogate.name}); switch the weight off or choose a recipe that "
        "corrects once, such as 'tis'; a part of your own that reads a ratio and does not multiply by it says "
        'factor=""'
    )


def _refuse_selection(config: Config) -> None:
    section = config.objective
    if section.selection == "aepo":
        _refuse_second_rollouts(config)
    if section.selection != "dapo" or config.rollout.group_size > 1:
        return
    if not section.selection_options.get("keep_singletons", True):
        raise UsageError(
            "objective.selection: 'dapo' with keep_singletons = false drops every group, because rollout.group_size is "
            "1; raise group_size"
        )


def _refuse_second_rollouts(config: Config) -> None:
    rollout, prompts = config.rollout, config.learner.prompts_per_step
    share = {**_defaults("aepo"), **config.objective.selection_options}["prompt_share"]
    if int(prompts * share) == 0:
        raise UsageError(
            f"objective.selection: 'aepo' samples a share of {share:g} (prompt_share) of the {prompts} prompts of a "
            "rollout batch a second time, which is none; raise it or learner.prompts_per_step"
        )
    first = -(-prompts // config.learner.minibatches)
    if int(prompts * share) > first:
        raise UsageError(
            f"objective.selection: 'aepo' samples {int(prompts * share)} prompts of a rollout batch again, more "
            f"than the {first} of its first minibatch; lower prompt_share or learner.minibatches"
        )
    if rollout.top_p < 1 or rollout.top_k or rollout.min_p or rollout.sampler != "standard":
        raise UsageError(
            "objective.selection: 'aepo' draws its second rollouts from the whole vocabulary at a temperature of their "
            'own; use rollout.sampler = "standard" with top_p = 1, top_k = 0 and min_p = 0'
        )


def _recipe_warnings(config: Config, recipe: Objective) -> list[str]:
    section, warnings = config.objective, []
    one_step = config.learner.minibatches * config.learner.epochs == 1
    if one_step and recipe.update_edge_only and plain_at_one(recipe):
        warnings.append(
            f"the recipe {recipe.name!r} acts only on the update edge π/q, which is 1 in the first optimizer step of a "
            "rollout batch: with minibatches = 1 and epochs = 1 its gates, weights and clips do nothing, and what is "
            "left is a policy gradient without any correction"
        )
    if one_step and config.schedule.mode == "sync" and "version" in recipe.needs:
        warnings.append(
            f'the recipe {recipe.name!r} goes by the age of each token, which is 0 in schedule.mode = "sync" with '
            "minibatches = 1 and epochs = 1"
        )
    if recipe.composition.average == 0:
        warnings.append(f"the recipe {recipe.name!r} with beta = 0 clips nothing: the average is the current weights")
    if section.kl_coef > 0 and "reference_logprob" in recipe.needs:
        warnings.append(
            f"the recipe {recipe.name!r} already pulls towards the starting model; objective.kl_coef = "
            f"{section.kl_coef:g} pulls a second time"
        )
    return warnings


def plain_at_one(recipe: Objective) -> bool:
    """Whether, at π = q, the recipe is the plain policy gradient A ∇log π on every token, up to its normalizer.

    Found by trying: random tokens with μ ≠ q = π, advantages and log-probabilities of wide spread.
    """
    import torch

    from estr.batch import TokenBatch

    generator = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.randn(_PROBE_TOKENS, generator=generator, dtype=torch.float64)

    logprob, entropy = -noise().square() - 0.01, noise().square() + 0.01
    advantage, rows = noise(), torch.arange(_PROBE_TOKENS) * _PROBE_SEQUENCES // _PROBE_TOKENS
    groups = torch.arange(_PROBE_SEQUENCES) // 4
    current = logprob.clone().requires_grad_()
    batch = TokenBatch(
        logprob=current,
        behavior_logprob=logprob + 0.3 * noise(),
        advantage=advantage,
        sequence=rows,
        behavior_entropy=entropy,
        proximal_logprob=logprob,
        proximal_entropy=entropy,
        entropy=entropy,
        group=groups,
        reward=(torch.arange(_PROBE_SEQUENCES) % 2).double(),
    )
    output = recipe(batch, generator=generator)
    (gradient,) = torch.autograd.grad(output.token_loss.sum(), current)
    return torch.allclose(-gradient, advantage, rtol=1e-6, atol=1e-9)


def _advantage_warnings(config: Config, recipe: Objective) -> list[str]:
    section, warnings = config.objective, []
    options = section.reweighting_options
    if section.reweighting == "gtpo" and section.advantage != "grpo":
        warnings.append(
            f"objective.advantage = {section.advantage!r} has no effect: the re-weighting 'gtpo' replaces advantages"
        )
    weights = [options.get("positive", 1.1)] + [options.get("negative", 0.9)] * (options.get("variant") == "C2")
    if section.reweighting == "stare" and set(weights) == {1} and not options.get("adaptive", False):
        warnings.append("the re-weighting 'stare' with weights of 1 that do not adapt does nothing")
    if section.advantage == "opob" and not set("BE") & recipe.edges:
        warnings.append(
            f"the advantage 'opob' is the best baseline for gradients weighted by π/μ, but the recipe {recipe.name!r} "
            "does not weigh by it"
        )
    if section.selection == "dapo" and config.rollout.group_size == 1:
        warnings.append("objective.selection = 'dapo' keeps every group, because rollout.group_size is 1")
    if section.selection == "aepo" and config.rollout.temperature != 1:
        warnings.append(
            "objective.selection = 'aepo' measures entropy at rollout.temperature = "
            f"{config.rollout.temperature:g}; its target and its own temperatures are meant for 1"
        )
    return warnings


def _reward_warnings(config: Config) -> list[str]:
    section = config.objective
    if "overlong" not in section.shaping:
        return []
    options = {**_defaults("overlong"), **section.shaping_options.get("overlong", {})}
    longest = config.rollout.max_new_tokens * config.rollout.max_turns
    free = options["max_length"] - options["buffer"]
    if longest > free:
        return []
    return [
        f"the shaping 'overlong' does nothing: it takes from rewards beyond {free} action tokens (max_length - "
        f"buffer), but a trajectory has at most {longest} (rollout.max_new_tokens × max_turns); set its max_length and "
        "buffer"
    ]


def _defaults(name: str) -> dict[str, Any]:
    from estr.shaping import selections, shapings

    return {**shapings(), **selections()}[name].hyperparameters


def _controller_warnings(config: Config) -> list[str]:
    checks: dict[str, Callable[[Config, dict[str, Any]], str | None]] = {"fixed_norm": _fixed_norm, "rq": _rolling}
    found = []
    for name in config.learner.controllers:
        if name in checks:
            found.append(checks[name](config, config.learner.controller_options.get(name, {})))
    return [warning for warning in found if warning]


def _fixed_norm(config: Config, options: dict[str, Any]) -> str | None:
    bound, outer = options.get("max_norm", 1.0), config.learner.max_grad_norm
    if bound == 0:
        return "the controller 'fixed_norm' with max_norm = 0 never scales"
    if not 0 < outer <= bound:
        return None
    return (
        f"the controller 'fixed_norm' with max_norm = {bound:g} does nothing beside learner.max_grad_norm = {outer:g}, "
        "which is at least as tight; set max_grad_norm = 0"
    )


def _rolling(config: Config, options: dict[str, Any]) -> str | None:
    history = options.get("min_history", 10)
    if config.run.steps > history or options.get("decay", 0.0) > 0:
        return None
    return (
        f"the controller 'rq' waits for {history} gradients (min_history) before it scales one, but run.steps is "
        f"{config.run.steps}"
    )
