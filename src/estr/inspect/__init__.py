"""``estr inspect``: deconstructs the off-policy ratios of stored rollouts, ours or another trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from estr.inspect.decode import token_decoder
from estr.inspect.formats import parse_mapping
from estr.inspect.inspection import Inspection, inspect_dump
from estr.inspect.read import read_dump

__all__ = ["Inspection", "inspect_dump", "inspect_path", "read_dump"]


def inspect_path(
    source: Path,
    preset: str | None = None,
    mapping: Sequence[str] = (),
    tokenizer: Path | None = None,
    recipes: Sequence[str] = (),
) -> Inspection:
    """Read and analyze the rollouts at ``source`` (a run directory, Parquet or JSON lines).

    ``preset`` names another trainer's columns, ``mapping`` single ones ("ours=theirs"), ``tokenizer`` a tokenizer.json
    or a directory that holds one, ``recipes`` are recipes of the user's own as ``module:name``. Raises UsageError for
    what cannot be read.
    """
    decoder = token_decoder(source, tokenizer)
    return inspect_dump(read_dump(source, preset, dict(parse_mapping(mapping))), decoder, recipes)
