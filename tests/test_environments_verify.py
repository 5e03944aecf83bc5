"""The verifier and the extraction of tool calls."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.environments.tool_call import find_call
from estr.environments.verify import as_number, extract_answer, is_correct


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 24", 24),
        ("so 12*2 = 24\n#### 24\n", 24),
        ("####24", 24),
        ("#### 24.0", 24),
        ("#### 1,200", 1200),
        ("#### $1,200.50", Fraction(2401, 2)),
        ("#### 24%", 24),
        ("#### 24.", 24),
        ("#### 24 apples", 24),
        ("#### -3", -3),
        ("#### −3", -3),
        ("#### -$3", -3),
        ("#### $-3", -3),
        ("#### .5", Fraction(1, 2)),
        ("#### 1\n#### 2", 2),
        ("#### 1 #### 2", 2),
        ("#### 24\n####", 24),
        ("##### 24", 24),
        ("#### 0.1", Fraction(1, 10)),
    ],
)
def test_answers(text, number):
    assert extract_answer(text) == number


@pytest.mark.parametrize(
    "text",
    ["", "24", "### 24", "####", "#### ", "#### x", "#### --3", "#### 24 or 25", "#### 24/2", "#### 1e5",
     "#### 1,20", "#### 24.5.6", "#### " + "9" * 61, "####\n24", "#### 1\n#### 2 or 3", "#### ٣"],
)  # fmt: skip
def test_garbage_is_no_answer(text):
    assert extract_answer(text) is None


def test_match_is_exact():
    assert is_correct("#### 24.0", 24)
    assert is_correct("#### 24", "24.00")
    assert is_correct("#### 0.3", 0.3)
    assert not is_correct("#### 0.30000000000000004", 0.3)
    assert not is_correct("#### 9007199254740993", 9007199254740992)
    assert not is_correct("24", 24)
    assert not is_correct("", None)
    assert not is_correct("#### 1", True)
    assert not is_correct("#### 1", float("nan"))
    assert as_number(10**5000) == 10**5000
    assert as_number(float("inf")) is None


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.text("#0123456789.,-−$% \n", max_size=60)))
def test_any_text_gives_a_number_or_none(text):
    answer = extract_answer(text)
    assert answer is None or isinstance(answer, Fraction)
    assert is_correct(text, answer) == (answer is not None)


def test_work_is_bounded_on_long_text():
    """Only the end counts; patterns that would be quadratic are cut to the bound."""
    assert extract_answer("#### 7\n" + " " * 20_000) is None
    assert extract_answer("#" * 1_000_000 + " 7") == 7
    assert extract_answer("#### " * 200_000) is None
    assert extract_answer("#### 1,111" * 100_000 + "\n#### 5") == 5


@pytest.mark.parametrize(
    ("text", "expression", "reply"),
    [
        ("<calc>12*5</calc>", "12*5", "60"),
        ("first <calc> 48/2 </calc>", " 48/2 ", "24"),
        ("<calc>1+1</calc><calc>2+2</calc>", "1+1", "2"),
        ("<calc>1+1</calc> so it is #### 3", "1+1", "2"),
        ("<calc>1/0</calc>", "1/0", "error: division by zero"),
        ("<calc></calc>", "", "error: empty expression"),
        ("<calc>1+<calc>2</calc>", "1+<calc>2", "error: unexpected '<'"),
        ("</calc><calc>1+1</calc>", "1+1", "2"),
        ("<calc>12*5", None, "error: the call has no end tag"),
        ("12*5</calc>", None, "error: the call has no start tag"),
        ("</calc> <calc>", None, "error: the call has no end tag"),
    ],
)
def test_calls(text, expression, reply):
    call = find_call(text)
    assert call is not None
    assert call.expression == expression
    assert call.answer() == reply


@pytest.mark.parametrize("text", ["", "#### 24", "calc 1+1", "<calc", "< calc>1< /calc>"])
def test_no_call(text):
    assert find_call(text) is None


fragments = st.lists(st.sampled_from(["<calc>", "</calc>", "<", ">", "1", "+", "#### 5", "é", "\n", "/"]), max_size=20)


@settings(max_examples=300, deadline=None)
@given(st.one_of(fragments.map("".join), st.text()))
def test_any_text_gets_one_short_tool_reply_or_none(text):
    call = find_call(text)
    if call is None:
        assert "<calc>" not in text
        assert "</calc>" not in text
    else:
        answer = call.answer()
        assert 0 < len(answer) < 120
        assert "####" not in answer
        assert "calc>" not in answer
