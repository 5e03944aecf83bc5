"""Checks across sections: one sentence for what cannot work, one line for what does nothing."""

import importlib.util

import pytest

from estr.config import RolloutConfig
from estr.config.load import load_config
from estr.config.validate import check_sampling, validate_config
from estr.errors import MissingExtraError, UsageError


def validate(*sets, training=True):
    return validate_config(load_config(None, sets).config, training=training)


def test_defaults_are_valid_and_silent():
    assert validate() == []


TRUNCATED = {"top_p": 0.9, "top_k": 50, "min_p": 0.1}


@pytest.mark.parametrize("key", ["top_p", "min_p"])
def test_fault_A3_truncated_sampling_is_refused_where_the_support_cannot_be_recorded(key):
    assert validate(f"rollout.{key}={TRUNCATED[key]}") == []
    with pytest.raises(UsageError, match=rf"rollout.{key} = .* would normalize over others"):
        check_sampling(RolloutConfig(engine="vllm", **{key: TRUNCATED[key]}))
    check_sampling(RolloutConfig(engine="vllm", top_k=50, **{key: TRUNCATED[key]}))


@pytest.mark.parametrize("sampler", ["cuts", "mixed_cuts"])
@pytest.mark.parametrize("key", TRUNCATED)
def test_cuts_does_not_go_with_truncated_sampling(sampler, key):
    with pytest.raises(UsageError, match=f"rollout.{key} = .* does not go with rollout.sampler"):
        validate(f"rollout.sampler={sampler}", f"rollout.{key}={TRUNCATED[key]}")
    assert validate(f"rollout.sampler={sampler}") == []


def test_exploring_samplers_are_refused_with_vllm():
    check_sampling(RolloutConfig(sampler="cuts"))
    with pytest.raises(UsageError, match=r"rollout.sampler = .* needs rollout.engine"):
        check_sampling(RolloutConfig(engine="vllm", sampler="cuts"))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_vllm_has_to_be_installed():
    with pytest.raises(MissingExtraError, match=r"pip install 'estr\[vllm\]'"):
        validate("rollout.engine=vllm")


def test_what_only_vllm_uses_is_named():
    (warning,) = validate("rollout.entropy=bounded", "rollout.entropy_topk=20")
    assert warning == 'rollout.engine = "local" does not use rollout.entropy, rollout.entropy_topk'


@pytest.mark.parametrize("recipe", ["pdm", "score_centering"])
def test_recipes_on_the_likely_tokens_need_them_recorded(recipe):
    with pytest.raises(UsageError, match=r"topk_logprobs = 0; set it to"):
        validate(f"objective.recipe={recipe}")
    assert validate(f"objective.recipe={recipe}", "rollout.topk_logprobs=16") == []


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["learner.minibatches=9", "schedule.max_staleness=9"], "minibatches = 9 is more than .*prompts_per_step = 8"),
        (["learner.minibatches=4", "learner.epochs=2", "schedule.max_staleness=6"], "set it to 7 or more"),
        (["schedule.mode=lockstep", "runtime.engines=2"], "engines = 2 is refused in lockstep"),
        (["rollout.engine=vllm", "schedule.mode=lockstep"], 'lockstep" needs rollout.engine = "local"'),
        (["rollout.engine=vllm", "rollout.dtype=int8"], 'int8" needs rollout.engine = "local"'),
        (["rollout.group_size=1", "rollout.sampler=mixed_cuts"], r"splits each group .* rollout.group_size is 1"),
        (["runtime.kind=ray", "runtime.address=ray://head:10001"], "runtime.address = 'ray://head:10001' is refused"),
        (["rollout.dtype=int9"], "int2 to int8"),
        (["rollout.dtype=int1"], "int2 to int8"),
        (["rollout.dtype=bfloat"], "did you mean 'bfloat16'"),
    ],
)
def test_what_cannot_work_is_refused(sets, words):
    with pytest.raises(UsageError, match=words):
        validate(*sets)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int5", "int2"])
def test_engine_precisions(dtype):
    assert validate(f"rollout.dtype={dtype}") == []


@pytest.mark.parametrize(
    "sets",
    [
        ["learner.minibatches=4", "learner.epochs=2", "schedule.max_staleness=7"],
        ["learner.minibatches=4", "schedule.mode=sync", "schedule.max_staleness=0"],
        ["schedule.max_staleness=0"],
        ["schedule.mode=lockstep", "runtime.engines=1"],
    ],
)
def test_bounds_are_inclusive(sets):
    assert validate(*sets) == []


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo"])
def test_a_group_of_one_without_a_baseline_is_warned_about(advantage):
    sets = ["rollout.group_size=1", f"objective.advantage={advantage}"]
    (warning,) = validate(*sets)
    assert "nothing is learned" in warning


@pytest.mark.parametrize("advantage", ["reinforce_pp", "maxrl"])
def test_an_estimator_that_does_without_groups_is_not(advantage):
    assert validate("rollout.group_size=1", f"objective.advantage={advantage}") == []
