"""``--match masked_fraction``: thresholds at which all recipes drop the same share of tokens.

A pilot run (of the baseline or of ``match.pilot``, on a seed that is not reported) is stored. Each recipe's threshold
is bisected so that replaying the pilot's steps drops the wanted share. What a recipe drops in a run of its own differs,
because dropping changes where the run goes; so, in further rounds, each recipe's own pilot at its threshold takes the
first one's place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from estr.compare.driver import ENDED, Status
from estr.compare.plan import Entry, Plan, PlannedRun, Point, variant_of
from estr.compare.study import StudyFile
from estr.compare.tuning import Trainer
from estr.errors import RunError, UsageError
from estr.inspect.dump import Dump
from estr.inspect.read import read_dump
from estr.inspect.replay import replay
from estr.objectives import objective
from estr.trajectory import derive_seed

TOLERANCE = 1e-3  # of the masked fraction
ITERATIONS = 40
LOWEST, HIGHEST = 1e-6, 1e6  # of a threshold, as a multiple where a gate has several


@dataclass(frozen=True)
class Threshold:
    """How one number moves a recipe's gate: hyperparameters from it, dropping less as it grows."""

    names: tuple[str, ...]
    settings: Callable[[float, Mapping[str, Any]], dict[str, float]]


def _single(name: str) -> Threshold:
    return Threshold((name,), lambda x, _: {name: x})


def _power(base: float, exponent: float) -> float:
    return math.exp(max(-80.0, min(80.0, exponent * math.log(base))))


THRESHOLDS: dict[str, Threshold] = {
    "estr": _single("tau"),
    "kpop": _single("phi"),
    "dppo_kl": _single("delta"),
    "trm": _single("delta"),
    "opsm": _single("delta"),
    # the band keeps its shape: both ends move by one factor of their logarithms
    "icepop": Threshold(("low", "high"), lambda x, at: {"low": _power(at["low"], x), "high": _power(at["high"], x)}),
    "dppo_tv": Threshold(
        ("low", "high"), lambda x, at: {"low": min(at["low"] * x, 1.0), "high": min(at["high"] * x, 1.0)}
    ),
}


@dataclass(frozen=True)
class Matched:
    """A recipe's threshold, and the masked fractions that replaying gave at it, round by round."""

    entry: Entry
    settings: Mapping[str, float]
    replayed: Sequence[float]
    reached: bool  # whether the target lay within what the threshold can do


def threshold_of(study: StudyFile, entry: Entry) -> Threshold | None:
    """What moves the gate of an entry's recipe; None where it drops nothing that can be matched."""
    own = variant_of(study, entry.variant).threshold
    return _single(own) if own else THRESHOLDS.get(entry.recipe)


def match(
    study: StudyFile, plan: Plan, entries: Sequence[Entry], baseline: Entry, train: Trainer
) -> tuple[float, list[Matched]]:
    """The target and, for every entry with a threshold, the one that drops that share; others are left as they are.

    Raises:
        UsageError: no entry has a threshold, or the reference of the target is not compared.
        RunError: a pilot failed.
    """
    movable = [entry for entry in entries if threshold_of(study, entry) is not None]
    if not movable:
        raise UsageError(f"{study.path}: none of the recipes has a threshold that --match could move")
    settings = study.section.match
    reference = movable[0] if settings.target else _named(movable, settings.reference, "reference", study)
    chosen = _named(entries, settings.pilot, "pilot", study) if settings.pilot else baseline
    pilot = _pilots(plan, [chosen], study, train, "match-pilot-")[0]
    target = settings.target or _share(pilot, reference, _hyperparameters(plan, reference, study))
    found = [_bisect(study, entry, pilot, target, (), plan) for entry in movable]
    for number in range(1, settings.rounds):
        pilots = _pilots(plan, [one.entry for one in found], study, train, f"match-round{number}-")
        found = [
            _bisect(study, entry, own, target, one.replayed, plan)
            for entry, own, one in zip(movable, pilots, found, strict=True)
        ]
    return target, found


def masked_share(dump: Dump, recipe: str, hyperparameters: Mapping[str, Any], seed: int) -> float:
    """Share of the learner's tokens that a recipe's gate would have dropped over the stored steps."""
    steps = replay(dump, objective(recipe, **hyperparameters), lambda version: derive_seed(seed, "objective", version))
    seen = sum(step.seen for step in steps)
    return sum(step.masked_fraction * step.seen for step in steps) / max(seen, 1)


def bisect(share: Callable[[float], float], target: float) -> tuple[float, float, bool]:
    """(threshold, its share, whether the target is reached) for a share that falls as the threshold grows.

    Bisection in the logarithm between 1e-6 and 1e6; where the target lies outside, the nearer end.
    """
    low, high = math.log(LOWEST), math.log(HIGHEST)
    for end in (low, high):
        found = share(math.exp(end))
        if (end == low and found < target) or (end == high and found > target):
            return math.exp(end), found, abs(found - target) <= TOLERANCE
    for _ in range(ITERATIONS):
        middle = (low + high) / 2
        found = share(math.exp(middle))
        if abs(found - target) <= TOLERANCE * min(1.0, max(target, 1e-2) * 10):
            break
        low, high = (middle, high) if found > target else (low, middle)
    return math.exp(middle), found, abs(found - target) <= TOLERANCE


def _bisect(
    study: StudyFile, entry: Entry, pilot: Pilot, target: float, before: Sequence[float], plan: Plan
) -> Matched:
    threshold = threshold_of(study, entry)
    assert threshold is not None
    at = _hyperparameters(plan, entry, study)

    def share(x: float) -> float:
        return _share(pilot, entry, at | threshold.settings(x, at))

    x, found, reached = bisect(share, target)
    chosen = threshold.settings(x, at)
    moved = {f"objective.{name}": value for name, value in chosen.items()}
    matched = replace(entry, settings={**entry.settings, **moved}, choice={**entry.choice, **moved})
    return Matched(matched, chosen, (*before, found), reached)


@dataclass(frozen=True)
class Pilot:
    """A stored run that is replayed."""

    name: str
    dump: Dump
    seed: int


def _pilots(plan: Plan, entries: Sequence[Entry], study: StudyFile, train: Trainer, prefix: str) -> list[Pilot]:
    seed = study.section.match.seed
    runs = [cell.run for cell in plan.cells(entries, [Point()], [seed], prefix)]
    statuses = train(dict.fromkeys(runs))
    return [Pilot(run.name, _dump(run, statuses[run.name]), seed) for run in runs]


def _dump(run: PlannedRun, status: Status) -> Dump:
    if status.state not in ENDED:
        raise RunError(f"the pilot run {run.name} failed: {status.reason}")
    return read_dump(status.path, "estr")


def _named(entries: Sequence[Entry], wanted: str, key: str, study: StudyFile) -> Entry:
    for entry in entries:
        if wanted in (entry.label, entry.variant):
            return entry
    hint = " with a threshold; set it, or give compare.match.target" if key == "reference" else "; set it"
    raise UsageError(f"{study.path}: compare.match.{key} is {wanted!r}, which is not among what is compared{hint}")


def _hyperparameters(plan: Plan, entry: Entry, study: StudyFile) -> dict[str, Any]:
    """The recipe's complete hyperparameters, as its run would have them."""
    return plan.config(entry, study.section.match.seed).objective.hyperparameters()


def _share(pilot: Pilot, entry: Entry, hyperparameters: Mapping[str, Any]) -> float:
    try:
        return masked_share(pilot.dump, entry.recipe, hyperparameters, pilot.seed)
    except ValueError as error:
        raise UsageError(f"{entry.label} cannot be matched: {error}") from error
