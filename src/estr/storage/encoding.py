"""JSON that stays JSON when a number is NaN, and text that every file format accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_FLOAT = "$float"
_NAMED_FLOAT = f'"{_FLOAT}"'


def plain(value: Any) -> Any:
    """``value`` as plain JSON types: tuples become lists, NumPy and torch scalars become numbers.

    A non-finite float becomes ``{"$float": "nan"}`` (or ``inf``, ``-inf``), which ``restore`` turns back.

    Raises:
        TypeError: something that JSON cannot hold; it is never pickled instead.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, dict):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return plain(value.item())
    raise TypeError(f"a {type(value).__name__} cannot be stored as JSON")


def _key(key: Any) -> str:
    if not isinstance(key, str) or key == _FLOAT:
        raise TypeError(f"a key of stored JSON must be a string other than {_FLOAT!r}, got {key!r}")
    return key


def restore(value: Any) -> Any:
    """The inverse of ``plain`` (lists stay lists). Raises ValueError for what ``plain`` does not write."""
    if isinstance(value, dict):
        if set(value) == {_FLOAT}:
            return float(str(value[_FLOAT]))
        return {key: restore(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restore(item) for item in value]
    return value


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON of ``plain(value)``, keys in a stable order."""
    return json.dumps(plain(value), sort_keys=True, allow_nan=False, indent=indent)


def quick_dumps(value: Mapping[str, Any]) -> str:
    """Strict JSON of ``plain(value)``, keys in the order they have; for what is written thousands of times a minute."""
    try:
        text = _ENCODER.encode(value)
    except ValueError:  # a number that is not finite
        return _ENCODER.encode(plain(value))
    return text if _NAMED_FLOAT not in text else _ENCODER.encode(plain(value))


def loads(text: str | bytes) -> Any:
    """What ``dumps`` wrote.

    Raises:
        ValueError: malformed JSON.
    """
    try:
        return restore(json.loads(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def clean_text(text: str) -> str:
    """``text`` with lone surrogates replaced, so that it can be written as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


_ENCODER = json.JSONEncoder(allow_nan=False, default=plain)
