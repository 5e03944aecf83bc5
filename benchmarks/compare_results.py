"""Two result files of one benchmark, compared by their ratios: what became worse since the older one.

    python -m benchmarks.compare_results OLD.json NEW.json [--tolerance 0.1]

Ratios of things that ran side by side travel between machines; seconds do not. A ratio is worse where its median moved
the wrong way by more than the tolerance and the two ranges do not overlap. Exit status 1 where one is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.common import machine, results
from benchmarks.common.timing import columns, number

TOLERANCE = 0.1


def verdict(old: results.Ratio, new: results.Ratio, tolerance: float) -> str:
    """``worse``, ``better`` or ``same``; a change inside the ranges of both is no change."""
    better, worse = (max, min) if old.higher else (min, max)
    change = new.median / old.median if old.higher else old.median / new.median
    if change < 1 - tolerance and _beyond(better(new.values), worse(old.values), old.higher):
        return "worse"
    if change > 1 + tolerance and _beyond(better(old.values), worse(new.values), old.higher):
        return "better"
    return "same"


def _beyond(best_of_lower: float, worst_of_higher: float, higher: bool) -> bool:
    return best_of_lower < worst_of_higher if higher else best_of_lower > worst_of_higher


def compare(old: results.Result, new: results.Result, tolerance: float = TOLERANCE) -> list[tuple[str, str, str, str]]:
    """(ratio, old median, new median, verdict) of every ratio in either; raises ValueError for two benchmarks."""
    if old.name != new.name:
        raise ValueError(f"{old.name} and {new.name} are results of two benchmarks; compare results of one")
    before, after = ({ratio.name: ratio for ratio in result.ratios} for result in (old, new))
    rows = []
    for name in {**before, **after}:
        if name not in after:
            rows.append((name, number(before[name].median), "", "gone"))
        elif name not in before:
            rows.append((name, "", number(after[name].median), "new"))
        else:
            medians = number(before[name].median), number(after[name].median)
            rows.append((name, *medians, verdict(before[name], after[name], tolerance)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="relative change that is none")
    arguments = parser.parse_args()
    try:
        old, new = results.read(arguments.old), results.read(arguments.new)
        rows = compare(old, new, arguments.tolerance)
    except (OSError, ValueError) as error:
        sys.exit(f"{error}")
    print(f"old: {machine.sentence(old.machine)}\nnew: {machine.sentence(new.machine)}\n")
    print(columns([("ratio", "old", "new", ""), *rows]))
    if any(row[-1] == "worse" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
