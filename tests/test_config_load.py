"""Configuration files and --set: what takes effect, what is refused and in which words, and the way back to TOML."""

import contextlib
import typing

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from estr.config import Config
from estr.config.load import dump_config, load_config
from estr.config.methods import families
from estr.errors import UsageError
from estr.objectives import recipes


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write_file


def refusal(path, sets=()):
    with pytest.raises(UsageError) as caught:
        load_config(path, sets)
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    return message


def test_defaults_and_values(write):
    path = write('[run]\nsteps = 7\n[learner]\nlearning_rate = 1\n[task]\nname = "gsm8k"\nlevel = [1, 2]\n')
    config, notices = load_config(path)
    assert (config.run.steps, config.learner.learning_rate, config.run.seed) == (7, 1.0, 0)
    assert config.task.options() == {"level": [1, 2]}
    assert notices == []


def test_sets_win_and_are_read_as_toml(write):
    path = write("[run]\nsteps = 7\n")
    sets = ["run.steps=9", "model.path=builtin:micro", "task.path=1e5", "run.trackers=['wandb']", "task.deep.er=true",
            "learner.learning_rate=3e-4", "task.word=two words", "run.output=",
            "model.trust_remote_code = true"]  # fmt: skip
    config, _ = load_config(path, sets)
    assert config.run.steps == 9
    assert (config.model.path, config.task.path, config.run.output) == ("builtin:micro", "1e5", "")
    assert config.run.trackers == ["wandb"]
    assert config.task.options() == {"deep": {"er": True}, "word": "two words"}
    assert config.learner.learning_rate == 3e-4
    assert config.model.trust_remote_code is True


def test_without_a_file_there_are_defaults():
    config, _ = load_config(None, ["task.name=gsm8k"])
    assert config.task.name == "gsm8k"
    assert refusal(None, ["run.step=1"]).startswith("--set run.step is not a known key")


def test_the_resolved_objective_is_flat_and_complete(write):
    flat = load_config(write('[objective]\nrecipe = "estr"\ntau = 2.0\n')).config
    named = load_config(write("[objective.estr]\ntau = 2.0\n[objective.grpo]\nclip_low = 0.1\n")).config
    assert flat == named
    assert flat.objective.hyperparameters() == {**recipes()["estr"].hyperparameters, "tau": 2.0}
    assert load_config(None, ["objective.estr.tau=2.0"]).config == flat
    assert load_config(write("[objective.estr]\ntau = 1.0\n"), ["objective.tau=2.0"]).config == flat


def test_hyperparameters_of_the_old_recipe_are_left_out_with_a_line(write):
    path = write("[objective]\ntau = 2.0\nclip_low = 0.5\nkl_coef = 0.1\n[objective.icepop]\nhigh = 3.0\n")
    config, notices = load_config(path, ["objective.recipe=icepop"])
    assert config.objective.hyperparameters() == {
        key: value
        for key, value in {**recipes()["icepop"].hyperparameters, "high": 3.0}.items()
        if value is not None
    }  # fmt: skip
    assert config.objective.kl_coef == 0.1
    assert notices == ["objective.recipe is now icepop: the file's tau, clip_low of estr left out"]


def test_a_resolved_configuration_can_change_its_recipe(write):
    dumped = dump_config(load_config(None).config)
    config, (notice,) = load_config(write(dumped), ["objective.recipe=grpo", "objective.clip_low=0.3"])
    assert config.objective.hyperparameters()["clip_low"] == 0.3
    assert "tau" in notice
    assert "tau" not in config.objective.hyperparameters()


def test_naming_the_same_recipe_again_leaves_nothing_out(write):
    config, notices = load_config(write("[objective]\ntau = 2.0\n"), ["objective.recipe=estr"])
    assert config.objective.hyperparameters()["tau"] == 2.0
    assert notices == []


def test_advantage_options(write):
    path = write('[objective]\nadvantage = "grpo"\n[objective.advantage_options]\nstd = "none"\n')
    assert load_config(path).config.objective.advantage_options == {"std": "none", "eps": 1e-6}
    assert "advantage" in refusal(None, ["objective.advantage=grop"])
    assert "did you mean 'std'" in refusal(None, ["objective.advantage_options.stdd=none"])


@pytest.mark.parametrize(
    ("mode", "given", "notices"),
    [
        ("sync", ["max_staleness=4", "inter=2"], ["schedule.mode is sync: inter, max_staleness not used"]),
        ("async", ["max_staleness=2", "intra_every=2"], ["schedule.mode is async: intra_every not used"]),
        ("lockstep", ["inter=2", "intra=1", "wait_timeout=9"], []),
    ],
)
def test_schedule_keys_that_the_mode_does_not_use_are_named_once(mode, given, notices):
    sets = [f"schedule.mode={mode}", *(f"schedule.{key}" for key in given)]
    assert load_config(None, sets).notices == notices


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[run]\nsteps = \n", "run.toml is not valid TOML: invalid value (at line 2, column 9)"),
        ("[run]\nsteps = 1\nsteps = 2\n", "(at line 3,"),
        ("steps = 3\n", "run.toml, line 1: there is no key outside the sections 'steps'"),
        ("run = 3\n", "run.toml, line 1: run must be a section: write [run]"),
        ("[runs]\nsteps = 3\n", "run.toml, line 1: there is no section 'runs'; did you mean 'run'?"),
        ("[run]\n\nstep = 3\n", "run.toml, line 3: run.step is not a known key; did you mean 'steps'?"),
        ("[run]\nsteps = 'many'\n", "run.toml, line 2: run.steps must be a whole number, got 'many'"),
        ("[run]\nsteps = true\n", "run.toml, line 2: run.steps must be a whole number, got true"),
        ("[run]\nsteps = 1.5\n", "run.steps must be a whole number, got 1.5"),
        ("[run]\nsteps = -1\n", "run.steps must be at least 0 and at most 1,000,000,000, got -1"),
        ("[learner]\nlearning_rate = nan\n", "learner.learning_rate must be a finite number, got nan"),
        ("[learner]\nlearning_rate = '1e-4'\n", "learner.learning_rate must be a number, got '1e-4'"),
        ("[rollout]\ntop_p = 2\n", "rollout.top_p must be greater than 0 and at most 1, got 2"),
        ("[model]\ntrust_remote_code = 1\n", "model.trust_remote_code must be true or false, got 1"),
        ("[model]\npath = 3\n", "model.path must be text in quotes, got 3"),
        ("[schedule]\nmode = 'asnc'\n", "mode must be 'sync', 'async' or 'lockstep', got 'asnc'; did you mean 'async'"),
        ("[run]\ntrackers = 'wandb'\n", "run.trackers must be a list in brackets, got 'wandb'"),
        ("[run]\nstep = 1\nstps = 2\n", "(and 1 more)"),
        ("[objective]\nrecipe = 'esrt'\n", "line 2: objective.recipe: there is no recipe 'esrt'; did you mean 'estr'?"),
        ("[objective]\ntaau = 1\n", "taau: the recipe 'estr' has no such hyperparameter; did you mean 'tau'?"),
        ("[objective]\n\nadvantag = 1\n", "line 3: objective.advantag: "),
        ("[objective]\nadvantag = 1\n", "did you mean 'advantage'?"),
        ("[objective.estr]\ntau = 'x'\n", "run.toml, line 2: objective.tau must be a number"),
        ("[objective]\ntau = 1\n[objective.estr]\ntau = 2\n", "objective.tau and objective.estr.tau are the same"),
        ("[objective.grpo]\nclip_lo = 1\n", "line 2: objective.clip_lo: the recipe 'grpo' has no such"),
        ("[objective.grp]\nclip_low = 1\n", "line 1: objective.grp is a table, but there is no recipe of"),
        ("[objective]\nkl_coef = -1\n", "run.toml, line 2: objective.kl_coef must be at least 0, got -1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(write, text, expected):
    message = refusal(write(text))
    assert expected in message
    assert message.count("run.toml") == 1


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("steps=3", "must have the form section.key=value"),
        ("run.steps", "must have the form section.key=value"),
        ("run.=1", "must have the form section.key=value"),
        ("runn.steps=3", "there is no section 'runn'; did you mean 'run'?"),
        ("run.stepz=3", "--set run.stepz is not a known key; did you mean 'steps'?"),
        ("run.steps=few", "--set run.steps must be a whole number, got 'few'"),
        ("run.steps.more=1", "--set run.steps must be a whole number"),
        ("objective.recipe=nope", "--set objective.recipe: there is no recipe 'nope'"),
        ("objective.phi=2", "--set objective.phi: the recipe 'estr' has no such hyperparameter"),
        ("objective.estr.phi=2", "--set objective.phi: the recipe 'estr' has no such hyperparameter"),
        ("objective.tau=-1", "--set objective.tau must be a number"),
        ("run.steps=1\nx = 2", "--set run.steps must be a whole number"),
    ],
)
def test_wrong_sets_are_said(argument, expected):
    assert expected in refusal(None, [argument]).replace("\\n", " ")


def test_sets_that_contradict_each_other():
    assert "is a value already" in refusal(None, ["task.a=1", "task.a.b=2"])


def test_files_that_cannot_be_read(tmp_path):
    assert "does not exist" in refusal(tmp_path / "none.toml")
    assert "cannot read" in refusal(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refusal(tmp_path / "binary.toml")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 50_000)
    assert "nested too deeply" in refusal(tmp_path / "deep.toml")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_any_bytes_give_a_configuration_or_a_sentence(tmp_path, data):
    path = tmp_path / "fuzz.toml"
    path.write_bytes(data)
    with contextlib.suppress(UsageError):
        load_config(path)


def values_of(field) -> st.SearchStrategy:
    limits = {
        key: getattr(item, key) for item in field.metadata for key in ("ge", "gt", "le", "lt") if hasattr(item, key)
    }
    if field.annotation is bool:
        return st.booleans()
    if field.annotation is int:
        return st.integers(limits.get("ge", 0), limits.get("le", 2**63 - 1))
    if field.annotation is float:
        low, high = limits.get("ge", limits.get("gt", 0)), limits.get("le", limits.get("lt", 1e300))
        return st.floats(low, high, exclude_min="gt" in limits, exclude_max="lt" in limits)
    if field.annotation is str:
        return st.text(st.characters(codec="utf-8"), max_size=8)
    if typing.get_origin(field.annotation) is list:
        return st.lists(st.sampled_from(["wandb", "trackio"]), max_size=2)
    if typing.get_origin(field.annotation) is dict:
        return st.dictionaries(NAMES, st.floats(0, 8), max_size=2)
    return st.sampled_from(typing.get_args(field.annotation))


PLAIN = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8"), max_size=5)
NAMES = st.from_regex("[a-z_]{1,6}", fullmatch=True)


@st.composite
def configurations(draw):
    sections = {}
    for name, section in Config.model_fields.items():
        fields = section.annotation.model_fields
        chosen = draw(st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=4))
        sections[name] = {key: draw(values_of(fields[key])) for key in chosen if name != "objective"}
        for key in ("controllers", "controller_options"):
            sections[name].pop(key, None)
    extra = draw(st.dictionaries(NAMES, PLAIN | st.dictionaries(NAMES, PLAIN, max_size=2), max_size=3))
    sections["task"] = {key: value for key, value in extra.items() if key not in ("name", "path")} | sections["task"]
    sections["objective"] = {"recipe": draw(st.sampled_from(sorted(recipes())))}
    for family in families():
        names = st.sampled_from(sorted(family.table()))
        chosen = draw(st.lists(names, unique=True, max_size=3) if family.several else names)
        sections[family.section][family.key] = chosen
    return sections


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(configurations())
def test_dump_and_load_are_inverse(tmp_path, sections):
    path = tmp_path / "any.toml"
    path.write_text(tomli_w.dumps(sections), encoding="utf-8")
    config = load_config(path).config
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path).config == config
    assert set(config.model_dump()) == set(Config.model_fields)
