"""What durability costs: the share of a step that the learner's loop spends in ledger, rollouts, metrics, checkpoints.

    python -m benchmarks.durability [--config examples/quickstart.toml] [--steps 50] [--json FILE] [--short]

A run of `calculator` as in the quickstart, without evaluations, with `WARM` steps that are not counted and then --steps
that are, one checkpoint among them. Functions of the storage room are timed where the loop calls them, on the clock and
in processor time, each without what it calls of another kind. What falls into the loop's waiting for trajectories is
hidden where the loop goes on waiting afterwards: the batch was not there yet. Work before the first wait and the filing
of the events that completed the batch count. Beside it stands the processor time of the thread that writes rollouts,
which the loop does not wait for.
"""

from __future__ import annotations

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

from benchmarks.common import results
from benchmarks.common.timing import Spread
from estr.cli.main import main as estr
from estr.runtime.accounting import Accounting
from estr.runtime.collector import Collector
from estr.runtime.saving import CheckpointStore
from estr.storage import rollout_files
from estr.storage.ledger import Ledger
from estr.storage.metrics import JsonLinesWriter, MetricsWriter, TimelineWriter
from estr.storage.rollout_files import RolloutWriter

WARM = 5
AIM = 0.02
HIDDEN = ", hidden in waiting"
TIMED: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    (
        "ledger",
        Ledger,
        (
            "issue_group",
            "finish_packed",
            "keep_packed_turns",
            "settle",
            "drop",
            "drop_group",
            "load",
            "position",
            "commit",
        ),
    ),
    ("rollouts", RolloutWriter, ("write_settled", "flush")),
    ("metrics and timeline", JsonLinesWriter, ("append", "sync")),
    ("metrics and timeline", TimelineWriter, ("append",)),
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
        self._gathered = False  # whether this wait has slept yet
        self._since: list[tuple[str, float, float]] = []  # what this wait did since it last slept
        self._inner: list[list[float]] = []
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def during(self, kind: str) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            yield
            return
        self._inner.append([0.0, 0.0])
        begun = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            took = time.perf_counter() - begun[0], time.thread_time() - begun[1]
            inside = self._inner.pop()
            self._count(kind, took[0] - inside[0], took[1] - inside[1])
            if self._inner:
                self._inner[-1] = [a + b for a, b in zip(self._inner[-1], took, strict=True)]

    def _count(self, kind: str, wall: float, processor: float) -> None:
        if self.waiting:
            self._since.append((kind, wall, processor))
            return
        self.wall[kind] += wall
        self.processor[kind] += processor
        self.calls[kind] += 1

    def _settle(self, *, hidden: bool) -> None:
        """Count what was done in a wait, now that it is known whether the wait went on."""
        since, self._since, waiting, self.waiting = self._since, [], self.waiting, False
        for kind, wall, processor in since:
            self._count(kind + HIDDEN * hidden, wall, processor)
        self.waiting = waiting

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
                self.waiting, self._gathered = kind == "wait", False
                try:
                    yield
                finally:
                    self._settle(hidden=False)
                    self.waiting = False

        Accounting.learner = noted  # type: ignore[method-assign, assignment]

    def wrap_gathering(self) -> None:
        real = Collector._gather

        def noted(collector: Collector, *arguments: Any) -> Any:
            self._settle(hidden=self._gathered)
            self._gathered = True
            return real(collector, *arguments)

        Collector._gather = noted  # type: ignore[method-assign, assignment]

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
    clock.wrap_gathering()
    clock.wrap_background()
    window = Window(clock, steps)
    with tempfile.TemporaryDirectory(prefix="estr-durability-", dir=".") as directory:
        every = {"run.steps": WARM + steps + 1, "run.checkpoint_every": WARM + steps // 2, "run.eval_every": 0}
        sets = [part for key, value in every.items() for part in ("--set", f"{key}={value}")]
        status = estr(["train", str(config), "--output", str(Path(directory, "run")), *sets])
        assert status == 0, "the run failed"
    return window


def report(result: results.Result, window: Window, steps: int) -> None:
    """The rows of one run, and the shares of a step's time."""
    shown, hidden = 0.0, 0.0
    for kind in sorted(window.end["wall"]):
        wall, processor, calls = (window.difference(name, kind) for name in ("wall", "processor", "calls"))
        result.measured(kind, Spread((1e3 * wall / steps,)), "ms a step")
        result.measured(f"{kind}: processor", Spread((1e3 * processor / steps,)), "ms a step")
        result.measured(f"{kind}: calls", Spread((calls / steps,)), "a step")
        shown, hidden = (shown, hidden + wall) if kind.endswith(HIDDEN) else (shown + wall, hidden)
    background = window.end["background"] - window.begin["background"]
    result.measured("written in background: processor", Spread((1e3 * background / steps,)), "ms a step")
    result.measured("a whole step", Spread((1e3 * window.seconds / steps,)), "ms")
    result.ratio("ledger and storage / a step", Spread((shown / window.seconds,)), AIM, higher=False)
    result.ratio("the same, with what is hidden in waiting", Spread(((shown + hidden) / window.seconds,)), higher=False)


def main() -> int:
    parser = results.parser(__doc__, repeats=1)
    parser.add_argument("--config", type=Path, default=Path("examples/quickstart.toml"))
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    if arguments.short:
        arguments.steps = 2
    result = results.begin("durability", arguments, config=str(arguments.config), steps=arguments.steps)
    report(result, measure(arguments.config, arguments.steps), arguments.steps)
    results.finish(result, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
