"""A tiny model, made-up trajectories and a plain padded forward pass for the learner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from estr.config import Config
from estr.trajectory import Segment, Trajectory

VOCABULARY = 41


def tiny_model(
    seed: int = 0, tied: bool = True, scale: float = 0.25, vocabulary: int = VOCABULARY, head: int = 8
) -> Any:
    """A Qwen3 (tied head) or Llama (own head) of two layers with weights large enough to matter."""
    shared = {
        "vocab_size": vocabulary,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**shared, head_dim=head)) if tied else LlamaForCausalLM(LlamaConfig(**shared))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=scale)
    return model


def segment(tokens: list[int], action: list[int], logprob: Any = -1.0, entropy: Any = 1.0, version: Any = 0) -> Segment:
    """A row; ``logprob``, ``entropy`` and ``version`` are one number or one per action token."""
    mask = np.array(action, bool)
    columns = []
    for values, missing, dtype in (
        (logprob, np.nan, np.float32),
        (entropy, np.nan, np.float32),
        (version, -1, np.int32),
    ):
        column = np.full(len(tokens), missing, dtype)
        column[mask] = values
        columns.append(column)
    return Segment(np.array(tokens, np.int32), mask, *columns)


def trajectory(
    *segments: Segment, group: int = 0, sibling: int = 0, reward: float = 1.0, finish: str = "stop"
) -> Trajectory:
    return Trajectory(
        group=group,
        sibling=sibling,
        attempt=0,
        task_id=f"task-{group}",
        prompt="",
        seed=0,
        segments=list(segments),
        reward=reward,
        finish_reason=finish,
    )


def random_segment(
    rng: np.random.Generator, version: int = 0, longest: int = 14, prompt: Sequence[int] = ()
) -> Segment:
    """A prompt, ``prompt`` where one is given, then actions with a tool's answer between them."""
    length = int(rng.integers(4, longest))
    action = rng.random(length) < 0.7
    action[: int(rng.integers(1, 3))] = False
    action[-1] = True
    action[0] |= bool(prompt)
    count = int(action.sum())
    tokens = [*prompt, *rng.integers(1, VOCABULARY, length).tolist()]
    return segment(
        tokens,
        [False] * len(prompt) + action.tolist(),
        -rng.exponential(2.0, count),
        rng.exponential(1.5, count),
        version,
    )


def random_groups(groups: int = 3, siblings: int = 4, seed: int = 0, version: int = 0) -> list[list[Trajectory]]:
    """Groups whose rewards differ and whose trajectories begin alike; every third trajectory has two segments."""
    rng = np.random.default_rng(seed)
    result = []
    for g in range(groups):
        members, prompt = [], rng.integers(1, VOCABULARY, g + 2).tolist()
        for s in range(siblings):
            rows = [random_segment(rng, version, prompt=prompt)]
            rows += [random_segment(rng, version) for _ in range((g * siblings + s) % 3 == 2)]
            members.append(trajectory(*rows, group=g, sibling=s, reward=float(rng.normal())))
        result.append(members)
    return result


def near_policy(model: Any, groups: list[list[Trajectory]], noise: float = 0.3, temperature: float = 1.0) -> None:
    """Make the recorded log μ and H those of ``model``, with some noise on log μ."""
    rng = np.random.default_rng(1)
    for row in (row for group in groups for member in group for row in member.segments):
        logprob, entropy = plain_values(model, row, temperature)
        row.logprob[row.action] = logprob.detach().numpy() + rng.normal(0, noise, row.action_count)
        row.entropy[row.action] = entropy.detach().numpy()


def plain_values(model: Any, row: Segment, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """log π and entropy of a row's action tokens by an unpacked forward pass and a whole log-softmax."""
    tokens = torch.from_numpy(row.tokens.astype(np.int64))
    log_p = (model(tokens[None]).logits[0].float() / temperature).log_softmax(-1)
    at = torch.from_numpy(np.flatnonzero(row.action))
    chosen = log_p[at - 1]
    return chosen.gather(1, tokens[at, None])[:, 0], -(chosen.exp() * chosen).sum(-1)


def settings(**sections: dict[str, Any]) -> Config:
    """A configuration with one micro-batch per step, no clipping and a visible learning rate, and changes to it."""
    learner = {"learning_rate": 1e-2, "max_grad_norm": 0.0, "tokens_per_microbatch": 4096}
    merged = {"run": {"steps": 100}, "learner": {**learner, **sections.pop("learner", {})}, **sections}
    return Config(**merged)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """max|dg| <= tolerance · |g|inf over all parameters."""
    assert got.keys() == want.keys()
    scale = max(float(g.abs().max()) for g in want.values())
    assert scale > 0
    worst = max((float((got[name] - want[name]).abs().max()), name) for name in want)
    assert worst[0] <= tolerance * scale, worst
