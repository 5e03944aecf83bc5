"""Methods that see the k most likely tokens of the sampler, not only the sampled one."""

from __future__ import annotations

import torch
from torch import Tensor

from estr.objectives.composition import Gate, Surrogate
from estr.objectives.context import PROBABILITY, Context, clamped_exp

NEEDS = frozenset({"behavior_topk_logprob", "topk_logprob"})


def predictive_divergence(delta: float, tail: str, vocabulary: int) -> Gate:
    """Drops KL(μ||π) > delta where the update is predicted to raise it (PDM, arXiv 2607.10848).

    The predicted change is A ((π_y - μ_y) + sum_i π_i (μ_i - π_i)) over the top-K; ``tail`` says how the mass outside
    them enters: "aggregated" as one token, "uniform" over the ``vocabulary`` - K others, "none".
    """
    if tail == "uniform" and vocabulary <= 0:
        raise ValueError('tail = "uniform" needs vocabulary, the number of tokens of the model')

    def apply(context: Context) -> Tensor:
        log_mu, log_pi, known = _pair(context)
        mu, pi = _masked_exp(log_mu, known), _masked_exp(log_pi, known)
        divergence = (mu * (log_mu - log_pi)).sum(-1)
        change = (pi * (mu - pi)).sum(-1)
        if tail != "none":
            mu_tail, pi_tail = (1 - mu.sum(-1)).clamp(min=0), (1 - pi.sum(-1)).clamp(min=0)
            small = PROBABILITY
            divergence = divergence + mu_tail * (mu_tail.clamp(min=small) / pi_tail.clamp(min=small)).log()
            others = 1 if tail == "aggregated" else max(vocabulary - mu.shape[-1], 1)
            change = change + pi_tail * (mu_tail - pi_tail) / others
        predicted = context.advantage * (context.log_pi.exp() - context.log_mu.exp() + change)
        return ~((divergence > delta) & (predicted > 0))

    return Gate("KL(μ||π) ≤ delta or predicted to fall", "E", "token", apply, NEEDS)


def score_centered(weight: str, cap: float, low: float, high: float) -> Surrogate:
    """The policy gradient minus its expectation over the sampler's top-k (score centering, arXiv 2609.20807).

    -A (sg(w(p_y/μ_y)) log p_y - sum_v sg(μ_v w(p_v/μ_v) - alpha p_v) log p_v), with alpha = rho w(1/rho) and rho the
    quotient of the two tails. w(r): "truncate" min(r, cap), "none" 1, "band" r inside [low, high] and 0 outside.
    """
    if weight == "band" and low > high:
        raise ValueError(f"low ({low:g}) must not exceed high ({high:g})")

    def w(ratio: Tensor) -> Tensor:
        if weight == "none":
            return torch.ones_like(ratio)
        if weight == "truncate":
            return ratio.clamp(max=cap)
        return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))

    def apply(context: Context) -> Tensor:
        log_mu, log_p, known = _pair(context)
        with torch.no_grad():
            mu, p = _masked_exp(log_mu, known), _masked_exp(log_p, known)
            tails = [(1 - mass.sum(-1)).clamp(min=PROBABILITY) for mass in (mu, p)]
            rho = tails[0] / tails[1]
            alpha = rho * w(1 / rho)
            center = mu * w(clamped_exp(log_p - log_mu)) - alpha.unsqueeze(-1) * p
            own = w(context.ratio("E"))
        centered = own * context.log_pi - (torch.where(known, center, center.new_zeros(())) * log_p).sum(-1)
        return -context.advantage * centered

    return Surrogate("centered policy gradient", "E", "token", apply, NEEDS)


def _pair(context: Context) -> tuple[Tensor, Tensor, Tensor]:
    """log μ and log π [N, K] with 0 where one of them is not finite or the token invalid, and where they are known."""
    log_mu, log_pi = context.given("behavior_topk_logprob"), context.given("topk_logprob")
    known = log_mu.isfinite() & log_pi.detach().isfinite() & context.valid.unsqueeze(-1)
    zero = torch.zeros((), dtype=context.dtype, device=log_mu.device)
    safe = [torch.where(known, value.to(context.dtype), zero) for value in (log_mu, log_pi)]
    return safe[0], safe[1], known


def _masked_exp(logprob: Tensor, known: Tensor) -> Tensor:
    return torch.where(known, logprob.exp(), torch.zeros_like(logprob))
