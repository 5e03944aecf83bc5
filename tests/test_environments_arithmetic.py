"""The calculator: closed-form values, a grammar checked against random expression trees, bounded work on garbage."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.environments.arithmetic import CalculatorError, calculate, evaluate, format_number


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("48/2", "24"),
        ("12*5", "60"),
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("10-4-3", "3"),
        ("100/10/2", "5"),
        ("-2^2", "-4"),
        ("(-2)^2", "4"),
        ("2^3^2", "512"),
        ("2**10", "1024"),
        ("2^-1", "0.5"),
        ("2*-3", "-6"),
        ("--3", "3"),
        ("1,200+1", "1201"),
        ("1,234,567.5", "1234567.5"),
        ("0.1+0.2", "0.3"),
        (".5*4.", "2"),
        ("50%*30", "15"),
        ("7 − 10", "-3"),
        ("6×7÷2", "21"),
        ("1/8", "0.125"),
        ("1/3", "0.333333"),
        ("2/3", "0.666667"),
        ("-2/3", "-0.666667"),
        ("100/3", "33.333333"),
        ("1/3000", "0.000333333"),
        ("1/3*3", "1"),
        ("  7  ", "7"),
        ("0^0", "1"),
    ],
)
def test_values(expression, answer):
    assert calculate(expression) == answer


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1/0", "division by zero"),
        ("1/(2-2)", "division by zero"),
        ("0^-1", "division by zero"),
        ("", "empty expression"),
        ("   ", "empty expression"),
        ("2+", "the expression ends too early"),
        ("2 3", "unexpected '3'"),
        ("7%3", "unexpected '3'"),
        ("(2+3", "missing ')'"),
        ("2)", "unexpected ')'"),
        ("12=12", "unexpected '='"),
        ("x+1", "unexpected 'x'"),
        ("1,20", "unexpected ','"),
        ("1\x00", "unexpected character"),
        ("٣+1", "unexpected character"),
        ("9^99", "powers must be whole numbers up to 64"),
        ("2^0.5", "powers must be whole numbers up to 64"),
        ("9^64", "the number is too large"),
        ("9^9^9^9", "powers must be whole numbers up to 64"),
        ("9" * 60, "the number is too large"),
        ("1+" * 100 + "1", "too long, the limit is 200 characters"),
        ("(" * 99 + "1" + ")" * 99, "nested too deep"),
        ("-" * 150 + "1", "nested too deep"),
        ("1" + "^1" * 90, "nested too deep"),
        ("__import__('os')", "unexpected '_'"),
    ],
)
def test_refusals_say_what_is_wrong(expression, message):
    with pytest.raises(CalculatorError, match=f"^{re.escape(message)}$"):
        evaluate(expression)
    assert calculate(expression) == f"error: {message}"


def test_memory_stays_bounded_where_every_step_is_small():
    assert calculate("*".join(["(9^40)"] * 20)) == "error: the number is too large"
    assert calculate("+".join(f"1/{n}" for n in (97, 89, 83, 79, 73, 71, 67, 61, 59, 53) * 2)).startswith("0.")


numbers = st.one_of(
    st.integers(0, 9999).map(lambda n: (str(n), Fraction(n))),
    st.integers(1000, 9_999_999).map(lambda n: (f"{n:,}", Fraction(n))),
    st.tuples(st.integers(0, 99), st.integers(0, 999)).map(
        lambda p: (f"{p[0]}.{p[1]:03d}", Fraction(p[0]) + Fraction(p[1], 1000))
    ),
)


def combine(children):
    """Fully parenthesized children: what precedence does is checked by the closed-form values above."""

    def binary(parts):
        (left, a), operator, (right, b) = parts
        if a is None or b is None or (operator == "/" and b == 0):
            return f"({left}){operator}({right})", None
        value = {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[operator]()
        return f"({left}){operator}({right})", value

    negated = children.map(lambda child: (f"-({child[0]})", None if child[1] is None else -child[1]))
    return st.one_of(st.tuples(children, st.sampled_from("+-*/"), children).map(binary), negated)


@settings(max_examples=300, deadline=None)
@given(st.recursive(numbers, combine, max_leaves=8))
def test_agrees_with_fractions(tree):
    text, value = tree
    if len(text) > 200 or (value is not None and max(abs(value.numerator), value.denominator) >= 10**25):
        return
    if value is None:
        assert calculate(text) == "error: division by zero"
    else:
        assert evaluate(text) == value


flat = st.lists(
    st.tuples(st.sampled_from("+-*/"), st.sampled_from(["", "-"]), st.integers(1, 99)), min_size=1, max_size=12
)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 99), flat)
def test_precedence_agrees_with_products_summed(first, rest):
    """A chain without parentheses equals the sum of its products, each multiplied from the left."""
    terms = [Fraction(first)]
    for operator, sign, number in rest:
        value = Fraction(-number if sign else number)
        if operator in "+-":
            terms.append(value if operator == "+" else -value)
        else:
            terms[-1] = terms[-1] * value if operator == "*" else terms[-1] / value
    text = str(first) + "".join(f"{o}{s}{n}" for o, s, n in rest)
    assert evaluate(text) == sum(terms)


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.text(max_size=250), st.text("0123456789+-*/^%(). ,", max_size=220)))
def test_garbage_never_raises_anything_else(text):
    answer = calculate(text)
    assert len(answer) < 120
    assert answer.startswith("error: ") or set(answer) <= set("-0123456789.")


@settings(max_examples=300, deadline=None)
@given(st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=10**6))
def test_formatted_numbers_read_back(value):
    text = format_number(value)
    back = evaluate(text)
    tolerance = (
        max(abs(value), Fraction(1)) * Fraction(1, 10**6) if abs(value) >= 1 else abs(value) * Fraction(1, 10**5)
    )
    assert abs(back - value) <= tolerance
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    if denominator == 1 and 10**12 % value.denominator == 0:
        assert back == value
    assert not ("." in text and text.endswith("0"))
