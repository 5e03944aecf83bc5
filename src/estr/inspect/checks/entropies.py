"""Faults of H and of what is attached to which row: A10, A12, A13, A15, and the entropy half of A3."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from estr.inspect.checks.base import Finding
from estr.inspect.checks.statistics import (
    FEWEST,
    SIGNIFICANT,
    Mask,
    Mean,
    compare,
    mean_of,
    neighbor,
    quantile_bins,
    temperatures,
)
from estr.inspect.dump import Dump, Floats


@dataclass(frozen=True)
class Column:
    """An entropy column [N] and the surprisal [N] whose mean it should be."""

    name: str
    words: str  # what a person calls it
    entropy: Floats
    surprisal: Floats
    weight: Floats  # [N] that turns means over sampled tokens into means over the column's own policy
    tolerance: float  # relative bias that is not yet a fault

    @property
    def known(self) -> Mask:
        return np.isfinite(self.entropy) & np.isfinite(self.surprisal)

    @cached_property
    def refuted(self) -> bool:
        """Whether H cannot be the expectation of the surprisal at its own token: the slope of the one on the other is
        not 1. What follows a token may fit its surprisal by chance of the text; this cannot happen by chance."""
        entropy = self.entropy[self.known]
        if len(entropy) < FEWEST // 2:
            return False
        centered = entropy - entropy.mean()
        spread = float((centered**2).mean())
        if spread < 1e-9:
            return False
        missing = mean_of(-(self.weight * (self.surprisal - self.entropy))[self.known] * centered / spread)
        return missing.value > 0.05 and missing.t > SIGNIFICANT


def columns(dump: Dump) -> list[Column]:
    """The entropies that are stored and claim to be exact, each with its own log-probability.

    The learner's tokens were drawn by the engine: they are weighted by π/μ, and that column must be off by more to
    count.
    """
    found = []
    if dump.has("entropy") and dump.entropy_kind in ("exact", "mixed"):
        found.append(
            Column("entropy", "H of the engine", dump.entropy, dump.surprisal, np.ones(dump.token_count), 0.03)
        )
    if dump.has("learner_entropy") and dump.has("learner_logprob"):
        surprisal = np.where(np.isfinite(dump.learner_logprob), -dump.learner_logprob, np.nan)
        found.append(
            Column("learner_entropy", "H of the learner", dump.learner_entropy, surprisal, _weight(dump), 0.08)
        )
    return found


def _weight(dump: Dump) -> Floats:
    """π/μ, at most 10; 1 where μ is not stored."""
    return np.where(np.isfinite(dump.delta), np.exp(np.clip(dump.delta, -20.0, np.log(10.0))), 1.0)


def entropy_one_off(dump: Dump) -> Finding | None:
    """A10. H of a neighboring position explains the surprisal of a token better than its own H does."""
    for column in filter(lambda column: column.refuted, columns(dump)):
        for step in (1, -1):
            fit = compare(column.surprisal, column.entropy, neighbor(column.entropy, dump.row, step), column.weight)
            if fit.score > 0.5 and fit.t > SIGNIFICANT and fit.count >= FEWEST // 2:
                where = "the token before" if step < 0 else "the token after"
                return Finding(
                    "A10",
                    f"{column.words} stands one position off its log-probabilities: the surprisal of a token fits the "
                    "entropy "
                    f"stored with {where} it (score {fit.score:.2f}, where 1 is certain and right data give −1).",
                    {"column": column.name, "shift": step, "score": fit.score, "standard_errors": fit.t},
                )
    return None


@dataclass(frozen=True)
class Bias:
    """surprisal − H of some tokens: its mean, and its mean over H [bins]."""

    mean: Mean
    by_bin: list[Mean]
    surprisal: float
    highest: float  # largest H

    @classmethod
    def of(cls, column: Column, chosen: Mask) -> Bias | None:
        use = chosen & column.known
        if use.sum() < FEWEST:
            return None
        gap, entropy = column.weight[use] * (column.surprisal[use] - column.entropy[use]), column.entropy[use]
        bins = quantile_bins(entropy, 8)
        parts = [mean_of(gap[bins == index]) for index in range(int(bins.max()) + 1)]
        return cls(mean_of(gap), parts, float(column.surprisal[use].mean()), float(entropy.max()))

    def off(self, sign: int, tolerance: float) -> bool:
        """Whether H is wrong in this direction (+1: too small), by enough, and in no bin in the other direction."""
        enough = sign * self.mean.value > tolerance * max(self.surprisal, 1e-3) and sign * self.mean.t > SIGNIFICANT
        return enough and all(sign * part.t > -3.0 for part in self.by_bin)


def entropy_of_part(dump: Dump) -> Finding | None:
    """A13. "Entropy" from the sampled token (it equals −log μ, or −μ log μ) or from the top k (sampled tokens are more
    surprising than it says, most where it is largest, and it never exceeds log k)."""
    for column in columns(dump):
        found = _sampled_only(column, dump) or _too_small(column, dump)
        if found is not None:
            return found
    return None


def entropy_before_temperature(dump: Dump) -> Finding | None:
    """A15. H before temperature, log-probability after it: H lies above the mean surprisal where T < 1, below where
    T > 1, at every level of H."""
    for column in columns(dump):
        for temperature, chosen in temperatures(dump):
            bias = Bias.of(column, chosen)
            sign = -1 if temperature < 1 else 1
            if bias is None or not bias.off(sign, column.tolerance):
                continue
            if _support_only(dump, column, chosen) or (sign > 0 and _saturated(column, chosen) is not None):
                continue
            side = "above" if sign < 0 else "below"
            return Finding(
                "A15",
                f"{column.words} is taken before temperature {temperature:g}, the log-probabilities after it: H lies "
                f"{abs(bias.mean.value):.3f} nats {side} the mean surprisal {bias.surprisal:.3f} of the sampled "
                "tokens, which "
                "it should equal.",
                {
                    "column": column.name,
                    "temperature": temperature,
                    "surprisal": bias.surprisal,
                    "entropy": bias.surprisal - bias.mean.value,
                    "standard_errors": abs(bias.mean.t),
                },
            )
    return None


def entropy_over_vocabulary(dump: Dump) -> Finding | None:
    """A3, its other half. Log-probabilities over the kept tokens, H over the vocabulary: H above the mean surprisal."""
    chosen = dump.truncated[dump.row]
    for column in columns(dump):
        bias = Bias.of(column, chosen)
        if bias is None or not bias.off(-1, column.tolerance):
            continue
        return Finding(
            "A3",
            f"{column.words} is taken over the whole vocabulary, the log-probabilities over the tokens that top-p or "
            "top-k "
            f"kept: H lies {-bias.mean.value:.3f} nats above the mean surprisal {bias.surprisal:.3f} of the sampled "
            "tokens, "
            "which it should equal.",
            {
                "column": column.name,
                "surprisal": bias.surprisal,
                "entropy": bias.surprisal - bias.mean.value,
                "standard_errors": -bias.mean.t,
            },
        )
    return None


def _sampled_only(column: Column, dump: Dump) -> Finding | None:
    use = column.known & (column.surprisal > 1e-3)
    if use.sum() < FEWEST // 2:
        return None
    s, h = column.surprisal[use], column.entropy[use]
    tolerance = 1e-3 * np.maximum(s, 0.05)
    for words, formula in (("−log μ", s), ("−μ log μ", s * np.exp(-s))):
        share = float((np.abs(h - formula) <= tolerance).mean())
        if share > 0.9 and s.std() > 0.05:
            return Finding(
                "A13",
                f"{column.words} is computed from the sampled token alone: it equals {words} of that token at "
                f"{share:.1%} of "
                "the tokens, so it says nothing about the distribution it was drawn from.",
                {"column": column.name, "formula": words, "share": share},
            )
    return None


def _too_small(column: Column, dump: Dump) -> Finding | None:
    by_token = dump.temperature[dump.row]
    use = column.known & ~(by_token > 1 + 1e-3)
    if not use.any() and _saturated(column, column.known) is not None:
        use = column.known
    bias = Bias.of(column, use)
    if bias is None or not bias.off(1, column.tolerance) or not _grows(bias):
        return None
    k = _saturated(column, use)
    if k is None and _delta_is_biased(dump):
        return None
    reason = f"never exceeds log {k}" if k is not None else "falls short at every level"
    return Finding(
        "A13",
        f"{column.words} is taken from the most likely tokens only: sampled tokens are {bias.mean.value:.3f} nats more "
        f"surprising than it says (mean surprisal {bias.surprisal:.3f}, {bias.mean.t:.0f} standard errors), and it "
        f"{reason}.",
        {
            "column": column.name,
            "surprisal": bias.surprisal,
            "entropy": bias.surprisal - bias.mean.value,
            "standard_errors": bias.mean.t,
            "k": k,
        },
    )


def _grows(bias: Bias) -> bool:
    """Whether H misses more where it is larger, as a sum cut off does; unrelated numbers miss most where H is small."""
    half = len(bias.by_bin) // 2
    low = np.mean([part.value for part in bias.by_bin[:half] or bias.by_bin])
    high = np.mean([part.value for part in bias.by_bin[half:]])
    return bool(high > low)


def _saturated(column: Column, chosen: Mask) -> int | None:
    """k where H never exceeds log k, piles up under it, and the tokens drawn there are more surprising than that."""
    use = chosen & column.known
    entropy = column.entropy[use]
    highest = float(entropy.max()) if len(entropy) else 0.0
    k = round(float(np.exp(highest)) + 0.3)
    if not 2 <= k <= 512 or highest < np.log(k) * 0.97 or highest > np.log(k) + 1e-3:
        return None
    pile = entropy > 0.9 * highest
    excess = float((column.surprisal[use][pile] - entropy[pile]).mean())
    return k if pile.mean() > 0.02 and excess > 0.15 * highest else None


def _support_only(dump: Dump, column: Column, chosen: Mask) -> bool:
    """Whether tokens that were certain after truncation have entropy: temperature alone never makes a token certain."""
    certain = chosen & column.known & (column.surprisal < 1e-6)
    return bool(certain.sum() >= 10 and float(column.entropy[certain].mean()) > 0.01)


def _delta_is_biased(dump: Dump) -> bool:
    """Whether the log-probabilities themselves are in doubt (see A20): then H is not the one to blame."""
    delta = mean_of(dump.delta)
    return delta.count >= FEWEST and delta.t > SIGNIFICANT and delta.value > 0.005
