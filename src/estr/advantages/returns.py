"""Discounted sums over flat action tokens.

A step is one action token. Text between two action tokens (a tool's answer) neither earns nor discounts, so a reward
reaches the tokens before a tool call undiminished by the length of the answer.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def discounted_returns(value: Tensor, sequence: Tensor, gamma: float) -> Tensor:
    """G_t = value_t + gamma G_{t+1} inside each sequence.

    ``value`` float [N], ``sequence`` int64 [N] non-decreasing. Returns float64 [N] without graph. Raises
    ``ValueError`` where shapes differ. The work is one vectorized step per token of the longest sequence.
    """
    check_tokens(value, sequence)
    total = value.detach().double().clone()
    if gamma == 0 or total.numel() == 0:
        return total
    distance = tokens_to_end(sequence)
    order = torch.argsort(distance, stable=True)
    ends = torch.bincount(distance).cumsum(0).tolist()
    for start, stop in itertools.pairwise(ends):
        token = order[start:stop]
        total[token] += gamma * total[token + 1]
    return total


def tokens_to_end(sequence: Tensor) -> Tensor:
    """How many tokens of the same sequence follow each token, int64 [N]; 0 for a sequence's last."""
    last = torch.bincount(sequence).cumsum(0) - 1
    return last[sequence] - torch.arange(sequence.numel(), device=sequence.device)


def tokens_from_start(sequence: Tensor) -> Tensor:
    """The position of each token among its sequence's action tokens, int64 [N], from 0."""
    first = torch.bincount(sequence).cumsum(0) - torch.bincount(sequence)
    return torch.arange(sequence.numel(), device=sequence.device) - first[sequence]


def place_at_end(reward: Tensor, sequence: Tensor) -> Tensor:
    """Rewards [S] put on the last token of each sequence, float64 [N], 0 on all others."""
    return torch.where(tokens_to_end(sequence) == 0, reward.detach().double()[sequence], 0.0)


def check_tokens(value: Tensor, sequence: Tensor) -> None:
    """Raise ``ValueError`` unless both have shape [N] and the tokens of each sequence stand together, in order."""
    if value.dim() != 1 or value.shape != sequence.shape:
        shapes = f"{list(value.shape)} and {list(sequence.shape)}"
        raise ValueError(f"values and sequence must both have shape [N], one entry per action token, but have {shapes}")
    if sequence.numel() > 1 and bool((sequence[1:] < sequence[:-1]).any()):
        raise ValueError("sequence must be non-decreasing: the tokens of one sequence stand together, in order")
