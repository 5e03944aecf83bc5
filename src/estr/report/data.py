"""Reading a run directory for the report: whatever is there, however unfinished, without executing anything."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estr.errors import UsageError
from estr.report.rollouts import Rollouts, read_rollout_tokens

Floats = NDArray[np.float64]
KINDS = ("generate", "train", "publish", "sync", "evaluate", "checkpoint", "other", "wait", "idle")
EPOCH_SECONDS = 1e8  # a wall time beyond this is a date, not a duration


@dataclass
class Metrics:
    """metrics.jsonl as columns: one float64 [n] a key, NaN where a line lacks it, in order of ``step``."""

    columns: dict[str, Floats] = field(default_factory=dict)
    lines: int = 0

    def __getitem__(self, key: str) -> Floats:
        return self.columns.get(key, np.full(self.lines, np.nan))

    def has(self, key: str) -> bool:
        return bool(np.isfinite(self[key]).any())

    def last(self, key: str) -> float | None:
        values = self[key][np.isfinite(self[key])]
        return float(values[-1]) if len(values) else None

    def total(self, key: str) -> float | None:
        values = self[key][np.isfinite(self[key])]
        return float(values.sum()) if len(values) else None


@dataclass
class Timeline:
    """timeline.jsonl: who did what from when to when (seconds since the run's start)."""

    actor: NDArray[np.str_]
    kind: NDArray[np.str_]
    start: Floats
    end: Floats
    version: Floats

    def __len__(self) -> int:
        return len(self.start)

    @property
    def actors(self) -> list[str]:
        """Engines first, in their order, then everyone else; the learner last."""
        return sorted(set(self.actor.tolist()), key=lambda name: (name == "learner", _natural(name)))

    @property
    def seconds(self) -> float:
        return float(self.end.max()) if len(self) else 0.0

    @property
    def begin(self) -> float:
        return float(self.start.min()) if len(self) else 0.0

    def of(self, actor: str, kind: str) -> tuple[Floats, Floats]:
        """Starts and ends of one actor's spans of one kind."""
        chosen = (self.actor == actor) & (self.kind == kind)
        return self.start[chosen], self.end[chosen]


@dataclass
class Evaluations:
    """Held-out evaluations in order of step, [K] each; ``decoding`` says how many problems and at what temperature."""

    step: Floats
    reward: Floats
    seconds: Floats  # wall time, NaN where unknown
    decoding: str = ""

    def __len__(self) -> int:
        return len(self.step)


@dataclass
class Run:
    """Everything the report knows of one run; ``notes`` are sentences on what could not be read."""

    path: Path
    label: str
    config: dict[str, Any]
    metrics: Metrics
    evaluations: Evaluations
    timeline: Timeline
    rollouts: Rollouts
    notes: list[str]

    def setting(self, section: str, key: str, default: Any = None) -> Any:
        part = self.config.get(section)
        return part.get(key, default) if isinstance(part, dict) else default

    @property
    def recipe(self) -> str:
        return str(self.setting("objective", "recipe", "") or "")

    def hyperparameter(self, name: str, default: float) -> float:
        """A number of the objective, from ``[objective]`` or ``[objective.RECIPE]``."""
        own = self.setting("objective", self.recipe, {})
        value = own.get(name) if isinstance(own, dict) else None
        value = self.setting("objective", name) if value is None else value
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def read_runs(paths: Sequence[Path], token_budget: int) -> list[Run]:
    """Read runs; raises UsageError for a path that is no run directory. ``token_budget`` bounds the rollout tokens."""
    if not paths:
        raise UsageError("a report needs at least one run directory")
    labels = _labels(paths)
    return [read_run(path, label, token_budget // len(paths)) for path, label in zip(paths, labels, strict=True)]


def read_run(path: Path, label: str, token_budget: int) -> Run:
    if not (path / "config.toml").is_file() and not (path / "metrics.jsonl").is_file():
        raise UsageError(f"{path} is no run directory: it has neither config.toml nor metrics.jsonl")
    notes: list[str] = []
    config = _read_config(path / "config.toml", notes)
    metrics = read_metrics(path / "metrics.jsonl", notes)
    timeline = read_timeline(path / "timeline.jsonl", notes)
    rollouts = read_rollout_tokens(path / "rollouts", token_budget, notes)
    evaluations = read_evaluations(path / "evaluations.jsonl", metrics, notes)
    return Run(path, label, config, metrics, evaluations, timeline, rollouts, notes)


def read_metrics(path: Path, notes: list[str]) -> Metrics:
    """Columns of metrics.jsonl, sorted by step, with a wall time that starts at 0 and never runs back."""
    rows = read_json_lines(path, notes)
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = {key: np.array([_float(row.get(key)) for row in rows]) for key in keys}
    columns = {key: column for key, column in columns.items() if np.isfinite(column).any()}
    if "step" in columns:
        order = np.argsort(np.nan_to_num(columns["step"], nan=-1.0), kind="stable")
        columns = {key: column[order] for key, column in columns.items()}
    else:
        columns["step"] = np.arange(1, len(rows) + 1, dtype=np.float64)
    if "wall_time" in columns:
        columns["wall_time"] = continuous_time(columns["wall_time"])
    return Metrics(columns, len(rows))


def read_evaluations(path: Path, metrics: Metrics, notes: list[str]) -> Evaluations:
    """``eval/reward`` of metrics.jsonl, with those of evaluations.jsonl (there also before the first step)."""
    seconds = dict(zip(metrics["step"].tolist(), metrics["wall_time"].tolist(), strict=True))
    logged = zip(metrics["step"].tolist(), metrics["eval/reward"].tolist(), strict=True)
    found = {step: reward for step, reward in logged if math.isfinite(reward)}
    last: dict[str, Any] = {}
    for row in read_json_lines(path, notes):
        step, reward = _float(row.get("step")), _float(row.get("reward"))
        if math.isfinite(step) and math.isfinite(reward):
            found[step], last = reward, row
    steps = sorted(found)
    return Evaluations(
        np.array(steps, np.float64),
        np.array([found[step] for step in steps], np.float64),
        np.array([0.0 if step == 0 else seconds.get(step, math.nan) for step in steps], np.float64),
        _decoding(last),
    )


def _decoding(row: dict[str, Any]) -> str:
    problems, temperature = _float(row.get("problems")), _float(row.get("temperature"))
    words = [f"{problems:,.0f} problems"] if math.isfinite(problems) else []
    if math.isfinite(temperature):
        words.append(f"temperature {temperature:g}" if temperature > 0 else "greedy")
    return ", ".join(words)


def continuous_time(seconds: Floats) -> Floats:
    """Wall time of one history: dates become seconds since the first, a clock that a resume restarted is joined on."""
    if not len(seconds):
        return seconds
    if np.nanmin(seconds) > EPOCH_SECONDS:
        seconds = seconds - np.nanmin(seconds)
    backwards = np.minimum(np.diff(seconds, prepend=seconds[:1]), 0.0)
    return seconds - np.cumsum(np.nan_to_num(backwards))


def read_timeline(path: Path, notes: list[str]) -> Timeline:
    rows = [row for row in read_json_lines(path, notes) if _is_span(row)]
    return Timeline(
        actor=np.array([str(row["actor"]) for row in rows], dtype=np.str_),
        kind=np.array([row["kind"] if row["kind"] in KINDS else "other" for row in rows], dtype=np.str_),
        start=np.array([float(row["start"]) for row in rows]),
        end=np.array([float(row["end"]) for row in rows]),
        version=np.array([_float(row.get("version")) for row in rows]),
    )


def read_json_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Objects of a JSONL file; a missing file has none, a torn last line is left out, other bad lines are noted."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{path.name} could not be read ({error.strerror}).")
        return []
    rows, bad = [], []
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        row = _json_object(line)
        if row is not None:
            rows.append(row)
        elif index < len(lines) - 1:
            bad.append(index + 1)
    if bad:
        notes.append(f"{path.name}: {len(bad)} unreadable line(s) left out, the first is line {bad[0]}.")
    return rows


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append("config.toml is missing: settings are shown as unknown.")
    except (OSError, ValueError) as error:
        notes.append(f"config.toml could not be read ({error}).")
    return {}


def _is_span(row: dict[str, Any]) -> bool:
    if not {"actor", "kind", "start", "end"} <= row.keys() or not row["kind"]:
        return False
    start, end = _float(row["start"]), _float(row["end"])
    return math.isfinite(start) and math.isfinite(end) and end >= start


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _natural(name: str) -> tuple[str, int]:
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or 0)


def _labels(paths: Iterable[Path]) -> list[str]:
    """Directory names; with their parents where names repeat, numbered where even those do."""
    resolved = [path.resolve() for path in paths]
    names = [path.name for path in resolved]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.name}" for path in resolved]
    return [f"{name} ({index + 1})" if names.count(name) > 1 else name for index, name in enumerate(names)]
