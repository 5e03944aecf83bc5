"""Metrics to TensorBoard, Weights & Biases or Trackio, each optional, behind one interface."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from estr.errors import MissingExtraError


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files under RUN/tensorboard."""

    def __init__(self, directory: Path) -> None:
        writer = _imported("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(str(directory / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class HostedTracker:
    """wandb and trackio share their interface: init, log, finish."""

    def __init__(self, package: str, directory: Path) -> None:
        self._module = _imported(package, package)
        self._module.init(project="estr", name=directory.name)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._module.log(dict(metrics), step=step)

    def close(self) -> None:
        self._module.finish()


def make_trackers(names: Sequence[str], directory: Path, stack: ExitStack) -> list[Tracker]:
    """The named trackers, closed with ``stack``; raises MissingExtraError where a package is not installed."""
    trackers: list[Tracker] = []
    for name in names:
        tracker: Tracker = TensorBoardTracker(directory) if name == "tensorboard" else HostedTracker(name, directory)
        stack.callback(tracker.close)
        trackers.append(tracker)
    return trackers


def _imported(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(extra, extra) from error
