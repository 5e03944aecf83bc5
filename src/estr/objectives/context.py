"""What the parts of an objective see of a batch: the three edges, per-sequence sums, fields made safe."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from estr.batch import TokenBatch

CLAMP = 20.0  # log-ratios are clamped to this before exp; beyond it the ratio is a constant
PROBABILITY = 1e-6  # probabilities that enter a binary KL stay this far from 0 and 1
FINITE = ("proximal_logprob", "reference_logprob", "behavior_entropy", "proximal_entropy", "entropy")


class Context:
    """One batch as gates, weights and surrogates read it.

    Invalid tokens (a needed log-probability, a needed entropy or the advantage NaN or infinite) are selected away here,
    before any arithmetic, so that neither values nor gradients can turn NaN; ``valid`` (bool [N]) says which are left.

    Edges are named by a letter: "B" = q/μ, "U" = π/q, "E" = π/μ. Without q, q ≡ μ.
    """

    def __init__(
        self,
        batch: TokenBatch,
        needed: frozenset[str] = frozenset(),
        proximal: Callable[[Context], Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.batch = batch
        self.generator = generator
        self.tokens = batch.tokens
        self.sequences = batch.sequence_count
        self.sequence = batch.sequence
        self.dtype = torch.promote_types(
            torch.promote_types(batch.logprob.dtype, batch.behavior_logprob.dtype), batch.advantage.dtype
        )
        self.valid = _valid(batch, needed)
        self.clipped: Tensor | None = None
        self.segment: Tensor | None = None
        self.kinds = 1
        self.undecided: Tensor | None = None
        self._cache: dict[str, Tensor] = {}
        self._graph = torch.is_grad_enabled()
        self._zero = torch.zeros((), dtype=self.dtype, device=batch.logprob.device)
        self.log_pi = self.safe(batch.logprob)
        self.log_mu = self.safe(batch.behavior_logprob)
        self.advantage = self.safe(batch.advantage)
        if proximal is not None:
            self.log_q = proximal(self).detach()
        elif batch.proximal_logprob is not None and "proximal_logprob" in needed:
            self.log_q = self.safe(batch.proximal_logprob)
        else:
            self.log_q = self.log_mu

    def safe(self, values: Tensor) -> Tensor:
        """``values`` [N] with 0 at invalid tokens, in the arithmetic's dtype; gradients there are 0."""
        return torch.where(self.valid, values.to(self.dtype), self._zero)

    def given(self, name: str) -> Tensor:
        """A field of the batch that the caller knows to be there, as it was given."""
        value: Tensor = getattr(self.batch, name)
        return value

    def field(self, name: str) -> Tensor:
        """A float field [N] of the batch, made safe."""
        return self._once(name, lambda: self.safe(self.given(name)))

    def delta(self, edge: str) -> Tensor:
        """The raw log-ratio [N] of an edge; for a surrogate "U" and "E" carry the graph of π."""
        ends = {"B": ("log_q", "log_mu"), "U": ("log_pi", "log_q"), "E": ("log_pi", "log_mu")}
        top, bottom = ends[edge]
        return self._once("delta" + edge, lambda: getattr(self, top) - getattr(self, bottom))

    def ratio(self, edge: str) -> Tensor:
        """exp of the clamped log-ratio [N]; beyond the clamp a constant without gradient."""
        return self._once("ratio" + edge, lambda: clamped_exp(self.delta(edge)))

    def scoped(self, values: Tensor, scope: str) -> Tensor:
        """Token values [N] collected over a scope and handed back to each token.

        "token" leaves them; "sequence" sums over the sequence (the log of a product of ratios); "geometric" averages
        over the sequence's valid tokens (the log of the geometric mean).
        """
        if scope == "token":
            return values
        total = self.sequence_sum(values) if scope == "sequence" else self.sequence_mean(values)
        return total[self.sequence]

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Sum of [N] over each sequence, [S]."""
        return segment_sum(values, self.sequence, self.sequences)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean of [N] over each sequence's valid tokens, [S]; 0 where there are none."""
        return self.sequence_sum(self.safe(values)) / self.valid_lengths.clamp(min=1)

    def sequence_max(self, values: Tensor) -> Tensor:
        """Largest of [N] among each sequence's valid tokens, [S]; -inf where there are none."""
        lowest = torch.where(self.valid, values, values.new_tensor(-torch.inf))
        out = values.new_full((self.sequences,), -torch.inf)
        return out.scatter_reduce(0, self.sequence, lowest, "amax")

    def sequence_any(self, mask: Tensor) -> Tensor:
        """Whether a valid token of the sequence is True, handed back to each token: bool [N]."""
        return (self.sequence_sum((mask & self.valid).to(self.dtype)) > 0)[self.sequence]

    def split(self, kind: Tensor, kinds: int) -> None:
        """Divides each sequence into segments by ``kind``, int64 [N] in 0..kinds-1."""
        self.segment = self.sequence * kinds + kind
        self.kinds = kinds

    def segment_mean(self, values: Tensor) -> Tensor:
        """Mean of [N] over the valid tokens of each token's segment, handed back: [N]."""
        assert self.segment is not None
        size = self.sequences * self.kinds
        total = segment_sum(self.safe(values), self.segment, size)
        count = segment_sum(self.valid.to(self.dtype), self.segment, size)
        return (total / count.clamp(min=1))[self.segment]

    def anchor_entropy(self) -> Tensor:
        """The entropy [N] of q, or of μ where q's is not given."""
        for name in ("proximal_entropy", "behavior_entropy"):
            if getattr(self.batch, name) is not None:
                return self.field(name)
        raise ValueError("needs proximal_entropy (or behavior_entropy); give it to the TokenBatch")

    @property
    def lengths(self) -> Tensor:
        """Action tokens of each sequence, [S]."""
        ones = torch.ones(self.tokens, dtype=self.dtype, device=self.sequence.device)
        return self._once("lengths", lambda: self.sequence_sum(ones))

    @property
    def valid_lengths(self) -> Tensor:
        """Valid tokens of each sequence, [S]."""
        return self._once("valid_lengths", lambda: self.sequence_sum(self.valid.to(self.dtype)))

    @property
    def position(self) -> Tensor:
        """0-based index of each token inside its sequence, int64 [N]."""
        starts = torch.searchsorted(self.sequence, self.sequence)
        return torch.arange(self.tokens, device=self.sequence.device) - starts

    def valid_mean(self, values: Tensor) -> Tensor:
        """Mean of [N] over valid tokens, a scalar; 0 where there are none."""
        return self.safe(values).sum() / self.valid.sum().clamp(min=1)

    def note_clipped(self, mask: Tensor) -> None:
        """Records tokens on which a clip was binding, for ``clip/fraction``."""
        self.clipped = mask if self.clipped is None else self.clipped | mask

    def note_undecided(self, mask: Tensor) -> None:
        """Records tokens for which a gate had no certain verdict, for ``gate/undecided_fraction``."""
        self.undecided = mask if self.undecided is None else self.undecided | mask

    def _once(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        # gates and weights ask without gradient mode; the same value then serves the surrogate with its graph
        if key not in self._cache:
            with torch.set_grad_enabled(self._graph):
                self._cache[key] = make()
        value = self._cache[key]
        return value if torch.is_grad_enabled() else value.detach()


def clamped_exp(log_ratio: Tensor, low: float = -CLAMP, high: float = CLAMP) -> Tensor:
    """exp(clamp(log_ratio, low, high)); the gradient beyond the clamp is 0."""
    return log_ratio.clamp(low, high).exp()


def segment_sum(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum of ``values`` [N] by ``index`` [N], [count]."""
    return values.new_zeros(count).index_add(0, index, values)


def k_estimate(log_ratio: Tensor, estimator: str) -> Tensor:
    """Schulman's estimators of a KL divergence from the log-ratio x, clamped to ±20: -x, x²/2, exp(x) - 1 - x."""
    x = log_ratio.clamp(-CLAMP, CLAMP)
    if estimator == "k1":
        return -x
    return x.square() / 2 if estimator == "k2" else x.expm1() - x


def quantile(values: Tensor, q: float) -> Tensor:
    """The q quantile of [n], linear between neighbours (any n; 0 where there are none)."""
    if values.numel() == 0:
        return values.new_zeros(())
    place = q * (values.numel() - 1)
    below = int(place)
    lower = values.kthvalue(below + 1).values
    if below == place:
        return lower
    return torch.lerp(lower, values.kthvalue(below + 2).values, place - below)


def binary_kl(p: Tensor, r: Tensor) -> Tensor:
    """D_B(p, r) = p log(p/r) + (1-p) log((1-p)/(1-r)) of two Bernoulli distributions, in nats.

    ``p`` and ``r`` are log-probabilities [N]; the probabilities are clamped to [1e-6, 1 - 1e-6].
    """
    p = p.exp().clamp(PROBABILITY, 1 - PROBABILITY)
    r = r.exp().clamp(PROBABILITY, 1 - PROBABILITY)
    return p * (p / r).log() + (1 - p) * ((1 - p) / (1 - r)).log()


def _valid(batch: TokenBatch, needed: frozenset[str]) -> Tensor:
    # one sum instead of a test per field: NaN and infinities survive every addition
    total = batch.logprob.detach() + batch.behavior_logprob + batch.advantage
    for name in FINITE:
        value = getattr(batch, name)
        if value is not None and name in needed:
            total = total + value.detach()
    valid = total.abs() < math.inf
    upper = batch.behavior_entropy_upper
    if upper is not None and "behavior_entropy_upper" in needed:
        valid = valid & (upper == upper)  # not NaN; an unknown upper end may be infinite
    return valid
