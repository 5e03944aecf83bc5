"""The verifier: the number after the last ``####`` of a text, compared exactly (rationals, never floats)."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

MAX_CHARACTERS = 10_000
"""Only the end of a longer text is read."""
MAX_DIGITS = 60

_NUMBER = (
    r"(?P<sign>[-−+]?)[ \t]*\$?[ \t]*(?P<inner>[-−]?)"
    r"(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<rest>(?:(?!####)[^\n])*)"
)
_ANSWER = re.compile(r"####[ \t]*" + _NUMBER)
_DIGIT = re.compile(r"\d")


def extract_answer(text: str) -> Fraction | None:
    """The number after the last ``####`` that a number follows, or None.

    Thousands separators, a dollar sign, a percent sign (which does not scale), a period at the end, a Unicode minus
    and words behind the number are tolerated. A second number on the line (``#### 24 or 25``, ``#### 24/2``) is no
    answer. Work is bounded: only the last 10,000 characters are read, and a number of over 60 digits is no answer.
    """
    answer = None
    for match in _ANSWER.finditer(text[-MAX_CHARACTERS:]):
        answer = _value(match)
    return answer


def _value(match: re.Match[str]) -> Fraction | None:
    digits = match["number"].replace(",", "")
    if len(digits) > MAX_DIGITS or (match["sign"] and match["inner"]) or _DIGIT.search(match["rest"]):
        return None
    value = Fraction(digits)
    return -value if match["sign"] in ("-", "−") or match["inner"] else value


def as_number(answer: Any) -> Fraction | None:
    """A reference answer (int, Fraction, float or text such as ``"1,200"``) as an exact number, or None."""
    if isinstance(answer, str):
        return extract_answer(f"#### {answer}")
    if isinstance(answer, float):
        return Fraction(repr(answer)) if math.isfinite(answer) else None
    if isinstance(answer, int | Fraction) and not isinstance(answer, bool):
        return Fraction(answer)
    return None


def is_correct(text: str, answer: Any) -> bool:
    """Whether the final answer in ``text`` equals ``answer`` exactly; 24.0 equals 24."""
    given, wanted = extract_answer(text), as_number(answer)
    return given is not None and given == wanted
