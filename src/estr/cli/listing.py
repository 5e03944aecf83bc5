"""``estr recipes`` and ``estr tasks``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from estr.errors import UsageError, nearest

if TYPE_CHECKING:
    from estr.cli.catalogue import Entry

_EDGES = {"B": "q/μ", "U": "π/q", "E": "π/μ"}


def show_recipes() -> None:
    """One line a method, family by family."""
    from estr.cli.catalogue import catalogue

    for family in catalogue():
        rows = [(family.title.lower(), "what it does", "place: operator edge scope", "confidence")]
        for entry in family.entries:
            places = "; ".join(dict.fromkeys(map(str, entry.places)))
            rows.append((entry.name, entry.description, places, entry.confidence))
        _print_table(rows)
        print()


def show_recipe(name: str) -> None:
    """The methods of that name in full: formula, edge, source, confidence, defaults."""
    from estr.cli.catalogue import find, names

    try:
        entries = find(name)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not entries:
        raise UsageError(f"there is no recipe {name!r}{nearest(name, names())}")
    for entry in entries:
        _show_entry(entry)


def _show_entry(entry: Entry) -> None:
    print(f"{entry.name} ({entry.family}): {entry.description}")
    edges = "".join(sorted(set("".join(place.edge for place in entry.places))))
    lines = {
        "formula": entry.formula,
        "edge": ", ".join(f"{edge} ({_EDGES[edge]})" for edge in edges) or "none",
        "place": "; ".join(dict.fromkeys(map(str, entry.places))),
        "reduction": entry.reduction,
        "needs": ", ".join(entry.needs),
        "source": entry.source,
        "confidence": entry.confidence,
        "note": entry.note,
        "chosen by": entry.choose,
    }
    for label, value in lines.items():
        if value:
            print(f"  {label:<11} {value}")
    for key, value in entry.hyperparameters.items():
        allowed = entry.allowed.get(key, "")
        print(f"  {key} = {value!r}" + (f"  {allowed}" if allowed else ""))


def show_tasks() -> None:
    """Every task with its options."""
    from estr.environments.registry import tasks

    for name, task in tasks().items():
        print(f"{name}: {task.description}")
        for key, option in task.options.items():
            print(f"  {key} = {option.default!r}  {option.description}")


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """The first row is the heading; folded to the terminal where rich is installed."""
    if importlib.util.find_spec("rich") is None:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    wide = console if console.is_terminal else Console(markup=False, highlight=False, width=160)
    wide.print(table)
