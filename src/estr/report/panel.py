"""What a page is made of: sections of panels, each a drawing with a legend and one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from matplotlib.figure import Figure

from estr.report.svg import SERIES, inline_svg

Mark = Literal["line", "thin", "dashed", "dotted", "dot", "bar"]


@dataclass(frozen=True)
class Entry:
    """One line of a legend: a mark in the color of ``role`` (a CSS variable's name) and its words."""

    role: str
    text: str
    mark: Mark = "line"


def run_entry(index: int, text: str, mark: Mark | None = None) -> Entry:
    """Legend line of the ``index``-th of several runs."""
    dashes: tuple[Mark, ...] = ("line", "dashed", "dotted")
    return Entry(SERIES[index % len(SERIES)], text, mark or dashes[index // len(SERIES) % 3])


@dataclass(frozen=True)
class Panel:
    """A drawing, or a sentence on why there is none (``svg`` empty, ``sentence`` says it)."""

    name: str
    title: str
    sentence: str
    svg: str = ""
    legend: Sequence[Entry] = ()
    wide: bool = False
    table: Table | None = None


@dataclass(frozen=True)
class Table:
    """A small table; the first cell of a row is its heading."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    panels: Sequence[Panel] = field(default_factory=tuple)


def drawn(
    name: str,
    title: str,
    sentence: str,
    figure: Figure,
    legend: Sequence[Entry] = (),
    wide: bool = False,
    table: Table | None = None,
) -> Panel:
    """A panel with ``figure`` as inline SVG; its accessible name is title and sentence."""
    return Panel(name, title, sentence, inline_svg(figure, name, f"{title}. {sentence}"), legend, wide, table)


def empty(name: str, title: str, reason: str) -> Panel:
    """A panel that says in one sentence why it has nothing to show."""
    return Panel(name, title, reason)
