"""Everything ``estr inspect`` finds of a dump, and the one JSON object that says it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from estr.diagnostics import PowerLawFit, Staleness, integer_histogram, trajectory_staleness
from estr.inspect.checks import Finding, run_checks
from estr.inspect.dump import Dump
from estr.inspect.ratios import Decomposition, Distribution, LagFit, decompose, fit_all, fit_by_lag
from estr.inspect.recipes import Disagreement, Verdicts, verdicts
from estr.inspect.switches import Switches, version_switches

AROUND = 12  # tokens of context on either side of an example
Texts = Callable[[Sequence[int]], list[str]]  # token ids → the text each of them adds


@dataclass(frozen=True)
class Example:
    """A token on which two gates disagree, in its text."""

    row: str
    position: int
    before: str
    token: str
    after: str
    delta: float | None
    entropy: float | None
    probability: float | None  # under μ
    version: int | None


@dataclass(frozen=True)
class Inspection:
    """The results of all analyses of one dump."""

    dump: Dump
    delta: Distribution
    fit: PowerLawFit | None
    by_lag: list[LagFit]
    decomposition: Decomposition
    staleness: Staleness
    switches: Switches
    verdicts: Verdicts
    findings: list[Finding]
    texts: Texts

    def example(self, token: int) -> Example:
        """Token ``token`` with the text around it."""
        dump = self.dump
        row = int(dump.row[token])
        before, own, after = self._context(token)
        return Example(
            row=str(dump.name[row]),
            position=int(dump.position[token]),
            before=before,
            token=own,
            after=after,
            delta=_finite(dump.delta[token]),
            entropy=_finite(dump.entropy[token]),
            probability=_finite(math.exp(min(dump.logprob[token], 0.0))),
            version=None if np.isnan(dump.version[token]) else int(dump.version[token]),
        )

    def _context(self, token: int) -> tuple[str, str, str]:
        stream = self.dump.stream
        if stream is None:
            return "", "", ""
        begin, end = (int(x) for x in stream.offsets[[self.dump.row[token], self.dump.row[token] + 1]])
        at = begin + int(self.dump.position[token])
        first, last = max(begin, at - AROUND), min(end, at + AROUND + 1)
        texts = self.texts(stream.ids[first:last].tolist())
        here = at - first
        return "".join(texts[:here]), texts[here], "".join(texts[here + 1 :])

    def to_json(self) -> dict[str, Any]:
        """One object of plain values: no NaN, a missing value is null."""
        return plain(
            {
                "source": self.dump.source,
                "preset": self.dump.preset,
                "tokens": self.dump.token_count,
                "trajectories": self.dump.trajectories,
                "entropy_kind": self.dump.entropy_kind,
                "delta": asdict(self.delta),
                "fit": _fit(self.fit) | {"by_lag": [_lag_fit(one) for one in self.by_lag]},
                "decomposition": asdict(self.decomposition),
                "staleness": {
                    "inter": integer_histogram(self.staleness.inter),
                    "intra": integer_histogram(self.staleness.intra),
                },
                "switches": asdict(self.switches),
                "recipes": {name: {"masked_fraction": value} for name, value in self.verdicts.masked.items()},
                "recipes_left_out": self.verdicts.left_out,
                "gates": self.verdicts.gates,
                "disagreements": [self._disagreement(pair) for pair in self.verdicts.disagreements],
                "findings": [asdict(finding) for finding in self.findings],
                "notes": [*self.dump.notes, *self.verdicts.notes],
            }
        )

    def _disagreement(self, pair: Disagreement) -> dict[str, Any]:
        return asdict(pair) | {"examples": [asdict(self.example(token)) for token in pair.examples]}


def inspect_dump(dump: Dump, texts: Texts | None = None, recipes: Sequence[str] = ()) -> Inspection:
    """Analyze a dump; ``texts`` turns token ids into text (default: the ids themselves), ``recipes`` are recipes of the
    user's own (``module:name``) beside the built-in ones."""
    first_row = np.unique(dump.trajectory, return_index=True)[1]
    return Inspection(
        dump=dump,
        delta=Distribution.of(dump.delta),
        fit=fit_all(dump),
        by_lag=fit_by_lag(dump),
        decomposition=decompose(dump),
        staleness=_staleness(dump, first_row),
        switches=version_switches(dump),
        verdicts=verdicts(dump, recipes),
        findings=run_checks(dump),
        texts=texts or _ids,
    )


def plain(value: Any) -> Any:
    """Only what JSON has: numpy numbers become plain ones, NaN and infinities null, keys strings."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _staleness(dump: Dump, first_row: Any) -> Staleness:
    """Of trajectories whose tokens carry versions; the others are unknown."""
    trajectory = dump.trajectory[dump.row]
    known = np.flatnonzero(np.isfinite(dump.version))
    known = known[np.argsort(trajectory[known], kind="stable")]
    return trajectory_staleness(dump.version[known], trajectory[known], dump.target_version[first_row])


def _fit(fit: PowerLawFit | None) -> dict[str, Any]:
    if fit is None:
        return {"exponent": None, "slope": None, "coefficient": None, "r2": None, "bins": []}
    table = fit.bins
    bins = [
        {
            "low": table.edges[i],
            "high": table.edges[i + 1],
            "count": table.count[i],
            "entropy": table.entropy[i],
            "delta_abs": table.delta_abs[i],
            "delta_squared": table.delta_squared[i],
        }
        for i in range(len(table.count))
    ]
    return {
        "exponent": fit.exponent,
        "slope": fit.slope,
        "coefficient": fit.coefficient,
        "r2": fit.r2,
        "bins": bins,
    }


def _lag_fit(one: LagFit) -> dict[str, Any]:
    return {
        "lag": one.lag,
        "tokens": one.tokens,
        "delta_squared": one.squared,
        "exponent": one.fit.exponent if one.fit else None,
        "slope": one.fit.slope if one.fit else None,
        "r2": one.fit.r2 if one.fit else None,
    }


def _ids(ids: Sequence[int]) -> list[str]:
    return [f"⟨{token}⟩" for token in ids]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
