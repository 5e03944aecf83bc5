"""Engine precision: what a weight becomes when an engine computes in fewer bits than the learner."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from estr.errors import UsageError, nearest


@dataclass(frozen=True)
class Precision:
    """An engine precision: the type its tensors have, and for ``intN`` the bits its matrices are rounded to."""

    name: str
    torch_dtype: torch.dtype
    bits: int | None = None


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32", torch.float32),
        Precision("bfloat16", torch.bfloat16),
        *(Precision(f"int{bits}", torch.float32, bits) for bits in range(8, 1, -1)),
    )
}


def parse_dtype(name: str) -> Precision:
    """The precision called ``name`` (float32, bfloat16, int8 … int2); `UsageError` for any other name."""
    if name not in PRECISIONS:
        raise UsageError(f"rollout.dtype: no engine precision {name!r}{nearest(name, PRECISIONS)}")
    return PRECISIONS[name]


def to_engine(tensor: Tensor, name: str, dtype: str | Precision) -> Tensor:
    """The parameter ``name`` as an engine of precision ``dtype`` sees it; same shape.

    float32 and bfloat16 cast (a tensor that already has the type comes back itself, not a copy). intN keeps float32
    and rounds every tensor of at least two dimensions to N bits a row (`round_rows`); vectors (norms, biases) stay.
    Tensors that are not floating point stay. Idempotent. Raises `UsageError` for an unknown precision and for a
    matrix with NaN or infinity, which no scale can represent.
    """
    precision = parse_dtype(dtype) if isinstance(dtype, str) else dtype
    if not tensor.is_floating_point():
        return tensor
    cast = tensor.to(precision.torch_dtype)
    if precision.bits is None or tensor.dim() < 2:
        return cast
    if not torch.isfinite(cast).all():
        raise UsageError(f"{name}: weights with NaN or infinity cannot be rounded to {precision.name}")
    return round_rows(cast, precision.bits)


def round_rows(matrix: Tensor, bits: int) -> Tensor:
    """``matrix`` [..., rows, columns] rounded to ``bits`` bits, symmetric, one scale a row (output channel).

    With q = 2^(bits-1) - 1 and scale s = max|row| / q: s · clamp(round(w / s), -q, q), round half to even; a row of
    zeros stays. float64 inside, so that the largest entry comes back exactly and rounding twice changes nothing.
    """
    levels = 2 ** (bits - 1) - 1
    wide = matrix.double()
    scale = wide.abs().amax(dim=-1, keepdim=True) / levels
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (torch.round(wide / safe).clamp(-levels, levels) * safe).to(matrix.dtype)
