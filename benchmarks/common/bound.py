"""The shortest step that asynchrony can reach: perfect overlap of generation and learning, and the wait that the
staleness bound itself imposes.

The real schedule is driven on a simulated clock by trajectories that last as long as those of a finished run would with
an engine of its own: a decode step for every token, and the latencies of its tools. The learner takes what it took in
that run. Nobody can be faster than the slower of this and the engines' own work.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import runs
from estr.environments.latency import Latency
from estr.schedule import Schedule, ScheduleRules
from estr.storage.metrics import read_timeline
from estr.storage.rollout_files import read_rollouts
from estr.trajectory import Trajectory

STEPS = 60  # simulated, of which the first third is left out


@dataclass(frozen=True)
class Bound:
    """Seconds a step below which the run could not have gone.

    ``waiting``: for trajectories and the learner, with engines that are never busy; ``engines``: their own work. Decode
    steps and the learner's passes took what they took in the run, each beside the other.
    """

    waiting: float
    engines: float


def bound(
    run: Path, latency: Latency, groups: int, group_size: int, staleness: int, first: int, last: int | None
) -> Bound:
    """For the work that ``run`` had and has measured in its steps ``first`` to ``last``."""
    durations = _durations(run, latency)

    def busy(actor: str) -> float:
        idle = runs.mean(run, f"time/{actor}_idle_fraction", first, last)
        return runs.seconds_per_step(run, first, last) * (1 - idle)

    learning, engines = busy("learner"), busy("engine")
    waiting = simulate(durations, learning, groups, group_size, staleness)
    return Bound(waiting, engines)


def simulate(durations: Sequence[float], learning: float, groups: int, group_size: int, staleness: int) -> float:
    """Seconds a step with engines that are never busy and a learner that needs ``learning`` seconds a step."""
    schedule = Schedule(ScheduleRules(prompts_per_step=groups, group_size=group_size, max_staleness=staleness))
    flying: list[tuple[float, int, int]] = []
    now, drawn, marks = 0.0, 0, []
    for version in range(STEPS):
        while True:
            for _ in range(schedule.admissible(version)):
                for ticket in schedule.admit(version):
                    heapq.heappush(flying, (now + durations[drawn % len(durations)], ticket.group, ticket.sibling))
                    drawn += 1
            while flying and flying[0][0] <= now:
                _, group, sibling = heapq.heappop(flying)
                schedule.finish(Trajectory(group, sibling, 0, "", "", 0))
            if isinstance(schedule.take(version), list):
                break
            now = flying[0][0]
        now += learning
        marks.append(now)
    first = STEPS // 3
    return (marks[-1] - marks[first]) / (STEPS - 1 - first)


def _durations(run: Path, latency: Latency) -> list[float]:
    """Seconds of every trajectory of the run if it had an engine to itself, in the order they were issued."""
    decode = decode_seconds(run)
    rows = read_rollouts(run, ["trajectory_id", "segment", "seed", "turns", "action"]).to_pylist()
    return [
        sum(latency.draw(int(row["seed"]), turn) for turn in range(int(row["turns"]) - 1)) + decode * sum(row["action"])
        for row in sorted(rows, key=lambda row: row["trajectory_id"])
        if row["segment"] == 0
    ]


def decode_seconds(run: Path) -> float:
    """Mean seconds of a decode step, whatever else the engine did between two of them included."""
    spans = [span for span in read_timeline(run) if span["kind"] == "generate"]
    steps = sum(span.get("decode_steps", 0) for span in spans)
    return sum(span["end"] - span["start"] for span in spans) / max(1, steps)
