"""The divergence from a frozen reference model, as a loss beside the objective."""

from __future__ import annotations

import torch
from torch import Tensor

_CLAMP = 20.0


def reference_kl(logprob: Tensor, reference_logprob: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(π‖reference) at each sampled token, ``[N]``, with gradient through π alone.

    With x = log reference − log π: ``k1`` is −x (unbiased for samples of π, of either sign), ``k3`` is
    exp(x) − 1 − x (never negative); Schulman, "Approximating KL divergence", 2020. No ratio multiplies it. x is
    clamped to ±20 before exp; where it is not finite the token contributes 0.
    """
    reference_logprob = reference_logprob.detach()
    finite = (logprob.detach() - reference_logprob).isfinite()
    x = torch.where(finite, reference_logprob, 0.0) - torch.where(finite, logprob, 0.0)
    if estimator == "k1":
        return -x
    if estimator == "k3":
        return x.clamp(-_CLAMP, _CLAMP).expm1() - x
    raise ValueError(f"kl_estimator must be 'k1' or 'k3', got {estimator!r}")
