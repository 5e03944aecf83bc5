"""``estr compare``: the same run for several recipes and seeds; table, intervals, page."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from estr.compare.driver import Driver, Status
from estr.compare.matching import Matched, match
from estr.compare.page import write_page
from estr.compare.plan import Entry, Plan, PlannedRun, Point, baseline_of, entries_of, points_of
from estr.compare.results import MEASURES
from estr.compare.study import MATCHES, StudyFile, read_study
from estr.compare.summary import Comparison, plain, summarize, to_json, write_json
from estr.compare.tuning import Tuned, tune
from estr.compare.words import difference_words, interval_words, p_words
from estr.errors import RunError, UsageError
from estr.report.series import duration, number
from estr.runtime.builders import build_task
from estr.storage.files import disk_errors, write_atomic
from estr.storage.lock import FileLock

LINE_EVERY = 30.0  # seconds between lines on all runs together


@dataclass(frozen=True)
class Options:
    """What the command line says beside the study file."""

    recipes: str | None = None
    seeds: str | None = None
    sets: Sequence[str] = ()
    output: str | None = None
    workers: int | None = None
    match: str | None = None
    tune: bool = False
    report_only: bool = False
    dry_run: bool = False
    as_json: bool = False


def compare(path: str, options: Options) -> None:
    """Run (or finish) a study, write compare.json and compare.html, print the table.

    Raises:
        UsageError: the study or an option is wrong.
        RunError: runs failed; the result of the others is written before.
    """
    study = read_study(path, _names(options.recipes), _seeds(options.seeds), options.sets)
    _check(options)
    plan = Plan(study)
    entries, points = entries_of(study), points_of(study)
    cells = plan.cells(entries, points, study.section.seeds)
    for run in {cell.entry: cell.run for cell in cells}.values():
        build_task(run.config)
    for notice in plan.notices:
        print(f"note: {notice}", file=sys.stderr)
    if options.dry_run:
        _print_plan([cell.run for cell in cells])
        return
    output = Path(options.output or study.section.output or Path("runs") / study.name)
    with disk_errors("create", output):
        output.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output / ".lock")
    lock.acquire()
    try:
        _study(study, options, output, entries, points)
    finally:
        lock.release()


def _study(study: StudyFile, options: Options, output: Path, entries: list[Entry], points: list[Point]) -> None:
    with disk_errors("write to", output):
        write_atomic(output / "study.toml", study.path.read_bytes())
    plan = Plan(study)
    driver = Driver(
        output,
        options.workers or study.section.workers or os.cpu_count() or 1,
        Progress(),
        keep_checkpoints=study.section.keep_checkpoints,
        modules=study.path.parent,
        train=not options.report_only,
    )
    notes: list[str] = []
    extra: dict[str, Any] = {}
    baseline = baseline_of(study, entries)
    if options.tune:
        tuned = tune(study, plan, entries, driver)
        entries = [one.entry for one in tuned]
        baseline = next(entry for entry in entries if entry.variant == baseline.variant)
        notes += _tuning_notes(tuned, study)
        extra["tuning"] = [
            {"entry": one.entry.label, "choice": one.entry.choice, "scores": one.scores} for one in tuned
        ]
    if options.match:
        target, matched = match(study, plan, entries, baseline, driver)
        entries, baseline = _replaced(entries, matched), _replaced([baseline], matched)[0]
        notes += _matching_notes(target, matched)
        extra["matching"] = {"target": target, "entries": [_matched_json(one) for one in matched]}
    cells = plan.cells(entries, points, study.section.seeds)
    statuses = driver(dict.fromkeys(cell.run for cell in cells))
    comparison = summarize(study.name, cells, statuses, baseline, final=study.section.final, notes=notes)
    result = write_json(comparison, output / "compare.json", extra)
    page = write_page(comparison, output / "compare.html")
    if options.as_json:
        print(json.dumps(plain(to_json(comparison) | extra), allow_nan=False))
    else:
        _print(comparison)
        print(f"result {result}")
        print(f"page {page}")
    if comparison.failed:
        raise RunError(
            f"{len(comparison.failed)} of {len(statuses)} runs failed and are left out of the result; the same command "
            f"tries them again (what they said is in {output / 'logs'})"
        )


class Progress:
    """A line when a run begins or ends, and now and then one on all of them with the time left."""

    def __init__(self) -> None:
        self._printed = time.monotonic()
        self._seconds = 0.0

    def changed(self, status: Status, statuses: Sequence[Status]) -> None:
        done = sum(one.state not in ("waiting", "running") for one in statuses)
        if status.state == "running":
            words = "goes on" if status.steps_before else "begins"
            _say(f"{status.run.name} {words}" + (f" at step {status.steps_before}" if status.steps_before else ""))
            return
        reason = f": {status.reason}" if status.reason else ""
        _say(f"{status.run.name} {status.state}{reason} ({done} of {len(statuses)} runs, {self._left(statuses)})")

    def tick(self, statuses: Sequence[Status], seconds: float) -> None:
        self._seconds = seconds
        if time.monotonic() - self._printed < LINE_EVERY:
            return
        self._printed = time.monotonic()
        now = ", ".join(f"{one.run.name} {one.steps}/{one.total}" for one in statuses if one.state == "running")
        if now:
            _say(f"{now}; {self._left(statuses)}")

    def _left(self, statuses: Sequence[Status]) -> str:
        seconds = time_left(statuses, self._seconds)
        return f"about {duration(seconds)} left" if seconds is not None else "time left unknown"


def time_left(statuses: Sequence[Status], seconds: float) -> float | None:
    """Seconds until all runs are done, at the steps per second of this call so far; None before the first step."""
    taken = sum(one.steps - one.steps_before for one in statuses if one.state != "waiting")
    if taken <= 0 or seconds <= 0:
        return None
    missing = sum(max(0, one.total - one.steps) for one in statuses if one.state in ("waiting", "running"))
    return missing * seconds / taken


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"--seeds must be whole numbers with commas between them, as in 0,1,2, got {text!r}") from None


def _check(options: Options) -> None:
    if options.match is not None and options.match not in MATCHES:
        raise UsageError(f"--match can match {' or '.join(MATCHES)}, not {options.match!r}")
    if options.match is not None and options.tune:
        raise UsageError("--match and --tune both choose thresholds; use one of them")


def _replaced(entries: Iterable[Entry], matched: Sequence[Matched]) -> list[Entry]:
    by_label = {one.entry.label: one.entry for one in matched}
    return [by_label.get(entry.label, entry) for entry in entries]


def _choice(entry: Entry) -> str:
    return ", ".join(
        f"{key.removeprefix('objective.')} {number(v) if isinstance(v, float) else v}"
        for key, v in entry.choice.items()
    )


def _tuning_notes(tuned: Sequence[Tuned], study: StudyFile) -> list[str]:
    measure = "area under the curve" if study.section.tune.by == "auc" else "final reward"
    chosen = [f"{one.entry.label}: {_choice(one.entry)} ({one.runs} runs)" for one in tuned if one.runs]
    free = [one.entry.label for one in tuned if not one.runs]
    notes = [f"Tuned by {measure} on seeds that are not reported. {'; '.join(chosen)}."] if chosen else []
    return notes + ([f"Without a grid, so as they are: {', '.join(free)}."] if free else [])


def _matching_notes(target: float, matched: Sequence[Matched]) -> list[str]:
    found = [
        f"{one.entry.label}: {', '.join(f'{key} {number(value)}' for key, value in one.settings.items())} "
        f"(replayed {one.replayed[-1]:.2%}{'' if one.reached else ', out of reach'})"
        for one in matched
    ]
    return [f"Thresholds that drop {target:.2%} of the tokens of stored pilot runs. {'; '.join(found)}."]


def _matched_json(one: Matched) -> dict[str, Any]:
    return {
        "entry": one.entry.label,
        "settings": dict(one.settings),
        "replayed": list(one.replayed),
        "reached": one.reached,
    }


def _print_plan(runs: Iterable[PlannedRun]) -> None:
    names = list(dict.fromkeys(run.name for run in runs))
    steps = sum({run.name: run.config.run.steps for run in runs}.values())
    for name in names:
        print(name)
    print(f"{len(names)} runs, {steps:,} optimizer steps together")


COLUMNS = ("final", "auc", "collapsed", "masked_fraction", "kl", "ratio_deviation", "delta_abs")


def _print(comparison: Comparison) -> None:
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, width=200)
    for point in comparison.points:
        if point.axis:
            console.print(f"\n{point.axis} = {point.label}")
        console.print(_table(comparison, point))
    for note in comparison.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for status in comparison.failed:
        console.print(f"failed: {status.run.name}: {status.reason}", soft_wrap=True)


def _table(comparison: Comparison, point: Point) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    names = {measure.key: measure.name for measure in MEASURES}
    heads = ["recipe", "seeds", *(names[key] for key in COLUMNS), f"final − {comparison.baseline.label}", "p (Holm)"]
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 else "right", no_wrap=index > 0)
    for row in comparison.at(point):
        found = row.differences.get("final")
        table.add_row(
            row.entry.label,
            str(len(row.runs)),
            *(interval_words(key, row.measures.get(key)) for key in COLUMNS),
            difference_words(found),
            p_words(found),
        )
    return table
