"""A sweep in words and rows, for a terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence

from estr.plan.outcome import Outcome
from estr.plan.sections import PlanConfig
from estr.plan.sweep import Sweep
from estr.report.series import number, percent

HEAD = (
    "GPUs",
    "engines",
    "learner ranks",
    "slots",
    "max_staleness",
    "prompts/step",
    "s/step",
    "tokens/s",
    "engines idle",
    "learner idle",
    "Δ inter",
    "Δ intra",
    "over sync",
)


def row(outcome: Outcome) -> list[str]:
    """An outcome under ``HEAD``; tokens are trained action tokens."""
    return [
        f"{outcome.gpus:,}",
        f"{outcome.engines:,}",
        f"{outcome.learner_ranks:,}",
        str(outcome.slots),
        "sync" if outcome.mode == "sync" else str(outcome.max_staleness),
        f"{outcome.prompts_per_step:,}",
        number(outcome.seconds_per_step),
        number(round(outcome.trained_tokens_per_second)),
        percent(outcome.engine_idle_fraction),
        percent(outcome.learner_idle_fraction),
        f"{outcome.inter_mean:.2f}",
        f"{outcome.intra_mean:.2f}",
        "–" if outcome.speedup is None else f"{outcome.speedup:.2f}×",
    ]


def short_list(sweep: Sweep) -> list[Outcome]:
    """What a terminal shows: the plan itself, sync, and the points; of a sweep over GPUs for each number the best of
    each max_staleness."""
    return [sweep.own, sweep.sync, *(best_by_staleness(sweep) if sweep.plan.sweep.gpus else sweep.points)]


def best_by_staleness(sweep: Sweep) -> list[Outcome]:
    """The fastest point of each (GPUs, max_staleness)."""
    best: dict[tuple[int, int], Outcome] = {}
    for point in sweep.points:
        key = (point.gpus, point.max_staleness)
        if key not in best or point.tokens_per_gpu_second > best[key].tokens_per_gpu_second:
            best[key] = point
    return [best[key] for key in sorted(best)]


def recommendations(sweep: Sweep) -> list[str]:
    """One sentence for each number of GPUs."""
    return [_sentence(best, sweep.plan.sweep.worth) for best in sweep.best()]


def _sentence(best: Outcome, worth: float) -> str:
    ratio = best.engines / best.learner_ranks
    split = (
        f"{number(ratio)} engine{'' if ratio == 1 else 's'} a learner rank"
        if ratio >= 1
        else f"{number(1 / ratio)} learner ranks an engine"
    )
    speed = number(round(best.trained_tokens_per_second))
    over = f", {best.speedup:.2f} times synchronous training on the same" if best.speedup is not None else ""
    return (
        f"{best.gpus:,} GPUs or processes: {_count(best.engines, 'engine')} and "
        f"{_count(best.learner_ranks, 'learner rank')} ({split}), {best.slots} slots, max_staleness "
        f"{best.max_staleness}, the smallest within {percent(worth)} of the best throughput a GPU; {speed} trained "
        f"action tokens a second{over}; engines idle {percent(best.engine_idle_fraction)}, learner idle "
        f"{percent(best.learner_idle_fraction)}."
    )


def _count(amount: int, word: str) -> str:
    return f"{amount:,} {word}{'' if amount == 1 else 's'}"


def staleness_words(outcome: Outcome) -> str:
    """The distributions of Δ_inter and Δ_intra on two lines."""
    lines = []
    for name, shares in (("inter", outcome.inter), ("intra", outcome.intra)):
        parts = ", ".join(f"{value}: {percent(share)}" for value, share in shares.items())
        lines.append(f"Δ {name} of trained trajectories (optimizer steps: share): {parts}")
    return "\n".join(lines)


def parameters(plan: PlanConfig) -> list[tuple[str, str]]:
    """Every parameter that is not the default's, and all that cost time."""
    shown = []
    for section in ("cluster", "workload", "tools", "engine", "learner", "weights", "schedule"):
        for key, value in getattr(plan, section).model_dump().items():
            if section == "tools" and key.startswith("latency_") and not _used(plan.tools.latency, key):
                continue
            shown.append((f"{section}.{key}", _value(value)))
    return shown


def _used(latency: str, key: str) -> bool:
    keys = {"none": (), "fixed": ("latency_seconds",)}
    return key in keys.get(latency, ("latency_median", "latency_p99", "latency_cap"))


def _value(value: object) -> str:
    if isinstance(value, dict):
        if value["kind"] == "fixed":
            return number(float(value["value"]))
        cap = f", at most {number(float(value['cap']))}" if value["cap"] < 1e9 else ""
        return f"log-normal, median {number(float(value['median']))}, 99 % below {number(float(value['p99']))}{cap}"
    return number(float(value)) if isinstance(value, float) else str(value)


def plain(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in plain text, columns aligned to the right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in [head, *rows]]
    return "\n".join(line.rstrip() for line in lines)
