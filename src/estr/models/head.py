"""The language-model head fused with log-softmax, gather and entropy: no ``[N, V]`` tensor ever exists.

Rows are worked through in chunks; logits are recomputed in the backward pass. Arithmetic is float32 (float64 stays
float64), also under autocast. With z the logits after scale, soft cap and temperature, and Z their log-sum-exp::

    log π(y) = z_y − Z          ∂ log π(y) / ∂z_j = 1[j = y] − p_j
    H = Z − Σ_j p_j z_j         ∂ H / ∂z_j       = −p_j (z_j − Z + H)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from estr.models.ragged import Ragged

_CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
_LEAST_ROWS = 32


@dataclass(frozen=True)
class Head:
    """Everything between the last hidden state and the logits: ``softcap · tanh((h Wᵀ + b) · scale / softcap)``."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[N, V]`` before temperature, float32 or wider; for a sampler, which needs all of them."""
        weight, bias = _wide(self.weight), None if self.bias is None else _wide(self.bias)
        with torch.autocast(hidden.device.type, enabled=False):
            return _logits(hidden.to(weight.dtype), weight, bias, _Squash(self.scale, self.softcap, 1.0))

    def logprob_entropy(
        self,
        hidden: Tensor,
        target: Tensor,
        temperature: float = 1.0,
        chunk: int | None = None,
        support: Ragged | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability ``[N]`` of ``target`` and entropy ``[N]`` in nats; see :func:`linear_logprob_entropy`."""
        values = self.values(hidden, target, temperature, chunk, support)
        return values.logprob, values.entropy

    def values(
        self,
        hidden: Tensor,
        target: Tensor,
        temperature: float = 1.0,
        chunk: int | None = None,
        support: Ragged | None = None,
        others: Tensor | None = None,
    ) -> HeadValues:
        """What :func:`linear_values` gives for this head."""
        return linear_values(
            hidden,
            self.weight,
            target,
            bias=self.bias,
            temperature=temperature,
            scale=self.scale,
            softcap=self.softcap,
            chunk=chunk,
            support=support,
            others=others,
        )


class HeadValues(NamedTuple):
    """What the head gives for N positions, all of one distribution, with graph."""

    logprob: Tensor  # [N], of the target
    entropy: Tensor  # [N], nats
    other_logprob: Tensor | None  # [N, K], of further ids, where asked for


def linear_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    support: Ragged | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of ``target`` and entropy in nats, both of the distribution after temperature.

    ``hidden`` ``[N, D]``, ``weight`` ``[V, D]``, ``target`` int64 ``[N]``, ``bias`` ``[V]``; returns two float32 (or
    float64) ``[N]``, differentiable in hidden, weight and bias. ``chunk`` rows are worked on at once; the default
    bounds one chunk's logits by a fixed number of elements. The entropy is over the whole vocabulary, never an
    estimate from the sampled token. With ``support`` both are of the distribution restricted to each row's ids and
    renormalized; a target outside them has log-probability -inf. Raises ValueError where shapes do not match or the
    temperature is not positive.
    """
    values = linear_values(
        hidden,
        weight,
        target,
        bias=bias,
        temperature=temperature,
        scale=scale,
        softcap=softcap,
        chunk=chunk,
        support=support,
    )
    return values.logprob, values.entropy


def linear_values(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    support: Ragged | None = None,
    others: Tensor | None = None,
) -> HeadValues:
    """:func:`linear_logprob_entropy`, and with ``others`` int64 ``[N, K]`` the log-probabilities of those ids too.

    All of them are of one distribution and differentiable. An id outside the row's ``support`` has -inf.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or target.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden must be [N, D], weight [V, D] and target [N]; "
            f"got {list(hidden.shape)}, {list(weight.shape)} and {list(target.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if others is not None and (others.ndim != 2 or others.shape[0] != target.shape[0]):
        raise ValueError(f"others must be [{target.shape[0]}, K], got {list(others.shape)}")
    ids = offsets = None
    if support is not None:
        support.check(target.shape[0])
        ids, offsets = support.ids, support.offsets
    chunk = chunk or _chunk_rows(hidden, weight)
    squash = _Squash(scale, softcap, temperature)
    return HeadValues(*_FusedHead.apply(hidden, weight, bias, target, ids, offsets, others, squash, chunk))


@torch.no_grad()
def linear_polarity(
    hidden: Tensor, head: Head, temperature: float = 1.0, chunk: int | None = None, support: Ragged | None = None
) -> Tensor:
    """Σ_v p_v² (log p_v + H) of each row, ``[N]``, without graph: what PAPO (arXiv 2605.11775) needs of a state."""
    rows = chunk or _chunk_rows(hidden, head.weight)
    result = torch.empty(hidden.shape[0], dtype=_wide(head.weight).dtype, device=hidden.device)
    for start in range(0, hidden.shape[0], rows):
        z = head.logits(hidden[start : start + rows]) / temperature
        if support is not None:
            z.masked_fill_(
                support.outside(torch.arange(start, start + len(z), device=z.device), z.shape[1]), -torch.inf
            )
        log_p = _bounded_(z.log_softmax(-1))
        p = log_p.exp()
        entropy = -torch.linalg.vecdot(p, log_p)
        result[start : start + rows] = torch.linalg.vecdot(p.square(), log_p + entropy[:, None])
    return result


def _chunk_rows(hidden: Tensor, weight: Tensor) -> int:
    return max(_LEAST_ROWS, _CHUNK_ELEMENTS.get(hidden.device.type, 2**22) // max(1, weight.shape[0]))


@dataclass(frozen=True)
class _Squash:
    """From raw logits to z, and the derivative on the way back; both work in place."""

    scale: float
    softcap: float | None
    temperature: float

    def forward_(self, raw: Tensor) -> Tensor:
        if self.softcap is None:
            factor = self.scale / self.temperature
            return raw if factor == 1.0 else raw.mul_(factor)
        return raw.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def backward_(self, grad: Tensor, z: Tensor) -> Tensor:
        if self.softcap is not None:
            grad.mul_(1.0 - (z * (self.temperature / self.softcap)).square_())
        factor = self.scale / self.temperature
        return grad if factor == 1.0 else grad.mul_(factor)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _bounded_(log_p: Tensor) -> Tensor:
    """Log-probabilities of which even -inf can be multiplied by their probability, which is 0 long before."""
    return log_p.clamp_(min=-1e4)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, squash: _Squash) -> Tensor:
    raw = hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())
    return squash.forward_(raw)


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ids: Tensor | None,
        offsets: Tensor | None,
        others: Tensor | None,
        squash: _Squash,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        wide, wide_bias = _wide(weight), None if bias is None else _wide(bias)
        dtype = torch.promote_types(wide.dtype, torch.float32)
        logprob = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        log_norm, entropy = torch.empty_like(logprob), torch.empty_like(logprob)
        other = None if others is None else logprob.new_empty(others.shape)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], chunk):
                rows = slice(start, start + chunk)
                z = _logits(hidden[rows].to(dtype), wide, wide_bias, squash)
                if ids is not None and offsets is not None:
                    index = torch.arange(start, start + len(z), device=z.device)
                    z.masked_fill_(Ragged(ids, offsets).outside(index, weight.shape[0]), -torch.inf)
                log_norm[rows] = z.logsumexp(-1)
                logprob[rows] = z.gather(1, target[rows, None])[:, 0] - log_norm[rows]
                if other is not None and others is not None:
                    other[rows] = z.gather(1, others[rows]) - log_norm[rows, None]
                log_p = _bounded_(z.sub_(log_norm[rows, None]))
                entropy[rows] = -torch.linalg.vecdot(log_p.exp(), log_p)
        ctx.save_for_backward(hidden, weight, bias, target, ids, offsets, others, log_norm, entropy)
        ctx.squash, ctx.chunk = squash, chunk
        return logprob, entropy, other

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, ids, offsets, others, log_norm, entropy = ctx.saved_tensors
        wide, wide_bias = _wide(weight), None if bias is None else _wide(bias)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(wide) if need_weight else None
        grad_bias = torch.zeros_like(wide_bias) if need_bias and wide_bias is not None else None
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _live_rows(grads).split(ctx.chunk):
                h = hidden[rows].to(wide.dtype)
                z = _logits(h, wide, wide_bias, ctx.squash)
                log_p = z - log_norm[rows, None]
                if ids is not None:
                    log_p.masked_fill_(Ragged(ids, offsets).outside(rows, weight.shape[0]), -torch.inf)
                grad = _grad_z(
                    _bounded_(log_p),
                    target[rows],
                    None if others is None else others[rows],
                    entropy[rows],
                    *(None if grad is None else grad[rows] for grad in grads),
                )
                ctx.squash.backward_(grad, z)
                if grad_hidden is not None:
                    grad_hidden[rows] = (grad @ wide).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight.addmm_(grad.t(), h)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None for _ in range(6)),
        )


def _live_rows(grads: tuple[Tensor | None, ...]) -> Tensor:
    """Rows whose outputs have a gradient; a dropped or clipped token costs nothing in backward."""
    live: Tensor | None = None
    for grad in grads:
        if grad is not None:
            found = grad != 0 if grad.ndim == 1 else (grad != 0).any(-1)
            live = found if live is None else live | found
    return torch.empty(0, dtype=torch.int64) if live is None else live.nonzero()[:, 0]


def _grad_z(
    log_p: Tensor,
    target: Tensor,
    others: Tensor | None,
    entropy: Tensor,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    grad_other: Tensor | None,
) -> Tensor:
    """Gradient with respect to z, ``[rows, V]``: p_j · (−g − g_entropy (log p_j + H)) with g the gradient of all
    log-probabilities of the row together, plus that of each of them at its own id."""
    total = grad_logprob
    if grad_other is not None:
        total = grad_other.sum(-1) if total is None else total + grad_other.sum(-1)
    grad = log_p.exp()
    if grad_entropy is not None:
        factor = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        if total is not None:
            factor.sub_(total[:, None])
        grad.mul_(factor)
    elif total is not None:
        grad.mul_(-total[:, None])
    if grad_logprob is not None:
        grad.scatter_add_(1, target[:, None], grad_logprob[:, None])
    if grad_other is not None and others is not None:
        grad.scatter_add_(1, others, grad_other)
    return grad
