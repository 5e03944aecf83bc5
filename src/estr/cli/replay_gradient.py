"""Gradient norms of replayed steps in the parameters, where a checkpoint has the weights the step was trained at."""

from __future__ import annotations

import numpy as np
import torch

from estr.config import Config
from estr.inspect.dump import Dump
from estr.inspect.replay import ReplayedStep
from estr.learner.packing import pack
from estr.learner.scoring import logprob_entropy
from estr.models.load import load_model
from estr.storage.checkpoints import checkpoint_path, checkpoint_steps, load_checkpoint
from estr.storage.run_directory import RunDirectory
from estr.trajectory import Segment


def parameter_norms(
    run: RunDirectory, config: Config, dump: Dump, steps: list[ReplayedStep]
) -> tuple[dict[int, float], str]:
    """Step → Euclidean norm of ∂loss/∂θ, and why there is none where there is none.

    The chain rule through log π: Σ (∂loss/∂log π)·∂log π/∂θ with log π from the checkpoint's weights, which are those
    of the step. What a loss has beside log π (a KL term, an entropy bonus) is not part of it.
    """
    why = _cannot(config, dump)
    if why:
        return {}, why
    norms: dict[int, float] = {}
    by_version = {step.target_version: step for step in steps if step.target_version is not None}
    for number in checkpoint_steps(run):
        checkpoint = load_checkpoint(checkpoint_path(run, number))
        step = by_version.get(int(checkpoint.state["version"]))
        if step is not None:
            model = load_model(checkpoint.path, config.model.dtype, config.model.trust_remote_code).model
            norms[step.step] = _norm(model, config, dump, step)
    return norms, "" if norms else "no checkpoint has the weights at which a stored step was trained"


def _cannot(config: Config, dump: Dump) -> str:
    if dump.stream is None:
        return "no token ids are stored"
    if config.model.lora_rank > 0:
        return "a checkpoint holds merged weights, not the adapter that was trained"
    if dump.truncated.any():
        return "the tokens were drawn from a part of the vocabulary"
    return ""


def _norm(model: torch.nn.Module, config: Config, dump: Dump, step: ReplayedStep) -> float:
    """Norm over all parameters, in the micro-batches of training."""
    gradient = np.full(dump.token_count, np.nan)
    gradient[step.order] = step.gradient
    rows = np.unique(dump.row[step.order])
    units = [[_segment(dump, int(row))] for row in rows]
    columns = [[gradient[dump.starts[row] : dump.starts[row + 1]].astype(np.float32)] for row in rows]
    autocast = torch.bfloat16 if config.learner.dtype == "bfloat16" else None
    model.zero_grad()
    for microbatch in pack(units, config.learner.tokens_per_microbatch):
        logprob, _ = logprob_entropy(model, microbatch, config.rollout.temperature, autocast)
        (microbatch.gather(columns) * logprob).sum().backward()
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def _segment(dump: Dump, row: int) -> Segment:
    """A stored row as the learner packs it."""
    assert dump.stream is not None
    tokens = dump.stream.ids[dump.stream.offsets[row] : dump.stream.offsets[row + 1]]
    part = slice(int(dump.starts[row]), int(dump.starts[row + 1]))
    at = dump.position[part]
    action = np.zeros(len(tokens), bool)
    action[at] = True
    columns = {name: np.full(len(tokens), np.nan, np.float32) for name in ("logprob", "entropy")}
    for name, column in columns.items():
        column[at] = getattr(dump, name)[part]
    version = np.full(len(tokens), -1, np.int32)
    version[at] = np.nan_to_num(dump.version[part], nan=-1)
    return Segment(tokens.astype(np.int32), action, columns["logprob"], columns["entropy"], version)
