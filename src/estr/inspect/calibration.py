"""The noise floor of δ and of S = δ² / (H + ε) where engine and learner hold the same weights, and τ and ε from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from estr.diagnostics import delta_by_entropy, delta_score
from estr.errors import RunError
from estr.inspect.dump import Dump, Floats
from estr.inspect.ratios import entropy_of

BINS = 10
FEWEST = 200  # tokens below which nothing is proposed
EPS_RANGE = (1e-4, 1.0)
EPS_DEFAULT = 0.01
BEYOND = 10  # tokens above the threshold that make a quantile trustworthy


@dataclass(frozen=True)
class NoiseBin:
    """The tokens of one bin of H (nats)."""

    low: float
    high: float
    count: int
    entropy: float  # mean H
    delta_squared: float  # mean δ²
    score_median: float  # of S with the proposed ε
    score_share: float  # the stated share of the bin's tokens has S at or below this


@dataclass(frozen=True)
class Calibration:
    """A noise floor and the thresholds it suggests."""

    tau: float
    eps: float
    share: float  # of zero-staleness tokens that S ≤ tau keeps
    tokens: int
    delta_squared: float
    logit_noise: float  # standard deviation on every logit that would give it
    bins: list[NoiseBin]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``[objective] calibration`` reads them."""
        return {
            "tau": self.tau,
            "eps": self.eps,
            "share": self.share,
            "tokens": self.tokens,
            "delta_squared": self.delta_squared,
            "logit_noise": self.logit_noise,
            "bins": [vars(one) for one in self.bins],
            "notes": self.notes,
        }


def calibrate(dump: Dump, share: float) -> Calibration:
    """Thresholds under which ``share`` of the dump's tokens are kept; all of them must be free of staleness.

    ε is where the noise that stays at H = 0 equals the noise that grows with H: E[δ²] = b·(H + ε), a line through means
    in bins of H. τ is then the ``share`` quantile of S. Raises RunError where fewer than 200 tokens have δ and H.
    """
    entropy = entropy_of(dump)
    known = np.isfinite(dump.delta) & np.isfinite(entropy)
    if known.sum() < FEWEST:
        raise RunError(
            f"{int(known.sum())} tokens have both δ and H, {FEWEST} are needed to calibrate; take more steps (--steps)"
        )
    delta, h, logprob = dump.delta[known], np.maximum(entropy[known], 0.0), dump.logprob[known]
    notes: list[str] = []
    eps = _eps(delta, h, notes)
    score = delta_score(delta, h, eps)
    tau = float(np.quantile(score, share, method="higher"))
    if len(score) * (1 - share) < BEYOND:
        notes.append(
            f"Only {len(score) * (1 - share):.1f} of {len(score):,} tokens lie beyond a share of {share:g}; "
            "more steps make tau steadier."
        )
    if tau == 0:
        notes.append("Engine and learner agree exactly, so that tau would be 0; 1e-6 is proposed instead.")
        tau = 1e-6
    room = float((1 - np.exp(np.minimum(logprob, 0.0))).mean())
    squared = float((delta**2).mean())
    sigma = float(np.sqrt(squared / room)) if room > 1e-9 else 0.0
    return Calibration(tau, eps, share, len(score), squared, sigma, _bins(delta, h, score, share), notes)


def _eps(delta: Floats, entropy: Floats, notes: list[str]) -> float:
    table = delta_by_entropy(delta, entropy, 20)
    use = table.count > 0
    weight = np.sqrt(table.count[use].astype(np.float64))
    design = np.stack([np.ones(int(use.sum())), table.entropy[use]], axis=1)
    solution = np.linalg.lstsq(design * weight[:, None], table.delta_squared[use] * weight, rcond=None)[0]
    floor, slope = float(solution[0]), float(solution[1])
    means = table.entropy[use]
    if means.max() < 2 * means.min():
        notes.append(
            f"The entropies are too alike to tell how the noise grows with them; eps stays at {EPS_DEFAULT:g}."
        )
        return EPS_DEFAULT
    if slope <= 0:
        notes.append(f"The noise does not grow with H here; eps stays at {EPS_DEFAULT:g}.")
        return EPS_DEFAULT
    return float(np.clip(floor / slope, *EPS_RANGE))


def _bins(delta: Floats, entropy: Floats, score: Floats, share: float) -> list[NoiseBin]:
    edges = np.unique(np.quantile(entropy, np.linspace(0, 1, BINS + 1)))
    index = np.clip(np.searchsorted(edges, entropy, side="right") - 1, 0, max(len(edges) - 2, 0))
    found = []
    for number in np.unique(index).tolist():
        chosen = index == number
        found.append(
            NoiseBin(
                low=float(edges[number]),
                high=float(edges[min(number + 1, len(edges) - 1)]),
                count=int(chosen.sum()),
                entropy=float(entropy[chosen].mean()),
                delta_squared=float((delta[chosen] ** 2).mean()),
                score_median=float(np.median(score[chosen])),
                score_share=float(np.quantile(score[chosen], share, method="higher")),
            )
        )
    return found
