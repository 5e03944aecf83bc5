"""What a person sees of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from estr.cli.stopping import say, silence
from estr.runtime.reporter import Reporter, Summary

_LINE_EVERY = 5.0  # seconds between plain lines, except for steps with an evaluation


class ClosingReporter(Reporter, Protocol):
    def close(self) -> None: ...


def make_reporter() -> ClosingReporter:
    """The live view where standard error is a terminal, else plain lines."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    return UnheardReporter(LiveReporter()) if terminal else LineReporter()


def describe(metrics: Mapping[str, float]) -> str:
    """The numbers of a step that a person watches, in one line."""
    parts = []
    if "reward/mean" in metrics:
        parts.append(f"reward {metrics['reward/mean']:.3f}")
    if "eval/reward" in metrics:
        parts.append(f"held-out {metrics['eval/reward']:.3f}")
    if "throughput/trained_tokens_per_second" in metrics:
        parts.append(f"{metrics['throughput/trained_tokens_per_second']:,.0f} tokens/s")
    if "staleness/inter_mean" in metrics:
        parts.append(f"staleness {metrics['staleness/inter_mean']:.1f}+{metrics.get('staleness/intra_mean', 0.0):.1f}")
    if "gate/masked_fraction" in metrics:
        parts.append(f"masked {metrics['gate/masked_fraction']:.2%}")
    return ", ".join(parts)


class LineReporter:
    """Plain lines on standard error, a few seconds apart."""

    def __init__(self) -> None:
        self._steps, self._printed = 0, 0.0

    def notice(self, sentence: str) -> None:
        say(f"note: {sentence}")

    def phase(self, sentence: str) -> None:
        say(f"{sentence} …")

    def progress(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._printed >= _LINE_EVERY or done == total:
            self._printed = now
            say(f"{what}: {done} of {total}")

    def start(self, directory: Path, step: int, steps: int) -> None:
        self._steps = steps
        say(f"run directory {directory}, step {step} of {steps}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now - self._printed >= _LINE_EVERY or "eval/reward" in metrics or step >= self._steps:
            self._printed = now
            say(f"step {step}/{self._steps}: {describe(metrics)}")

    def finish(self, summary: Summary) -> None:
        pass

    def close(self) -> None:
        pass


class LiveReporter:
    """A progress bar with step, reward, tokens per second, staleness, masked fraction and time left."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("run", total=None, numbers="starting")
        self._held_out = ""
        self._progress.start()

    def notice(self, sentence: str) -> None:
        self._progress.console.print(f"note: {sentence}", markup=False, highlight=False)

    def phase(self, sentence: str) -> None:
        self._progress.update(self._task, numbers=sentence)

    def progress(self, what: str, done: int, total: int) -> None:
        self._progress.update(self._task, total=total, completed=done, numbers=what)

    def start(self, directory: Path, step: int, steps: int) -> None:
        self._progress.console.print(f"run directory {directory}", markup=False, highlight=False)
        self._progress.update(self._task, total=steps, completed=step, numbers="waiting for the first batch")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if "eval/reward" in metrics:
            self._held_out = f", held-out {metrics['eval/reward']:.3f}"
            metrics = {key: value for key, value in metrics.items() if key != "eval/reward"}
        self._progress.update(self._task, completed=step, numbers=describe(metrics) + self._held_out)

    def finish(self, summary: Summary) -> None:
        pass

    def close(self) -> None:
        self._progress.stop()


class UnheardReporter:
    """Another reporter, whose terminal may go away: the run goes on without it."""

    def __init__(self, reporter: ClosingReporter) -> None:
        self._reporter = reporter

    def notice(self, sentence: str) -> None:
        self._tell(lambda: self._reporter.notice(sentence))

    def phase(self, sentence: str) -> None:
        self._tell(lambda: self._reporter.phase(sentence))

    def progress(self, what: str, done: int, total: int) -> None:
        self._tell(lambda: self._reporter.progress(what, done, total))

    def start(self, directory: Path, step: int, steps: int) -> None:
        self._tell(lambda: self._reporter.start(directory, step, steps))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tell(lambda: self._reporter.step(step, metrics))

    def finish(self, summary: Summary) -> None:
        self._tell(lambda: self._reporter.finish(summary))

    def close(self) -> None:
        self._tell(self._reporter.close)

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (OSError, SystemExit):  # rich exits where a pipe is closed
            silence(sys.stderr)
