"""The parameters of a plan from a run: what was generated, how fast, and what the learner took for it.

rollouts/       lengths of prompts, turns and replies, by group
timeline.jsonl  decode steps, tokens and seconds of the engines; how long tools took; learner, publication, pauses
metrics.jsonl   what the run came to, to compare a prediction with
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estr.config import Config
from estr.environments.latency import LATENCY_OPTIONS
from estr.errors import UsageError
from estr.plan.sections import PlanConfig
from estr.plan.workload import Profile, RecordedWorkload, ToolWaits, Workload, tool_latency
from estr.storage.metrics import Record, read_metrics, read_timeline
from estr.storage.rollout_files import read_rollouts
from estr.storage.run_directory import RunDirectory

Floats = NDArray[np.float64]
_SKIPPED = 2  # optimizer steps of start-up that no rate is taken from
_COLUMNS = ("trajectory_id", "parent_id", "segment", "group_id", "action", "state", "trained_step")


@dataclass(frozen=True)
class Measured:
    """What a run came to in its steady state."""

    seconds_per_step: float
    trained_tokens_per_second: float
    generated_tokens_per_second: float
    engine_idle_fraction: float
    learner_idle_fraction: float
    inter_mean: float
    intra_mean: float


@dataclass(frozen=True)
class Calibration:
    """A run as a plan, with the groups it trained and the seconds its tools took."""

    plan: PlanConfig
    groups: Sequence[Sequence[Profile]]
    tool_seconds: Sequence[float]
    measured: Measured

    def workload(self, plan: PlanConfig) -> Workload:
        """The run's groups, with tools as ``plan`` says: where it says none, as slow as they were."""
        seed = plan.simulation.seed
        recorded = self.tool_seconds if plan.tools.latency == "none" else ()
        return RecordedWorkload(self.groups, seed, ToolWaits(seed, tool_latency(plan.tools), recorded))


def calibrate(directory: Path) -> Calibration:
    """Take the parameters of a plan from a run directory.

    Raises:
        UsageError: it is no run directory, or too little is recorded in it.
    """
    config = RunDirectory.open(directory).config()
    spans, metrics = read_timeline(directory), read_metrics(directory)
    if config.schedule.mode == "lockstep":
        raise UsageError(
            f"{directory} is a lockstep run, whose clock is not the machine's; plan from a sync or async run"
        )
    if len(metrics) < _SKIPPED + 4:
        raise UsageError(f"{directory} has {len(metrics)} optimizer steps, too few to plan from; at least 6 are needed")
    groups, tokens = _rollouts(directory, config)
    plan = _sections(config, spans)
    _fit_engine(plan, directory, spans)
    _fit_learner(plan, spans, tokens)
    waits = [] if _artificial(config) else [wait for span in spans for wait in span.get("tool_seconds", [])]
    return Calibration(plan, groups, waits, measure(metrics, plan.staleness_bound))


def measure(metrics: Sequence[Record], bound: int) -> Measured:
    """Means over the steps between start-up and the end, where no new work is begun."""
    first = min(bound + 4, len(metrics) // 3)
    lines = metrics[first : max(first + 1, len(metrics) - bound)]

    def mean(key: str) -> float:
        return float(np.mean([line.get(key, 0.0) for line in lines]))

    seconds = sum(line["time/step"] for line in lines)
    return Measured(
        seconds_per_step=seconds / len(lines),
        trained_tokens_per_second=sum(line["tokens/action"] for line in lines) / seconds,
        generated_tokens_per_second=sum(
            line["throughput/generated_tokens_per_second"] * line["time/step"] for line in lines
        )
        / seconds,
        engine_idle_fraction=mean("time/engine_idle_fraction"),
        learner_idle_fraction=mean("time/learner_idle_fraction"),
        inter_mean=mean("staleness/inter_mean"),
        intra_mean=mean("staleness/intra_mean"),
    )


# ---------------------------------------------------------------------- what was generated


def _rollouts(directory: Path, config: Config) -> tuple[list[list[Profile]], dict[int, int]]:
    """Profiles of the groups that were trained whole, and the tokens that each optimizer step trained first."""
    rows = read_rollouts(directory, columns=_COLUMNS).to_pylist()
    trajectories: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["state"] == "trained":
            trajectories.setdefault(row["parent_id"] or row["trajectory_id"], []).append(row)
    groups: dict[str, list[Profile]] = {}
    tokens: dict[int, int] = {}
    for segments in trajectories.values():
        segments.sort(key=lambda row: row["segment"])
        profile = profile_of([np.array(row["action"], bool) for row in segments])
        if profile is not None:
            groups.setdefault(segments[0]["group_id"], []).append(profile)
            step = segments[0]["trained_step"]
            tokens[step] = tokens.get(step, 0) + sum(len(row["action"]) for row in segments)
    whole = [group for group in groups.values() if len(group) >= config.rollout.group_size]
    if not whole:
        raise UsageError(f"{directory} has no group that was trained whole, so there are no lengths to plan with")
    return whole, tokens


def profile_of(segments: Sequence[NDArray[np.bool_]]) -> Profile | None:
    """Lengths of a trajectory from the action masks of its rows; None where nothing was sampled. What a forked history
    is read again counts as a reply."""
    turns: list[int] = []
    between: list[int] = []
    for action in segments:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], action, [False]]).astype(np.int8)))
        starts, ends = edges[::2], edges[1::2]
        gaps = starts - np.concatenate([[0], ends[:-1]]) if len(starts) else []
        turns += (ends - starts).tolist()
        between += [int(gap) for gap in gaps]
    return Profile(between[0], tuple(turns), tuple(between[1:])) if turns else None


# ---------------------------------------------------------------------- how fast


def _sections(config: Config, spans: Sequence[Record]) -> PlanConfig:
    plan = PlanConfig()
    engines = {span["actor"] for span in spans if span["kind"] == "generate"}
    plan.cluster.engines = max(1, len(engines))
    plan.cluster.learner_ranks = config.learner.ranks
    plan.cluster.slots, plan.cluster.parked = config.rollout.slots, config.rollout.parked
    for key in ("prompts_per_step", "minibatches", "epochs"):
        setattr(plan.workload, key, getattr(config.learner, key))
    plan.workload.group_size, plan.workload.attempts = config.rollout.group_size, config.schedule.attempts
    plan.schedule.mode = "sync" if config.schedule.mode == "sync" else "async"
    plan.schedule.max_staleness = max(config.schedule.max_staleness, plan.steps_per_batch - 1)
    if plan.schedule.mode == "sync":
        plan.cluster.learner_ranks = plan.cluster.engines  # the same cores or GPUs, which take turns
    if _artificial(config):
        options = config.task.options()
        for key, option in LATENCY_OPTIONS.items():
            value = options.get(key, option.default)
            if value:  # what this kind of latency does not use may be 0
                setattr(plan.tools, key, value)
    return plan


def _artificial(config: Config) -> bool:
    """Whether the task's tools wait as a distribution says."""
    return config.task.options().get("latency") in ("fixed", "lognormal")


def _fit_engine(plan: PlanConfig, directory: Path, spans: Sequence[Record]) -> None:
    """Seconds a decode step, a row and a token read, by least squares over stretches of generating."""
    start = _steady_from(spans)
    chosen = [s for s in spans if s["kind"] == "generate" and s["start"] >= start and s.get("decode_steps")]
    if len(chosen) < 4:
        raise UsageError(
            f"the timeline of {directory} does not say how many decode steps its engines took; it was written by an "
            "older version or by engines of another kind: run again, or plan from a TOML file"
        )
    work = np.array([[s["decode_steps"], s["sampled_tokens"], s["prefilled_tokens"]] for s in chosen], np.float64)
    seconds = np.array([s["end"] - s["start"] for s in chosen])
    step, row, read = non_negative_least_squares(work, seconds)
    plan.engine.seconds_per_step, plan.engine.seconds_per_row = step, row
    plan.engine.seconds_per_prefill_token = read
    pauses = [s["end"] - s["start"] for s in spans if s["kind"] == "sync" and s["start"] >= start]
    plan.weights.sync_seconds = float(np.mean(pauses)) if pauses else 0.0


def _fit_learner(plan: PlanConfig, spans: Sequence[Record], tokens: dict[int, int]) -> None:
    start = _steady_from(spans)
    learner = [s for s in spans if s["actor"] == "learner" and s["start"] >= start]
    trained = [s for s in learner if s["kind"] == "train"]
    seconds = np.array([s["end"] - s["start"] for s in trained])
    count = np.array([tokens.get(s["version"] + 1, 0) for s in trained], np.float64)
    if plan.workload.epochs > 1 or not count.all():
        count = np.full(len(trained), sum(tokens.values()) / max(len(tokens), 1))
    fixed, each = non_negative_least_squares(np.stack([np.ones(len(count)), count], 1), seconds)
    plan.learner.seconds_per_step = fixed
    plan.learner.seconds_per_token = each * plan.cluster.learner_ranks
    published = [s["end"] - s["start"] for s in learner if s["kind"] == "publish"]
    plan.weights.publish_seconds = float(np.mean(published)) if published else 0.0
    plan.learner.overhead_seconds = _overhead(learner, len(trained))


def _overhead(learner: Sequence[Record], steps: int) -> float:
    """What no span accounts for, a step, and the least that the learner waits (handing out new work)."""
    elapsed = max(s["end"] for s in learner) - min(s["start"] for s in learner)
    between = max(0.0, elapsed - sum(s["end"] - s["start"] for s in learner)) / steps
    waits = [s["end"] - s["start"] for s in learner if s["kind"] == "wait"]
    waits += [0.0] * max(0, steps - len(waits))
    return float(between + np.quantile(waits, 0.1))


def _steady_from(spans: Sequence[Record]) -> float:
    """When the learner began the first step that counts."""
    starts = sorted(s["start"] for s in spans if s["actor"] == "learner" and s["kind"] == "train")
    return float(starts[min(_SKIPPED, len(starts) - 1)]) if starts else 0.0


def non_negative_least_squares(columns: Floats, values: Floats) -> list[float]:
    """Coefficients ≥ 0 of ``columns`` [n, k ≤ 3] nearest to ``values`` [n], scaled so that the sums agree.

    With so few columns every set of them that may be above 0 is tried.
    """
    best, error = np.zeros(columns.shape[1]), np.inf
    for size in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), size):
            found = np.linalg.lstsq(columns[:, chosen], values, rcond=None)[0]
            rest = float(((columns[:, chosen] @ found - values) ** 2).sum())
            if (found >= 0).all() and rest < error * (1 - 1e-9):
                best, error = np.zeros(columns.shape[1]), rest
                best[list(chosen)] = found
    total = float((columns @ best).sum())
    return [float(x) for x in best * (values.sum() / total if total > 0 else 1.0)]
