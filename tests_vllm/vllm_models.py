"""Small models with a tied head and with one of its own, and what plain transformers and the learner say of a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from estr.engines.vllm.engine import VllmEngine, VllmSettings
from estr.trajectory import Segment

VOCABULARY, CONTEXT, TEMPERATURE = 300, 128, 0.7


def small_model(tied: bool, scale: float = 0.15) -> Any:
    """Qwen3 (tied head) or Llama (own head), its weights spread so that distributions differ from place to place."""
    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
        "head_dim": 32,
    }
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**shared)) if tied else LlamaForCausalLM(LlamaConfig(**shared))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=scale)
    return model.float().eval()


def saved(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def engine(path: Path, **settings: Any) -> VllmEngine:
    chosen: dict[str, Any] = {"temperature": TEMPERATURE, "slots": 8, "end_ids": (7,)} | settings
    return VllmEngine(VllmSettings(path=path, vocabulary=VOCABULARY, max_context=CONTEXT, **chosen))


def tensors(model: Any) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def moved(model: Any, by: float = 0.05) -> Any:
    """The same model after a step in a random direction."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn_like(parameter))
    return model


def finish(engine: VllmEngine) -> None:
    """Step until nothing runs."""
    while engine.busy:
        engine.step()


@torch.no_grad()
def replayed(models: dict[int, Any], row: Segment, temperature: float = TEMPERATURE) -> list[Tensor]:
    """log μ over the vocabulary at each action, float64: keys and values of a place are those of the version that
    samples the next action after it, and stay (kv = "keep")."""
    from transformers import DynamicCache

    cache, found, start = DynamicCache(), [], 0
    ids = torch.from_numpy(row.tokens).long()
    for at in np.flatnonzero(row.action).tolist():
        model = models[int(row.version[at])]
        logits = model(ids[None, start:at], past_key_values=cache, use_cache=True).logits[0, -1]
        found.append(torch.log_softmax(logits.double() / temperature, -1))
        start = at
    return found
