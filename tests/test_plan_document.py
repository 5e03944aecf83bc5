"""The complete TOML files in docs/cluster.md load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from estr.config.load import load_config
from estr.config.validate import validate_config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cluster.md"
FILES = [text for text in re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL) if "[run]" in text]


@pytest.mark.parametrize("text", FILES, ids=range(len(FILES)))
def test_a_complete_file_is_a_configuration_without_complaints(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    loaded = load_config(path)
    assert [*loaded.notices, *validate_config(loaded.config)] == []


def test_files_for_one_eight_and_sixty_four_gpus_say_that_they_were_not_run() -> None:
    for gpus in ("1 GPU", "8 GPUs", "64 GPUs"):
        assert any(f"{gpus}. Not run here." in text for text in FILES)
