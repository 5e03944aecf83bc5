"""Token ids as text: the tokenizer of a run, or one that the user names; read as data, never executed."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from estr.errors import UsageError
from estr.inspect.inspection import Texts
from estr.report.decode import token_texts


def token_decoder(source: Path, tokenizer: Path | None = None) -> Texts | None:
    """How to turn ids into text; None where there is no tokenizer. ``tokenizer`` is a file or a model's directory.

    Raises UsageError where ``tokenizer`` is given and cannot be read.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    for path in [_named(tokenizer)] if tokenizer is not None else _of_run(source):
        try:
            loaded = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a file it cannot read
            if tokenizer is not None:
                raise UsageError(f"{path} is no tokenizer.json that can be read: {error}") from None
            continue
        return partial(_texts, loaded)
    return None


def _texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    return token_texts(ids, lambda part: str(tokenizer.decode(part, skip_special_tokens=False)))


def _named(path: Path) -> Path:
    inside = path / "tokenizer.json"
    if inside.is_file():
        return inside
    if not path.is_file():
        raise UsageError(f"{path} is neither a tokenizer.json nor a directory with one")
    return path


def _of_run(source: Path) -> Sequence[Path]:
    if not (source / "config.toml").is_file():
        return []
    places = sorted((source / "checkpoints").glob("step-*/tokenizer.json"), reverse=True)
    places += [source / "tokenizer.json", source / "tokenizer" / "tokenizer.json"]
    try:
        model = tomllib.loads((source / "config.toml").read_text(encoding="utf-8")).get("model", {}).get("path", "")
    except (OSError, ValueError, AttributeError):
        model = ""
    if isinstance(model, str) and model and not model.startswith("builtin:"):
        places.append(Path(model) / "tokenizer.json")
    return [place for place in places if place.is_file()]
