"""Closed-form values of the method sheets: losses and gradients on the shared fixture F8, to the printed digits."""

import pytest
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
    """The fixture with q; ``fields`` are added or replace its columns."""
    values = {
        "logprob": PI.log().requires_grad_(),
        "behavior_logprob": MU.log(),
        "proximal_logprob": Q.log(),
        "behavior_entropy": H,
        "advantage": column(1.0, -0.5),
        "sequence": SEQUENCE,
    }
    return TokenBatch(**{**values, **fields})


def run(name, batch=None, **hyperparameters):
    """Output and the gradient coefficient g = -(d loss_token / d log π) of every token."""
    batch = f8() if batch is None else batch
    out = objective(name, **hyperparameters)(batch)
    (gradient,) = torch.autograd.grad(out.token_loss.sum(), batch.logprob, retain_graph=True)
    return out, -gradient


def close(actual, expected, digits=4):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(
        torch.as_tensor(actual).to(torch.float64).detach(), expected, atol=0.6 * 10**-digits, rtol=0
    )


PPO_E = [-1, -1.1, -1.2, -1.2, 0.5211, 0.4, 7.5, 0.4]

ROWS = {
    "grpo": ({}, PPO_E, 0.540132, [1, 1.1, 0, 0, -0.5211, 0, -7.5, 0]),
    "grpo, dual clip": (
        {"dual_clip": 3},
        [-1, -1.1, -1.2, -1.2, 0.5211, 0.4, 1.5, 0.4],
        -0.209868,
        [1, 1.1, 0, 0, -0.5211, 0, 0, 0],
    ),
    "estr": ({}, [-1, -1.1, 0, -1.28, 0.5211, 0.4, 0, 0.4], -0.257368, [1, 1.1, 0, 0, -0.5211, 0, 0, 0]),
    "estr, tau 2": (
        {"tau": 2.0},
        [-1, -1.1, 0, -1.28, 0.5211, 0.4, 0, 0.4],
        -0.257368,
        [1, 1.1, 0, 0, -0.5211, 0, 0, 0],
    ),
    "estr, tau .5": ({"tau": 0.5}, [-1, -1.1, 0, 0, 0.5211, 0, 0, 0.4], -0.147368, [1, 1.1, 0, 0, -0.5211, 0, 0, 0]),
    "icepop": (
        {},
        [-1, -1.08, -1.44, -1.5, 0.5211, 0.3733, 0, 0.3750],
        -0.468827,
        [1, 0, 0, 0, -0.5211, 0, 0, -0.375],
    ),
    "icepop, [0, 2]": (
        {"low": 0, "high": 2},
        [-1, -1.08, -1.44, -1.5, 0.5211, 0.3733, 0, 0.3750],
        -0.468827,
        [1, 0, 0, 0, -0.5211, 0, 0, -0.375],
    ),
    "tis": (
        {},
        [-1, -1.08, -1.44, -1.5, 0.5211, 0.3733, 1.5, 0.3750],
        -0.281327,
        [1, 0, 0, 0, -0.5211, 0, -1.5, -0.375],
    ),
    "decoupled_ppo": (
        {},
        [-1, -1.08, -1.44, -1.5, 0.5211, 0.3733, 7.5, 0.3750],
        0.468673,
        [1, 0, 0, 0, -0.5211, 0, -7.5, -0.375],
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_f8_row(row):
    hyperparameters, losses, mean, gradient = ROWS[row]
    out, g = run(row.split(",")[0], **hyperparameters)
    close(out.token_loss, losses)
    close(out.loss, mean, 6)
    close(g, gradient)


def test_estr_mask_and_masked_fraction():
    out, _ = run("estr")
    assert out.keep.tolist() == [True, True, False, True, True, True, False, True]
    assert out.metrics["gate/masked_fraction"] == pytest.approx(0.25)
    assert run("estr", tau=0.5)[0].metrics["gate/masked_fraction"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("mu", "pi", "entropy", "tau", "kept"),
    [
        (0.5, 0.55, 0.0, 1, True),
        (0.5, 0.56, 0.0, 1, False),
        (0.9, 0.7, 0.325, 1, True),
        (0.9, 0.7, 0.325, 0.1, False),
    ],
)
def test_estr_single_tokens(mu, pi, entropy, tau, kept):
    batch = TokenBatch(
        column(pi).log(), column(mu).log(), column(1), torch.tensor([0]), behavior_entropy=column(entropy)
    )
    assert bool(objective("estr", tau=tau)(batch).keep) is kept


@pytest.mark.parametrize(
    ("phi", "dropped"), [(2.0, []), (0.1, []), (0.025, [6]), (0.006, [3, 6, 7]), (0.0001, [1, 2, 3, 4, 5, 6, 7])]
)
def test_kpop_drops_by_binary_kl(phi, dropped):
    out, _ = run("kpop", phi=phi)
    assert [i for i, kept in enumerate(out.keep.tolist()) if not kept] == dropped


def test_kpop_at_default_equals_decoupled_ppo_on_f8():
    close(run("kpop")[0].token_loss, run("decoupled_ppo")[0].token_loss.detach(), 12)


@pytest.mark.parametrize(
    ("q", "mu", "phi", "kept"),
    [
        (0.9, 0.2, 2.0, True),
        (0.9, 0.2, 0.75, False),
        (0.5, 0.1, 0.5, False),
        (0.99, 0.6, 0.5, False),
        (0.5, 0.4, 0.0205, True),
        (0.5, 0.4, 0.0203, False),
    ],
)
def test_kpop_single_tokens(q, mu, phi, kept):
    batch = TokenBatch(
        column(q).log(), column(mu).log(), column(1), torch.tensor([0]), proximal_logprob=column(q).log()
    )
    assert bool(objective("kpop", phi=phi)(batch).keep) is kept


def test_icepop_bands_separate_at_0_3_and_3():
    batch = f8(proximal_logprob=(MU * column(0.3, 3, 1, 1, 1, 1, 1, 1)).log())
    assert run("icepop", batch)[0].weight.tolist()[:2] == pytest.approx([0, 3])
    assert run("icepop", batch, low=None, high=2)[0].weight.tolist()[:2] == pytest.approx([0.3, 0])
