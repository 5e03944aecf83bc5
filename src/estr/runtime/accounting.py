"""Where the time went: the timeline, idle fractions and throughput of each step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from estr.runtime.messages import Activity

LEARNER = "learner"


class TimelineSink(Protocol):
    def write(
        self,
        actor: str,
        kind: str,
        start: float,
        end: float,
        version: int | None = None,
        work: Mapping[str, Any] | None = None,
    ) -> None: ...


class Accounting:
    """Sums what engines and learner did since the last step; seconds of the monotonic clock since the run's start.

    ``offset`` is the run time that earlier processes of the same run have used (after a resume).
    """

    def __init__(self, sink: TimelineSink, engines: int, *, offset: float = 0.0) -> None:
        self._sink = sink
        self.engines = engines  # how many there are at the moment
        self._origin = time.monotonic() - offset
        self._since = time.monotonic()
        self._busy = self._waited = 0.0
        self._generated = self._trained = 0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._origin

    def engine_activity(self, activity: Activity) -> None:
        self._generated += activity.sampled_tokens
        for interval in activity.intervals:
            if interval.kind == "generate":
                self._busy += interval.end - interval.start
            start, end = interval.start - self._origin, interval.end - self._origin
            work = interval.work.to_json() if interval.work is not None else None
            self._sink.write(interval.actor, interval.kind, start, end, interval.version, work)

    @contextmanager
    def learner(self, kind: str, version: int) -> Iterator[None]:
        """Time of the learner spent on ``kind``: train, wait, publish, evaluate, checkpoint."""
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            if kind == "wait":
                self._waited += end - start
            if end - start > 1e-4:
                self._sink.write(LEARNER, kind, start - self._origin, end - self._origin, version)

    def trained(self, action_tokens: int) -> None:
        self._trained += action_tokens

    def step(self) -> dict[str, float]:
        """Metrics of the time since the last call, which starts over."""
        now = time.monotonic()
        period = max(now - self._since, 1e-9)
        metrics = {
            "wall_time": now - self._origin,
            "time/step": period,
            "time/engine_idle_fraction": min(1.0, max(0.0, 1.0 - self._busy / (period * max(1, self.engines)))),
            "time/learner_idle_fraction": min(1.0, self._waited / period),
            "throughput/generated_tokens_per_second": self._generated / period,
            "throughput/trained_tokens_per_second": self._trained / period,
        }
        self._since, self._busy, self._waited = now, 0.0, 0.0
        self._generated = self._trained = 0
        return metrics
