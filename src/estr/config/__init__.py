"""Typed configuration of a run."""

from estr.config.sections import (
    Config,
    LearnerConfig,
    ModelConfig,
    ObjectiveConfig,
    RolloutConfig,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
    TaskConfig,
)

__all__ = [
    "Config",
    "LearnerConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "RolloutConfig",
    "RunConfig",
    "RuntimeConfig",
    "ScheduleConfig",
    "TaskConfig",
]
