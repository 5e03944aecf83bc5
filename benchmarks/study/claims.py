"""The paper's claims, each with the rule by which the stored numbers decide it. A rule looks at intervals only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
HOLDS, FAILS, OPEN = "holds here", "does not hold here", "cannot be told here"


@dataclass
class Section:
    """One claim: what was asked, a verdict with its reason, and a table."""

    title: str
    question: str
    commands: list[str]
    verdict: str = ""
    reason: str = ""
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def interval(found: Row | None, digits: int = 3, percent: bool = False) -> str:
    """0.571 (0.512 to 0.630); a dash where nothing was measured."""
    if not found:
        return "–"
    scale, unit = (100.0, " %") if percent else (1.0, "")
    mean = f"{scale * found['mean']:.{digits}f}"
    if found.get("low") is None:
        return mean + unit
    return f"{mean} ({scale * found['low']:.{digits}f} to {scale * found['high']:.{digits}f}){unit}"


def at(study: Row, entry: str, value: Any = None) -> Row | None:
    """The row of an entry at a point of the sweep."""
    for row in study["rows"]:
        if row["entry"] == entry and (value is None or row["value"] == value):
            return row
    return None


def measure(row: Row | None, key: str) -> Row | None:
    return None if row is None else row["measures"].get(key)


def entries(study: Row) -> list[str]:
    return list(dict.fromkeys(row["entry"] for row in study["rows"]))


def law(data: Row) -> Section:
    """(a) E[δ²] ∝ H."""
    section = Section(
        "E[δ²] grows in proportion to H",
        "The exponent k of E[δ²] = c·H^k over twenty bins of equal count; the claim is k = 1.",
        ["estr compare benchmarks/study/law.toml", "python -m benchmarks.study.law runs/study/law"],
        header=["engine", "staleness", "exponent k", "R²", "E[δ²]"],
        figures=["law"],
    )
    ends = []
    for row in data["rows"]:
        found = row["intervals"]
        stale = "inter 16, intra 4" if row["entry"] == "stale" else "none"
        section.rows.append(
            [
                row["dtype"],
                stale,
                interval(found["exponent"], 2),
                interval(found["r2"], 2),
                interval(found["delta_squared"], 5),
            ]
        )
        ends.append((found["exponent"]["low"], found["exponent"]["high"]))
    section.verdict, section.reason = _law_verdict(ends)
    simulation = data["simulated"]
    section.notes.append(
        "The same fit on simulated logits with independent noise gives k = "
        f"{simulation['exact']['exponent']:.2f} from exact expectations and "
        f"{simulation['sampled']['exponent']:.2f} from one drawn token a position, "
        "so the fit itself would find a law near 1 where there is one."
    )
    return section


def _law_verdict(ends: list[tuple[float, float]]) -> tuple[str, str]:
    if all(low > 1.2 for low, _ in ends):
        return FAILS, (
            "δ² grows with H in every setting, but faster than in proportion: every interval lies above 1.2. Confident "
            "positions deviate less than the law allows them, so a threshold on δ²/(H+ε) is looser there than it says"
        )
    if all(low <= 1.2 and high >= 0.8 for low, high in ends):
        return HOLDS, "every interval reaches into 0.8 to 1.2"
    return OPEN, "some settings agree with an exponent of 1 and some do not"


def switches(data: Row) -> Section:
    """(b) what happens where new weights arrive."""
    section = Section(
        "Version switches: H and |δ| around them",
        "Change of H and of |δ| from the eight tokens before new weights arrive in a trajectory to the eight after.",
        ["python -m benchmarks.study.law runs/study/law"],
        header=["engine", "switches a run", "change of H (nats)", "change of |δ|"],
        figures=["switches"],
    )
    changes = []
    for row in data["rows"]:
        if row["entry"] != "stale":
            continue
        found = row["intervals"]
        counts = [run["switches"] for run in row["runs"]]
        section.rows.append(
            [
                row["dtype"],
                f"{sum(counts) / len(counts):,.0f}",
                interval(found.get("entropy_change"), 4),
                interval(found.get("delta_change"), 4),
            ]
        )
        changes.append(found.get("delta_change"))
    falls = [found for found in changes if found and found["high"] is not None and found["high"] < 0]
    section.verdict = HOLDS if changes and len(falls) == len(changes) else OPEN
    section.reason = (
        "|δ| is smaller on the side of the newer weights at every precision, as it must be where staleness is part of δ"
        if section.verdict == HOLDS
        else "the change of |δ| is not clear of 0 at every precision"
    )
    return section


def dropped(mild: Row, matched: Row | None) -> Section:
    """(c) masked fraction and |E−1| of ESTR against IcePop and KPop."""
    section = Section(
        "ESTR drops fewer tokens and keeps the ratios of the others nearer to 1",
        "Share of tokens dropped and mean |E − 1|, at the published thresholds and where all drop the same share.",
        [
            "estr compare benchmarks/study/default.toml",
            "estr compare benchmarks/study/default.toml --match masked_fraction",
        ],
        header=["thresholds", "recipe", "dropped", "mean |E − 1|", "final reward"],
    )
    for name, study in (("published", mild), ("matched", matched)):
        for entry in entries(study) if study else ():
            if entry == "sync" or (name == "matched" and entry in ("grpo", "tis")):
                continue
            row = at(study, entry) if study else None
            section.rows.append(
                [
                    name,
                    entry,
                    interval(measure(row, "masked_fraction"), 2, percent=True),
                    interval(measure(row, "ratio_deviation"), 4),
                    interval(measure(row, "final")),
                ]
            )
    shares = {entry: measure(at(mild, entry), "masked_fraction") for entry in ("estr", "icepop", "kpop")}
    own, rivals = shares["estr"], [shares["icepop"], shares["kpop"]]
    if own and all(rivals):
        fewer = [own["high"] < rival["low"] for rival in rivals if rival]
        factors = ", ".join(
            f"{rival['mean'] / own['mean']:.1f} times ESTR's share for {name}"
            for name, rival in zip(("icepop", "kpop"), rivals, strict=True)
            if rival and own["mean"]
        )
        section.verdict = HOLDS if all(fewer) else FAILS
        section.reason = f"dropped at the published thresholds: {factors}; the paper speaks of about ten"
    return section


def reward(name: str, study: Row, command: str) -> Section:
    """(d) final reward of sync, async and the corrections."""
    section = Section(
        f"Final reward, {name}",
        "Held-out reward at the end, against asynchronous GRPO without a correction; differences are paired over the "
        "seeds, their intervals corrected (Holm) over the recipes.",
        [command],
        header=["recipe", "final reward", "difference from grpo", "area under the curve", "collapsed", "dropped"],
        figures=[f"reward-{name}"],
    )
    for entry in entries(study):
        row = at(study, entry)
        assert row is not None
        difference = row["differences"].get("final")
        collapsed = measure(row, "collapsed")
        section.rows.append(
            [
                entry,
                interval(measure(row, "final")),
                interval(difference) + (" *" if difference and difference["decided"] else ""),
                interval(measure(row, "auc")),
                f"{round(collapsed['mean'] * collapsed['count'])} of {collapsed['count']}" if collapsed else "–",
                interval(measure(row, "masked_fraction"), 2, percent=True),
            ]
        )
    section.notes.append("\\* the corrected interval excludes 0.")
    better = _decided(study, above=True)
    worse = _decided(study, above=False)
    section.verdict = HOLDS if "estr" in better else FAILS if "estr" in worse else OPEN
    section.reason = f"better than grpo beyond doubt: {_names(better)}; worse: {_names(worse)}"
    return section


def _decided(study: Row, above: bool) -> list[str]:
    found = []
    for row in study["rows"]:
        difference = row["differences"].get("final")
        if difference and difference["decided"] and (difference["mean"] > 0) == above:
            found.append(row["entry"])
    return found


def _names(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def sweep(title: str, question: str, study: Row, command: str, figure: str) -> Section:
    """(e) and the stress sweeps: a measure at each point."""
    section = Section(title, question, [command], figures=[figure])
    names = entries(study)
    section.header = ["setting", *(f"{name}: final" for name in names), *(f"{name}: dropped" for name in names)]
    points = list(dict.fromkeys((row["axis"], row["point"]) for row in study["rows"]))
    for axis, point in points:
        rows = {row["entry"]: row for row in study["rows"] if (row["axis"], row["point"]) == (axis, point)}
        section.rows.append(
            [
                f"{axis} = {point}",
                *(interval(measure(rows.get(name), "final"), 2) for name in names),
                *(interval(measure(rows.get(name), "masked_fraction"), 2, percent=True) for name in names),
            ]
        )
    section.verdict, section.reason = _sweep_verdict(study, names)
    return section


def _sweep_verdict(study: Row, names: list[str]) -> tuple[str, str]:
    decided = dict.fromkeys(names, 0)
    worse = dict.fromkeys(names, 0)
    for row in study["rows"]:
        difference = row["differences"].get("final")
        if difference and difference["decided"]:
            (decided if difference["mean"] > 0 else worse)[row["entry"]] += 1
    points = len({(row["axis"], row["point"]) for row in study["rows"]})
    reason = (
        f"of {points} settings ESTR is better than grpo beyond doubt in {decided.get('estr', 0)} and worse in "
        f"{worse.get('estr', 0)}"
    )
    if decided.get("estr", 0) and not worse.get("estr", 0):
        return HOLDS, reason
    return (FAILS if worse.get("estr", 0) else OPEN), reason


def sensitivity(study: Row, command: str) -> Section:
    """(f) tau and eps."""
    section = Section(
        "Sensitivity to τ and ε",
        "Final reward and dropped share of ESTR over τ and ε.",
        [command],
        header=["setting", "final reward", "difference from grpo", "dropped", "mean |E − 1|"],
        figures=["sensitivity"],
    )
    for row in study["rows"]:
        section.rows.append(
            [
                row["entry"],
                interval(measure(row, "final")),
                interval(row["differences"].get("final")),
                interval(measure(row, "masked_fraction"), 2, percent=True),
                interval(measure(row, "ratio_deviation"), 4),
            ]
        )
    finals = [measure(row, "final") for row in study["rows"] if row["entry"].startswith("estr")]
    lows = [found["low"] for found in finals if found]
    highs = [found["high"] for found in finals if found]
    overlap = max(lows) <= min(highs)
    section.verdict = "insensitive in this range" if overlap else "sensitive"
    section.reason = (
        "all intervals overlap" if overlap else "the intervals of the best and the worst setting do not overlap"
    )
    return section


def wallclock(data: Row) -> Section:
    """(g) wall-clock to a reward."""
    speed = data["speedup"]
    section = Section(
        "Wall-clock to a given reward, sync against async",
        f"Seconds of training to a held-out reward of {data['reward']}; log-normal tool latency, equal hardware.",
        ["python -m benchmarks.study.wallclock"],
        header=["seed", "sync (s)", "async (s)", "final reward, sync", "final reward, async"],
        figures=["wallclock"],
    )
    by = {(run["mode"], run["seed"]): run for run in data["runs"]}
    for seed in dict.fromkeys(run["seed"] for run in data["runs"]):
        pair = [by[mode, seed] for mode in ("sync", "async")]
        reached = [f"{run['reached']:.1f}" if run["reached"] is not None else "not reached" for run in pair]
        section.rows.append([str(seed), *reached, *(f"{run['rewards'][-1]:.3f}" for run in pair)])
    if speed:
        section.verdict = HOLDS if speed["low"] >= 2.6 else OPEN if speed["high"] >= 2.6 else FAILS
        section.reason = (
            f"async is {interval(speed, 2)} times as fast over {speed['pairs']} pairs (geometric mean); the paper says "
            "2.6. "
            f"Difference of the final rewards, async minus sync: {interval(data['final_difference'])}"
        )
    return section
