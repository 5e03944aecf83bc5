"""A benchmark's result: measurements, ratios with their aims, a profile; printed as tables and written as JSON."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from benchmarks.common.timing import Spread, columns

FOLDER = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Ratio:
    """One number that a benchmark is about; ``aim`` is at least (``higher``) or at most what is wanted."""

    name: str
    values: tuple[float, ...]
    aim: float | None = None
    higher: bool = True

    @property
    def median(self) -> float:
        return Spread(self.values).median

    @property
    def verdict(self) -> str:
        return verdict(self.median, self.aim, self.higher)


def verdict(median: float, aim: float | None, higher: bool) -> str:
    """Whether an aim was met, in words; nothing where there is none."""
    if aim is None:
        return ""
    met = median >= aim if higher else median <= aim
    return f"aim {'≥' if higher else '≤'} {aim:g}: {'met' if met else 'missed'}"


@dataclass
class Result:
    """Everything one invocation measured."""

    name: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    measurements: list[dict[str, Any]] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    profile: dict[str, dict[str, float]] = field(default_factory=dict)  # loop → part → share of its time
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def measured(self, name: str, spread: Spread, unit: str, aim: float | None = None, *, higher: bool = True) -> None:
        """A number of this machine; ``aim`` only where the aim itself is one of a machine, not a ratio."""
        found = {"name": name, "unit": unit, "values": list(spread.values)}
        self.measurements.append(found if aim is None else found | {"aim": aim, "higher": higher})

    def ratio(self, name: str, spread: Spread, aim: float | None = None, *, higher: bool = True) -> None:
        assert all(known.name != name for known in self.ratios), f"two ratios are called {name!r}"
        self.ratios.append(Ratio(name, spread.values, aim, higher))

    def tables(self) -> str:
        parts = [machine.sentence(self.machine), ", ".join(f"{k} {v}" for k, v in self.settings.items())]
        if self.measurements:
            rows = [[m["name"], str(Spread(tuple(m["values"]))), m["unit"], _verdict(m)] for m in self.measurements]
            parts.append(columns([["measured", "median (range)", "", ""], *rows]))
        if self.ratios:
            rows = [[r.name, str(Spread(r.values)), r.verdict] for r in self.ratios]
            parts.append(columns([["ratio", "median (range)", ""], *rows]))
        for loop, shares in self.profile.items():
            rows = [[part, f"{share:.1%}"] for part, share in shares.items()]
            parts.append(columns([[f"profile: {loop}", ""], *rows]))
        return "\n\n".join([*parts, *self.notes])


def _verdict(measurement: dict[str, Any]) -> str:
    median = Spread(tuple(measurement["values"])).median
    return verdict(median, measurement.get("aim"), measurement.get("higher", True))


def parser(doc: str | None, *, repeats: int = 5) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    found = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    found.add_argument("--json", type=Path, help="also write the result here, as benchmarks/results/NAME.json")
    found.add_argument("--short", action="store_true", help="a few seconds, to show that it works")
    found.add_argument("--repeats", type=int, default=repeats, help="measurements of each contestant")
    found.add_argument("--threads", type=int, default=1, help="threads of each process")
    return found


def begin(name: str, arguments: argparse.Namespace, **settings: Any) -> Result:
    """A result to fill, with the facts of the machine."""
    start = time.perf_counter()
    found = machine.facts(arguments.threads, short=arguments.short)
    settings = {"short": arguments.short, "repeats": arguments.repeats, **settings}
    return Result(name, settings, found, seconds=-start)


def finish(result: Result, path: Path | None) -> None:
    """Print the tables, and write the file where one is asked for.

    The machine's rates are taken once more: it may have changed its speed meanwhile.
    """
    short = bool(result.settings.get("short"))
    result.machine |= {f"{name}_after": rate for name, rate in machine.rates(short=short).items()}
    result.seconds = round(result.seconds + time.perf_counter(), 1)
    print(result.tables())
    print(f"\n{result.seconds:.0f} s in all")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Result:
    """A stored result; raises ValueError where the file is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found["ratios"] = [Ratio(**(r | {"values": tuple(r["values"])})) for r in found["ratios"]]
        return Result(**found)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no result of a benchmark: {error}") from error
