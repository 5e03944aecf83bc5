"""What durability costs: the share of a step that the learner's loop spends in ledger, rollouts, metrics, checkpoints.

    python benchmarks/durability.py [--config examples/quickstart.toml] [--steps 50]

A run of `calculator` as in the quickstart, without evaluations, with `WARM` steps that are not counted and then --steps
that are, one checkpoint among them. Functions of the storage room are timed where the loop calls them, on the clock and
in processor time, each without what it calls of another kind; in a row of its own what fell into the loop's waiting
for trajectories, where it holds up nothing but the newest of them. Beside it stands the processor time of the thread
that writes rollouts, which the loop does not wait for.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from estr.cli.main import main as estr
from estr.runtime.accounting import Accounting
from estr.runtime.journal import RunJournal
from estr.runtime.saving import CheckpointStore
from estr.storage import rollout_files
from estr.storage.ledger import Ledger
from estr.storage.metrics import JsonLinesWriter, MetricsWriter
from estr.storage.rollout_files import RolloutWriter

WARM = 5
AIM = 0.02
WAITING = ", while it waits"
TIMED: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    (
        "ledger",
        Ledger,
        ("issue", "finish_packed", "keep_packed_turns", "settle", "drop", "drop_group", "load", "position", "commit"),
    ),
    ("rollouts", RunJournal, ("_rows",)),
    ("rollouts", RolloutWriter, ("write", "flush")),
    ("metrics and timeline", JsonLinesWriter, ("append", "sync")),
    ("checkpoint", CheckpointStore, ("save",)),
)


class Clock:
    """Seconds of this thread by kind of work, each without what was inside it of another kind."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.processor: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.background = 0.0
        self.waiting = False
        self._inner: list[list[float]] = []
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def during(self, kind: str) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            yield
            return
        kind += WAITING * self.waiting
        self._inner.append([0.0, 0.0])
        begun = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            took = time.perf_counter() - begun[0], time.thread_time() - begun[1]
            inside = self._inner.pop()
            self.wall[kind] += took[0] - inside[0]
            self.processor[kind] += took[1] - inside[1]
            self.calls[kind] += 1
            if self._inner:
                self._inner[-1] = [a + b for a, b in zip(self._inner[-1], took, strict=True)]

    def wrap(self, kind: str, holder: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(holder, name)

        @functools.wraps(real)
        def timed(*arguments: Any, **named: Any) -> Any:
            with self.during(kind):
                return real(*arguments, **named)

        setattr(holder, name, timed)

    def wrap_batches(self) -> None:
        """Beginning and committing a transaction, without what happens in it."""
        real = Ledger.batch

        @contextlib.contextmanager
        def timed(ledger: Ledger) -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                batch = real(ledger)
                with self.during("ledger"):
                    batch.__enter__()
                stack.push(lambda *error: self._leave(batch, *error))
                yield

        Ledger.batch = timed  # type: ignore[method-assign, assignment]

    def _leave(self, batch: Any, *error: Any) -> bool | None:
        with self.during("ledger"):
            left: bool | None = batch.__exit__(*error)
        return left

    def wrap_waiting(self) -> None:
        real = Accounting.learner

        @contextlib.contextmanager
        def noted(accounting: Accounting, kind: str, version: int) -> Iterator[None]:
            with real(accounting, kind, version):
                self.waiting = kind == "wait"
                try:
                    yield
                finally:
                    self.waiting = False

        Accounting.learner = noted  # type: ignore[method-assign, assignment]

    def wrap_background(self) -> None:
        real = RolloutWriter._store

        def timed(writer: RolloutWriter, *arguments: Any) -> None:
            begun = time.thread_time()
            try:
                real(writer, *arguments)
            finally:
                self.background += time.thread_time() - begun

        rollout_files.RolloutWriter._store = timed  # type: ignore[method-assign, assignment]


class Window:
    """The counted steps: what the clock shows at their begin is taken off what it shows at their end."""

    def __init__(self, clock: Clock, steps: int) -> None:
        self._clock, self._first, self._last = clock, WARM, WARM + steps
        self.begin: dict[str, Any] = {}
        self.end: dict[str, Any] = {}
        real = MetricsWriter.write

        def write(writer: MetricsWriter, step: int, metrics: Any) -> None:
            real(writer, step, metrics)
            if step in (self._first, self._last):
                (self.begin if step == self._first else self.end).update(self._shown())

        MetricsWriter.write = write  # type: ignore[method-assign, assignment]

    def _shown(self) -> dict[str, Any]:
        clock = self._clock
        shown = {"now": time.perf_counter(), "background": clock.background}
        return shown | {name: dict(getattr(clock, name)) for name in ("wall", "processor", "calls")}

    def difference(self, name: str, kind: str) -> float:
        return float(self.end[name].get(kind, 0) - self.begin[name].get(kind, 0))

    @property
    def seconds(self) -> float:
        return float(self.end["now"] - self.begin["now"])


def measure(config: Path, steps: int) -> Window:
    """One run in this process, its engines in others."""
    clock = Clock()
    for kind, holder, names in TIMED:
        for name in names:
            clock.wrap(kind, holder, name)
    clock.wrap_batches()
    clock.wrap_waiting()
    clock.wrap_background()
    window = Window(clock, steps)
    with tempfile.TemporaryDirectory(prefix="estr-durability-", dir=".") as directory:
        every = {"run.steps": WARM + steps + 1, "run.checkpoint_every": WARM + steps // 2, "run.eval_every": 0}
        sets = [part for key, value in every.items() for part in ("--set", f"{key}={value}")]
        status = estr(["train", str(config), "--output", str(Path(directory, "run")), *sets])
        assert status == 0, "the run failed"
    return window


def report(window: Window, steps: int) -> float:
    """Print one run; the share of its time that the loop spent on storage."""
    total = 0.0
    print(f"{'':38}{'ms a step':>10}{'processor':>11}{'share':>8}{'calls a step':>14}")
    for kind in sorted(window.end["wall"]):
        wall, processor, calls = (window.difference(name, kind) for name in ("wall", "processor", "calls"))
        total += wall
        line = f"{kind:38}{1e3 * wall / steps:>10.2f}{1e3 * processor / steps:>11.2f}{wall / window.seconds:>8.2%}"
        print(f"{line}{calls / steps:>14.1f}")
    background = window.end["background"] - window.begin["background"]
    print(f"{'a whole step':38}{1e3 * window.seconds / steps:>10.2f}")
    print(f"{'written in background':38}{'':>10}{1e3 * background / steps:>11.2f}{background / window.seconds:>8.2%}")
    return total / window.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("examples/quickstart.toml"))
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    share = report(measure(given.config, given.steps), given.steps)
    print(f"ledger and storage: {share:.2%} of a step's time; aim {AIM:.0%}: {'yes' if share <= AIM else 'NO'}")
    return 0 if share <= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
