"""``--tune``: each recipe spends the same number of runs on its grid, on seeds that are not reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from estr.compare.driver import ENDED, Status
from estr.compare.plan import Cell, Entry, Plan, PlannedRun, Point
from estr.compare.results import read_result
from estr.compare.study import StudyFile

FIRST_SEED = 1000
Trainer = Callable[[Iterable[PlannedRun]], dict[str, Status]]


@dataclass(frozen=True)
class Tuned:
    """What tuning one variant came to: the chosen entry, and the score of each candidate (mean over its seeds)."""

    entry: Entry
    scores: Mapping[str, float]
    runs: int


def candidates(entries: Sequence[Entry], budget: int) -> list[Entry]:
    """At most ``budget`` entries of a grid, evenly spread over it."""
    if len(entries) <= budget:
        return list(entries)
    chosen = np.unique(np.linspace(0, len(entries) - 1, budget).round().astype(int))
    return [entries[index] for index in chosen]


def tuning_seeds(study: StudyFile, count: int) -> list[int]:
    """The first ``count`` seeds for tuning, none of them reported."""
    given = study.section.tune.seeds
    taken = {*study.section.seeds, *given}
    more = (seed for seed in range(FIRST_SEED, FIRST_SEED + count + len(taken)) if seed not in taken)
    return [*given, *more][:count]


def tune(study: StudyFile, plan: Plan, entries: Sequence[Entry], train: Trainer) -> list[Tuned]:
    """Choose one entry per variant by its mean score over seeds that are not reported.

    A grid of k candidates gets budget // k seeds each, so that every variant costs about the same number of runs; one
    without a grid has nothing to choose and costs none. Tuning happens without the sweep. Ties go to the candidate
    that stands first. A candidate whose runs all failed is not chosen.
    """
    variants = list(dict.fromkeys(entry.variant for entry in entries))
    cells: dict[str, list[Cell]] = {}
    for variant in variants:
        own = [entry for entry in entries if entry.variant == variant]
        if len(own) > 1:
            shown = candidates(own, study.section.tune.budget)
            seeds = tuning_seeds(study, max(1, study.section.tune.budget // len(shown)))
            cells[variant] = plan.cells(shown, [Point()], seeds, prefix="tune-")
    statuses = train(dict.fromkeys(cell.run for variant in cells.values() for cell in variant))
    found = []
    for variant in variants:
        own = [entry for entry in entries if entry.variant == variant]
        found.append(_choose(own, cells.get(variant, []), statuses, study))
    return found


def _choose(own: Sequence[Entry], cells: Sequence[Cell], statuses: Mapping[str, Status], study: StudyFile) -> Tuned:
    scores: dict[str, list[float]] = {}
    for cell in cells:
        status = statuses[cell.run.name]
        if status.state in ENDED:
            result = read_result(status.path, final=study.section.final, diverged=status.state == "diverged")
            scores.setdefault(cell.entry.label, []).append(result.values[study.section.tune.by])
    means = {label: float(np.mean(values)) for label, values in scores.items() if np.isfinite(values).all()}
    best = max(own, key=lambda entry: means.get(entry.label, -np.inf))
    return Tuned(replace(best, label=best.variant), means, len(cells))
