"""A calculator with a parser of its own: exact rationals, bounded work on any input, nothing of Python evaluated.

Grammar (white space between tokens is ignored; ``×``, ``÷``, ``−`` stand for ``*``, ``/``, ``-``)::

    sum     = product { ("+" | "-") product }
    product = sign { ("*" | "/") sign }
    sign    = ("-" | "+") sign | power
    power   = percent [ ("**" | "^") sign ]         right-associative; -2^2 is -4
    percent = atom { "%" }                          50% is 1/2
    atom    = number | "(" sum ")"
    number  = digits with optional thousands separators (1,200) and decimals (0.5, .5, 5.)
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_DEPTH = 32
MAX_EXPONENT = 64
MAX_DIGITS = 50
"""Numerators and denominators stay below ``10 ** MAX_DIGITS``, between steps as in the result."""
EXACT_DECIMALS = 12
ROUNDED_DIGITS = 6

_LIMIT = 10**MAX_DIGITS
_TOKEN = re.compile(r"\s*(?:([0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(\*\*|[-+*/^()%×÷−]))")
_ALIASES = {"×": "*", "÷": "/", "−": "-", "**": "^"}


class CalculatorError(ValueError):
    """An expression that has no value here; the text says what is wrong, in a few words a model can read."""


def evaluate(expression: str) -> Fraction:
    """The exact value of ``expression``. Raises `CalculatorError`, and nothing else, on any text."""
    if len(expression) > MAX_CHARACTERS:
        raise CalculatorError(f"too long, the limit is {MAX_CHARACTERS} characters")
    tokens = _tokenize(expression)
    if not tokens:
        raise CalculatorError("empty expression")
    parser = _Parser(tokens)
    value = parser.sum()
    parser.expect_end()
    return value


def calculate(expression: str) -> str:
    """The value as text (see `format_number`), or ``error: ...``; never raises, whatever the text."""
    try:
        return format_number(evaluate(expression))
    except CalculatorError as error:
        return f"error: {error}"


def format_number(value: Fraction) -> str:
    """The shortest exact decimal: ``24``, ``-0.5``, ``62.5``.

    A value whose decimals do not end, or only after 12 places, is rounded (half to even) to 6 decimals, or to 6
    significant digits below 1; zeros at the end are cut: 2/3 is ``0.666667``, 1/3000 is ``0.000333333``.
    """
    if value.denominator == 1:
        return str(value.numerator)
    for places in range(1, EXACT_DECIMALS + 1):
        if 10**places % value.denominator == 0:
            return _decimal(value, places)
    places = ROUNDED_DIGITS
    scaled = abs(value) * 10
    while scaled < 1:
        scaled *= 10
        places += 1
    return _decimal(value, places)


def _decimal(value: Fraction, places: int) -> str:
    scaled = round(value * 10**places)
    digits = str(abs(scaled)).rjust(places + 1, "0")
    text = f"{digits[:-places]}.{digits[-places:]}".rstrip("0").rstrip(".")
    return f"-{text}" if scaled < 0 else text


def _tokenize(text: str) -> list[str]:
    tokens, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise CalculatorError(f"unexpected {_visible(text[position:].lstrip()[0])}")
        token = match.group(1) or match.group(2)
        tokens.append(_ALIASES.get(token, token))
        position = match.end()
    return tokens


def _visible(character: str) -> str:
    return f"'{character}'" if character.isprintable() and character.isascii() else "character"


class _Parser:
    """Recursive descent over the token list; every method returns the value of what it consumed."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0

    def sum(self) -> Fraction:
        value = self.product()
        while (operator := self.take("+", "-")) is not None:
            right = self.product()
            value = _bounded(value + right if operator == "+" else value - right)
        return value

    def product(self) -> Fraction:
        value = self.sign()
        while (operator := self.take("*", "/")) is not None:
            right = self.sign()
            value = _bounded(value * right if operator == "*" else _divide(value, right))
        return value

    def sign(self) -> Fraction:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise CalculatorError("nested too deep")
        operator = self.take("-", "+")
        value = self.power() if operator is None else self.sign()
        self.depth -= 1
        return -value if operator == "-" else value

    def power(self) -> Fraction:
        base = self.percent()
        return _power(base, self.sign()) if self.take("^") else base

    def percent(self) -> Fraction:
        value = self.atom()
        while self.take("%"):
            value = _bounded(value / 100)
        return value

    def atom(self) -> Fraction:
        if self.position >= len(self.tokens):
            raise CalculatorError("the expression ends too early")
        token = self.tokens[self.position]
        self.position += 1
        if token == "(":
            value = self.sum()
            if self.take(")") is None:
                raise CalculatorError("missing ')'")
            return value
        if token[0].isdigit() or token[0] == ".":
            return _bounded(Fraction(token.replace(",", "").rstrip(".")))
        raise CalculatorError(f"unexpected '{token}'")

    def take(self, *operators: str) -> str | None:
        """The next token where it is one of ``operators``, else None."""
        if self.position < len(self.tokens) and self.tokens[self.position] in operators:
            self.position += 1
            return self.tokens[self.position - 1]
        return None

    def expect_end(self) -> None:
        if self.position < len(self.tokens):
            raise CalculatorError(f"unexpected '{self.tokens[self.position][:12]}'")


def _divide(left: Fraction, right: Fraction) -> Fraction:
    if right == 0:
        raise CalculatorError("division by zero")
    return left / right


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise CalculatorError(f"powers must be whole numbers up to {MAX_EXPONENT}")
    if base == 0 and exponent < 0:
        raise CalculatorError("division by zero")
    return _bounded(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if abs(value.numerator) >= _LIMIT or value.denominator >= _LIMIT:
        raise CalculatorError("the number is too large")
    return value
