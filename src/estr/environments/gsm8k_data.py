"""Rows of GSM8K (Cobbe et al., arXiv 2110.14168): reading, checking, and turning annotations into tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from estr.environments import tool_call
from estr.environments.arithmetic import CalculatorError, evaluate, format_number
from estr.environments.base import Message
from estr.environments.episode import opening
from estr.environments.verify import extract_answer
from estr.errors import MissingExtraError, UsageError

HUB_NAME = "openai/gsm8k"
HUB_FILES = {"train": "main/train-00000-of-00001.parquet", "test": "main/test-00000-of-00001.parquet"}
_ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>]*)>>")


@dataclass(frozen=True)
class Row:
    """A problem with its worked solution; ``number`` is the final answer, ``line`` counts from 1."""

    question: str
    answer: str
    number: Fraction
    line: int


@dataclass(frozen=True)
class Agreement:
    """How the calculator's results compare with those that a file's annotations state."""

    equal: int = 0
    different: int = 0  # the calculator has another value, which is used
    refused: int = 0  # the calculator has none; such an annotation makes no call


def read_jsonl(path: str | Path) -> list[Row]:
    """The rows of a file with one JSON object a line (``question``, ``answer`` that ends in ``#### n``).

    Raises `UsageError` naming file and line; blank lines are skipped.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            return list(_parse(path, enumerate(file, start=1)))
    except OSError as error:
        raise UsageError(f"cannot read task.path {str(path)!r}: {error.strerror or error}") from None


def read_hub(split: str) -> list[Row]:
    """The rows of a split ("train" | "test") from the Hugging Face hub or its cache on this machine.

    Raises `UsageError` where the hub cannot be reached, `MissingExtraError` without huggingface_hub or pyarrow.
    """
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise MissingExtraError("huggingface_hub", "train") from None
    try:
        path = hf_hub_download(HUB_NAME, HUB_FILES[split], repo_type="dataset")
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"cannot get {HUB_NAME} from the Hugging Face hub ({reason}); set task.path to a local JSONL file"
        ) from None
    return read_parquet(path)


def read_parquet(path: str | Path) -> list[Row]:
    """The rows of a Parquet file with text columns ``question`` and ``answer``; errors as in `read_jsonl`."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "train") from None
    try:
        table = pyarrow.parquet.read_table(path, columns=["question", "answer"])
        table.validate(full=True)
        objects = table.to_pylist()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {str(path)!r}: {str(error).splitlines()[0]}") from None
    return [_row(path, line, value) for line, value in enumerate(objects, start=1)]


def _parse(path: str | Path, lines: Iterable[tuple[int, bytes]]) -> Iterator[Row]:
    for line, raw in lines:
        if not raw.strip():
            continue
        try:
            value = json.loads(raw.decode("utf-8-sig" if line == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, line {line}: not a JSON object in UTF-8 ({error})") from None
        yield _row(path, line, value)


def _row(path: str | Path, line: int, value: Any) -> Row:
    if not isinstance(value, dict):
        raise UsageError(f"{path}, line {line}: expected a JSON object with 'question' and 'answer'")
    for field in ("question", "answer"):
        if not isinstance(value.get(field), str) or not value[field].strip():
            raise UsageError(f"{path}, line {line}: the field {field!r} is missing or not a text")
    number = extract_answer(value["answer"])
    if number is None:
        raise UsageError(f"{path}, line {line}: 'answer' does not end in a line '#### number'")
    return Row(value["question"].strip(), value["answer"].strip(), number, line)


def conversation(row: Row, instructions: str = "") -> list[Message]:
    """The worked solution as a conversation: each annotation ``<<48/2=24>>`` becomes a turn and a tool reply.

    An assistant turn is the text up to and with ``<calc>48/2</calc>``; the tool replies with the calculator's value,
    whatever the annotation states; the text goes on in the next turn. The last turn ends in ``#### n``. An
    annotation whose expression the calculator refuses is cut out and makes no call.
    """
    messages = opening(row.question, instructions)
    turn, position = "", 0
    for match in _ANNOTATION.finditer(row.answer):
        turn += row.answer[position : match.start()]
        position = match.end()
        result = _calculated(match)
        if result is None:
            continue
        call = f"{tool_call.OPEN}{match[1].strip()}{tool_call.CLOSE}"
        messages.append({"role": "assistant", "content": turn + call})
        messages.append({"role": "tool", "content": format_number(result)})
        turn = ""
    messages.append({"role": "assistant", "content": turn + row.answer[position:]})
    return messages


def agreement(rows: Iterable[Row]) -> Agreement:
    """Count the annotations whose stated result is the calculator's, is another one, or has none."""
    equal = different = refused = 0
    for row in rows:
        for match in _ANNOTATION.finditer(row.answer):
            result = _calculated(match)
            if result is None:
                refused += 1
            elif extract_answer(f"#### {match[2]}") == result:
                equal += 1
            else:
                different += 1
    return Agreement(equal, different, refused)


def _calculated(match: re.Match[str]) -> Fraction | None:
    try:
        return evaluate(match[1])
    except CalculatorError:
        return None
