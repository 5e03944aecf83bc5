"""What δ is made of: its distribution, its growth with H, and parts from noise and from both kinds of staleness."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from estr.diagnostics import PowerLawFit, fit_power_law
from estr.inspect.dump import Dump, Floats

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
LAGS = 12  # at most so many lags get a fit of their own
LAG_TOKENS = 200
FRESH_TOKENS = 100  # tokens at zero lag that suffice to measure noise by


@dataclass(frozen=True)
class Distribution:
    """δ of the tokens whose δ is known; None where there are none."""

    tokens: int
    mean: float | None
    std: float | None
    absolute: float | None  # mean |δ|
    squared: float | None  # mean δ²
    quantiles: dict[str, float]

    @classmethod
    def of(cls, delta: Floats) -> Distribution:
        x = delta[np.isfinite(delta)]
        if not len(x):
            return cls(0, None, None, None, None, {})
        points = dict(zip(map(str, QUANTILES), np.quantile(x, QUANTILES).tolist(), strict=True))
        squared = float((x**2).mean())
        return cls(len(x), float(x.mean()), float(x.std()), float(np.abs(x).mean()), squared, points)


@dataclass(frozen=True)
class LagFit:
    """δ² of the tokens of one lag (v_target − version), and its fit against H."""

    lag: int
    tokens: int
    squared: float
    fit: PowerLawFit | None


def entropy_of(dump: Dump) -> Floats:
    """H as the fit sees it [N]: as stored, the middle of an interval, or the learner's where no other is stored."""
    if not dump.has("entropy"):
        return dump.learner_entropy
    return np.where(np.isfinite(dump.entropy_upper), (dump.entropy + dump.entropy_upper) / 2, dump.entropy)


def fit_all(dump: Dump) -> PowerLawFit | None:
    """E[δ²] against H over all tokens; None where fewer than three bins of H have both."""
    return fit_power_law(dump.delta, entropy_of(dump))


def fit_by_lag(dump: Dump) -> list[LagFit]:
    """One fit for each of the most frequent lags, in order of lag."""
    known = np.isfinite(dump.delta) & np.isfinite(dump.lag)
    lags, counts = np.unique(dump.lag[known], return_counts=True)
    frequent = lags[counts >= LAG_TOKENS][np.argsort(-counts[counts >= LAG_TOKENS], kind="stable")][:LAGS]
    entropy, fits = entropy_of(dump), []
    for lag in np.sort(frequent):
        chosen = known & (dump.lag == lag)
        delta = dump.delta[chosen]
        fit = fit_power_law(delta, entropy[chosen], bins=10)
        fits.append(LagFit(int(lag), len(delta), float((delta**2).mean()), fit))
    return fits


@dataclass(frozen=True)
class Decomposition:
    """Mean δ² as a sum of parts; a part is None where the data cannot tell it from another, ``note`` says why.

    Model: E[δ²] = x·(noise + inter·Δ_inter + intra·(v_last − v)), where x is H, or 1 − μ(a) where no H is stored:
    logits that move independently add variances, and their effect on log μ grows with the entropy. ``noise`` is
    measured at zero lag where enough tokens have it; all else is least squares, no coefficient below 0. A part is its
    coefficient times the mean of its factor.
    """

    tokens: int
    total: float | None
    noise: float | None
    inter: float | None
    intra: float | None
    unexplained: float | None
    zero_lag_tokens: int
    zero_lag: float | None  # mean δ² where engine and learner held the same weights
    logit_noise: float | None  # standard deviation on every logit that would give it
    scale: str  # "H" | "1 − μ"
    note: str = ""


def decompose(dump: Dump) -> Decomposition:
    """The parts of mean δ² over the tokens whose lag is known."""
    entropy, scale = entropy_of(dump), "H"
    known = np.isfinite(dump.delta)
    if not np.isfinite(entropy[known]).any():
        entropy, scale = 1.0 - np.exp(np.minimum(dump.logprob, 0.0)), "1 − μ"
    known &= np.isfinite(dump.lag) & np.isfinite(dump.inter) & np.isfinite(entropy)
    tokens, fresh = int(known.sum()), known & (dump.lag == 0)
    zero = _zero_lag(dump, fresh)
    if tokens < 3:
        note = "Versions of tokens and of the learner that trained them are needed to tell noise from staleness."
        return Decomposition(tokens, None, None, None, None, None, *zero, scale, note)
    factors = [np.ones(tokens), dump.inter[known], dump.intra[known]]
    squared, x = dump.delta[known] ** 2, np.maximum(entropy[known], 0.0)
    total = float(squared.mean())
    blurred = _blurred(factors)
    if blurred:
        return Decomposition(tokens, total, None, None, None, None, *zero, scale, blurred)
    design = np.stack([factor * x for factor in factors], axis=1)
    still = dump.lag[known] == 0
    if still.sum() >= FRESH_TOKENS and x[still].sum() > 0:
        floor = min(squared[still].sum() / x[still].sum(), squared.sum() / x.sum())
        rest = nonnegative_least_squares(design[:, 1:], squared - floor * x)
        coefficients = np.concatenate([[floor], rest])
    else:
        coefficients = nonnegative_least_squares(design, squared)
    noise, inter, intra = (float(part) for part in coefficients * design.mean(0))
    left = total - noise - inter - intra
    unexplained = 0.0 if abs(left) < 1e-9 * total else left
    return Decomposition(tokens, total, noise, inter, intra, unexplained, *zero, scale)


def nonnegative_least_squares(design: Floats, target: Floats) -> Floats:
    """Coefficients ≥ 0 [K] that bring ``design`` [n, K] closest to ``target`` [n]; every subset of K ≤ 3 is tried."""
    gram, moment = design.T @ design, design.T @ target
    columns = range(design.shape[1])
    best, best_loss = np.zeros(design.shape[1]), 0.0
    for size in range(1, design.shape[1] + 1):
        for subset in combinations(columns, size):
            chosen = list(subset)
            part = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], moment[chosen], rcond=None)[0]
            loss = float(part @ gram[np.ix_(chosen, chosen)] @ part - 2 * part @ moment[chosen])
            if (part >= 0).all() and loss < best_loss - 1e-12 * abs(best_loss):
                best, best_loss = np.zeros(design.shape[1]), loss
                best[chosen] = part
    return best


def _blurred(factors: list[Floats]) -> str:
    """Why the parts cannot be told apart, or "": a staleness other than 0 that never varies looks like noise."""
    _, inter, intra = factors
    if inter.min() == inter.max() != 0:
        return f"Every token has Δ_inter {inter[0]:g}, so that its part cannot be told from engine noise."
    if intra.min() == intra.max() != 0:
        return f"Every token has the same staleness {intra[0]:g} inside its trajectory, which looks like engine noise."
    varies = inter.min() < inter.max() and intra.min() < intra.max()
    if varies and abs(float(np.corrcoef(inter, intra)[0, 1])) > 0.999:
        return "Δ_inter and Δ_intra rise together, so that their parts cannot be told apart."
    return ""


def _zero_lag(dump: Dump, fresh: np.ndarray) -> tuple[int, float | None, float | None]:
    count = int(fresh.sum())
    if not count:
        return 0, None, None
    squared = float((dump.delta[fresh] ** 2).mean())
    room = float((1.0 - np.exp(np.minimum(dump.logprob[fresh], 0.0))).mean())
    return count, squared, float(np.sqrt(squared / room)) if room > 1e-9 else None
