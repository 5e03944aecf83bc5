"""From the runs of a study to its result: means with intervals, paired differences, compare.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from estr.compare.driver import ENDED, Status
from estr.compare.plan import Cell, Entry, Point
from estr.compare.results import AUC, FINAL, MEASURES, RunResult, read_result
from estr.compare.statistics import LEVEL, Difference, Interval, mean_interval, paired_differences
from estr.storage.files import disk_errors, write_atomic

COMPARED = (FINAL, AUC)
"""Measures whose paired differences are tested; each is a Holm family of its own at each point."""


@dataclass
class Row:
    """One entry at one point: its runs by seed, and what they come to."""

    entry: Entry
    point: Point
    runs: dict[int, RunResult]
    names: dict[int, str]
    measures: dict[str, Interval] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)  # against the baseline; none for itself


@dataclass
class Comparison:
    """The result of a study."""

    name: str
    entries: list[Entry]
    points: list[Point]
    baseline: Entry
    rows: list[Row]
    final: int  # evaluations behind a final reward
    failed: list[Status]
    notes: list[str]
    seconds: float = 0.0  # of all its runs together

    def row(self, entry: Entry, point: Point) -> Row:
        return next(row for row in self.rows if row.entry == entry and row.point == point)

    def at(self, point: Point) -> list[Row]:
        return [row for row in self.rows if row.point == point]

    @property
    def axes(self) -> list[str]:
        return list(dict.fromkeys(point.axis for point in self.points if point.axis))


def summarize(
    name: str,
    cells: Sequence[Cell],
    statuses: Mapping[str, Status],
    baseline: Entry,
    *,
    final: int = 1,
    notes: Sequence[str] = (),
) -> Comparison:
    """Read every run that ended and compare them; runs that failed are left out and named."""
    entries = list(dict.fromkeys(cell.entry for cell in cells))
    points = list(dict.fromkeys(cell.point for cell in cells))
    used = list(dict.fromkeys(cell.run.name for cell in cells))
    ended = [statuses[run] for run in used if statuses[run].state in ENDED]
    results = {
        status.run.name: read_result(status.path, final=final, diverged=status.state == "diverged") for status in ended
    }
    rows = [_row(entry, point, cells, results) for point in points for entry in entries]
    comparison = Comparison(
        name=name,
        entries=entries,
        points=points,
        baseline=baseline,
        rows=rows,
        final=final,
        failed=[statuses[run] for run in used if statuses[run].state == "failed"],
        notes=[*notes, *_missing(statuses, used), *_run_notes(results)],
        seconds=sum(result.seconds for result in results.values() if math.isfinite(result.seconds)),
    )
    for point in points:
        _compare(comparison, point)
    return comparison


def write_json(comparison: Comparison, path: Path, extra: Mapping[str, Any] | None = None) -> Path:
    """Write the result for machines; raises RunError where the disk refuses."""
    value = plain(to_json(comparison) | dict(extra or {}))
    with disk_errors("write", path):
        write_atomic(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())
    return path


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The result as JSON holds it (after ``plain``)."""
    return {
        "study": comparison.name,
        "baseline": comparison.baseline.label,
        "confidence": LEVEL,
        "final_evaluations": comparison.final,
        "measures": {measure.key: {"name": measure.name, "unit": measure.unit} for measure in MEASURES},
        "entries": [asdict(entry) for entry in comparison.entries],
        "rows": [_row_json(row) for row in comparison.rows],
        "failed": [{"run": status.run.name, "reason": status.reason} for status in comparison.failed],
        "notes": comparison.notes,
        "run_seconds": comparison.seconds,
    }


def plain(value: Any) -> Any:
    """``value`` with missing numbers as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _row(entry: Entry, point: Point, cells: Sequence[Cell], results: Mapping[str, RunResult]) -> Row:
    mine = [cell for cell in cells if cell.entry == entry and cell.point == point and cell.run.name in results]
    row = Row(entry, point, {c.seed: results[c.run.name] for c in mine}, {c.seed: c.run.name for c in mine})
    for measure in MEASURES:
        values = [run.values[measure.key] for run in row.runs.values()]
        if any(math.isfinite(value) for value in values):
            row.measures[measure.key] = mean_interval(values)
    return row


def _compare(comparison: Comparison, point: Point) -> None:
    """Paired differences over the seeds that both have; corrected over the entries of this point."""
    base = comparison.row(comparison.baseline, point)
    others = [row for row in comparison.at(point) if row is not base]
    for measure in COMPARED:
        families = [_pairs(row, base, measure.key) for row in others]
        for row, found in zip(others, paired_differences(families), strict=True):
            if found.count:
                row.differences[measure.key] = found


def _pairs(row: Row, base: Row, key: str) -> list[float]:
    return [run.values[key] - base.runs[seed].values[key] for seed, run in row.runs.items() if seed in base.runs]


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "entry": row.entry.label,
        "axis": row.point.axis,
        "point": row.point.label,
        "value": row.point.value,
        "seeds": list(row.runs),
        "measures": {key: asdict(found) for key, found in row.measures.items()},
        "differences": {key: asdict(found) | {"decided": found.decided} for key, found in row.differences.items()},
        "runs": [
            {
                "seed": seed,
                "run": row.names[seed],
                "steps": run.steps,
                "collapse_step": run.collapse_step,
                "values": dict(run.values),
                "curve": {"step": run.eval_step.tolist(), "reward": run.eval_reward.tolist()},
            }
            for seed, run in row.runs.items()
        ],
    }


def _missing(statuses: Mapping[str, Status], used: Sequence[str]) -> list[str]:
    missing = [run for run in used if statuses[run].state == "waiting"]
    return [f"{len(missing)} of {len(used)} runs have not ended and are left out."] if missing else []


def _run_notes(results: Mapping[str, RunResult]) -> list[str]:
    notes = [f"{name}: {note}" for name, result in results.items() for note in result.notes]
    silent = [name for name, result in results.items() if not len(result.eval_reward)]
    if silent:
        notes.append(
            f"{len(silent)} runs have no held-out evaluation (run.eval_every is 0), so they have no reward to compare."
        )
    return notes
