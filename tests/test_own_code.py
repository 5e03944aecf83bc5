"""Recipes, methods and tasks in the user's own modules: found, trained, gone on with, replayed, inspected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from estr.advantages.base import estimators
from estr.config.load import load_config
from estr.config.validate import validate_config
from estr.objectives import find_recipe, objective
from estr.storage.run_directory import RunDirectory
from loop_helpers import estr, write_config

METHODS = """
from dataclasses import dataclass

from estr.advantages.base import AdvantageEstimator, estimators
from estr.objectives import Composition, Gate, Recipe, register, surrogates
from estr.objectives.hyperparameters import number


def gate(limit):
    return Gate("|π - μ| ≤ limit", "E", "token", lambda c: (c.log_pi.exp() - c.log_mu.exp()).abs() <= limit)


def recipe(name):
    return Recipe(
        name=name,
        description="Keeps tokens whose probability moved little.",
        formula="1[|π-μ| ≤ limit]·ppo(E, A)",
        source="here",
        confidence="our reading",
        parameters={"limit": number(0.1, 0)},
        compose=lambda h: Composition(surrogates.ppo("E", 0.2, 0.2), gates=(gate(h.limit),)),
    )


SMALL_MOVE = recipe("small_move")
TAKEN = Recipe("taken", "x", "x", "x", "x", {"kl_coef": number(1.0)}, SMALL_MOVE.compose)


def compose_badly(h):
    raise KeyError("nothing")


BAD = Recipe("bad", "x", "x", "x", "x", {}, compose_badly)


@estimators.register(
    "SUFFIX_signs", description="x", formula="x", source="x", confidence="x", scope="group"
)
@dataclass
class Signs(AdvantageEstimator):
    size: float = 1.0

    def estimate(self, groups, **fields):
        return self.size * (2.0 * (groups.value > 0) - 1.0)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A directory with a module of a name that no other test uses, and the directory in which estr is started."""
    name = "own_" + "".join(c if c.isalnum() else "_" for c in request.node.name)
    home, start = tmp_path / "home", tmp_path / "start"
    home.mkdir()
    start.mkdir()
    monkeypatch.chdir(start)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # and sys.path is put back afterwards
    (home / f"{name}.py").write_text(METHODS.replace("SUFFIX", name))
    before = estimators.table()
    yield name, home
    for entered in estimators.table().keys() - before.keys():
        del estimators._methods[entered]


def configured(home: Path, recipe: str, **more: Any) -> Path:
    objective = {"recipe": recipe, **more.pop("objective", {})}
    return write_config(home / "run.toml", objective=objective, **more)


def test_a_recipe_beside_the_configuration_is_trained_resumed_and_replayed(own, tmp_path, capsys, monkeypatch):
    name, home = own
    config = configured(home, f"{name}:small_move", run={"steps": 1}, objective={"small_move": {"limit": 0.25}})
    run = tmp_path / "run"
    outcome = estr(capsys, "train", config, "--output", run)
    assert outcome.status == 0, outcome.err
    stored = load_config(run / "config.toml", stored=True).config
    assert stored.objective.recipe == f"{name}:small_move"
    assert stored.objective.hyperparameters() == {"limit": 0.25, "denominator": "all"}
    assert stored.run.module_directories == [str(home)]
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("steps = 1", "steps = 2"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert estr(capsys, "resume", run).status == 0
    replayed = json.loads(estr(capsys, "replay", run, "--set", "objective.limit=0.0", "--json").out)
    assert replayed["replayed"]["hyperparameters"]["limit"] == 0.0
    assert replayed["own"]["recipe"] == "small_move"
    reference = f"{name}:small_move"
    inspected = json.loads(estr(capsys, "inspect", run, "--recipe", reference, "--json").out)
    assert reference in inspected["recipes"]
    assert reference not in json.loads(estr(capsys, "inspect", run, "--json").out)["recipes"]


def test_reading_a_run_imports_nothing(own, tmp_path, capsys):
    name, home = own
    config = configured(home, f"{name}:small_move", run={"steps": 0}, objective={"advantage": f"{name}:{name}_signs"})
    with RunDirectory.create(tmp_path / "run", load_config(config).config):
        pass
    (home / f"{name}.py").write_text("raise SystemExit('imported')")
    text = (tmp_path / "run" / "config.toml").read_text().replace(name, "gone_for_good")
    (tmp_path / "run" / "config.toml").write_text(text)
    read = RunDirectory.open(tmp_path / "run").config()
    assert read.objective.recipe == "gone_for_good:small_move"
    assert read.objective.advantage_options == {"size": 1.0}
    assert estr(capsys, "runs", tmp_path / "run").status == 0
    assert "'gone_for_good'" in estr(capsys, "resume", tmp_path / "run").complaint


@pytest.mark.parametrize("where", ["own", "shaping", "task"])
def test_nothing_in_a_run_directory_is_executed(own, tmp_path, capsys, monkeypatch, where):
    _, home = own
    run = tmp_path / "run"
    with RunDirectory.create(run, load_config(configured(home, "grpo")).config):
        pass
    (run / "evil_module.py").write_text("raise SystemExit('executed')")
    key = {"own": "recipe = ", "shaping": "advantage = ", "task": "name = "}[where]
    text = (run / "config.toml").read_text()
    lines = [f'{key}"evil_module:X"' if line.startswith(key) else line for line in text.splitlines()]
    lines = [f"module_directories = ['{run}']" if line.startswith("module_directories") else line for line in lines]
    (run / "config.toml").write_text("\n".join(lines))
    monkeypatch.chdir(run)
    for command in (["resume"], ["eval"], ["replay"], ["calibrate"]):
        outcome = estr(capsys, *command, run)
        assert outcome.status == 2
        assert "from which nothing is executed" in outcome.complaint


def test_a_recipe_where_estr_is_started_and_by_set(own, capsys):
    name, home = own
    (home / f"{name}.py").rename(Path(f"{name}.py"))
    config, notices = load_config(configured(home, "estr"), [f"objective.recipe={name}:small_move"])
    assert validate_config(config) == notices == []
    assert config.run.module_directories == [str(Path.cwd())]
    assert config.objective.hyperparameters() == {"limit": 0.1, "denominator": "all"}
    shown = estr(capsys, "recipes", f"{name}:small_move").out
    assert "Keeps tokens" in shown
    assert f'[objective] recipe = "{name}:small_move"' in shown
    assert "limit = 0.1" in shown


def test_hyperparameters_stand_flat_or_under_either_name(own):
    name, home = own
    reference = f"{name}:small_move"
    for table in ({"limit": 0.3}, {"small_move": {"limit": 0.3}}, {reference: {"limit": 0.3}}):
        config = load_config(configured(home, reference, objective=table)).config
        assert config.objective.hyperparameters()["limit"] == 0.3
    file = configured(home, "estr", objective={reference: {"limit": 0.3}})
    assert load_config(file, [f"objective.recipe={reference}"]).config.objective.hyperparameters()["limit"] == 0.3
    assert "limit" not in load_config(file).config.objective.hyperparameters()
    set_limit = [f"objective.recipe={reference}", "objective.small_move.limit=0.4"]
    assert load_config(file, set_limit).config.objective.hyperparameters()["limit"] == 0.4


def test_an_estimator_of_ones_own(own):
    name, home = own
    chosen = {"advantage": f"{name}:{name}_signs", "advantage_options": {"size": 2.0}}
    config = load_config(configured(home, "grpo", objective=chosen)).config
    assert config.objective.advantage_options == {"size": 2.0}
    assert validate_config(config) == []


def test_from_python(own, monkeypatch):
    name, home = own
    monkeypatch.syspath_prepend(str(home))
    assert objective(f"{name}:small_move", limit=0.5).hyperparameters["limit"] == 0.5
    assert find_recipe(f"{name}:SMALL_MOVE") is find_recipe(f"{name}:small_move")


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("MODULE:small_mov", ["line 5: objective.recipe: module 'MODULE' (", "defines no recipe 'small_mov'; did you"]),
        ("MODULEX:small_move", ["cannot import 'MODULEX'", "HOME", "START", "did you mean 'MODULE'?"]),
        ("MODULE:", ["'MODULE:' is not of the form module:name"]),
        (":small_move", ["is not of the form module:name"]),
        ("MODULE.py:small_move", ["cannot import 'MODULE.py'"]),
        ("MODULE:taken", ["has a hyperparameter 'kl_coef', which is a key of [objective] already"]),
        ("MODULE:bad", ["'MODULE:bad' raised KeyError: 'nothing'"]),
        ("broken_own_code:x", ["cannot import 'broken_own_code': ZeroDivisionError: division by zero"]),
        ("leaving_own_code:x", ["cannot import 'leaving_own_code': SystemExit"]),
    ],
)
def test_what_is_wrong_is_said(own, capsys, recipe, words):
    name, home = own
    (home / "broken_own_code.py").write_text("1 / 0")
    (home / "leaving_own_code.py").write_text("exit(3)")
    config = configured(home, recipe.replace("MODULE", name))
    lines = config.read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.startswith("recipe"))
    outcome = estr(capsys, "train", config, "--dry-run")
    assert outcome.status == 2
    for word in words:
        word = word.replace("line 5", f"line {number}").replace("HOME", str(home)).replace("START", str(Path.cwd()))
        assert word.replace("MODULE", name) in outcome.complaint
