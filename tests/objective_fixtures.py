"""The shared fixture F8 of the method sheets and small helpers for the tests of the objectives."""

import torch

from estr import TokenBatch, objective

torch.set_num_threads(1)


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


MU = column(0.90, 0.50, 0.01, 0.20, 0.95, 0.30, 0.002, 0.60)
Q = column(0.90, 0.45, 0.012, 0.25, 0.97, 0.28, 0.02, 0.50)
PI = column(0.90, 0.55, 0.02, 0.60, 0.99, 0.10, 0.03, 0.45)
H = column(0.33, 0.70, 0.06, 1.20, 0.20, 1.50, 0.02, 0.68)
SEQUENCE = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])


def f8(**fields):
    """F8 with q; ``fields`` are added or replace its columns."""
    values = {
        "logprob": PI.log().requires_grad_(),
        "behavior_logprob": MU.log(),
        "proximal_logprob": Q.log(),
        "behavior_entropy": H,
        "advantage": column(1.0, -0.5),
        "sequence": SEQUENCE,
    }
    return TokenBatch(**{**values, **fields})


def token(mu, pi, advantage=1.0, **fields):
    """A batch of single-token sequences from probabilities (numbers or lists)."""
    mu, pi, advantage = (torch.atleast_1d(torch.as_tensor(x, dtype=torch.float64)) for x in (mu, pi, advantage))
    fields = {k: torch.atleast_1d(torch.as_tensor(v)) if k != "target_version" else v for k, v in fields.items()}
    logprob = pi.log().requires_grad_()
    return TokenBatch(logprob, mu.log(), advantage.expand(len(pi)), torch.arange(len(pi)), **fields)


def run(name, batch=None, **hyperparameters):
    """Output and the gradient coefficient g = -(d loss_token / d log π) of every token."""
    batch = f8() if batch is None else batch
    out = objective(name, **hyperparameters)(batch)
    (gradient,) = torch.autograd.grad(out.token_loss.sum(), batch.logprob, retain_graph=True)
    return out, -gradient


def close(actual, expected, digits=4):
    """Equal to the printed digits."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    actual = torch.as_tensor(actual).to(torch.float64).detach()
    torch.testing.assert_close(actual, expected, atol=0.6 * 10**-digits, rtol=0)


def everything(n_sequences=5, seed=0, dtype=torch.float64, lengths=None, spread=0.3):
    """A random batch with every field that any recipe needs; sequences of 0 to 6 tokens."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (n_sequences,), generator=g) if lengths is None else torch.as_tensor(lengths)
    S, N, K = len(lengths), int(lengths.sum()), 3

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    behavior = -2.5 * uniform(N) - 0.05
    proximal = (behavior + spread * normal(N)).clamp(max=-0.01)
    logprob = (proximal + spread * normal(N)).clamp(max=-0.01)
    entropy = 1.5 * uniform(N)
    mu_top = (0.9 * normal(N, K).softmax(-1)).log()
    pi_top = (0.9 * normal(N, K).softmax(-1)).log()
    floats = {
        "logprob": logprob,
        "behavior_logprob": behavior,
        "advantage": normal(S)[torch.repeat_interleave(torch.arange(S), lengths)],
        "behavior_entropy": entropy,
        "proximal_logprob": proximal,
        "proximal_entropy": (entropy * (1 + 0.04 * normal(N))).clamp(min=0),
        "reference_logprob": (behavior + spread * normal(N)).clamp(max=-0.01),
        "entropy": (entropy * (1 + 0.04 * normal(N))).clamp(min=0),
        "reward": (uniform(S) > 0.5).double(),
        "behavior_topk_logprob": mu_top,
        "topk_logprob": pi_top,
    }
    floats = {name: value.to(dtype) for name, value in floats.items()}
    for name in ("logprob", "entropy", "topk_logprob"):
        floats[name].requires_grad_()
    return TokenBatch(
        **floats,
        sequence=torch.repeat_interleave(torch.arange(S), lengths),
        sequences=S,
        version=torch.randint(0, 5, (N,), generator=g),
        target_version=5,
        group=torch.arange(S) // 2,
        topk_ids=torch.arange(K).expand(N, K),
        advantage_scope="token",
    )
