"""Choosing methods of every family from TOML: names, options, what is left out, what is refused and in which words."""

import pytest
import tomli_w

from estr.config import LearnerConfig, ObjectiveConfig
from estr.config.load import dump_config, load_config
from estr.config.methods import families
from estr.errors import UsageError
from estr.learner import Extensions
from estr.objectives import recipes
from estr.registry import Registry


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write_file


EVERYTHING = """
[objective]
recipe = "grpo"
advantage = "rloo"
reweighting = "stare"
regularizer = "aer"
shaping = ["overlong", "err"]
selection = "dapo"
[objective.reweighting_options]
variant = "C2"
positive = 1.05
[objective.regularizer_options]
tau = 0.5
[objective.shaping_options.overlong]
max_length = 64
buffer = 16
[learner]
controllers = ["vcpo", "gac"]
[learner.controller_options.vcpo]
base_ess_ratio = 0.55
"""


def refusal(path, sets=()):
    with pytest.raises(UsageError) as caught:
        load_config(path, sets)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_family_is_chosen_and_completed(write):
    config, notices = load_config(write(EVERYTHING))
    assert notices == []
    objective, learner = config.objective, config.learner
    assert (objective.reweighting, objective.reweighting_options["variant"]) == ("stare", "C2")
    assert objective.reweighting_options["fraction"] == 0.1
    assert "initial_entropy" not in objective.regularizer_options  # None, which TOML cannot say
    assert objective.shaping == ["overlong", "err"]
    assert objective.shaping_options["overlong"]["buffer"] == 16
    assert objective.shaping_options["err"]["lam"] == 0.3
    assert learner.controllers == ["vcpo", "gac"]
    assert learner.controller_options["vcpo"] == {"base_ess_ratio": 0.55, "scaling": "sqrt"}
    assert learner.controller_options["gac"]["low"] == 0.2


def test_what_is_dumped_is_read_back(write):
    config = load_config(write(EVERYTHING)).config
    assert load_config(write(dump_config(config))).config == config


def test_one_name_stands_for_a_list_of_one():
    config = load_config(None, ["learner.controllers=rq", "objective.shaping=err"]).config
    assert (config.learner.controllers, config.objective.shaping) == (["rq"], ["err"])


def test_sets_go_over_the_file_option_by_option(write):
    sets = ["objective.reweighting_options.positive=1.2", "learner.controller_options.vcpo.scaling=linear"]
    config, notices = load_config(write(EVERYTHING), sets)
    assert notices == []
    assert config.objective.reweighting_options["positive"] == 1.2
    assert config.objective.reweighting_options["variant"] == "C2"
    assert config.learner.controller_options["vcpo"] == {"base_ess_ratio": 0.55, "scaling": "linear"}


def test_options_of_a_method_that_is_no_longer_chosen_are_left_out_with_a_line(write):
    config, notices = load_config(write(EVERYTHING), ["objective.reweighting=papo", "learner.controllers=['gac']"])
    assert "positive" not in config.objective.reweighting_options
    assert list(config.learner.controller_options) == ["gac"]
    assert notices == [
        "objective.reweighting is now papo: the file's variant, positive of stare left out",
        "learner.controller_options.vcpo has no effect: learner.controllers does not name vcpo",
    ]
    assert load_config(write(EVERYTHING), ["objective.reweighting=none"]).config.objective.reweighting_options == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[objective]\nreweighting = 'star'\n",
         "line 2: objective.reweighting: there is no token re-weighting 'star'; did you mean 'stare'?"),
        ("[objective]\nregularizer = 'aerr'\n", "there is no entropy regularizer 'aerr'; did you mean 'aer'?"),
        ("[objective]\nselection = 'dappo'\n", "there is no selection rule 'dappo'; did you mean 'dapo'?"),
        ("[objective]\nshaping = ['er']\n", "line 2: objective.shaping: there is no reward shaping 'er'"),
        ("[learner]\ncontrollers = ['vcop']\n",
         "line 2: learner.controllers: there is no step controller 'vcop'; did you mean 'vcpo'?"),
        ("[learner]\ncontrollers = ['none']\n", "there is no step controller 'none'"),
        ("[learner]\ncontrollers = ['gac', 'gac']\n", "names a step controller twice"),
        ("[learner]\ncontrollers = [1]\n", "learner.controllers.0 must be text in quotes, got 1"),
        ("[learner]\ncontrollers = 3\n", "learner.controllers must be a list in brackets, got 3"),
        ("[objective]\nshaping = {a = 1}\n", "objective.shaping must be a list in brackets"),
        ("[objective]\nreweighting = ['stare']\n", "objective.reweighting must be text in quotes"),
        ("[objective]\nreweighting = 'stare'\nreweighting_options = 3\n", "reweighting_options must be a table, got 3"),
        ("[objective]\nreweighting = 'stare'\n[objective.reweighting_options]\nvarian = 'C2'\n",
         "line 4: objective.reweighting_options.varian: the token re-weighting 'stare' has no such option; "
         "did you mean 'variant'?"),
        ("[objective.reweighting_options]\nvariant = 'C2'\n",
         "line 2: objective.reweighting_options.variant has nothing to act on: objective.reweighting is 'none'"),
        ("[objective]\nreweighting = 'stare'\n[objective.reweighting_options]\nvariant = 'C3'\n",
         "line 4: objective.reweighting_options.variant must be one of 'O1', 'C2', not 'C3'"),
        ("[objective]\nreweighting = 'stare'\n[objective.reweighting_options]\nadaptive = 'yes'\n",
         "objective.reweighting_options.adaptive must be true or false, not 'yes'"),
        ("[objective]\nshaping = ['err']\n[objective.shaping_options.err]\nphase = 1.5\n",
         "objective.shaping_options.err.phase must be a whole number, not 1.5"),
        ("[objective]\nregularizer = 'tecrl'\n[objective.regularizer_options]\nbudget = 'high'\n",
         "objective.regularizer_options.budget must be a finite number, not 'high'"),
        ("[learner]\ncontrollers = ['gac']\n[learner.controller_options.gac]\nlow = 2.0\n",
         "line 4: learner.controller_options.gac.low must be a number in [0, 1], not 2.0"),
        ("[learner.controller_options.gacc]\nlow = 0.1\n",
         "line 1: learner.controller_options.gacc: there is no step controller 'gacc'; did you mean 'gac'?"),
        ("[learner.controller_options.gac]\nlo = 0.1\n", "gac.lo: the step controller 'gac' has no such option"),
        ("[objective.reweighting_option]\nvariant = 'C2'\n", "did you mean 'reweighting_options'?"),
        ("[learner]\ncontroler = ['gac']\n", "learner.controler is not a known key; did you mean 'controllers'?"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(write, text, expected):
    assert expected in refusal(write(text))


def test_wrong_sets_are_said():
    assert refusal(None, ["learner.controllers=vcop"]).startswith("--set learner.controllers: there is no step")
    assert refusal(None, ["objective.reweighting=stare", "objective.reweighting_options.fraction=2"]).startswith(
        "--set objective.reweighting_options.fraction must be a number in (0, 1]"
    )


def test_every_method_of_every_family_can_be_named(write):
    """Each with all its defaults written out, as a resolved file has them."""
    for family in families():
        for name, method in family.table().items():
            options = {key: value for key, value in method.hyperparameters.items() if value is not None}
            section = {family.key: [name] if family.several else name}
            section[family.options] = {name: options} if family.several else options
            config = load_config(write(tomli_w.dumps({family.section: section}))).config
            chosen = getattr(getattr(config, family.section), family.options)
            assert (chosen[name] if family.several else chosen) == options


def test_no_recipe_has_a_hyperparameter_with_the_name_of_a_key():
    names = {name for recipe in recipes().values() for name in recipe.hyperparameters}
    assert not names & set(ObjectiveConfig.model_fields)


def test_every_key_is_described_in_one_line():
    for section in (ObjectiveConfig, LearnerConfig):
        for name, field in section.model_fields.items():
            assert field.description, name
            assert "\n" not in field.description


@pytest.mark.parametrize("family", families(), ids=lambda family: family.key)
def test_options_of_another_kind_than_the_default_are_refused(family):
    for name, method in family.table().items():
        for option, default in method.hyperparameters.items():
            wrong = 1 if isinstance(default, str | bool) else "x"
            with pytest.raises(ValueError, match=f"^{option} must be"):
                family.registry.make(name, {option: wrong})


def test_a_number_may_stand_where_the_default_is_none():
    assert isinstance(families()[0].table(), dict)
    registry: Registry[object] = Registry("thing", operator="thing")

    @registry.register("box", description="", formula="", source="", confidence="", scope="token")
    class Box:
        def __init__(self, size: float | None = None) -> None:
            self.size = size

    assert registry.make("box", {"size": 3}).size == 3
    assert registry.make("box", {"size": None}).size is None
    for wrong in (float("nan"), float("inf"), True, "3"):
        with pytest.raises(ValueError, match="size must be a finite number"):
            registry.make("box", {"size": wrong})


def test_extensions_are_built_from_the_configuration(write):
    config = load_config(write(EVERYTHING)).config
    built = Extensions.of(config)
    assert [type(shaping).__name__ for shaping in built.shapings] == ["Overlong", "EntropyRelief"]
    assert (built.shapings[0].max_length, built.reweighting.variant, built.regularizer.tau) == (64, "C2", 0.5)
    assert [type(controller).__name__ for controller in built.controllers] == [
        "EffectiveSampleSizeRate",
        "GradientAlignment",
    ]
    nothing = Extensions.of(load_config(None).config)
    assert (list(nothing.shapings), nothing.reweighting, nothing.regularizer, list(nothing.controllers)) == (
        [], None, None, []
    )  # fmt: skip
