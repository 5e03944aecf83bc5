"""Version switches: where new weights arrived inside a trajectory, and H and |δ| around that moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estr.inspect.dump import Dump, Floats, Ints
from estr.inspect.ratios import entropy_of

WINDOW = 8  # tokens before and after
CHUNK = 200_000  # switches looked at together


@dataclass(frozen=True)
class Change:
    """After minus before, averaged over switches, with its standard error; None where fewer than two are known."""

    mean: float | None
    error: float | None


@dataclass(frozen=True)
class Switches:
    """Means at each offset from the first token under new weights; only tokens of the two versions that meet count."""

    count: int
    trajectories: int  # that hold at least one
    offsets: Ints  # [2·WINDOW], -WINDOW..WINDOW-1
    tokens: Ints  # [2·WINDOW] tokens behind each mean
    entropy: Floats  # [2·WINDOW], NaN where nothing is known
    delta_abs: Floats  # [2·WINDOW]
    entropy_change: Change
    delta_change: Change
    entropy_elsewhere: float | None  # mean over all tokens
    delta_elsewhere: float | None


def version_switches(dump: Dump) -> Switches:
    """All switches inside rows, from the versions stamped on their action tokens."""
    row, version = dump.row, dump.version
    with np.errstate(invalid="ignore"):
        changed = (row[1:] == row[:-1]) & (np.abs(version[1:] - version[:-1]) > 0)
    at = np.flatnonzero(changed) + 1
    offsets = np.arange(-WINDOW, WINDOW)
    entropy, delta = entropy_of(dump), np.abs(dump.delta)
    chunks = np.array_split(at, max(1, len(at) // CHUNK))
    parts = [_around(dump, chunk, offsets, (entropy, delta)) for chunk in chunks]
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.sum([part.totals for part in parts], axis=0) / np.sum([part.counts for part in parts], axis=0)
    paired = np.concatenate([part.paired for part in parts], axis=1)
    return Switches(
        count=len(at),
        trajectories=len(np.unique(dump.trajectory[row[at]])),
        offsets=offsets,
        tokens=np.sum([part.tokens for part in parts], axis=0),
        entropy=means[0],
        delta_abs=means[1],
        entropy_change=_change(paired[0]),
        delta_change=_change(paired[1]),
        entropy_elsewhere=_mean(entropy),
        delta_elsewhere=_mean(delta),
    )


@dataclass(frozen=True)
class _Around:
    """Columns around some switches: sums and counts by offset, and after − before of each switch."""

    totals: Floats  # [columns, offsets]
    counts: Floats  # [columns, offsets]
    tokens: Ints  # [offsets]
    paired: Floats  # [columns, switches]


def _around(dump: Dump, at: Ints, offsets: Ints, columns: tuple[Floats, ...]) -> _Around:
    index = at[:, None] + offsets[None, :]
    inside = (index >= 0) & (index < dump.token_count)
    index = np.where(inside, index, 0)
    side = np.where(offsets < 0, dump.version[at - 1][:, None], dump.version[at][:, None])
    inside &= (dump.row[index] == dump.row[at][:, None]) & (dump.version[index] == side)
    totals, counts, paired = [], [], []
    for column in columns:
        values = np.where(inside, column[index], np.nan)
        known = np.isfinite(values)
        totals.append(np.where(known, values, 0.0).sum(0))
        counts.append(known.sum(0).astype(np.float64))
        paired.append(_row_mean(values[:, offsets >= 0]) - _row_mean(values[:, offsets < 0]))
    return _Around(np.array(totals), np.array(counts), inside.sum(0).astype(np.int64), np.array(paired))


def _row_mean(values: Floats) -> Floats:
    known = np.isfinite(values)
    count = known.sum(1)
    return np.where(count > 0, np.where(known, values, 0.0).sum(1) / np.maximum(count, 1), np.nan)


def _change(values: Floats) -> Change:
    known = values[np.isfinite(values)]
    if len(known) < 2:
        return Change(None, None)
    return Change(float(known.mean()), float(known.std(ddof=1) / np.sqrt(len(known))))


def _mean(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None
