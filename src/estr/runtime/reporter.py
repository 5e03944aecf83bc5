"""What a run tells a person while it goes on; the command line shows it, tests collect it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    directory: Path
    steps: int
    version: int
    first_eval: float | None
    last_eval: float | None
    best_eval: float | None
    spanning_share: float | None  # trained trajectories after step 10 that hold two or more versions
    dropped: int
    skipped_steps: int
    seconds: float


class Reporter(Protocol):
    """Receives what happens, in order, from the process that runs the learner."""

    def notice(self, sentence: str) -> None:
        """Something a person should read once."""
        ...

    def phase(self, sentence: str) -> None:
        """What the run does now that takes a while."""
        ...

    def progress(self, what: str, done: int, total: int) -> None:
        """How far a preparation is."""
        ...

    def start(self, directory: Path, step: int, steps: int) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One optimizer step, with its line of metrics.jsonl."""
        ...

    def finish(self, summary: Summary) -> None: ...


class SilentReporter:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.metrics: list[dict[str, float]] = []
        self.summary: Summary | None = None

    def notice(self, sentence: str) -> None:
        self.notices.append(sentence)

    def phase(self, sentence: str) -> None:
        pass

    def progress(self, what: str, done: int, total: int) -> None:
        pass

    def start(self, directory: Path, step: int, steps: int) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append(dict(metrics))

    def finish(self, summary: Summary) -> None:
        self.summary = summary
