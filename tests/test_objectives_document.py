"""The generated page of methods is up to date, and the instructions for a new method work."""

import re
from pathlib import Path

from estr import recipes
from estr.objectives import document
from estr.objectives.table import RECIPES

DOCS = Path(__file__).parent.parent / "docs"


def test_methods_page_is_up_to_date():
    assert (DOCS / "methods.md").read_text(encoding="utf-8") == document.render(), (
        "docs/methods.md is out of date; run: python -m estr.objectives.document"
    )


def test_methods_page_names_every_recipe_and_hyperparameter():
    page = document.render()
    for name, recipe in recipes().items():
        section = page.split(f"### {name}\n", 1)[1].split("\n### ", 1)[0]
        assert recipe.source in section
        assert all(f"`{parameter}`" in section for parameter in recipe.hyperparameters)


def test_check_and_write(tmp_path, capsys):
    path = tmp_path / "methods.md"
    assert document.main([str(path), "--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert document.main([str(path)]) == 0
    assert document.main([str(path), "--check"]) == 0
    path.write_text("old")
    assert document.main([str(path), "--check"]) == 1


def test_adding_a_method_as_the_page_says():
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "add-a-method.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) < 25
    before = set(RECIPES)
    try:
        exec(compile(block, "docs/add-a-method.md", "exec"), {})
        assert set(RECIPES) - before == {"small_move"}
    finally:
        for name in set(RECIPES) - before:
            del RECIPES[name]
