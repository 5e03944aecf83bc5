import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from estr.environments.calculator import CalculatorTask
from estr.models.tokenizer import (
    END,
    PAD,
    PLAIN_TOKENS,
    ROLES,
    SPECIAL_TOKENS,
    VOCABULARY,
    builtin_tokenizer,
    train_tokenizer,
)
from estr.models.warmup import demonstration_rows

TOKENIZER = builtin_tokenizer()


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_any_text_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_special_tokens():
    assert len(TOKENIZER) <= VOCABULARY
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == (END, PAD)
    assert TOKENIZER.eos_token_id != TOKENIZER.pad_token_id
    for token in SPECIAL_TOKENS:
        assert len(TOKENIZER.encode(token)) == 1
        assert TOKENIZER.decode(TOKENIZER.encode(token), skip_special_tokens=True) == ""


@pytest.mark.parametrize("token", PLAIN_TOKENS)
def test_plain_tokens_are_single_and_are_text(token):
    ids = TOKENIZER.encode(token)
    assert len(ids) == 1
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == token


def test_one_token_a_digit_and_a_mark():
    assert [TOKENIZER.decode([i]) for i in TOKENIZER.encode("1250*3-$7.50")] == list("1250*3-$7.50")


def test_save_and_load(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<|user|>Ann has 48 eggs.<|end|><|assistant|><calc>48/2</calc>"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.chat_template == TOKENIZER.chat_template
    assert (loaded.eos_token_id, loaded.pad_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)


def test_training_is_deterministic():
    texts = [f"Ann has {n} kumquats and kayaks." for n in range(50)]
    one, two = (train_tokenizer(texts).backend_tokenizer.to_str() for _ in range(2))
    assert one == two
    assert len(train_tokenizer(texts).encode(" kumquats")) == 1


def test_calculator_problems_are_short():
    conversations = itertools.islice(CalculatorTask().demonstrations(3), 80)
    rows = [demonstration_rows(TOKENIZER, messages, ("</calc>",)) for messages in conversations]
    assert all(len(parts) == 1 for parts in rows)
    assert max(len(parts[0].tokens) for parts in rows) < 120
    prompts = [parts[0].action.index(True) for parts in rows]
    assert 20 <= sum(prompts) / len(prompts) <= 40


def test_chat_template_knows_four_roles_and_refuses_others():
    messages = [{"role": role, "content": role} for role in ROLES]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "".join(f"<|{role}|>{role}<|end|>" for role in ROLES) + "<|assistant|>"
    with pytest.raises(Exception, match="unknown role"):
        TOKENIZER.apply_chat_template([{"role": "narrator", "content": ""}], tokenize=False)
