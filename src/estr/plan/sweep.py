"""Many plans at once: which split of the machines, which slots, which bound on staleness; and what to recommend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from estr.plan.cluster import drawn_workload, simulate
from estr.plan.outcome import Outcome
from estr.plan.sections import PlanConfig
from estr.plan.workload import Workload

T = TypeVar("T")
WorkloadOf = Callable[[PlanConfig], Workload]
Progress = Callable[[int, int], None]
_STALENESS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Sweep:
    """``plan`` itself, synchronous training on the same machines, and every point that was tried."""

    plan: PlanConfig
    own: Outcome
    sync: Outcome
    points: list[Outcome]
    synchronous: dict[int, Outcome]  # GPUs → the best synchronous outcome

    def best(self) -> list[Outcome]:
        """For each number of GPUs that was swept (or for all points): the recommended point."""
        return [recommend(points, self.plan.sweep.worth) for points in self.by_gpus().values()]

    def by_gpus(self) -> dict[int, list[Outcome]]:
        if not self.plan.sweep.gpus:
            return {0: self.points}
        return {gpus: [p for p in self.points if p.gpus == gpus] for gpus in sorted({p.gpus for p in self.points})}


def recommend(points: Sequence[Outcome], worth: float) -> Outcome:
    """The smallest max_staleness whose throughput a GPU is within ``worth`` of the best; then the fastest of those."""
    near = max(point.tokens_per_gpu_second for point in points) * (1 - worth)
    good = [point for point in points if point.tokens_per_gpu_second >= near]
    least = min(point.max_staleness for point in good)
    return max((p for p in good if p.max_staleness == least), key=lambda p: p.tokens_per_gpu_second)


def run_sweep(
    plan: PlanConfig, workload_of: WorkloadOf = drawn_workload, progress: Progress = lambda done, total: None
) -> Sweep:
    """Simulate ``plan``, synchronous training, and the points of its sweep; every outcome has its speed-up."""
    plans = variants(plan)
    total = len(plans) + 2
    synchronous: dict[tuple[int, int, int], Outcome] = {}

    def over_sync(outcome: Outcome, of: PlanConfig) -> Outcome:
        base = sync_baseline(of)
        key = (base.gpus, base.cluster.slots, base.workload.prompts_per_step)
        if key not in synchronous:
            synchronous[key] = _simulate(base, workload_of)
        speedup = outcome.trained_tokens_per_second / max(synchronous[key].trained_tokens_per_second, 1e-12)
        return dataclasses.replace(outcome, speedup=speedup)

    own = over_sync(_simulate(plan, workload_of), plan)
    progress(1, total)
    sync = dataclasses.replace(next(iter(synchronous.values())), speedup=1.0)
    points = []
    for number, variant in enumerate(plans, 3):
        points.append(over_sync(_simulate(variant, workload_of), variant))
        progress(number, total)
    best: dict[int, Outcome] = {}
    for (gpus, _, _), outcome in synchronous.items():
        if gpus not in best or outcome.trained_tokens_per_second > best[gpus].trained_tokens_per_second:
            best[gpus] = outcome
    return Sweep(plan, own, sync, points, dict(sorted(best.items())))


def sync_baseline(plan: PlanConfig) -> PlanConfig:
    """Synchronous training at its best, as ``benchmarks/overlap.py`` has it: all GPUs generate, then all of them train,
    at no cost for the change; slots are full and tool waits overlap within a batch."""
    base = plan.model_copy(deep=True)
    base.cluster.engines = max(1, plan.gpus // plan.cluster.gpus_per_engine)
    base.cluster.learner_ranks = plan.gpus
    base.schedule.mode = "sync"
    base.simulation.warm_steps = 1
    return base


def variants(plan: PlanConfig) -> list[PlanConfig]:
    """The plans of the sweep."""
    sweep, least = plan.sweep, plan.steps_per_batch - 1
    slots = sweep.slots or [plan.cluster.slots]
    bounds = sorted({max(least, bound) for bound in sweep.max_staleness or [*_STALENESS, plan.schedule.max_staleness]})
    found = []
    for (engines, ranks, batch), slot, bound in product(_machines(plan), slots, bounds):
        variant = plan.model_copy(deep=True)
        variant.cluster.engines, variant.cluster.learner_ranks, variant.cluster.slots = engines, ranks, slot
        variant.workload.prompts_per_step = batch
        variant.schedule.mode, variant.schedule.max_staleness = "async", bound
        found.append(variant)
    return found


def _machines(plan: PlanConfig) -> list[tuple[int, int, int]]:
    """(engines, learner ranks, prompts per step) to try."""
    sweep, cluster, batch = plan.sweep, plan.cluster, plan.workload.prompts_per_step
    if sweep.gpus:
        found = []
        for gpus in sweep.gpus:
            scaled = max(1, round(batch * (gpus / plan.gpus) ** sweep.batch_exponent))
            found += [(engines, ranks, scaled) for engines, ranks in _splits(plan, gpus)]
        return found
    default = _distinct([max(1, cluster.engines // 2), cluster.engines, 2 * cluster.engines, 4 * cluster.engines])
    return [
        (engines, ranks, batch)
        for engines, ranks in product(sweep.engines or default, sweep.learner_ranks or [cluster.learner_ranks])
    ]


def _splits(plan: PlanConfig, gpus: int) -> list[tuple[int, int]]:
    size, found = plan.cluster.gpus_per_engine, []
    for share in plan.sweep.learner_shares:
        engines = max(1, min((gpus - 1) // size, round(gpus * (1 - share) / size)))
        if gpus - engines * size >= 1:
            found.append((engines, gpus - engines * size))
    return _distinct(found)


def cut_slice(plan: PlanConfig) -> tuple[PlanConfig, float]:
    """A plan of at most ``most_engines`` engines with their share of prompts and of the learner, and how many such
    slices the whole is. In a large cluster engines do not notice how many others there are."""
    whole, prompts = plan.cluster.engines, plan.workload.prompts_per_step
    least = max(1, plan.workload.minibatches)
    share = max(least, round(prompts * plan.simulation.most_engines / whole))
    if whole <= plan.simulation.most_engines or share >= prompts:
        return plan, 1.0
    part, times = plan.model_copy(deep=True), prompts / share
    part.workload.prompts_per_step = share
    part.cluster.engines = max(1, round(whole / times))
    part.learner.seconds_per_token = plan.learner.seconds_per_token * times
    return part, times


def _simulate(plan: PlanConfig, workload_of: WorkloadOf) -> Outcome:
    """``plan``, or a slice of it, over as many steps as ``most_trajectories`` allows."""
    part, times = cut_slice(plan)
    outcome = _shortened(part, workload_of)
    return dataclasses.replace(
        outcome,
        gpus=plan.gpus,
        engines=plan.cluster.engines,
        prompts_per_step=plan.workload.prompts_per_step,
        trained_tokens_per_second=outcome.trained_tokens_per_second * times,
        generated_tokens_per_second=outcome.generated_tokens_per_second * times,
        simulated_engines=part.cluster.engines,
    )


def _shortened(plan: PlanConfig, workload_of: WorkloadOf) -> Outcome:
    short = plan.model_copy(deep=True)
    each = plan.workload.prompts_per_step * plan.workload.group_size
    warm = plan.staleness_bound + 4 if plan.simulation.warm_steps < 0 else plan.simulation.warm_steps
    room = plan.simulation.most_trajectories // each * plan.steps_per_batch - warm
    short.simulation.steps = max(3 * plan.steps_per_batch, min(plan.simulation.steps, room))
    return simulate(short, workload_of(short))


def _distinct(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))
