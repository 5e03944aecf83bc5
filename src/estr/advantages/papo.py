"""PAPO: move pressure between tokens that expand entropy and tokens that contract it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from estr.advantages.reweighting import Reweighting, rules, same_shape
from estr.registry import choose, within


def polarity_correction(log_probability: Tensor) -> Tensor:
    """sum_v p_v^2 (log p_v + H) over the last axis of ``log_probability`` [..., V]: the polarity's state-wise part.

    Float32 or wider, without graph.
    """
    logp = log_probability.detach()
    logp = logp if logp.dtype == torch.float64 else logp.float()
    p = logp.exp()
    finite = torch.where(p > 0, logp, 0.0)
    entropy = -(p * finite).sum(-1, keepdim=True)
    return (p.square() * (finite + entropy)).sum(-1)


def entropy_response(logprob: Tensor, entropy: Tensor, correction: Tensor | None = None) -> Tensor:
    """T = -p (log p + H) + correction [N]: the change of entropy per unit of policy-gradient step on the sampled token.

    With the exact correction its expectation under the policy is 0; without one it is the sampled-token part only.
    """
    logprob, entropy = logprob.detach().double(), entropy.detach().double()
    own = -logprob.exp() * (logprob + entropy)
    return own if correction is None else own + correction.detach().double()


@rules.register(
    "papo",
    description="Favour tokens that expand entropy while it is too low, those that contract it while too high.",
    formula="P = A T; s = clip((H_ref - H)/H_ref, -1, 1); A' = A (1 + kappa s sign(P))",
    source="Polarity-Aware Policy Optimization, arXiv 2605.11775 (abstract); derivation of T and the rule are ours",
    confidence="reading of the abstract",
    scope="token",
)
@dataclass
class Papo(Reweighting):
    """``reweight(advantage, logprob=..., entropy=..., correction=...)``, all [N] of the policy about to be updated.

    ``correction`` is ``polarity_correction`` of the full distribution, not needed with ``response = "proxy"``.
    ``signal`` "level" compares the batch's entropy with its ``reference``: "ema" (a running mean with ``decay``) or
    "initial" (``tau`` times the first observation). "trend" is +1 while a fast running mean (``decay_fast``) is below
    the slow one and -1 while above: it opposes the trend. ``weighting`` "magnitude" scales the change by |P| / max |P|.
    """

    state_fields: ClassVar[tuple[str, ...]] = ("initial", "slow", "fast", "phase")

    kappa: float = 0.5
    response: str = "exact"
    signal: str = "level"
    reference: str = "ema"
    tau: float = 1.0
    decay: float = 0.99
    decay_fast: float = 0.9
    weighting: str = "sign"
    initial: float | None = field(default=None, init=False)
    slow: float | None = field(default=None, init=False)
    fast: float | None = field(default=None, init=False)
    phase: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        choose("response", self.response, ("exact", "proxy"))
        choose("signal", self.signal, ("level", "trend"))
        choose("reference", self.reference, ("ema", "initial"))
        choose("weighting", self.weighting, ("sign", "magnitude"))
        within("tau", self.tau, 0.0, open_low=True)
        within("decay", self.decay, 0.0, 1.0)
        within("decay_fast", self.decay_fast, 0.0, 1.0)
        if not 0 < self.kappa < 1:
            raise ValueError(f"kappa must lie inside (0, 1), so that weights stay positive, not {self.kappa!r}")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("logprob", "entropy", "correction") if self.response == "exact" else ("logprob", "entropy")

    def observe(self, entropy: float) -> dict[str, float]:
        """Set the phase s of this batch, then let the running means see it; a non-finite entropy changes nothing."""
        if math.isfinite(entropy):
            self.initial = entropy if self.initial is None else self.initial
            self.slow = entropy if self.slow is None else self.slow
            self.fast = entropy if self.fast is None else self.fast
            if self.signal == "level":
                self.phase = self._level(entropy)
            self.slow = self.decay * self.slow + (1 - self.decay) * entropy
            self.fast = self.decay_fast * self.fast + (1 - self.decay_fast) * entropy
            if self.signal == "trend":
                self.phase = float((self.slow > self.fast) - (self.slow < self.fast))
        return {"papo/phase": self.phase}

    def reweight(self, advantage: Tensor, **fields: Any) -> Tensor:
        return advantage.detach() * self.weights(advantage, **fields).to(advantage.dtype)

    def weights(
        self, advantage: Tensor, *, logprob: Tensor, entropy: Tensor, correction: Tensor | None = None
    ) -> Tensor:
        """w [N], float64, between 1 - kappa and 1 + kappa; 1 where the polarity is not finite."""
        same_shape(advantage, logprob=logprob, entropy=entropy)
        if self.response == "exact" and correction is None:
            raise ValueError("papo needs correction, sum p^2 (log p + H) of each token; or set response = 'proxy'")
        exact = correction if self.response == "exact" else None
        polarity = advantage.detach().double() * entropy_response(logprob, entropy, exact)
        polarity = torch.where(polarity.isfinite(), polarity, 0.0)
        direction = polarity.sign()
        if self.weighting == "magnitude" and polarity.numel():
            direction = polarity / polarity.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
        return 1 + self.kappa * self.phase * direction

    def _level(self, entropy: float) -> float:
        reference = self.slow if self.reference == "ema" else self.tau * (self.initial or 0.0)
        if not reference:
            return 0.0
        return min(max((reference - entropy) / reference, -1.0), 1.0)
