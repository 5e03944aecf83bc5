"""Detached factors: how much a token counts."""

from __future__ import annotations

from torch import Tensor

from estr.objectives.composition import Weight
from estr.objectives.context import Context, clamped_exp


def ratio(edge: str, cap: float | None = None, scope: str = "token") -> Weight:
    """min(ratio, cap); ``scope`` "sequence" takes the product over the sequence, "geometric" the geometric mean."""

    def apply(context: Context) -> Tensor:
        value = clamped_exp(context.scoped(context.delta(edge), scope))
        return value if cap is None else value.clamp(max=cap)

    name = "ratio" if cap is None else f"min(ratio, {cap:g})"
    return Weight(name, edge, "token" if scope == "token" else "sequence", apply)
