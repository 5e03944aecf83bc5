"""Faults that shift δ = log π − log μ as a whole: A1, A2, A3, A20."""

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
    freshest,
    mean_of,
    neighbor,
    position_bins,
    slope_within,
    temperatures,
    wrong_side,
)
from estr.inspect.dump import Dump, Floats

ONE_SIDED = 0.15  # largest share of Σδ² on the other side of 0 in a one-sided δ


@dataclass(frozen=True)
class Ratios:
    """δ of some tokens [n], what its mean is, and how it follows log μ among positions of like entropy."""

    delta: Floats
    logprob: Floats  # [n] log μ
    mean: Mean
    slope: Slope  # within positions of like entropy; of all tokens alike where no entropy is stored
    entropy: Floats  # [n], NaN where none is stored

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
        return cls(delta, dump.logprob[use], mean_of(delta), slope, column[use])

    @property
    def by_position(self) -> bool:
        """Whether positions could be told apart by their entropy."""
        return bool(np.isfinite(self.entropy).mean() > 0.9)

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
        fits = _fits_division(ratios, k) if ratios.by_position else not _bounded_by_support(dump, chosen, ratios)
        if not ratios.one_sided(sign) or not fits:
            continue
        wrong, right = ("learner's", "engine's") if sign * k < 0 else ("engine's", "learner's")
        return Finding(
            "A1",
            f"At temperature {temperature:g} the {wrong} log-probabilities are divided by the temperature after they "
            "were "
            f"normalized: δ has one sign (mean {ratios.mean.value:+.3f}), is the same for likely and unlikely tokens "
            "of "
            f"like positions, and has the size of (1/T − 1)·H; the {right} are normalized after division.",
            {
                "temperature": temperature,
                "delta_mean": ratios.mean.value,
                "standard_errors": ratios.mean.t,
                "slope_on_logprob": ratios.slope.value,
            },
        )
    return None


def _fits_division(ratios: Ratios, k: float) -> bool:
    """|δ| of A1 is at least (1/T − 1)·H at every token where T < 1, at most (1 − 1/T)·H where T > 1 (log Σ exp is
    convex in 1/T), and it does not depend on which token was drawn."""
    expected = abs(k) * np.nan_to_num(ratios.entropy)
    large = expected > 0.1
    if large.sum() < FEWEST // 4 or abs(ratios.slope.value) > 0.4 * abs(k):
        return False
    scale = np.abs(ratios.delta[large]) / expected[large]
    outside = scale < 0.8 if k > 0 else scale > 1.2
    return bool(outside.mean() < 0.2 and 0.6 < scale.mean() < 6.0)


def raw_logprobs(dump: Dump) -> Finding | None:
    """A2. One side raw, the other after temperature. Where the engine is raw, δ = k·log μ + c with k = 1/T − 1 and c ≥
    k·H at every token, and E[δ] = KL(p_T ‖ p_1) > 0, which no staleness can give. Where the learner is, δ is linear in
    log μ inside a position with slope T − 1."""
    for temperature, chosen in temperatures(dump):
        ratios = Ratios.of(dump, chosen)
        if ratios is None:
            continue
        slope, k = ratios.slope, 1.0 / temperature - 1.0
        engine = ratios.mean.t > 1.5 and _engine_is_raw(ratios, k)
        learner = ratios.by_position and _near(slope.value, temperature - 1.0, 0.15) and slope.r2 > 0.7
        if not engine and not learner:
            continue
        raw, other = ("engine", "learner") if engine else ("learner", "engine")
        return Finding(
            "A2",
            f"The {raw} reports log-probabilities before temperature {temperature:g}, the {other} after it: δ follows "
            f"log μ as this fault makes it (slope {slope.value:+.3f} among positions of like entropy; without "
            f"staleness it gives {k if engine else temperature - 1.0:+.3f}, right data 0), its mean is "
            f"{ratios.mean.value:+.3f}.",
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
    """Whether c = δ − k·log μ keeps its bound where right data would break it, or the slope is k.

    Where positions cannot be told apart the slope is weakened, which leaves only T < 1 to be seen: a draft model's
    log-probabilities (A20) have a negative slope too.
    """
    slope = ratios.slope
    sloped = abs(slope.value) > SIGNIFICANT * slope.error
    if not ratios.by_position:
        return sloped and k > 0 and 0.1 * k < slope.value < 1.2 * k
    floor = k * ratios.entropy - 0.05
    broken = float((ratios.delta - k * ratios.logprob < floor).mean())
    otherwise = float((-k * (ratios.delta + ratios.logprob) < floor).mean())
    bounded = otherwise > 0.2 and broken < 0.12 * otherwise and ratios.mean.t > SIGNIFICANT
    return bounded or (sloped and _near(slope.value, k, 0.45) and slope.r2 > 0.4)


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
        f"The {whole} normalizes over more tokens than the {kept}: δ has one sign (mean {ratios.mean.value:+.3f}) "
        "and does "
        f"not depend on which token was drawn, as if the {kept} had kept {mass:.1%} of the "
        f"mass{_recorded(dump, known)}.",
        {
            "delta_mean": ratios.mean.value,
            "standard_errors": ratios.mean.t,
            "kept_mass": mass,
            "top_p": _least(dump.top_p),
            "top_k": _least(dump.top_k),
        },
    )


def draft_logprobs(dump: Dump) -> Finding | None:
    """A20. Log-probabilities of another model than the one that sampled: E[log π/μ] > 0, which no staleness can give;
    or of a neighboring position: the learner's fit the engine's one token further on."""
    shifted = _shifted_logprobs(dump)
    if shifted is not None:
        return shifted
    ratios = Ratios.of(dump)
    if ratios is None or ratios.mean.t < SIGNIFICANT or ratios.mean.value < 0.01:
        return None
    return Finding(
        "A20",
        "The engine's log-probabilities are not those of the model that sampled: the learner gives the sampled "
        "tokens more "
        f"probability than the engine does (mean δ {ratios.mean.value:+.3f}, {ratios.mean.t:.0f} standard errors "
        "above 0, "
        "and staleness can only lower it), as with the draft model's log-probabilities in speculative decoding.",
        {"delta_mean": ratios.mean.value, "standard_errors": ratios.mean.t, "tokens": ratios.mean.count},
    )


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
