"""Makes docs/performance.md from benchmarks/results/*.json.

    python -m benchmarks.performance_page [--check]

With ``--check`` nothing is written; exit status 1 where the page is not what the stored results say.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.common import machine, results
from benchmarks.common.timing import Spread
from estr.report.svg import THEMED, new_figure, standalone_svg, style_axes

COST = "cost by tenth of the run"
PICTURES = {"bookkeeping": ("Cost of a trajectory over the run", lambda result: _costs(result))}
PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
TITLES = {
    "generation": "Generation",
    "learner": "Learner",
    "whole_step": "A whole step",
    "overlap": "Overlap of generation and training",
    "publication": "Weights to running engines",
    "bookkeeping": "Bookkeeping",
    "durability": "Ledger and storage in a run",
    "objectives": "Objectives, forward and backward",
    "gpu": "On a GPU",
}
HEAD = """# Performance

Made by `python -m benchmarks.performance_page` from `benchmarks/results/`; `make bench` measures anew. Every number
that matters is a ratio of things that ran side by side in one invocation, alternating, threads pinned: median, and
range of the repetitions. Seconds are of the machine named with them.
"""
REASONS = Path(__file__).with_name("reasons.md")


def page(folder: Path = results.FOLDER) -> str:
    """The whole page."""
    found = [results.read(folder / f"{name}.json") for name in TITLES if (folder / f"{name}.json").exists()]
    parts = [HEAD, *_aims(found), *(part for result in found for part in _section(result)), *_gpu(found)]
    return "\n".join(parts).rstrip() + "\n"


def _aims(found: list[results.Result]) -> Iterator[str]:
    """Every aim in one table, and what stands in the way of those that are missed."""
    rows = [(result, aimed) for result in found for aimed in _aimed(result)]
    if not rows:
        return
    yield "## Aims\n"
    yield "| benchmark | ratio | aim | reached | |\n|---|---|---|---|---|"
    for result, ratio in rows:
        sign, word = ("≥" if ratio.higher else "≤"), ratio.verdict.rpartition(" ")[2]
        yield f"| {TITLES[result.name]} | {ratio.name} | {sign} {ratio.aim:,g} | {Spread(ratio.values)} | {word} |"
    yield ""
    missed = {result.name for result, ratio in rows if ratio.verdict.endswith("missed")}
    reasons = _reasons()
    for name in TITLES:
        if name in missed:
            yield f"**{TITLES[name]}, what stands in the way:** {reasons.get(name, 'not yet known')}\n"


def _aimed(result: results.Result) -> list[results.Ratio]:
    """Ratios with an aim, and the numbers of this machine that have one."""
    numbers = [
        results.Ratio(f"{m['name']}, {m['unit']}", tuple(m["values"]), m["aim"], m["higher"])
        for m in result.measurements
        if "aim" in m
    ]
    return [ratio for ratio in result.ratios if ratio.aim is not None] + numbers


def _reasons() -> dict[str, str]:
    """Paragraphs ``name: text`` of reasons.md: what stands in the way of a benchmark's missed aims, or, as ``read
    name``, how its numbers are to be read."""
    if not REASONS.exists():
        return {}
    paragraphs = REASONS.read_text(encoding="utf-8").strip().split("\n\n")
    pairs = (paragraph.replace("\n", " ").partition(": ") for paragraph in paragraphs)
    return {name: text for name, _, text in pairs}


def _section(result: results.Result) -> Iterator[str]:
    yield f"## {TITLES[result.name]}\n"
    yield (
        f"{machine.sentence(result.machine)}. "
        f"{', '.join(f'{k} {v}' for k, v in result.settings.items() if k != 'short')}. {result.seconds:.0f} s.\n"
    )
    if (how := _reasons().get(f"read {result.name}")) is not None:
        yield f"How to read it: {how}\n"
    yield "| ratio | median (range) |\n|---|---|"
    yield from (f"| {ratio.name} | {Spread(ratio.values)} |" for ratio in result.ratios)
    yield "\n| measured | median (range) | |\n|---|---|---|"
    yield from (f"| {m['name']} | {Spread(tuple(m['values']))} | {m['unit']} |" for m in result.measurements)
    yield ""
    if result.name in PICTURES:
        yield f"![{PICTURES[result.name][0]}]({result.name}.svg)\n"
    for loop, shares in result.profile.items():
        yield f"| where the time of the {loop} goes | |\n|---|---|"
        yield from (f"| {part} | {share:.1%} |" for part, share in shares.items())
        yield ""
    yield from (f"{note}\n" for note in result.notes)


def _gpu(found: list[results.Result]) -> Iterator[str]:
    if all(result.name != "gpu" for result in found):
        yield (
            "## On a GPU\n\nUntested: no GPU was at hand. `make bench-gpu` is made to run generation and the learner's "
            "step on one machine with a GPU in at most ten minutes, and stores `benchmarks/results/gpu.json`.\n"
        )


def pictures(folder: Path = results.FOLDER) -> dict[str, str]:
    """SVG files beside the page, by the name of the benchmark whose result they show."""
    found = [results.read(path) for name in PICTURES if (path := folder / f"{name}.json").exists()]
    return {result.name: standalone_svg(PICTURES[result.name][1](result), result.name) for result in found}


def _costs(result: results.Result) -> Figure:
    """A line for each way of writing down: it is flat where a trajectory costs the same for ever."""
    figure = new_figure(560, 240)
    axes = figure.add_subplot()
    style_axes(axes, THEMED, "part of the run that is done", "µs a trajectory")
    shown = [m for m in result.measurements if m["name"].endswith(COST)]
    for index, measurement in enumerate(shown):
        costs = measurement["values"]
        done = [100 * (part + 0.5) / len(costs) for part in range(len(costs))]
        label = measurement["name"].partition(":")[0]
        axes.plot(done, costs, marker="o", markersize=3, color=THEMED.series(index), label=label)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g} %"))
    axes.legend(frameon=False, labelcolor=THEMED["ink"], fontsize=9)
    return figure


def main() -> None:
    wanted = page()
    if sys.argv[1:] == ["--check"]:
        files = {PAGE: wanted} | {PAGE.with_name(f"{name}.svg"): picture for name, picture in pictures().items()}
        if any(not path.exists() or path.read_text(encoding="utf-8") != content for path, content in files.items()):
            sys.exit(f"{PAGE} is not what the stored results say; run: python -m benchmarks.performance_page")
    elif sys.argv[1:]:
        sys.exit("usage: python -m benchmarks.performance_page [--check]")
    else:
        PAGE.write_text(wanted, encoding="utf-8")
        for name, picture in pictures().items():
            PAGE.with_name(f"{name}.svg").write_text(picture, encoding="utf-8")
        print(PAGE)


if __name__ == "__main__":
    main()
