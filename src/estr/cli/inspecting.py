"""``estr inspect``."""

from __future__ import annotations

import json
from pathlib import Path

from estr.errors import UsageError
from estr.inspect import inspect_path
from estr.inspect.summary import summary_lines
from estr.objectives import find_recipe
from estr.own_code import is_own


def inspect(
    source: str,
    *,
    as_json: bool,
    html: str | None,
    preset: str | None,
    mapping: list[str],
    tokenizer: str | None,
    recipes: list[str],
) -> None:
    """Deconstruct the ratios of stored rollouts: JSON, an HTML page, or lines for a terminal."""
    own = _own_recipes(recipes)
    inspection = inspect_path(Path(source), preset, mapping, Path(tokenizer) if tokenizer else None, own)
    if html is not None:
        from estr.inspect.page import write_page

        written = write_page(inspection, Path(html))
        if not as_json:
            print(written)
    if as_json:
        print(json.dumps(inspection.to_json(), allow_nan=False))
    elif html is None:
        for line in summary_lines(inspection):
            print(line)


def _own_recipes(names: list[str]) -> list[str]:
    """Those of ``names`` that are not in the table anyway; raises UsageError for one that there is not."""
    for name in names:
        try:
            find_recipe(name)
        except ValueError as error:
            raise UsageError(f"--recipe: {error}") from error
    return [name for name in dict.fromkeys(names) if is_own(name)]
