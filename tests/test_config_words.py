"""What a person reads who misspelt a key or wrote a value that cannot be: one short line with the way out."""

import pytest

from estr.cli.main import one_line
from estr.config.load import load_config
from estr.config.validate import validate_config
from estr.environments.registry import make_task
from estr.errors import UsageError, nearest, plain, shown

HUGE, DIGITS = "1" + "0" * 400, "9" * 5001


def _checked(path):
    config = load_config(path).config
    make_task(config.task.name, **config.task.options())


def refusal(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        _checked(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    assert "?;" not in message
    return message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[learner]\nlr = 1", "line 2: learner.lr is not a known key; did you mean 'learning_rate'?"),
        ("[learner]\nbatch_size = 1", "did you mean 'prompts_per_step'?"),
        ("[learner]\nclip_grad = 1", "did you mean 'max_grad_norm'?"),
        ("[rollout]\nn = 1", "did you mean 'group_size'?"),
        ("[rollout]\nmax_tokens = 1", "did you mean 'max_new_tokens'?"),
        ("[run]\nepochs = 1", "did you mean 'learner.epochs'?"),
        ("[run]\nlr = 1", "did you mean 'learner.learning_rate'?"),
        ("[objective]\nlearning_rate = 1", "did you mean 'learner.learning_rate'?"),
        ("[objective]\nbeta = 1", "did you mean 'kl_coef'?"),
        ("[model]\nname_or_path = 'x'", "did you mean 'path'?"),
        ("steps = 1", "there is no key outside the sections 'steps'; did you mean 'run.steps'?"),
        ("[task]\nnam = 'x'", "did you mean 'name'?"),
        ("[task]\nname = 'calculater'", "did you mean 'calculator'?"),
        ("[objective]\nrecipe = 'GRPO'", "did you mean 'grpo'?"),
        ("[objective]\nrecipe = 'ppo'", "PPO's clip on π/μ is 'grpo'"),
        (
            "[rollout]\ntemperature = 1e-6",
            "line 2: rollout.temperature must be at least 0.01 and at most 100, got 1e-06",
        ),
        ("[rollout]\ntop_k = 999999999999", "rollout.top_k must be at least 0 and at most 1,000,000, got 999999999999"),
        ("[runtime]\nengine_timeout = 1e-9", "must be at least 1 and at most 1,000,000, got 1e-09"),
        ("[rollout]\ngroup_size = 10000000", "must be at least 1 and at most 65,536"),
        (f"[run]\nseed = {DIGITS}", "holds a whole number of more than 4300 digits on line 2"),
        (f"[objective]\ntau = {HUGE}", "objective.tau must be a number at least 0, got 1000"),
        (f"[objective.advantage_options]\neps = {HUGE}", "eps must be a finite number, not 1000"),
        (f"[task]\nlatency_median = {HUGE}", "must be a finite number, not 1000"),
        (f"[learner]\nlearning_rate = {HUGE}", "must be a number, got 1000"),
        ('[run]\n"a\\nb" = 1', r"run.'a\nb' is not a known key"),
        ('["a\\nb"]\nx = 1', r"there is no section 'a\nb'"),
        ('[objective]\n"a\\nb" = 1', r"objective.'a\nb'"),
        ('[task]\n"a\\nb" = 1', r"no option 'a\nb'"),
        (f"[task]\n{'y' * 300} = 1", "no option 'yyy"),
        (f"[objective]\nrecipe = '{'x' * 500}'", "x…; known are a3po, "),
        (f"[task]\nname = '{'x' * 500}'", "x…; known are calculator, gsm8k, and module:Class for one of your own"),
        (f"[objective]\nadvantage = '{'x' * 500}'", "x…; known are "),
    ],
)
def test_what_is_wrong_and_the_way_out(tmp_path, text, words):
    assert words in refusal(tmp_path, text)


def test_set_with_a_number_of_too_many_digits():
    with pytest.raises(UsageError, match=r"run\.seed must be a whole number, got '999"):
        load_config(None, [f"run.seed={DIGITS}"])


def test_names_and_values_are_repeated_short_and_on_one_line():
    assert shown("a\nb") == r"'a\nb'"
    assert plain("tau") == "tau"
    assert plain("a\nb") == r"'a\nb'"
    assert len(shown("x" * 1000)) == 60
    assert shown(int("9" * 4000) * 10**1000) == "a int whose repr raises ValueError"
    assert nearest("zzz", map(str, range(100, 200))).endswith(" and 76 more")


def test_the_command_line_keeps_any_error_to_one_line():
    assert one_line("a\nb\x1b[31m " + "x" * 500) == r"a b\x1b[31m " + "x" * 60 + "…"
    path = "/" + "/".join(["d" * 90] * 4)
    assert one_line(f"cannot read {path}") == f"cannot read {path}"


def test_hyperparameters_of_a_recipe_that_is_not_trained_are_told(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[objective.grpo]\nclip_low = 0.1\n[objective.estr]\ntau = 2.0\n")
    told = "[objective.grpo] (clip_low) has no effect: objective.recipe is estr"
    assert load_config(path).notices == [told]
    assert load_config(None, ["objective.grpo.clip_low=0.1"]).notices == [told]
    assert load_config(path, ["objective.recipe=grpo"]).notices == [
        "objective.recipe is now grpo: the file's estr.tau of estr left out"
    ]


def test_staleness_that_lockstep_cannot_hold_is_told():
    sets = ["schedule.mode=lockstep", "learner.minibatches=4", "objective.recipe=estr"]
    (warning,) = validate_config(load_config(None, sets).config)
    assert warning.startswith(
        "schedule.inter = 0 cannot be held: the last of 4 minibatches is trained 3 steps after the newest"
    )
    assert "use inter = 3 or more" in warning
    assert validate_config(load_config(None, [*sets, "schedule.inter=3"]).config) == []


def test_a_temperature_of_evaluation_that_is_neither_greedy_nor_possible():
    with pytest.raises(UsageError, match="eval_temperature must be 0"):
        validate_config(load_config(None, ["run.eval_temperature=1e-6"]).config)
