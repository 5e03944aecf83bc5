"""The KL divergence from the policy to a frozen reference model, as a term beside the objective."""

from __future__ import annotations

from torch import Tensor

from estr.batch import TokenBatch
from estr.objectives.context import Context, clamped_exp
from estr.objectives.reductions import at_least_one

ESTIMATORS = ("k1", "k3")


def reference_kl(batch: TokenBatch, estimator: str = "k3") -> Tensor:
    """An estimate of KL(π || reference) at each token, [N] in nats, with a gradient that lowers it; 0 where invalid.

    With x = log π - log reference: "k1" has the value x and the gradient x ∇log π (the derivative of x itself is 0 in
    expectation and regularizes nothing); "k3" is exp(-x) - 1 + x and its own derivative (Schulman 2020). No importance
    ratio multiplies it.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"kl estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    if batch.reference_logprob is None:
        raise ValueError("the KL term needs reference_logprob; give it to the TokenBatch")
    context = Context(batch, frozenset({"reference_logprob"}))
    x = context.log_pi - context.field("reference_logprob")
    if estimator == "k3":
        return clamped_exp(-x) - 1 + x
    half_square = x.square() / 2
    return x.detach() + (half_square - half_square.detach())


def kl_penalty(batch: TokenBatch, coef: float, estimator: str = "k3", token_count: int | None = None) -> Tensor:
    """coef times the mean of ``reference_kl`` over all action tokens: a scalar to add to the loss.

    ``token_count`` is the number of action tokens of the whole optimizer batch (default: this batch's N).
    """
    total: Tensor = reference_kl(batch, estimator).sum()
    return coef * total / at_least_one(batch.tokens if token_count is None else token_count)
