"""The instructions for a new method work."""

import re
import sys
from pathlib import Path

import pytest

from estr.config.load import load_config
from estr.config.validate import validate_config

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "add-a-method.md").read_text(encoding="utf-8")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The page's module beside the page's configuration."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) < 25
    (tmp_path / "my_methods.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield block
    sys.modules.pop("my_methods", None)


def test_adding_a_method_as_the_page_says(module):
    entered = {}
    exec(compile(module, "docs/add-a-method.md", "exec"), entered)
    entered["test_small_move"]()


def test_the_configuration_of_the_page(module, tmp_path):
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_run.toml").write_text(block)
    config, notices = load_config(tmp_path / "my_run.toml")
    assert notices + validate_config(config) == []
    assert config.objective.hyperparameters()["limit"] == 0.2
    (sets,) = re.findall(r"quickstart.toml (--set .*)", PAGE)
    by_set = load_config(DOCS.parent / "examples" / "quickstart.toml", sets.replace("--set ", "").split()).config
    assert by_set.objective.hyperparameters()["limit"] == 0.2
