"""Samplers: the distribution a token is drawn from, row by row, and what is recorded of it.

A sampler turns logits into a log-distribution over the vocabulary, -inf outside its support. The token is drawn from
exactly that distribution, and log μ and H are read off it. A new one is a small class registered by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from estr.engines.sampler import Sampled, entropy_of, invert
from estr.registry import Registry, choose, within

_FIRST_LOOK = 64  # a nucleus is seldom larger, and sorting the whole vocabulary is slow
ROUNDING = 1e-6  # relative; a bound that a probability meets up to float32's rounding is met

samplers: Registry[Sampler] = Registry("sampler", operator="distribution")


class Distribution(NamedTuple):
    """What n rows are sampled from."""

    logprob: Tensor  # float32 [n, V], -inf outside the support
    recorded: Tensor  # float32 [n, V], what log μ and H are read off; ``logprob`` itself in all but one documented case
    truncated: Tensor  # bool [n], rows whose support has to be recorded: ``recorded`` has no mass elsewhere


class Sampler(ABC):
    """From logits to the distribution that is sampled."""

    temperature: float

    @property
    def plain(self) -> bool:
        """Whether it is nothing but temperature, for which :func:`estr.engines.sampler.sample` is enough."""
        return False

    @abstractmethod
    def distribution(self, logits: Tensor, position: Tensor, explore: Tensor) -> Distribution:
        """``logits``: float32 [n, V] before temperature; ``position``: int64 [n], tokens already sampled in the row's
        running turn; ``explore``: bool [n], rows that an exploring sampler treats (others are sampled as usual). A
        row's result does not depend on its neighbours."""


def draw(
    sampler: Sampler,
    logits: Tensor,
    position: Tensor,
    explore: Tensor,
    uniform: Tensor,
    topk: int = 0,
    heat: Tensor | None = None,
) -> Sampled:
    """Sample one token a row, by inverting the cumulative distribution as :func:`~estr.engines.sampler.sample` does.

    ``uniform``: float64 [n] in [0, 1); ``topk``: how many of the most likely tokens are recorded with their log μ.
    The token lies inside the support, and so do all ids recorded as support. ``heat``: float32 [n], where it is above 0
    the token is drawn at this temperature from the whole vocabulary, and what is recorded stays that of the sampler
    (AEPO's extra rollouts, whose ratios have the policy below the line and not the distribution that sampled).
    """
    got = sampler.distribution(logits, position, explore)
    drawn_from = got.logprob
    if heat is not None:
        tempered = torch.log_softmax(logits.float() / torch.where(heat > 0, heat, 1.0)[:, None], dim=-1)
        drawn_from = torch.where((heat > 0)[:, None], tempered, drawn_from)
    token = invert(drawn_from.exp(), uniform)
    entropy = entropy_of(got.recorded.exp(), got.recorded)
    support: tuple[Tensor, Tensor] | None = None
    if not sampler.plain:
        kept = got.logprob.isfinite() & got.truncated[:, None]
        support = (kept.nonzero()[:, 1].int(), kept.sum(-1))
    likely: tuple[Tensor, Tensor] | None = None
    if topk:
        values, ids = leading(got.recorded, topk)
        likely = (ids.int(), values)
    return Sampled(token, got.recorded.gather(-1, token[:, None])[:, 0], entropy, support, likely)


@samplers.register(
    "standard",
    description="Temperature, then top-k, top-p and min-p.",
    formula="softmax(z / T) over the kept tokens, renormalized",
    source="top-p: arXiv 1904.09751; min-p: arXiv 2407.01082; order of transformers and SGLang",
    confidence="framework code",
    scope="token",
)
@dataclass(frozen=True)
class Standard(Sampler):
    """Truncated sampling, each step on what the step before left and renormalized.

    ``top_k`` keeps the k most likely tokens (0: all). ``top_p`` keeps the smallest set of most likely tokens whose mass
    reaches it. ``min_p`` keeps tokens at least that many times as likely as the most likely one. Among equally likely
    tokens the lower id comes first. Without ``top_k`` at most ``max_support`` tokens are kept, so that what is recorded
    stays bounded: a larger nucleus is cut to its most likely tokens. With nothing set, no token is ever left out.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_support: int = 4096

    def __post_init__(self) -> None:
        within("temperature", self.temperature, 0, open_low=True)
        within("top_k", self.top_k, 0)
        within("top_p", self.top_p, 0, 1, open_low=True)
        within("min_p", self.min_p, 0, 1)
        within("max_support", self.max_support, 1)

    @property
    def plain(self) -> bool:
        return self.top_k == 0 and self.top_p == 1 and self.min_p == 0

    def distribution(self, logits: Tensor, position: Tensor, explore: Tensor) -> Distribution:
        logprob = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        if self.plain:
            return Distribution(logprob, logprob, torch.zeros_like(explore))
        values, ids, keep = self._kept(logprob)
        count = keep.sum(-1, keepdim=True)
        mass = values.double().exp().cumsum(-1).gather(1, count - 1)  # summed in order, so that the width is no matter
        kept = torch.where(keep, values - mass.log().float(), -math.inf)
        chosen = torch.full_like(logprob, -math.inf).scatter_(1, ids, kept)
        return Distribution(chosen, chosen, count[:, 0] < logits.shape[-1])

    def _kept(self, logprob: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The most likely tokens, at least those that are kept: log-probabilities, ids and which are kept, [n, k]."""
        limit = min(self.top_k or self.max_support, logprob.shape[-1])
        width = limit if self.top_k else min(_FIRST_LOOK, limit)
        while True:
            values, ids = leading(logprob, width)
            keep = self._keep(values)
            if width == limit or not keep[:, -1].any():
                return values, ids, keep
            width = min(8 * width, limit)

    def _keep(self, values: Tensor) -> Tensor:
        """Which of the candidates, log-probabilities [n, k] in falling order, are kept: always the first few."""
        keep = torch.ones_like(values, dtype=torch.bool)
        if self.top_p < 1:
            probability = (values.log_softmax(-1) if self.top_k else values).double().exp()
            before = probability.cumsum(-1) - probability
            keep &= before < self.top_p * (1 - ROUNDING)
            keep[:, 0] = True
        if self.min_p > 0:
            keep &= values >= values[:, :1] + math.log(self.min_p) - ROUNDING
        return keep


@samplers.register(
    "cuts",
    description="Uniform over the few most likely tokens, after the first tokens of a turn.",
    formula="uniform on {v in TopK: p_v ≥ delta}, p = softmax(z)",
    source="Too Correct to Learn, arXiv 2604.18493, section 2.3",
    confidence="notes on the paper and a third party's code",
    scope="token",
)
@dataclass(frozen=True)
class Cuts(Sampler):
    """CUTS for the rows that explore: uniform on the tokens among the ``k`` most likely whose probability at
    temperature 1 is at least ``delta``; the first ``warm`` tokens of a turn, and rows that do not explore, are sampled
    at ``temperature`` from the whole vocabulary. Where none of the k reaches delta, ``empty`` decides: "uniform" over
    all k, or "argmax".

    ``record`` says which distribution a CUTS token's log μ and H are of:

    * "proposal": the one that sampled, log μ = -log|S| and H = log|S|; S is recorded, and the learner normalizes π (and
      q) over S. E = π_S/μ is then a true importance ratio, whose mean under μ is 1: it leads from the uniform choice
      among S back to the policy's. It is not 1 at equal weights, since uniform is not the policy: recipes on the edges
      B and E see exploration as off-policy data and weigh, clip or drop it (ESTR drops what π finds unlikely within S),
      those on U with q do not. A position with |S| = 1 was no choice and has no gradient.
    * "policy": the policy before the transform (temperature applied, whole vocabulary), and no support. This is the
      paper's: its ratio has the recomputed policy below the line, so that E = 1 at equal weights and nothing corrects
      for the proposal. The price is a bias, because what sampled is not what is recorded.
    """

    temperature: float = 1.0
    k: int = 5
    delta: float = 0.03
    warm: int = 5
    empty: str = "uniform"
    record: str = "proposal"

    def __post_init__(self) -> None:
        within("temperature", self.temperature, 0, open_low=True)
        within("k", self.k, 1)
        within("delta", self.delta, 0, 1)
        within("warm", self.warm, 0)
        choose("empty", self.empty, ("uniform", "argmax"))
        choose("record", self.record, ("proposal", "policy"))

    def distribution(self, logits: Tensor, position: Tensor, explore: Tensor) -> Distribution:
        policy = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        active = explore & (position >= self.warm)
        logprob = torch.where(active[:, None], self._uniform(logits), policy)
        if self.record == "policy":
            return Distribution(logprob, policy, torch.zeros_like(active))
        return Distribution(logprob, logprob, active)

    def _uniform(self, logits: Tensor) -> Tensor:
        """The log of the uniform distribution on the kept tokens, [n, V]."""
        logprob = torch.log_softmax(logits.float(), dim=-1)
        values, ids = leading(logprob, self.k)
        keep = values.exp() >= self.delta * (1 - ROUNDING)
        fallback = values.isfinite()
        if self.empty == "argmax":
            fallback[:, 1:] = False
        keep = torch.where(keep.any(-1, keepdim=True), keep & values.isfinite(), fallback)
        share = torch.where(keep, -keep.sum(-1, keepdim=True).float().log(), -math.inf)
        return torch.full_like(logprob, -math.inf).scatter_(1, ids, share)


@samplers.register(
    "mixed_cuts",
    description="One half of each group samples as usual, the other with CUTS; one baseline for both.",
    formula="siblings 0 … G/2 - 1: softmax(z / T); the others: CUTS",
    source="Too Correct to Learn, arXiv 2604.18493",
    confidence="notes on the paper and a third party's code",
    scope="group",
)
@dataclass(frozen=True)
class MixedCuts(Cuts):
    """CUTS, where only a part of each group explores; which rows those are is said row by row."""


def leading(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of ``scores`` [n, V] and their ids, [n, min(k, V)], falling; of equal ones the lower id is first.

    NaN counts as -inf.
    """
    scores = torch.where(scores.isnan(), -math.inf, scores)
    if k >= scores.shape[-1]:
        return torch.sort(scores, dim=-1, descending=True, stable=True)
    least = scores.topk(k, sorted=False).values.amin(-1, keepdim=True)
    above, tied = scores > least, scores == least
    room = k - above.sum(-1, keepdim=True)
    ids = (above | (tied & (tied.cumsum(-1) <= room))).nonzero()[:, 1].view(-1, k)
    values, order = torch.sort(scores.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
