"""The instructions for a new method work."""

import re
from pathlib import Path

from estr.objectives.table import RECIPES

DOCS = Path(__file__).parent.parent / "docs"


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
