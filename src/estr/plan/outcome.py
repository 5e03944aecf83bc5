"""What a simulation found: throughput, idle time, staleness, and whether the work adds up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from estr.plan.sections import PlanConfig

if TYPE_CHECKING:
    from estr.plan.cluster import Cluster


@dataclass
class StepRecord:
    """One optimizer step; ``busy`` (seconds of all engines) and ``generated`` (tokens) count from the start."""

    ended: float
    waited: float
    action_tokens: int
    tokens: int
    busy: float
    generated: int
    intra: list[int]  # of each trajectory trained for the first time
    inter: list[int]


@dataclass(frozen=True)
class Outcome:
    """A simulated cluster in its steady state. Staleness maps optimizer steps to shares of trained trajectories."""

    gpus: int
    engines: int
    learner_ranks: int
    slots: int
    max_staleness: int
    mode: str
    prompts_per_step: int
    steps: int
    seconds_per_step: float
    trained_tokens_per_second: float  # action tokens
    generated_tokens_per_second: float
    engine_idle_fraction: float
    learner_idle_fraction: float
    active_rows: float  # mean rows of a decode step
    inter: dict[int, float]
    intra: dict[int, float]
    inter_mean: float
    intra_mean: float
    staleness_max: int  # largest v_target - v_first
    simulated_engines: int  # fewer than engines where a slice of the cluster was simulated
    engine_failures: int
    lost_tokens: int
    trajectories: dict[str, int] = field(default_factory=dict)  # issued, trained, dropped, failed, unfinished
    speedup: float | None = None  # over sync on the same GPUs

    @property
    def tokens_per_gpu_second(self) -> float:
        return self.trained_tokens_per_second / self.gpus

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(plan: PlanConfig, cluster: Cluster) -> Outcome:
    """The steps after the warm ones."""
    first, records = cluster.warm_steps, cluster.records
    before = records[first - 1] if first else None
    measured, last = records[first:], records[-1]
    seconds = last.ended - (before.ended if before else 0.0)
    busy = last.busy - (before.busy if before else 0.0)
    generated = last.generated - (before.generated if before else 0)
    inter = [value for record in measured for value in record.inter]
    intra = [value for record in measured for value in record.intra]
    every = [a + b for record in records for a, b in zip(record.inter, record.intra, strict=True)]
    decode_steps = sum(engine.totals.decode_steps for engine in cluster.engines)
    counts = cluster.counts
    return Outcome(
        gpus=plan.gpus,
        engines=plan.cluster.engines,
        learner_ranks=plan.cluster.learner_ranks,
        slots=plan.cluster.slots,
        max_staleness=plan.staleness_bound,
        mode=plan.schedule.mode,
        prompts_per_step=plan.workload.prompts_per_step,
        steps=len(measured),
        seconds_per_step=seconds / len(measured),
        trained_tokens_per_second=_rate(sum(record.action_tokens for record in measured), seconds),
        generated_tokens_per_second=_rate(generated, seconds),
        engine_idle_fraction=max(0.0, 1.0 - _rate(busy, seconds * plan.cluster.engines)),
        learner_idle_fraction=_rate(sum(record.waited for record in measured), seconds),
        active_rows=_rate(sum(engine.totals.tokens for engine in cluster.engines), decode_steps),
        inter=shares(inter),
        intra=shares(intra),
        inter_mean=mean(inter),
        intra_mean=mean(intra),
        staleness_max=max(every, default=0),
        simulated_engines=plan.cluster.engines,
        engine_failures=sum(engine.totals.failures for engine in cluster.engines),
        lost_tokens=sum(engine.totals.lost_tokens for engine in cluster.engines),
        trajectories={**vars(counts), "unfinished": counts.issued - counts.trained - counts.dropped - counts.failed},
    )


def shares(values: Sequence[int]) -> dict[int, float]:
    """Each value that occurs with its share, in order."""
    return {value: count / len(values) for value, count in sorted(Counter(values).items())}


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
