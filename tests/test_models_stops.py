import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.models.stops import StopTexts
from estr.models.tokenizer import builtin_tokenizer

TOKENIZER = builtin_tokenizer()


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def first_end(stops, ids):
    return next((n for n in range(1, len(ids) + 1) if stops.ends(ids[:n])), None)


def test_single_token():
    stops = StopTexts(TOKENIZER, ["</calc>"])
    ids = encode("<calc>48/2</calc>")
    assert first_end(stops, ids) == len(ids)
    assert stops.candidates.dtype is torch.bool
    assert len(stops.candidates) == len(TOKENIZER)


def test_text_that_spans_tokens():
    stops = StopTexts(TOKENIZER, ["</calc>"])
    ids = [token for character in "x<</calc>" for token in encode(character)]
    assert len(ids) == 9
    assert first_end(stops, ids) == 9


def test_bytes_of_one_character_in_several_tokens():
    stops = StopTexts(TOKENIZER, ["終"])
    ids = encode("a終")
    assert len(ids) == 4
    assert first_end(stops, ids) == 4


def test_a_token_that_reaches_beyond_the_stop_text():
    stops = StopTexts(TOKENIZER, ["th"])
    ids = encode(" the")
    assert len(ids) == 1
    assert stops.ends(ids)


def test_an_earlier_stop_text_is_not_completed_again():
    stops = StopTexts(TOKENIZER, ["</calc>"])
    assert not stops.ends(encode("</calc>>"))


def test_several_texts_and_none():
    stops = StopTexts(TOKENIZER, ["\n\n", "Done."])
    assert first_end(stops, encode("a\n\nb")) == 3
    assert first_end(stops, encode("Done.")) == len(encode("Done."))
    assert not StopTexts(TOKENIZER, []).candidates.any()
    assert not StopTexts(TOKENIZER, []).ends([5])
    assert not stops.ends([])


def test_an_empty_stop_text_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopTexts(TOKENIZER, [""])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(6, len(TOKENIZER) - 1), max_size=8), st.sampled_from(["e", "</calc>", " the", "ß"]))
def test_property_ends_where_the_text_first_holds_it(ids, text):
    stops = StopTexts(TOKENIZER, [text])
    holds = [text in TOKENIZER.decode(ids[:n]) for n in range(1, len(ids) + 1)]
    assert first_end(stops, ids) == (holds.index(True) + 1 if any(holds) else None)
