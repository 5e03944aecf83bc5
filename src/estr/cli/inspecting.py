"""``estr inspect``."""

from __future__ import annotations

import json
from pathlib import Path

from estr.inspect import inspect_path
from estr.inspect.summary import summary_lines


def inspect(
    source: str,
    *,
    as_json: bool,
    html: str | None,
    preset: str | None,
    mapping: list[str],
    tokenizer: str | None,
) -> None:
    """Deconstruct the ratios of stored rollouts: JSON, an HTML page, or lines for a terminal."""
    inspection = inspect_path(Path(source), preset, mapping, Path(tokenizer) if tokenizer else None)
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
