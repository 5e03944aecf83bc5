"""Token ids as text: the run's own tokenizer, read as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from estr.report.data import Run

Decode = Callable[[list[int]], str]

_INVISIBLE = (*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF)
CONTROLS: dict[int, int | str] = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
CONTROLS |= {0x7F: 0x2421} | {code: f"‹U+{code:04X}›" for code in _INVISIBLE}
"""Control and invisible characters become visible, so that no text hides or reorders what stands beside it."""


def load_decoder(run: Run) -> Decode | None:
    """The tokenizer saved with the newest checkpoint or at ``model.path``, read as data; None where there is none."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    for path in _tokenizer_files(run):
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception:  # the library raises bare Exception for a file it cannot read
            continue
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
    return None


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text each token adds; a character that several tokens share belongs to the last of them."""
    texts: list[str] = []
    prefix = read = 0
    for end in range(1, len(ids) + 1):
        before, now = decode(list(ids[prefix:read])), decode(list(ids[prefix:end]))
        whole = not now.endswith("\ufffd") or end == len(ids) or end - read >= 8
        texts.append(now[len(before) :] if whole else "")
        if whole:
            prefix, read = read, end
    return [text.translate(CONTROLS) for text in texts]


def _tokenizer_files(run: Run) -> list[Path]:
    checkpoints = sorted((run.path / "checkpoints").glob("step-*/tokenizer.json"), reverse=True)
    model = str(run.setting("model", "path", "") or "")
    places = [*checkpoints, run.path / "tokenizer.json", run.path / "tokenizer" / "tokenizer.json"]
    if model and not model.startswith("builtin:"):
        places.append(Path(model) / "tokenizer.json")
    return [place for place in places if place.is_file()]
