"""Random padded batches, and our objectives called on them: loss and gradient with respect to log π [B, T]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from estr import TokenBatch, objective

SEEDS = (0, 1, 2)


@dataclass
class Batch:
    """B padded rows of T tokens; masks have holes, μ ≠ q ≠ π, some ratios are large."""

    mask: Tensor
    mu: Tensor
    q: Tensor
    pi: Tensor
    advantage: Tensor  # [B]
    entropy: Tensor
    reference: Tensor

    @property
    def wide_advantage(self) -> Tensor:
        return self.advantage.unsqueeze(-1).expand_as(self.mask).clone()


def random_batch(seed: int, rows: int = 8, length: int = 12, noise: float = 0.4) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(rows, length, generator=generator) < 0.75
    mask[:, 0] = True
    mu = -normal(rows, length).square() - 0.02
    q, pi = (mu + noise * normal(rows, length) for _ in range(2))
    far = torch.rand(rows, length, generator=generator) < 0.1
    pi = torch.where(far, pi + 3 * normal(rows, length), pi).clamp(max=-1e-3)
    q = torch.where(far, q + 2 * normal(rows, length), q).clamp(max=-1e-3)
    entropy, reference = normal(rows, length).square(), (mu + noise * normal(rows, length)).clamp(max=-1e-3)
    return Batch(mask, mu, q, pi, normal(rows), entropy, reference)


def ours(name: str, batch: Batch, *, proximal: bool = True, **options: Any) -> tuple[float, Tensor]:
    """Loss and gradient [B, T] of our recipe."""
    pi = batch.pi.clone().requires_grad_()
    flat = TokenBatch.from_padded(
        batch.mask,
        logprob=pi,
        behavior_logprob=batch.mu,
        advantage=batch.advantage,
        entropy=batch.entropy,
        reference_logprob=batch.reference,
        **({"proximal_logprob": batch.q} if proximal else {}),
    )
    loss = objective(name, **options)(flat).loss
    (gradient,) = torch.autograd.grad(loss, pi)
    return float(loss.detach()), gradient


def gradient_of(loss: Tensor, pi: Tensor) -> tuple[float, Tensor]:
    """Loss and gradient [B, T] of a peer's function of ``pi``."""
    (gradient,) = torch.autograd.grad(loss, pi)
    return float(loss.detach()), gradient


def agree(got: tuple[float, Tensor], want: tuple[float, Tensor], *, value: bool = True) -> None:
    """Loss (unless ``value`` is False) and gradient agree to 1e-5."""
    if value:
        assert abs(got[0] - want[0]) <= 1e-5 * max(1.0, abs(want[0])), (got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)
    assert float(want[1].abs().max()) > 0
