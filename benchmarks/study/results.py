"""docs/results.md from the stored results of the study.

python -m benchmarks.study.results --collect runs/study   adds finished studies to benchmarks/results/study.json
python -m benchmarks.study.results                        makes the page and its pictures from that file
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.study import claims, law, plots
from benchmarks.study.claims import Row, Section

ROOT = Path(__file__).parents[2]
STORED = ROOT / "benchmarks" / "results" / "study.json"
PAGE = ROOT / "docs" / "results.md"
PICTURES = ROOT / "docs" / "results"
STUDIES = ("default", "default-matched", "aggressive", "aggressive-matched", "inter", "intra", "sensitivity", "stress")
SWEEPS = {
    "inter": ("Graceful degradation over Δ_inter", "Final reward and dropped share over the staleness between steps."),
    "intra": ("Graceful degradation over Δ_intra", "Final reward and dropped share over versions within a trajectory."),
    "stress": ("Stress", "Final reward and dropped share over engine precision, learning rate and trajectory length."),
}


def collect(folder: Path, known: Row) -> Row:
    """The numbers of every study under ``folder`` that has ended, and those ``known`` of others."""
    found: Row = {}
    for name in STUDIES:
        path = folder / name / "compare.json"
        if path.exists():
            found[name] = _slim(json.loads(path.read_text()))
    if (folder / "law" / "compare.json").exists():
        found["law"] = {"rows": law.of_study(folder / "law"), "simulated": law.simulated()}
    if (folder / "wallclock" / "wallclock.json").exists():
        found["wallclock"] = json.loads((folder / "wallclock" / "wallclock.json").read_text())
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    for study in found.values():
        study["machine"] = machine
    return known | found


def _slim(study: Row) -> Row:
    """What the page needs of a compare.json."""
    for row in study["rows"]:
        row["runs"] = [{key: run[key] for key in ("seed", "collapse_step", "curve")} for run in row["runs"]]
    return {key: study[key] for key in ("rows", "failed", "notes", "run_seconds")}


def sections(data: Row) -> list[Section]:
    """The claims in the order of the page; one that was not run says how to run it."""
    default = "estr compare benchmarks/study/default.toml --output runs/study/default"
    found = [
        claims.law(data["law"]) if "law" in data else _missing("E[δ²] grows in proportion to H", "law"),
        claims.switches(data["law"]) if "law" in data else _missing("Version switches", "law"),
    ]
    if "default" in data:
        found += [
            claims.dropped(data["default"], data.get("default-matched")),
            claims.reward("mild staleness", data["default"], default),
        ]
    else:
        found.append(_missing("Dropped tokens, and final reward under mild staleness", "default"))
    if "aggressive" in data:
        command = "estr compare benchmarks/study/aggressive.toml --output runs/study/aggressive"
        found.append(claims.reward("aggressive staleness", data["aggressive"], command))
    else:
        found.append(_missing("Final reward, aggressive staleness", "aggressive"))
    for name, (title, question) in SWEEPS.items():
        command = f"estr compare benchmarks/study/{name}.toml --output runs/study/{name}"
        if name in data:
            found.append(claims.sweep(title, question, data[name], command, name))
        else:
            found.append(_missing(title, name))
    command = "estr compare benchmarks/study/sensitivity.toml --output runs/study/sensitivity"
    known = "sensitivity" in data
    found.append(
        claims.sensitivity(data["sensitivity"], command) if known else _missing("Sensitivity to τ and ε", "sensitivity")
    )
    known = "wallclock" in data
    found.append(
        claims.wallclock(data["wallclock"]) if known else _missing("Wall-clock to a given reward", "wallclock")
    )
    return found


def _missing(title: str, name: str) -> Section:
    command = (
        "python -m benchmarks.study.wallclock"
        if name == "wallclock"
        else f"estr compare benchmarks/study/{name}.toml --output runs/study/{name}"
    )
    return Section(title, "", [command], verdict="not run yet")


def pictures(data: Row) -> dict[str, Figure]:
    """Every picture of the page by name."""
    drawn: dict[str, Figure] = {}
    if "law" in data:
        drawn |= {"law": plots.law(data["law"]), "switches": plots.switches(data["law"])}
    for name, title in (
        ("default", "mild staleness"),
        ("aggressive", "aggressive staleness"),
    ):
        if name in data:
            drawn[f"reward-{title}"] = plots.curves(data[name])
    for name in SWEEPS:
        if name in data:
            for axis in dict.fromkeys(row["axis"] for row in data[name]["rows"]):
                drawn[name if name != "stress" else f"stress-{axis}"] = plots.sweep(data[name], axis)
    if "sensitivity" in data:
        drawn["sensitivity"] = plots.settings(data["sensitivity"])
    if "wallclock" in data:
        drawn["wallclock"] = plots.wallclock(data["wallclock"])
    return {_slug(name): figure for name, figure in drawn.items()}


def page(data: Row) -> str:
    """docs/results.md."""
    names = list(pictures(data))
    lines = [
        "# What the paper claims, and what was measured here",
        "",
        "Made by `python -m benchmarks.study.results` from `benchmarks/results/study.json`; `make study` runs",
        "everything anew. The runs train `builtin:tiny` (0.72 million parameters) on `calculator` in `lockstep`, where",
        "staleness is set and not timed, so that they repeat bit for bit. Intervals are 95 % by Student's t over the",
        "seeds. A verdict follows from the intervals by a fixed rule (`benchmarks/study/claims.py`). A model this",
        "small on a task this short can refute that a law is universal; it cannot prove what happens at scale.",
        "Machine: " + "; ".join(sorted({study["machine"] for study in data.values()})) + ".",
        "",
    ]
    found = sections(data)
    lines += ["| claim | verdict |", "|---|---|"]
    lines += [f"| {section.title} | **{section.verdict}** |" for section in found]
    for section in found:
        lines += ["", *_section(section, names)]
    return "\n".join(lines) + "\n"


def _section(section: Section, pictures: list[str]) -> list[str]:
    lines = [f"## {section.title}", ""]
    if section.question:
        lines += [section.question, ""]
    reason = f": {section.reason}" if section.reason else ""
    lines += [f"**{section.verdict[:1].upper()}{section.verdict[1:]}**{reason}.", ""]
    for name in (_slug(figure) for figure in section.figures):
        lines += [
            f"![{section.title}](results/{shown}.svg)"
            for shown in pictures
            if shown == name or shown.startswith(f"{name}-")
        ]
        lines.append("")
    if section.rows:
        lines += ["| " + " | ".join(section.header) + " |", "|" + "---|" * len(section.header)]
        lines += ["| " + " | ".join(row) + " |" for row in section.rows]
        lines.append("")
    for note in section.notes:
        lines += [note, ""]
    lines += ["```bash", *section.commands, "```"]
    return lines


def _slug(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def stored() -> dict[str, Any]:
    """Every study that was ever collected."""
    return dict(json.loads(STORED.read_text())) if STORED.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", type=Path)
    arguments = parser.parse_args()
    if arguments.collect:
        STORED.parent.mkdir(parents=True, exist_ok=True)
        STORED.write_text(json.dumps(collect(arguments.collect, stored()), separators=(",", ":")) + "\n")
    data = stored()
    for name, figure in pictures(data).items():
        print(plots.write(figure, name, PICTURES))
    PAGE.write_text(page(data))
    print(PAGE)


if __name__ == "__main__":
    main()
