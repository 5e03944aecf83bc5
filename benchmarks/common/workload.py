"""Models and prompts that are the same for every contestant; needs torch and transformers alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ENDS = 8  # ids 0..7 end a turn: at random weights a turn is cut short with probability 8/V at every token


def model_config(width: int = 128, layers: int = 4, vocabulary: int = 512, **changes: Any) -> Qwen3Config:
    return Qwen3Config(
        **{
            "vocab_size": vocabulary,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": max(2, width // 32),
            "num_key_value_heads": max(1, width // 64),
            "head_dim": 32,
            "intermediate_size": 3 * width,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "initializer_range": width**-0.5 / 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }
        | changes
    )


def new_model(seed: int = 0, **sizes: Any) -> Qwen3ForCausalLM:
    """Random float32 weights."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(model_config(**sizes)).eval()


def save_model(directory: Path, **sizes: Any) -> None:
    """A model directory, with a tokenizer of one token a word that only names the ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    model = new_model(**sizes)
    model.save_pretrained(directory)
    vocabulary = {f"t{i}": i for i in range(model.config.vocab_size)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="t1"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0", pad_token="t0", unk_token="t1").save_pretrained(
        directory
    )


def prompts(groups: int, group_size: int, vocabulary: int = 512, seed: int = 0) -> list[list[int]]:
    """``groups`` prompts of 24 to 72 tokens, each ``group_size`` times."""
    source = random.Random(seed)
    distinct = [[source.randrange(ENDS, vocabulary) for _ in range(source.randint(24, 72))] for _ in range(groups)]
    return [prompt for prompt in distinct for _ in range(group_size)]
