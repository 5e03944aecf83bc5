"""Methods that do not go together: refused where a ratio counts twice, a line where something has no effect."""

import pytest

from estr.config.combinations import plain_at_one
from estr.config.load import load_config
from estr.config.validate import validate_config
from estr.errors import UsageError
from estr.objectives import objective, recipes

SEVERAL = ["learner.minibatches=2"]


def validate(*sets):
    full = [text if "." in text.split("=")[0] else f"objective.{text}" for text in sets]
    return validate_config(load_config(None, full).config)


@pytest.mark.parametrize(
    ("sets", "ratio"),
    [
        (["recipe=verl/bypass_ppo_clip", "rollout_is=token"], "q/μ and π/q twice"),
        (["recipe=verl/bypass_ppo_clip", "rollout_is=sequence"], "q/μ and π/q twice"),
        (["recipe=verl/bypass_ppo_clip_geo_rs", "rollout_is=token"], "q/μ and π/q twice"),
    ],
)
def test_a_ratio_that_counts_twice_is_refused(sets, ratio):
    """With q := μ the clip is on π/μ already; a weight of π/μ beside it would square the ratio."""
    with pytest.raises(UsageError, match=ratio):
        validate(*sets, *SEVERAL)


def test_the_refusal_says_how_a_weight_that_only_looks_at_the_ratio_is_let_through():
    with pytest.raises(UsageError, match=r'says factor=""$'):
        validate("recipe=verl/bypass_ppo_clip", "rollout_is=token", *SEVERAL)


def test_no_recipe_counts_a_ratio_twice_at_its_defaults():
    assert [name for name in recipes() if objective(name).composition.counted_twice] == []


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "verl/disabled", "rollout_is": "sequence"},
        {"recipe": "verl/bypass_pg_is", "rollout_is": "token"},
        {"recipe": "m2po", "variant": "areal"},
        {"recipe": "vespo", "token_cap": 2.0},
        {"recipe": "cispo", "edge": "E"},
        {"recipe": "trm", "edge": "E"},
        {"recipe": "ppo_ewma"},
    ],
    ids=lambda options: options["recipe"],
)
def test_a_correction_that_counts_once_is_not(options):
    assert not objective(options.pop("recipe"), **options).composition.counted_twice


PLAIN_AT_ONE = {"cispo", "erc", "espo", "etr", "gspo", "kl_cov", "sapo", "vespo", "verl/disabled"}


def test_recipes_that_do_nothing_while_q_is_the_current_policy():
    """All recipes that read nothing but the update edge: these are plain policy gradients at π = q, those are not."""
    update_only = {name for name in recipes() if objective(name).update_edge_only}
    assert {name for name in update_only if plain_at_one(objective(name))} == PLAIN_AT_ONE
    assert update_only - PLAIN_AT_ONE == {"clip_cov", "high_entropy"}


@pytest.mark.parametrize("name", sorted(PLAIN_AT_ONE))
def test_those_are_warned_about_with_one_step_per_rollout_batch(name):
    (warning,) = validate(f"recipe={name}")
    assert name in warning
    assert "without any correction" in warning
    assert validate(f"recipe={name}", *SEVERAL) == []
    assert validate(f"recipe={name}", "learner.epochs=2") == []


@pytest.mark.parametrize("name", ["estr", "grpo", "tis", "icepop", "clip_cov", "high_entropy", "opsm", "reinforce"])
def test_others_are_not(name):
    assert validate(f"recipe={name}") == []


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["recipe=a3po", "schedule.mode=sync"], "age of each token, which is 0"),
        (["recipe=ppo_ewma", "beta=0"], "beta = 0 clips nothing"),
        (["recipe=dar", "kl_coef=0.1"], "pulls a second time"),
        (["reweighting=gtpo", "advantage=rloo"], "objective.advantage = 'rloo' has no effect"),
        (["reweighting=stare", "objective.reweighting_options.positive=1.0"], "'stare' with weights of 1"),
        (["recipe=reinforce", "advantage=opob"], "does not weigh by it"),
        (["shaping=overlong"], "'overlong' does nothing: it takes from rewards beyond 16384 action tokens"),
        (["learner.controllers=fixed_norm"], "'fixed_norm' with max_norm = 1 does nothing beside"),
        (["learner.controllers=fixed_norm", "learner.controller_options.fixed_norm.max_norm=0"], "never scales"),
        (["learner.controllers=rq", "run.steps=10"], "'rq' waits for 10 gradients"),
        (["selection=dapo", "rollout.group_size=1", "advantage=maxrl"], "'dapo' keeps every group"),
        (["selection=aepo", "rollout.temperature=0.7"], "meant for 1"),
    ],
)
def test_what_has_no_effect_is_named(sets, words):
    (warning,) = validate(*sets)
    assert words in warning


@pytest.mark.parametrize(
    "sets",
    [
        ["recipe=a3po", "schedule.mode=sync", "schedule.max_staleness=0", *SEVERAL],
        ["recipe=a3po"],
        ["recipe=dar"],
        ["kl_coef=0.1"],
        ["reweighting=gtpo"],
        ["reweighting=stare"],
        ["reweighting=stare", "objective.reweighting_options.positive=1.0",
         "objective.reweighting_options.variant=C2"],
        ["recipe=tis_sequence", "advantage=opob", "learner.controllers=vcpo"],
        ["shaping=overlong", "objective.shaping_options.overlong.max_length=300",
         "objective.shaping_options.overlong.buffer=100"],
        ["learner.controllers=fixed_norm", "learner.max_grad_norm=0"],
        ["learner.controllers=fixed_norm", "learner.controller_options.fixed_norm.max_norm=0.5"],
        ["learner.controllers=['rq','gac']"],
        ["selection=dapo"],
        ["selection=aepo"],
    ],
)  # fmt: skip
def test_what_works_is_silent(sets):
    assert validate(*sets) == []


def test_a_selection_that_keeps_nothing_is_refused():
    with pytest.raises(UsageError, match="drops every group"):
        validate("selection=dapo", "objective.selection_options.keep_singletons=false", "rollout.group_size=1")


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["learner.prompts_per_step=3"], "a share of 0.25 .* of the 3 prompts .* which is none"),
        (["objective.selection_options.prompt_share=0.1"], "which is none"),
        (
            ["learner.minibatches=8", "schedule.max_staleness=8"],
            "samples 2 prompts .* again, more than the 1 of",
        ),
        (["rollout.top_p=0.9"], "whole vocabulary at a temperature of their own"),
        (["rollout.sampler=cuts"], "whole vocabulary at a temperature of their own"),
    ],
)
def test_second_rollouts_that_cannot_be_are_refused(sets, words):
    with pytest.raises(UsageError, match=words):
        validate("selection=aepo", *sets)
