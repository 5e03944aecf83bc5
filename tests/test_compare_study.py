"""The study file: sections, grids, sweeps, what is refused; a whole study with a trainer that follows a script."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from estr.cli import comparing
from estr.cli.main import main
from estr.compare.driver import Driver
from estr.compare.plan import Cell, Plan, baseline_of, entries_of, points_of, slug
from estr.compare.study import read_study, set_argument, without_section
from estr.compare.tuning import candidates, tuning_seeds
from estr.errors import UsageError
from estr.objectives.objective import RECIPES
from test_compare_driver import scripted

BASE = '[run]\nsteps = 4\n[schedule]\nmode = "lockstep"\n'


@pytest.fixture(scope="module", autouse=True)
def table_of_recipes() -> Iterator[None]:
    """Studies with methods of their own add them to the table of this process, where other tests must not find them."""
    before = dict(RECIPES)
    yield
    RECIPES.clear()
    RECIPES.update(before)


def write(folder: Path, compare: str, base: str = BASE) -> Path:
    path = folder / "study.toml"
    path.write_text(base + compare)
    return path


def refused(folder: Path, compare: str, base: str = BASE) -> str:
    with pytest.raises(UsageError) as caught:
        plan_all(write(folder, compare, base))
    return str(caught.value)


def plan_all(path: Path) -> list[Cell]:
    study = read_study(path)
    return Plan(study).cells(entries_of(study), points_of(study), study.section.seeds)


def test_an_ordinary_configuration_is_a_study_of_five_recipes_and_five_seeds(tmp_path: Path) -> None:
    study = read_study(write(tmp_path, ""))
    assert [entry.label for entry in entries_of(study)] == ["grpo", "estr", "icepop", "kpop", "tis"]
    assert study.section.seeds == [0, 1, 2, 3, 4]
    assert baseline_of(study, entries_of(study)).label == "grpo"


def test_recipes_and_seeds_of_the_command_line_replace_those_of_the_file(tmp_path: Path) -> None:
    study = read_study(write(tmp_path, '[compare]\nrecipes = ["grpo"]\n'), ["estr", "tis"], [7])
    assert [entry.recipe for entry in entries_of(study)] == ["estr", "tis"]
    assert study.section.seeds == [7]


def test_lists_of_a_variant_are_a_grid(tmp_path: Path) -> None:
    text = """[compare.variants.wide]
recipe = "estr"
tau = [0.5, 1.0]
eps = 0.02
set.learner.learning_rate = [1e-4, 2e-4]
"""
    entries = entries_of(read_study(write(tmp_path, text)))
    assert [entry.label for entry in entries] == [
        f"wide tau={tau} learning_rate={rate}" for tau in ("0.5", "1") for rate in ("0.0001", "0.0002")
    ]
    assert dict(entries[1].settings) == {
        "objective.recipe": "estr",
        "objective.eps": 0.02,
        "objective.tau": 0.5,
        "learner.learning_rate": 2e-4,
    }


def test_a_list_that_a_setting_is_made_of_is_no_grid(tmp_path: Path) -> None:
    text = '[compare.variants.grpo]\nset.learner.controllers = ["vcpo"]\n'
    assert len(entries_of(read_study(write(tmp_path, text)))) == 1


def test_configurations_of_cells_follow_point_variant_and_seed(tmp_path: Path) -> None:
    text = """[compare]
recipes = ["estr", "sync"]
seeds = [3]
set.run.eval_every = 2
[compare.variants.estr]
tau = 0.25
[compare.variants.sync]
recipe = "grpo"
set.schedule.inter = 0
[compare.sweep]
schedule.inter = [0, 8]
"""
    study = read_study(write(tmp_path, text), sets=["learner.learning_rate=0.5"])
    plan = Plan(study)
    cells = plan.cells(entries_of(study), points_of(study), study.section.seeds)
    names = [cell.run.name for cell in cells]
    assert names == ["estr@schedule.inter=0-s3", "sync@schedule.inter=0-s3", "estr@schedule.inter=8-s3", names[1]]
    config = cells[2].run.config
    assert (config.schedule.inter, config.objective.hyperparameters()["tau"], config.run.seed) == (8, 0.25, 3)
    assert (config.run.eval_every, config.learner.learning_rate, config.runtime.learner_threads) == (2, 0.5, 1)
    assert cells[1].run is cells[3].run  # its own staleness is not swept, so it is one run


def test_points_of_an_axis_may_be_sets_of_settings(tmp_path: Path) -> None:
    values = '{label = "short", value = 1, task.levels = [1]}, {label = "long", task.levels = [3]}'
    text = f"[compare.sweep]\nlength = [{values}]\n"
    points = points_of(read_study(write(tmp_path, text)))
    assert [(point.axis, point.label, point.value) for point in points] == [
        ("length", "short", 1.0),
        ("length", "long", None),
    ]
    assert points[0].settings == {"task.levels": [1]}


@pytest.mark.parametrize(
    ("compare", "words"),
    [
        ('[compare]\nrecipe = ["grpo"]\n', "did you mean 'recipes'"),
        ("[compare.tune]\nbudgt = 2\n", "did you mean 'budget'"),
        ('[compare]\nrecipes = ["grpoo"]\n', "did you mean 'grpo'"),
        ("[compare]\nseeds = []\n", "at least one seed"),
        ("[compare]\nseeds = [1, 1]\n", "twice"),
        ("[compare]\nseeds = [1]\ntune.seeds = [1]\n", "must not share seeds"),
        ('[compare]\nbaseline = "ester"\n', "did you mean 'estr'"),
        ("[compare]\nset.shedule.inter = 3\n", "did you mean 'schedule'"),
        ("[compare]\nset.schedule.intr = 3\n", "did you mean 'intra'"),
        ("[compare]\nset.run.seed = 3\n", "compare.seeds"),
        ("[compare.variants.estr]\ntaus = 3\n", "did you mean 'tau'"),
        ("[compare.sweep]\nschedule.inter = 4\n", "must be a list"),
        ("[compare.sweep]\nx = [{schedule.inter = 3}]\n", "label"),
        ("compare = 3\n", "must be a section"),
        ('[compare]\nconfig = "other.toml"\n', "belongs there"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, compare: str, words: str) -> None:
    base = "" if compare.startswith("compare =") else BASE
    told = refused(tmp_path, compare, base)
    assert words in told
    assert "study.toml" in told


def test_a_wrong_key_of_the_configuration_is_named_with_its_line(tmp_path: Path) -> None:
    told = refused(tmp_path, "", "[compare]\nseeds = [0]\n[run]\nstps = 3\n")
    assert re.search(r"study\.toml, line 4: run\.stps .*did you mean 'steps'", told)
    assert "estr-compare-" not in told


def test_the_configuration_may_stand_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(BASE)
    study = read_study(write(tmp_path, '[compare]\nconfig = "base.toml"\nset.run.steps = 9\n', ""))
    assert Plan(study).config(entries_of(study)[0], 0).run.steps == 9


def test_blanking_keeps_lines_and_dotted_tables_are_written_anew() -> None:
    text = "[run]\nsteps = 1\n[compare.sweep]\nx = [1]\n[schedule]\ninter = 2\n"
    assert (
        without_section(text, {"run": {"steps": 1}, "compare": {}, "schedule": {"inter": 2}}).splitlines()[4]
        == "[schedule]"
    )
    assert without_section("compare = {seeds = [1]}\n[run]\nsteps = 1\n", {"run": {"steps": 1}}) == "[run]\nsteps = 1\n"


def test_settings_as_arguments_and_names_as_directories() -> None:
    assert set_argument("rollout.dtype", "int8") == 'rollout.dtype="int8"'
    assert set_argument("task.levels", [1, 2]) == "task.levels=[ 1, 2, ]"
    assert set_argument("x.y", 1e-5) == "x.y=1e-05"
    assert slug("verl/seq tau=0.5 ../x") == "verl-seq-tau=0.5-..-x"


def test_recipes_of_the_users_own_lie_beside_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    (tmp_path / "own_for_compare.py").write_text(
        "from estr.objectives import Composition, Recipe, register, surrogates\n"
        "register(Recipe(name='plain', description='d', formula='f', source='s', confidence='c', parameters={},\n"
        "    compose=lambda h: Composition(surrogates.ppo('E', 0.2, 0.2))))\n"
    )
    study = read_study(write(tmp_path, '[compare]\nrecipes = ["grpo", "own_for_compare:plain"]\nseeds = [0]\n'))
    cells = Plan(study).cells(entries_of(study), points_of(study), [0])
    assert cells[1].run.config.objective.recipe == "own_for_compare:plain"
    assert cells[1].run.name == "own_for_compare-plain-s0"


def test_tuning_gives_each_grid_its_budget_on_seeds_of_its_own(tmp_path: Path) -> None:
    text = "[compare]\nseeds = [0, 1000]\n[compare.tune]\nseeds = [5]\n[compare.variants.estr]\ntau = [1, 2, 3, 4, 5]\n"
    study = read_study(write(tmp_path, text))
    assert tuning_seeds(study, 3) == [5, 1001, 1002]
    assert [entry.choice["objective.tau"] for entry in candidates(entries_of(study), 3)] == [1, 3, 5]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparing, "Driver", partial(Driver, command=scripted(tmp_path)))
    return tmp_path


def test_a_whole_study_by_hand(command: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(command, '[compare]\nrecipes = ["grpo", "icepop", "reinforce"]\nseeds = [0, 1, 2]\n')
    assert main(["compare", "study.toml", "--output", "out"]) == 0
    told = capsys.readouterr().out
    assert "0.510 ± 0.025" in told  # rewards .50, .51, .52
    result = json.loads((command / "out" / "compare.json").read_text())
    grpo, icepop, reinforce = result["rows"]
    assert grpo["measures"]["final"]["mean"] == pytest.approx(0.51)
    assert grpo["measures"]["auc"]["mean"] == pytest.approx((0.35 + 0.50 + 0.36 + 0.52) / 4 - 0.0025, abs=0.01)
    assert grpo["measures"]["masked_fraction"]["mean"] == pytest.approx(0.1 * (1 + 4 + 9 + 16) / 10)  # by tokens
    assert grpo["measures"]["collapsed"]["mean"] == 0
    assert grpo["differences"] == {}
    assert icepop["differences"]["final"]["mean"] == pytest.approx(0.2)
    assert icepop["differences"]["final"]["decided"]
    assert reinforce["differences"]["final"]["count"] == 3
    page = (command / "out" / "compare.html").read_text()
    assert "icepop" in page
    assert "<svg" in page
    assert not re.search(r"(?:src|href)=\"http", page)
    assert (command / "out" / "study.toml").read_text() == (command / "study.toml").read_text()


def test_a_sweep_shows_where_one_collapses(command: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        command, '[compare]\nrecipes = ["grpo", "icepop"]\nseeds = [0, 1]\n[compare.sweep]\nschedule.inter = [0, 8]\n'
    )
    assert main(["compare", "study.toml", "--output", "out", "--json"]) == 0
    rows = {(row["entry"], row["point"]): row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["grpo", "8"]["measures"]["collapsed"]["mean"] == 1
    assert rows["grpo", "8"]["runs"][0]["collapse_step"] == 4
    assert rows["grpo", "0"]["measures"]["collapsed"]["mean"] == 0
    assert rows["icepop", "8"]["differences"]["final"]["mean"] == pytest.approx(0.7 - 0.08 + 0.005 - 0.1)
    page = (command / "out" / "compare.html").read_text()
    assert "Stress: schedule.inter" in page
    assert "Collapsed: grpo 2 of 2." in page


def test_tuning_reports_the_best_of_the_grid_on_other_seeds(command: Path) -> None:
    write(
        command,
        '[compare]\nseeds = [0, 1]\nrecipes = ["grpo", "estr"]\n[compare.variants.estr]\ntau = [0.5, 2.0, 1.0]\n',
    )
    assert main(["compare", "study.toml", "--output", "out", "--tune"]) == 0
    result = json.loads((command / "out" / "compare.json").read_text())
    assert [entry["label"] for entry in result["entries"]] == ["grpo", "estr"]
    assert result["entries"][1]["settings"]["objective.tau"] == 2.0
    names = sorted(path.name for path in (command / "out" / "runs").iterdir())
    assert len([name for name in names if name.startswith("tune-")]) == 6  # the budget: three candidates, two seeds
    assert [name for name in names if not name.startswith("tune-")] == ["estr-s0", "estr-s1", "grpo-s0", "grpo-s1"]
    assert "Tuned by area under the curve" in " ".join(result["notes"])


def test_failed_runs_are_left_out_and_named(command: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        command,
        '[compare]\nseeds = [0, 1]\nrecipes = ["grpo", "estr"]\n[compare.variants.estr]\nset.run.keep_rollouts = 4\n',
    )
    assert main(["compare", "study.toml", "--output", "out"]) == 1
    told = capsys.readouterr()
    assert "failed: estr-s0: estr: nothing can begin" in told.out
    assert "2 of 4 runs failed" in told.err
    result = json.loads((command / "out" / "compare.json").read_text())
    assert [failed["run"] for failed in result["failed"]] == ["estr-s0", "estr-s1"]
    assert result["rows"][1]["measures"] == {}


def test_a_diverged_run_counts_as_collapsed(command: Path) -> None:
    write(
        command,
        '[compare]\nseeds = [0, 1]\nrecipes = ["grpo", "estr"]\n[compare.variants.estr]\nset.run.keep_rollouts = 2\n',
    )
    assert main(["compare", "study.toml", "--output", "out"]) == 0
    rows = json.loads((command / "out" / "compare.json").read_text())["rows"]
    assert rows[1]["measures"]["collapsed"]["mean"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--match", "masked"], "can match masked_fraction"),
        (["--match", "masked_fraction", "--tune"], "use one of them"),
        (["--match", "masked_fraction", "--recipes", "grpo,tis"], "none of the recipes has a threshold"),
        (["--match", "masked_fraction", "--recipes", "kpop,tis"], "compare.match.reference is 'estr'"),
        (["--seeds", "0,a"], "whole numbers"),
        (["--recipes", "grpoo"], "did you mean 'grpo'"),
    ],
)
def test_what_the_command_refuses(
    command: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    write(command, "")
    assert main(["compare", "study.toml", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (command / "calls").exists()


def test_a_dry_run_names_the_runs(command: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(command, "")
    assert main(["compare", "study.toml", "--recipes", "estr,tis", "--seeds", "0", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == ["estr-s0", "tis-s0", "2 runs, 8 optimizer steps together"]
    assert not (command / "runs").exists()


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parent.parent.glob("benchmarks/study/*.toml")), ids=lambda p: p.name
)
def test_the_studies_of_the_benchmarks_are_valid(path: Path) -> None:
    study = read_study(path)
    cells = Plan(study).cells(entries_of(study), points_of(study), study.section.seeds)
    assert len(study.section.seeds) >= 5
    assert all(cell.run.config.schedule.mode == "lockstep" for cell in cells)
