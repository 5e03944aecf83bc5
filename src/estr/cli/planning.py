"""``estr plan``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from estr.plan.calibrate import Calibration
    from estr.plan.sweep import Sweep

_SHOWN = 40  # rows of a terminal's table


def plan(source: str, sets: Sequence[str], *, as_json: bool, html: str | None) -> None:
    """Simulate the cluster of a plan's TOML file, or of a run: a table, one JSON object, or a page."""
    from estr.plan.cluster import drawn_workload
    from estr.plan.load import change_plan, load_plan
    from estr.plan.sweep import run_sweep

    path = Path(source)
    calibration = None
    if path.is_dir():
        from estr.plan.calibrate import calibrate

        calibration = calibrate(path)
        config = change_plan(calibration.plan, sets)
    else:
        config = load_plan(path, sets)
    workload_of = calibration.workload if calibration is not None else drawn_workload
    sweep = run_sweep(config, workload_of, _progress if sys.stderr.isatty() else _quiet)
    if html is not None:
        from estr.plan.page import write_page

        written = write_page(sweep, calibration, source, Path(html))
        if not as_json:
            print(written)
    if as_json:
        print(json.dumps(to_json(sweep, calibration), allow_nan=False))
    elif html is None:
        show(sweep, calibration)


def to_json(sweep: Sweep, calibration: Calibration | None) -> dict[str, object]:
    """One object: the plan, its own outcome, sync, all points, the recommended ones; what a run measured."""
    return {
        "plan": sweep.plan.model_dump(),
        "own": sweep.own.to_json(),
        "sync": sweep.sync.to_json(),
        "points": [point.to_json() for point in sweep.points],
        "recommended": [point.to_json() for point in sweep.best()],
        "measured": asdict(calibration.measured) if calibration is not None else None,
    }


def show(sweep: Sweep, calibration: Calibration | None) -> None:
    """The table and sentences for a terminal."""
    from estr.plan.table import HEAD, recommendations, row, short_list, staleness_words

    outcomes = short_list(sweep)
    _table(HEAD, [row(outcome) for outcome in outcomes[:_SHOWN]])
    if len(outcomes) > _SHOWN:
        print(f"… {len(outcomes) - _SHOWN} more rows in --json and --html")
    print("first row: the plan as given; second: synchronous training at its best on the same GPUs")
    print(staleness_words(sweep.own))
    if calibration is not None:
        measured = calibration.measured
        print(
            f"measured in the run: {measured.seconds_per_step:.3g} s a step, "
            f"{measured.trained_tokens_per_second:.4g} tokens/s, engines idle {measured.engine_idle_fraction:.0%}, "
            f"learner idle {measured.learner_idle_fraction:.0%}"
        )
    for sentence in recommendations(sweep):
        print(sentence)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """With rich where it is installed and the terminal is wide enough, else in plain text."""
    from estr.plan.table import plain

    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        print(plain(head, rows))
        return
    console = Console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in head:
        table.add_column(name, justify="right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    if console.is_terminal and console.measure(table).minimum <= console.width:
        console.print(table)
    else:
        print(plain(head, rows))


def _progress(done: int, total: int) -> None:
    print(f"\rsimulating {done} of {total} … ", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _quiet(done: int, total: int) -> None:
    return
