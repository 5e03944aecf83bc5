"""Faults of single tokens: a hidden penalty (A4), missing log-probabilities (A5), noise (A17)."""

from __future__ import annotations

import numpy as np

from estr.inspect.checks.base import Finding
from estr.inspect.checks.statistics import (
    FEWEST,
    SIGNIFICANT,
    Mask,
    freshest,
    mean_of,
    position_bins,
    slope_within,
)
from estr.inspect.dump import Dump, Floats

SENTINEL = -1000.0  # engines write numbers like −9999 where they have no log-probability
NOISE = 0.033  # logit noise above which A17 speaks; bfloat16 logits of usual size give 0.005 to 0.02


def repetition_penalty(dump: Dump) -> Finding | None:
    """A4. A hidden penalty lowers μ of tokens that stand in the context already: their δ lies above that of new tokens,
    also of the same ids where they are new, and at the smallest lags."""
    known = np.isfinite(dump.delta) & (dump.logprob < np.log(0.98))
    if dump.stream is None or known.sum() < FEWEST:
        return None
    seen = already_seen(dump)
    chosen = freshest(dump, known)
    lag = dump.lag[chosen]
    word = f"lag up to {lag.max():.0f}" if np.isfinite(lag).all() else "any lag"
    new, old = chosen & ~seen, chosen & seen
    if min(new.sum(), old.sum()) < 15:
        return None
    repeated = seen[chosen].astype(np.float64)
    effect = slope_within(dump.delta[chosen], repeated, position_bins(dump, chosen))
    same_id = slope_within(dump.delta[chosen], repeated, np.unique(_token_ids(dump)[chosen], return_inverse=True)[1])
    above = _probability_above(dump.delta[old], dump.delta[new])
    sure = effect.value > max(SIGNIFICANT * effect.error, 0.004) and same_id.value > 4.0 * same_id.error
    if not sure or above < 0.62:
        return None
    return Finding(
        "A4",
        f"Tokens that stand in the context already have δ {effect.value:+.3f} above that of new ones at like positions "
        f"({effect.value / effect.error:.0f} standard errors, {word}): the engine samples with a repetition penalty or "
        "another transform that looks at the context, and the learner does not know of it.",
        {
            "effect": effect.value,
            "standard_errors": effect.value / effect.error,
            "probability_above": above,
            "repeated": int(old.sum()),
            "new": int(new.sum()),
            "lag": word,
        },
    )


def missing_logprobs(dump: Dump) -> Finding | None:
    """A5. Action tokens without a usable log-probability: null, NaN, infinite, above 0, a sentinel, or 0 at a position
    whose entropy says that nothing was certain."""
    missing = ~np.isfinite(dump.logprob)
    positive = dump.logprob > 1e-4
    sentinel = np.isfinite(dump.logprob) & (dump.logprob <= SENTINEL)
    zero = (dump.logprob == 0.0) & (dump.entropy > 0.05) & ~_truncated(dump) & ~(dump.learner_logprob > -0.05)
    learner = ~np.isfinite(dump.learner_logprob) & _rows_with(dump, np.isfinite(dump.learner_logprob))
    counts = {
        "null, NaN or infinite": int(missing.sum()),
        "positive": int(positive.sum()),
        "a sentinel": int(sentinel.sum()),
        "0 where the entropy is not": int(zero.sum()),
        "missing from the learner": int(learner.sum()),
    }
    found = {name: count for name, count in counts.items() if count}
    if not found:
        return None
    bad = np.flatnonzero(missing | positive | sentinel | zero | learner)
    total = len(bad)
    words = ", ".join(f"{count:,} {name}" for name, count in found.items())
    return Finding(
        "A5",
        f"{total:,} of {dump.token_count:,} action tokens have no usable log-probability ({words}), the first in "
        f"{dump.name[dump.row[bad[0]]]} at position {int(dump.position[bad[0]])}; they must be dropped from the sum "
        "and stay "
        "in its denominator.",
        {"tokens": total, "kinds": found},
    )


def engine_noise(dump: Dump) -> Finding | None:
    """A17. δ² where engine and learner hold the same weights is noise. With noise of standard deviation σ on every
    logit E[δ²] = σ²·E[1 − μ(a)], which gives σ whatever the distributions are."""
    known = np.isfinite(dump.delta) & np.isfinite(dump.lag)
    same = known & (dump.lag == 0)
    words = "the same weights"
    if same.sum() < FEWEST:
        if not _independent_of_lag(dump, known):
            return None
        same, words = known, "weights of every age alike (δ² does not grow with staleness)"
    delta, mu = dump.delta[same], np.exp(np.minimum(dump.logprob[same], 0.0))
    room = float((1.0 - mu).mean())
    sigma = float(np.sqrt((delta**2).mean() / room)) if room > 1e-6 else 0.0
    error = float((delta**2).std(ddof=1) / np.sqrt(len(delta)) / (2 * max(sigma * room, 1e-12)))
    if sigma - 2 * error < NOISE:
        return None
    ratio = np.exp(np.clip(delta, -20, 20))
    outside = float((np.abs(ratio - 1) > 0.1).mean())
    return Finding(
        "A17",
        f"Engine and learner disagree under {words}: δ² is {float((delta**2).mean()):.2g} at {int(same.sum()):,} "
        "tokens, "
        f"{outside:.1%} of the ratios lie outside [0.9, 1.1], as if noise of {sigma:.3f} stood on every logit; this "
        "part of "
        "δ is engine noise, not staleness.",
        {
            "logit_noise": sigma,
            "delta_squared": float((delta**2).mean()),
            "outside_0.9_1.1": outside,
            "outside_0.8_1.2": float((np.abs(ratio - 1) > 0.2).mean()),
            "tokens": int(same.sum()),
        },
    )


def already_seen(dump: Dump) -> Mask:
    """Whether the same token id stands earlier in the row [N]."""
    assert dump.stream is not None
    ids, offsets = dump.stream.ids, dump.stream.offsets
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    order = np.lexsort((np.arange(len(ids)), ids, owner))
    first = np.ones(len(ids), bool)
    first[1:] = (ids[order][1:] != ids[order][:-1]) | (owner[order][1:] != owner[order][:-1])
    seen = np.empty(len(ids), bool)
    seen[order] = ~first
    return np.asarray(seen[offsets[dump.row] + dump.position], bool)


def _truncated(dump: Dump) -> Mask:
    """Tokens sampled from less than the vocabulary, where one token may be certain whatever the entropy [N]."""
    return np.asarray(dump.truncated[dump.row], bool)


def _token_ids(dump: Dump) -> np.ndarray:
    assert dump.stream is not None
    return dump.stream.ids[dump.stream.offsets[dump.row] + dump.position]


def _probability_above(a: Floats, b: Floats) -> float:
    """P(a > b) + P(a = b)/2 of random entries of a and b."""
    ordered = np.sort(b)
    below = np.searchsorted(ordered, a, side="left") + np.searchsorted(ordered, a, side="right")
    return float(below.mean() / (2 * len(b)))


def _rows_with(dump: Dump, mask: Mask) -> Mask:
    """Whether any token of a token's row is in the mask [N]."""
    return np.asarray((np.bincount(dump.row[mask], minlength=dump.rows) > 0)[dump.row], bool)


def _independent_of_lag(dump: Dump, known: Mask) -> bool:
    """Whether δ² over 1 − μ is the same at small and at large lags that differ by much."""
    lag = dump.lag[known]
    if len(lag) < 4 * FEWEST or lag.max() < 2 * max(lag.min(), 1):
        return False
    middle = np.median(lag)
    room = np.maximum(1.0 - np.exp(np.minimum(dump.logprob[known], 0.0)), 1e-3)
    scaled = dump.delta[known] ** 2 / room
    near, far = mean_of(scaled[lag <= middle]), mean_of(scaled[lag > middle])
    if min(near.count, far.count) < FEWEST:
        return False
    return far.value - near.value + 2 * float(np.hypot(near.error, far.error)) < 0.3 * near.value
