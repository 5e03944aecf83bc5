"""Entropy control by the covariance of advantage and log π (Clip-Cov and KL-Cov, arXiv 2505.22617)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from estr.objectives.composition import Gate, Surrogate
from estr.objectives.context import Context

_MASK = (1 << 63) - 1


@dataclass
class Draw:
    """Clip-Cov's random choice among the candidates of an optimizer batch: drawn once, on first use.

    Micro-batches that share it agree, because a token's place in the order depends on its content, that of its
    sequence, and the salt alone. Of tokens that are equal even in that (twin trajectories) the first ones of a pass
    over the batch are taken, so that the count is exact.
    """

    mean_advantage: Tensor
    mean_logprob: Tensor
    candidates: Tensor  # int64 [C] content hashes
    count: int  # how many of them are to be dropped
    salt: int | None = None
    limit: Tensor | None = None
    room: int = 0  # how many of those at the limit are taken
    seen: int = 0  # candidates met in this pass over the batch
    tied: int = 0  # of them, those at the limit

    def chosen(self, context: Context, hashes: Tensor, candidate: Tensor) -> Tensor:
        """bool [N]: which of the candidates are among the ``count`` drawn."""
        if self.count == 0:
            return torch.zeros_like(candidate)
        salt = self.decide(context.generator)
        assert self.limit is not None
        order = _mix(hashes ^ salt)
        tied = candidate & (order == self.limit)
        taken = tied & (tied.cumsum(0) + self.tied <= self.room)
        self._count(int(candidate.sum()), int(tied.sum()))
        return candidate & ((order < self.limit) | taken)

    def decide(self, generator: torch.Generator | None) -> int:
        """Draw, where that was not done yet; the salt."""
        if self.salt is None:
            self.salt = _draw(generator)
            if self.count:
                order = _mix(self.candidates ^ self.salt)
                self.limit = order.kthvalue(self.count).values
                self.room = self.count - int((order < self.limit).sum())
        return self.salt

    def to(self, device: torch.device | str) -> Draw:
        """The same with its tensors on ``device``."""
        names = (name for name, value in vars(self).items() if isinstance(value, Tensor))
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def _count(self, candidates: int, tied: int) -> None:
        self.seen, self.tied = self.seen + candidates, self.tied + tied
        if self.seen >= self.candidates.numel():
            self.seen = self.tied = 0


def clip_covariance(share: float, low: float, high: float, clip_low: float, clip_high: float) -> Gate:
    """Drops max(1, share N) random tokens among those with low < covariance < high that PPO does not clip anyway."""
    if low > high:
        raise ValueError(f"low ({low:g}) must not exceed high ({high:g})")

    def candidates(context: Context, means: tuple[Tensor, Tensor]) -> Tensor:
        value, A, ratio = covariance(context, *means), context.advantage, context.ratio("U")
        clipped = ((A > 0) & (ratio > 1 + clip_high)) | ((A < 0) & (ratio < 1 - clip_low))
        return (value > low) & (value < high) & ~clipped & context.valid

    def measure(context: Context) -> Draw:
        means = _means(context)
        chosen = candidates(context, means)
        hashes = _content(context)[chosen]
        wanted = max(1, int(share * int(context.valid.sum())))
        return Draw(*means, hashes, min(wanted, hashes.numel()))

    def apply(context: Context, draw: Draw) -> Tensor:
        dropped = candidates(context, (draw.mean_advantage, draw.mean_logprob))
        return ~draw.chosen(context, _content(context), dropped)

    return Gate("not drawn among high covariance", "U", "token", apply, measure=measure)


def kl_covariance(ratio: float, coef: float) -> Surrogate:
    """-A r + coef |log r| on the max(1, ratio N) tokens of largest covariance; no clip.

    Tokens that tie at the threshold share what is left of the count between them.
    """

    def measure(context: Context) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        means = _means(context)
        values = covariance(context, *means)[context.valid]
        if values.numel() == 0:
            return *means, values.new_tensor(torch.inf), values.new_zeros(())
        count = max(1, int(ratio * values.numel()))
        threshold = values.kthvalue(values.numel() - count + 1).values
        above, ties = (values > threshold).sum(), (values == threshold).sum()
        return *means, threshold, (count - above) / ties

    def apply(context: Context, measured: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        mean_advantage, mean_logprob, threshold, share = measured
        with torch.no_grad():
            value = covariance(context, mean_advantage, mean_logprob)
            chosen = (value > threshold).to(context.dtype) + share * (value == threshold)
        delta = context.delta("U")
        return -context.advantage * context.ratio("U") + coef * chosen * delta.abs()

    return Surrogate("ratio, penalty on high covariance", "U", "token", apply, measure=measure)


def covariance(context: Context, mean_advantage: Tensor, mean_logprob: Tensor) -> Tensor:
    """(A - mean A)(log π - mean log π) [N], not divided by N."""
    return (context.advantage - mean_advantage) * (context.log_pi.detach() - mean_logprob)


def _means(context: Context) -> tuple[Tensor, Tensor]:
    return context.valid_mean(context.advantage), context.valid_mean(context.log_pi)


def _draw(generator: torch.Generator | None) -> int:
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(_MASK, (1,), generator=generator, device=device).item())


def _content(context: Context) -> Tensor:
    """int64 [N]: a hash of log μ, advantage, position and the whole sequence, the same in every split of a batch."""
    bits = _mix(context.log_mu.to(torch.float64).view(torch.int64))
    bits = _mix(bits ^ context.advantage.to(torch.float64).view(torch.int64))
    bits = _mix(bits ^ context.position)
    sequence = context.batch.sequence
    whole = bits.new_zeros(context.batch.sequence_count).index_add_(0, sequence, bits)
    return _mix(bits ^ _mix(whole)[sequence])


def _mix(x: Tensor) -> Tensor:
    """The finalizer of splitmix64 on int64, which wraps around; the result is not negative."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & (_MASK >> (shift - 1)))) * factor
    return (x ^ ((x >> 31) & (_MASK >> 30))) & _MASK
