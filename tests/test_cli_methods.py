"""``estr recipes`` over all families, and the page of methods generated from the same tables."""

import re
from pathlib import Path

import pytest

from estr.cli import document
from estr.cli.catalogue import catalogue, find, names
from estr.config import RolloutConfig
from estr.config.load import load_config
from estr.config.methods import families
from estr.config.validate import validate_config
from estr.engines.samplers import samplers
from estr.objectives import recipes
from loop_helpers import estr

METHODS = Path(__file__).parent.parent / "docs" / "methods.md"


@pytest.mark.parametrize("name", document.pages())
def test_the_generated_pages_are_up_to_date(name):
    assert (METHODS.parent / name).read_text(encoding="utf-8") == document.pages()[name], (
        f"docs/{name} is out of date; run: python -m estr.cli.document"
    )


def test_the_configuration_on_the_page_is_valid_and_silent(tmp_path):
    (block,) = re.findall(r"```toml\n(.*?)```", METHODS.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "page.toml"
    path.write_text(block)
    config, notices = load_config(path)
    assert notices + validate_config(config) == []


def test_check_and_write(tmp_path, capsys):
    assert document.main([str(tmp_path), "--check"]) == 1
    assert capsys.readouterr().err.count("out of date") == 2
    assert document.main([str(tmp_path)]) == 0
    assert document.main([str(tmp_path), "--check"]) == 0
    (tmp_path / "configuration.md").write_text("old")
    assert document.main([str(tmp_path), "--check"]) == 1


def test_the_catalogue_holds_every_table():
    listed = {family.title: {entry.name for entry in family.entries} for family in catalogue()}
    assert listed.pop("Objectives") == set(recipes())
    assert listed.pop("Samplers") == set(samplers.table())
    assert listed.pop("Diagnostics") == {"entropy_law"}
    assert sorted(map(sorted, listed.values())) == sorted(sorted(family.table()) for family in families())


@pytest.mark.parametrize("entry", [e for family in catalogue() for e in family.entries], ids=lambda e: e.name)
def test_every_method_is_placed_and_described(entry):
    assert entry.places
    for place in entry.places:
        assert place.operator
        assert place.scope in {"token", "segment", "sequence", "group", "batch", "step", "run"}
        assert set(place.edge) <= set("BUE")
    assert all((entry.description, entry.formula, entry.source, entry.confidence, entry.choose))
    assert "\n" not in entry.description
    section = document.render().split(f"### {entry.name}\n")
    assert any(entry.source in part and all(f"`{name}`" in part for name in entry.hyperparameters) for part in section)


def test_only_readings_are_called_so():
    """Methods that are known from an abstract alone."""
    found = {name for name in names() if any(e.confidence == "reading of the abstract" for e in find(name))}
    assert found == {"etr", "gac", "aer", "papo", "rq"}


def test_options_of_samplers_are_keys_of_the_rollout_section():
    for name in samplers.table():
        (entry,) = find(name)
        assert set(entry.hyperparameters) <= set(RolloutConfig.model_fields)


def test_recipes_prints_all_families(capsys):
    outcome = estr(capsys, "recipes")
    assert outcome.status == 0
    for name in names():
        assert name in outcome.out
    for title in ("advantages", "re-weightings", "step controllers", "samplers"):
        assert title in outcome.out


def test_one_recipe_in_full(capsys):
    out = estr(capsys, "recipes", "icepop").out
    for text in ("1[low ≤ B ≤ high]", "B (q/μ), U (π/q)", "gate B token", "2510.18855", "framework code", "low = 0.5"):
        assert text in out
    out = estr(capsys, "recipes", "gac").out
    for text in ("gac (step controller)", "edge        none", "gradient step", "reading of the abstract", "low = 0.2"):
        assert text in out


def test_a_name_of_two_families_shows_both(capsys):
    out = estr(capsys, "recipes", "grpo").out
    assert "grpo (objective)" in out
    assert "grpo (advantage)" in out


def test_an_unknown_name_is_refused_with_the_nearest(capsys):
    outcome = estr(capsys, "recipes", "stair")
    assert outcome.status == 2
    assert "did you mean 'stare'?" in outcome.complaint
