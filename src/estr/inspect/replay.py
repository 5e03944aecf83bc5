"""Stored optimizer steps under another recipe, without generating or a model: loss, mask, ∂loss/∂log π."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from estr.errors import RunError
from estr.inspect.batches import TokenColumns, seen_by_learner
from estr.inspect.dump import Dump, Floats, Ints
from estr.objectives import Objective

Seed = Callable[[int], int]  # target version → seed of what a recipe draws at random


@dataclass(frozen=True)
class ReplayedStep:
    """One stored optimizer step under a recipe."""

    step: int
    target_version: int | None
    tokens: int  # action tokens of all its trajectories: the denominator
    seen: int  # those that the learner saw
    loss: float
    masked_fraction: float  # of the seen tokens
    clip_fraction: float
    gradient_norm: float  # Euclidean norm of ∂loss/∂log π over the seen tokens
    kept: Ints  # indices of the kept tokens in the dump
    order: Ints  # [seen] indices of the seen tokens in the dump
    gradient: Floats  # [seen] ∂loss/∂log π of those


def replay(dump: Dump, recipe: Objective, seed: Seed = lambda _: 0) -> list[ReplayedStep]:
    """Every stored step of a run under ``recipe``, in order of step.

    log π is that of the learner when it trained the step, so a step tells what the recipe would have done there, not
    where the run would have gone. Denominators are those of the whole step, as in training.

    Raises:
        RunError: nothing trained is stored.
        ValueError: the recipe needs a column that runs do not store.
    """
    chosen = seen_by_learner(dump) & np.isfinite(dump.trained_step)[dump.row]
    if not chosen.any():
        raise RunError(f"{dump.source} holds no trained trajectory yet, so there is no step to replay")
    columns = TokenColumns.of(dump, chosen)
    return [
        _step(dump, columns, recipe, seed, int(a), int(b)) for a, b in zip(columns.cuts, columns.cuts[1:], strict=False)
    ]


def _step(dump: Dump, columns: TokenColumns, recipe: Objective, seed: Seed, first: int, last: int) -> ReplayedStep:
    batch = columns.batch(recipe.uses | recipe.needs, first, last)
    batch.logprob = batch.logprob.detach().clone().requires_grad_()
    if batch.entropy is not None:
        batch.entropy = batch.entropy.detach()
    step = int(dump.trained_step[dump.row[columns.order[first]]])
    members = dump.trained_step[dump.row] == step
    tokens, sequences = int(members.sum()), len(np.unique(dump.trajectory[dump.row[members]]))
    target = columns.target[first]
    generator = torch.Generator().manual_seed(seed(int(target) if np.isfinite(target) else step))
    output = recipe(batch, tokens, sequences, None, generator)
    (gradient,) = torch.autograd.grad(output.loss, batch.logprob)
    order = columns.order[first:last]
    kept = order[output.keep.numpy()]
    return ReplayedStep(
        step=step,
        target_version=int(target) if np.isfinite(target) else None,
        tokens=tokens,
        seen=last - first,
        loss=float(output.loss.detach()),
        masked_fraction=1.0 - len(kept) / max(last - first, 1),
        clip_fraction=output.metrics["clip/fraction"],
        gradient_norm=float(gradient.double().norm()),
        kept=kept,
        order=order,
        gradient=gradient.double().numpy(),
    )
