"""Checkpoints of a run: model, optimizer, schedule and what lockstep still samples from, as one unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from estr.config import Config
from estr.models.load import is_lora, without_bars
from estr.runtime.divergence import is_good
from estr.runtime.pools import Pool
from estr.runtime.position import adapter_tensors, window_tensors
from estr.storage.checkpoints import (
    Best,
    best_checkpoint,
    checkpoint_steps,
    mark_best,
    newest_step,
    retain_checkpoints,
    save_checkpoint,
)
from estr.storage.rollout_files import retain_rollouts
from estr.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from estr.runtime.setup import Parts


class CheckpointStore:
    """Writes checkpoints of one run and keeps as many as the configuration says.

    ``source``: the step of the checkpoint that this process went on from; it is kept beyond that number, because an
    engine that is started in the place of a dead one reads its model there.
    """

    def __init__(self, directory: RunDirectory, config: Config, pool: Pool, source: int = 0) -> None:
        self._directory, self._config, self._pool, self._source = directory, config, pool, source

    def has(self, step: int) -> bool:
        return step in checkpoint_steps(self._directory)

    def save(self, step: int, kind: str, evaluations: list[tuple[int, float]], parts: Parts) -> Path:
        """Write the checkpoint of ``step``; raises RunError where the disk fails, older ones stay."""
        state = {
            "version": parts.learner.version,
            "elapsed": parts.accounting.elapsed,
            "evaluations": evaluations,
            "next_group": self._next_group(parts),
            "ledger": parts.journal.position(),
            "dropped_groups": parts.journal.dropped_groups,
            "learner": parts.learner.state(),
        }
        tensors = dict(parts.learner.state_tensors())
        tensors |= window_tensors(self._pool.versions)
        if is_lora(parts.loaded.model):
            tensors |= adapter_tensors(parts.learner.trainable())
        parts.metrics.sync()
        apart = is_lora(parts.loaded.model) or parts.config.learner.ranks > 1
        model = _Saveable(parts.loaded.model, parts.weights() if apart else None)
        path = save_checkpoint(self._directory, step, model, parts.loaded.tokenizer, tensors, state, kind)
        good = newest_step(self._directory, is_good)
        protected = () if good is None else (good,)
        kept = retain_checkpoints(self._directory, self._config.run.keep_checkpoints, (*protected, self._source))
        parts.journal.commit(step, prune_through=min((kept[0], *protected)))
        if keep := self._config.run.keep_rollouts:
            retain_rollouts(self._directory, step - keep + 1)
        return path

    def _next_group(self, parts: Parts) -> int:
        """Where a resume goes on; lockstep redoes the whole cohort that was on its way."""
        lockstep = self._config.schedule.mode == "lockstep"
        return parts.collecting if lockstep and parts.collecting is not None else parts.schedule.next_group

    def mark_best_of(self, evaluations: list[tuple[int, float]]) -> None:
        """Mark the checkpoint with the best of these held-out rewards (the earliest of equal ones), if it is there."""
        after_training = [(reward, -step) for step, reward in evaluations if step > 0 and not math.isnan(reward)]
        if not after_training:
            return
        reward, step = max(after_training)
        if self.has(-step) and best_checkpoint(self._directory) != Best(-step, reward):
            mark_best(self._directory, -step, reward)


class _Saveable:
    """The plain model in Hugging Face format; ``weights`` where they are not simply the model's own parameters:
    adapters merged into them, shards put together."""

    def __init__(self, model: Any, weights: Mapping[str, Tensor] | None) -> None:
        self._base = model.get_base_model() if is_lora(model) else model
        self._weights = weights

    def save_pretrained(self, directory: Path) -> None:
        state = None
        if self._weights is not None:
            kept = self._base.state_dict().keys()
            buffers = {name: buffer for name, buffer in self._base.named_buffers() if name in kept}
            state = buffers | {**self._weights}
        with without_bars():
            self._base.save_pretrained(directory, state_dict=state)
