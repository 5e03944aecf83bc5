"""Reading TOML, with the line where a key stands, and reading ``--set section.key=value``."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from estr.errors import UsageError

_HEADER = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_DIGITS = re.compile(r"[\d_]{4301}")
_BARE = re.compile(r"[A-Za-z0-9_-]{1,80}")


def read_toml(path: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """A TOML file's content and its text.

    Raises:
        UsageError: it cannot be read, or is not TOML (the line is named).
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"the configuration {name} does not exist") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read the configuration {name}: {cause}") from None
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name} is not valid TOML: {_lower_first(str(error))}") from None
    except RecursionError:
        raise UsageError(f"{name} is not valid TOML: it is nested too deeply") from None
    except ValueError:  # Python reads no longer ones
        raise UsageError(f"{name} holds a whole number of more than 4300 digits{_line_of_digits(text)}") from None


def _line_of_digits(text: str) -> str:
    lines = (number for number, line in enumerate(text.splitlines(), 1) if _DIGITS.search(line))
    return next((f" on line {number}" for number in lines), "")


def line_of(text: str, keys: tuple[str, ...]) -> int | None:
    """The 1-based line on which the key or table ``keys`` is written, where it is written in the usual way."""
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.match(line)
        if header:
            table = tuple(_split(header[1]))
            if table == keys:
                return number
        elif "=" in line and (*table, *_split(line.split("=", 1)[0])) == keys:
            return number
    return None


def parse_set(argument: str, text_key: bool = False) -> tuple[tuple[str, ...], Any]:
    """``section.key=value`` as its keys and value; the value is TOML, or else (a bare word) a string.

    Args:
        text_key: take the value as it stands, for keys that hold text.
    """
    left, equals, right = argument.partition("=")
    keys = tuple(part.strip() for part in left.split("."))
    if not equals or len(keys) < 2 or not all(_BARE.fullmatch(key) for key in keys):
        raise UsageError(f"--set {shown(argument)!r} must have the form section.key=value, as in --set run.steps=20")
    return keys, _value(right.strip(), text_key)


def shown(argument: str) -> str:
    """An argument as it is repeated in an error: one line, and not a long one."""
    line = argument if argument.isprintable() else repr(argument)
    return line if len(line) <= 80 else line[:79] + "…"


def _value(text: str, as_text: bool) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    if set(parsed) != {"value"} or (as_text and not isinstance(parsed["value"], str)):
        return text
    return parsed["value"]


def _split(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
