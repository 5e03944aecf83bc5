"""The learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math

from estr.config.sections import LearnerConfig


def learning_rate(step: int, total_steps: int, config: LearnerConfig) -> float:
    """Learning rate of the optimizer step that leads from version ``step`` (0-based) to ``step + 1``.

    Linear warm-up reaches the peak at step ``warmup_steps - 1``; then constant, or linear or cosine decay to
    ``min_learning_rate_ratio`` of the peak at ``total_steps``, where it stays.
    """
    peak = config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    left = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = config.min_learning_rate_ratio
    return peak * (floor + (1.0 - floor) * left)
