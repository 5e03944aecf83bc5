"""Faults that show in δ = log π − log μ: A1, A2, A3, A4, A5, A17, A20."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estr.inspect.checks.base import Finding
from estr.inspect.checks.statistics import (
    FEWEST,
    SIGNIFICANT,
    Mask,
    Mean,
    Slope,
    compare,
    mean_of,
    neighbor,
    position_bins,
    slope_within,
    temperatures,
    wrong_side,
)
from estr.inspect.dump import Dump, Floats

ONE_SIDED = 0.15  # largest share of Σδ² on the other side of 0 in a one-sided δ
SENTINEL = -1000.0  # engines write numbers like −9999 where they have no log-probability


@dataclass(frozen=True)
class Ratios:
    """δ of some tokens [n], what its mean is, and how it follows log μ among positions of like entropy."""

    delta: Floats
    mean: Mean
    slope: Slope  # within positions of like entropy; of all tokens alike where no entropy is stored
    entropy: float  # mean H of the tokens, NaN where none is stored

    @classmethod
    def of(cls, dump: Dump, chosen: Mask | None = None) -> Ratios | None:
        """δ of the tokens with the smallest lags, so that staleness does not cover what is looked for."""
        use = np.isfinite(dump.delta) if chosen is None else chosen & np.isfinite(dump.delta)
        use = freshest(dump, use)
        if use.sum() < FEWEST:
            return None
        delta = dump.delta[use]
        slope = slope_within(delta, dump.logprob[use], position_bins(dump, use))
        column = dump.entropy if dump.has("entropy") else dump.learner_entropy
        known = column[use][np.isfinite(column[use])]
        return cls(delta, mean_of(delta), slope, float(known.mean()) if len(known) else float("nan"))

    @property
    def by_position(self) -> bool:
        """Whether positions could be told apart by their entropy."""
        return bool(np.isfinite(self.entropy))

    @property
    def magnitude(self) -> float:
        return float(np.abs(self.delta).mean())

    def one_sided(self, sign: float) -> bool:
        """Whether δ lies on one side of 0 as noise and staleness cannot bring about, since they keep E[e^δ] = 1."""
        most = ONE_SIDED if self.by_position else ONE_SIDED / 5
        if sign * self.mean.t < SIGNIFICANT or wrong_side(self.delta, sign) > most:
            return False
        change = np.expm1(np.clip(self.delta, -20.0, 3.0))
        up, down = float(np.maximum(change, 0).sum()), float(np.maximum(-change, 0).sum())
        return up < 0.25 * down if sign < 0 else down < 0.25 * up


def logprobs_divided_by_temperature(dump: Dump) -> Finding | None:
    """A1. log p / T in place of log softmax(z / T): δ is one-sided, the same for every token of a position, and between
    (1/T − 1)·H and a few times that, since log Σ p^{1/T} = (1 − 1/T)·(Rényi entropy of order 1/T)."""
    for temperature, chosen in temperatures(dump):
        ratios = Ratios.of(dump, chosen)
        if ratios is None:
            continue
        k = 1.0 / temperature - 1.0
        sign = float(np.sign(ratios.mean.value))
        scale = ratios.magnitude / (abs(k) * ratios.entropy) if ratios.entropy > 0 else float("nan")
        fits = _fits_division(ratios, k, scale) if ratios.by_position else not _bounded_by_support(dump, chosen, ratios)
        if not ratios.one_sided(sign) or not fits:
            continue
        wrong, right = ("learner's", "engine's") if sign * k < 0 else ("engine's", "learner's")
        return Finding(
            "A1",
            f"At temperature {temperature:g} the {wrong} log-probabilities are divided by the temperature after they were "
            f"normalized: δ has one sign (mean {ratios.mean.value:+.3f}), is the same for likely and unlikely tokens of "
            f"like positions, and has the size of (1/T − 1)·H; the {right} are normalized after division.",
            {
                "temperature": temperature,
                "delta_mean": ratios.mean.value,
                "standard_errors": ratios.mean.t,
                "slope_on_logprob": ratios.slope.value,
                "delta_over_least": scale,
            },
        )
    return None


def _fits_division(ratios: Ratios, k: float, scale: float) -> bool:
    """|δ| of A1 is at least (1/T − 1)·H where T < 1, at most (1 − 1/T)·H where T > 1 (log Σ exp is convex in 1/T), and
    does not depend on the token."""
    low, high = (0.75, 6.0) if k > 0 else (0.2, 1.25)
    return low < scale < high and abs(ratios.slope.value) < 0.4 * abs(k)


def raw_logprobs(dump: Dump) -> Finding | None:
    """A2. One side raw, the other after temperature: δ is linear in log μ inside a position, with slope 1/T − 1 where the
    engine is raw (and E[δ] = KL(p_T ‖ p_1) > 0, which no staleness can give), T − 1 where the learner is."""
    for temperature, chosen in temperatures(dump):
        ratios = Ratios.of(dump, chosen)
        if ratios is None or abs(ratios.slope.value) < SIGNIFICANT * ratios.slope.error:
            continue
        slope, k = ratios.slope, 1.0 / temperature - 1.0
        engine = ratios.mean.t > 3.0 and _engine_is_raw(ratios, k)
        learner = ratios.by_position and _near(slope.value, temperature - 1.0, 0.15) and slope.r2 > 0.7
        if not engine and not learner:
            continue
        raw, other = ("engine", "learner") if engine else ("learner", "engine")
        return Finding(
            "A2",
            f"The {raw} reports log-probabilities before temperature {temperature:g}, the {other} after it: among positions "
            f"of like entropy δ rises with log μ with slope {slope.value:+.3f} (explaining {slope.r2:.0%} of it), where this "
            f"fault gives {k if engine else temperature - 1.0:+.3f} and agreement 0.",
            {
                "temperature": temperature,
                "raw": raw,
                "slope_on_logprob": slope.value,
                "expected_slope": k if engine else temperature - 1.0,
                "r2": slope.r2,
                "delta_mean": ratios.mean.value,
            },
        )
    return None


def _engine_is_raw(ratios: Ratios, k: float) -> bool:
    """Where positions cannot be told apart the slope is weakened, which leaves only T < 1 to be seen: a draft model's
    log-probabilities (A20) have a negative slope too."""
    if ratios.by_position:
        return _near(ratios.slope.value, k, 0.45) and ratios.slope.r2 > 0.4
    return k > 0 and 0.1 * k < ratios.slope.value < 1.2 * k


def support_differs(dump: Dump) -> Finding | None:
    """A3. Engine normalized over the kept tokens, learner over the vocabulary: δ = log of the kept mass, never above 0
    and the same for every token of a position, so that E[π/μ] is that mass and not 1 (or the other way round)."""
    ratios = Ratios.of(dump)
    if ratios is None or abs(ratios.mean.value) < 0.004 or abs(ratios.slope.value) > 0.25:
        return None
    sign = float(np.sign(ratios.mean.value))
    if not ratios.one_sided(sign):
        return None
    mass = float(np.exp(np.minimum(sign * -ratios.delta, 20.0)).mean())
    whole, kept = ("learner", "engine") if sign < 0 else ("engine", "learner")
    known = dump.has("top_p") or dump.has("top_k")
    return Finding(
        "A3",
        f"The {whole} normalizes over more tokens than the {kept}: δ has one sign (mean {ratios.mean.value:+.3f}) and does "
        f"not depend on which token was drawn, as if the {kept} had kept {mass:.1%} of the mass{_recorded(dump, known)}.",
        {
            "delta_mean": ratios.mean.value,
            "standard_errors": ratios.mean.t,
            "kept_mass": mass,
            "top_p": _least(dump.top_p),
            "top_k": _least(dump.top_k),
        },
    )


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
        f"({effect.value / effect.error:.0f} standard errors, {word}): the engine samples with a repetition penalty that the "
        "learner does not know of.",
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
        f"{dump.name[dump.row[bad[0]]]} at position {int(dump.position[bad[0]])}; they must be dropped from the sum and stay "
        "in its denominator.",
        {"tokens": total, "kinds": found},
    )


def engine_noise(dump: Dump) -> Finding | None:
    """A17. δ² where engine and learner hold the same weights is noise. With noise of standard deviation σ on every logit
    E[δ²] = σ²·E[1 − μ(a)], which gives σ whatever the distributions are."""
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
        f"Engine and learner disagree under {words}: δ² is {float((delta**2).mean()):.2g} at {int(same.sum()):,} tokens, "
        f"{outside:.1%} of the ratios lie outside [0.9, 1.1], as if noise of {sigma:.3f} stood on every logit; this part of "
        "δ is engine noise, not staleness.",
        {
            "logit_noise": sigma,
            "delta_squared": float((delta**2).mean()),
            "outside_0.9_1.1": outside,
            "outside_0.8_1.2": float((np.abs(ratio - 1) > 0.2).mean()),
            "tokens": int(same.sum()),
        },
    )


NOISE = 0.033  # logit noise above which A17 speaks; bfloat16 logits of usual size give 0.005 to 0.02


def draft_logprobs(dump: Dump) -> Finding | None:
    """A20. Log-probabilities of another model than the one that sampled: E[log π/μ] > 0, which no staleness can give; or
    of a neighboring position: the learner's fit the engine's one token further on."""
    shifted = _shifted_logprobs(dump)
    if shifted is not None:
        return shifted
    ratios = Ratios.of(dump)
    if ratios is None or ratios.mean.t < SIGNIFICANT or ratios.mean.value < 0.01:
        return None
    return Finding(
        "A20",
        f"The engine's log-probabilities are not those of the model that sampled: the learner gives the sampled tokens more "
        f"probability than the engine does (mean δ {ratios.mean.value:+.3f}, {ratios.mean.t:.0f} standard errors above 0, "
        "and staleness can only lower it), as with the draft model's log-probabilities in speculative decoding.",
        {"delta_mean": ratios.mean.value, "standard_errors": ratios.mean.t, "tokens": ratios.mean.count},
    )


def freshest(dump: Dump, use: Mask) -> Mask:
    """The tokens of ``use`` with the smallest lags, as many lags as it takes to judge by; all where lags are unknown."""
    lag = dump.lag[use]
    if not np.isfinite(lag).all() or len(lag) <= 4 * FEWEST:
        return use
    most = np.partition(lag, 4 * FEWEST)[4 * FEWEST]
    return use & (dump.lag <= most)


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


def _shifted_logprobs(dump: Dump) -> Finding | None:
    for step in (1, -1):
        fit = compare(dump.learner_logprob, dump.logprob, neighbor(dump.logprob, dump.row, step))
        if fit.score > 0.5 and fit.t > SIGNIFICANT and fit.count >= FEWEST:
            where = "one token further on" if step > 0 else "one token back"
            return Finding(
                "A20",
                f"The engine's log-probabilities stand at the wrong positions: the learner's fit those {where} (score "
                f"{fit.score:.2f}, where 1 is certain and right data give −1).",
                {"shift": step, "score": fit.score, "standard_errors": fit.t},
            )
    return None


def _truncated(dump: Dump) -> Mask:
    """Tokens sampled from less than the vocabulary, where one token may be certain whatever the entropy [N]."""
    return np.asarray(((dump.top_p < 1) | (dump.top_k > 0))[dump.row], bool)


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


def _near(value: float, expected: float, tolerance: float) -> bool:
    return abs(value - expected) <= tolerance * abs(expected)


def _bounded_by_support(dump: Dump, chosen: Mask, ratios: Ratios) -> bool:
    """Whether a recorded nucleus explains δ: nearly all of it above log(top_p), which A1 does not heed."""
    top_p = dump.top_p[dump.row][chosen]
    if not np.isfinite(top_p).any() or np.nanmax(top_p) >= 1.0:
        return False
    floor = float(np.log(np.nanmin(top_p)))
    return float(np.quantile(np.abs(ratios.delta), 0.98)) < -1.3 * floor


def _recorded(dump: Dump, known: bool) -> str:
    if not known:
        return "; top_p and top_k are not stored"
    p, k = _least(dump.top_p), _least(dump.top_k)
    if (p is None or p >= 1) and not k:
        return ", although neither top_p nor top_k is recorded as active"
    return f" (top_p {p if p is not None else 1:g}, top_k {int(k or 0)})"


def _least(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.min()) if len(known) else None


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
    return far.value - near.value < 0.15 * near.value + 2 * float(np.hypot(near.error, far.error))
