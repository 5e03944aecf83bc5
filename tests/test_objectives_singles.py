"""Closed-form values of the method sheets on small inputs made for one method each."""

import math

import pytest
import torch

from estr import TokenBatch, advantage, objective
from estr.objectives.budgets import second_moment_threshold
from estr.objectives.context import binary_kl, quantile
from estr.objectives.surrogates import hill_contraction
from objective_fixtures import close, column, f8, run, token


@pytest.mark.parametrize(
    ("mu", "pi", "entropy", "tau", "kept"),
    [
        (0.5, 0.55, 0.0, 1, True),
        (0.5, 0.56, 0.0, 1, False),
        (0.9, 0.7, 0.325, 1, True),
        (0.9, 0.7, 0.325, 0.1, False),
    ],
)
def test_estr(mu, pi, entropy, tau, kept):
    assert bool(objective("estr", tau=tau)(token(mu, pi, behavior_entropy=entropy)).keep) is kept


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
def test_kpop(q, mu, phi, kept):
    assert bool(objective("kpop", phi=phi)(token(mu, q, proximal_logprob=math.log(q))).keep) is kept


def test_binary_kl():
    p, r = column(0.9, 0.2, 0.5, 0.1).log(), column(0.2, 0.9, 0.1, 0.5).log()
    close(binary_kl(p, r), [1.145726, 1.362738, 0.510826, 0.368064], 6)
    assert binary_kl(column(0.0), column(-200.0)).isfinite()
    assert binary_kl(torch.zeros(1), torch.full((1,), -200.0)).item() == pytest.approx(13.8155, abs=1e-3)


def sat_batch(advantage=1.0):
    delta = torch.tensor([0.01 * i for i in range(1, 10)] + [0.5], dtype=torch.float64)
    return TokenBatch(
        (delta - 2).requires_grad_(), torch.full_like(delta, -2), torch.full_like(delta, advantage), torch.arange(10)
    )


@pytest.mark.parametrize(("hill", "c", "high"), [("literal", 0.064235, 1.012847), ("continuous", 0.111928, 1.022386)])
def test_sat_contraction(hill, c, high):
    size = torch.tensor([0.5], dtype=torch.float64)
    close(hill_contraction(size, torch.tensor(0.131, dtype=torch.float64), hill), [c], 6)
    out, g = run("sat", sat_batch(), hill=hill)
    close(out.token_loss[-1], -high, 6)
    close(out.token_loss[:-1], -torch.exp(0.01 * torch.arange(1, 10)), 6)
    assert g[-1] == 0


def test_sat_quantile_is_linear():
    close(quantile(sat_batch().logprob.detach() + 2, 0.9), 0.131, 9)
    close(quantile(torch.tensor([3.0]), 0.9), 3.0)
    assert quantile(torch.zeros(0), 0.9) == 0


@pytest.mark.parametrize(
    ("hill", "c"), [("literal", [0.3336, 0.1662, 0.1662, 0.0318]), ("continuous", [0.8541, 0.3940, 0.3940, 0.0466])]
)
def test_sat_contraction_on_f8(hill, c):
    delta = torch.tensor([0.6931, 1.0986, 1.0986, 2.7081], dtype=torch.float64)
    close(hill_contraction(delta, torch.tensor(0.490415, dtype=torch.float64), hill), c)


def test_sat_without_drift_is_ppo():
    gate = torch.tensor(0.0)
    assert hill_contraction(torch.tensor([0.0, 1.0]), gate, "literal").tolist() == [1, 1]
    assert hill_contraction(torch.tensor([0.0, 1.0]), gate, "continuous").tolist() == [1, 1]


def test_sat_sequence_with_wide_quantile_is_gspo_on_the_direct_edge():
    sat, g = run("sat", alpha=1.0, scope="sequence")
    gspo, expected = run("gspo", edge="E", clip_low=0.2, clip_high=0.2)
    close(sat.token_loss, gspo.token_loss.detach(), 12)
    close(sat.loss, gspo.loss.detach(), 12)
    close(g, expected, 12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.0, 1, 1.0),
        (2.0, 1, 0.199148),
        (0.5, 1, 1.120422),
        (2 / 3, 1, 1.208125),
        (2.0, -1, -1.082682),
        (0.5, -1, -0.339785),
        (1.5, -1, -1.241593),
    ],
)
def test_vespo_kernel(ratio, advantage, gradient):
    out, g = run("vespo", token(0.3, 0.3 * ratio, advantage))
    close(out.weight * advantage, [gradient], 6)
    close(g, [gradient], 6)


@pytest.mark.parametrize(
    ("advantage", "rewards", "width"),
    [
        (1.5, [1, 1, 1, 1, 0, 0, 0, 0], 0.435772),
        (0.5, [1, 0, 0, 0, 0, 0, 0, 0], 0.300071),
        (-2.0, [1, 0], 0.444604),
        (1.5, [1, float("nan"), 0], 0.435772),
    ],
)
def test_etr_width(advantage, rewards, width):
    n = len(rewards)
    ratio = 3.0 if advantage > 0 else 0.1
    batch = token(
        [0.3] * n,
        [0.3 * ratio] * n,
        advantage,
        reward=torch.tensor(rewards, dtype=torch.float64),
        group=torch.full((n,), 7),
    )
    out, _ = run("etr", batch)
    expected = -advantage * (1 + width if advantage > 0 else 1 - width)
    close(out.token_loss, [expected] * n, 6)


def test_etr_without_gains_is_ppo():
    batch = f8(reward=column(1, 0), group=torch.tensor([0, 0]))
    close(run("etr", batch, advantage_gain=0, variance_gain=0)[0].loss, -0.311211, 6)


def m2po_tau(sizes, budget=0.04):
    return second_moment_threshold(torch.tensor(sizes, dtype=torch.float64).square(), budget)


def test_m2po_threshold():
    close(m2po_tau([0.05] * 20 + [0.5, 0.9]), 0.5, 9)
    close(m2po_tau([0.05, 0.1, 0.3, 0.6]), 0.1, 9)
    close(m2po_tau([1.0, 2.0]), 0.0, 9)


def positive_drift(sizes):
    delta = torch.tensor(sizes, dtype=torch.float64)
    logprob = (delta - 3).requires_grad_()
    return TokenBatch(logprob, torch.full_like(delta, -3), torch.ones_like(delta), torch.arange(len(sizes)))


def test_m2po_official_bounds():
    out, _ = run("m2po", positive_drift([0.05] * 20 + [0.5, 0.9]))
    close(out.token_loss[-2:], [-math.exp(0.5), -1.648721], 6)
    out, _ = run("m2po", positive_drift([0.05, 0.1, 0.3, 0.6]))
    close(out.token_loss[-1], -1.5, 6)
    out, _ = run("m2po", positive_drift([0.05, 0.1, 0.15, 0.2]))
    close(out.token_loss, [-math.exp(x) for x in (0.05, 0.1, 0.15, 0.2)], 6)
    falling = TokenBatch(column(-3.9, -3.05, -3.05), column(-3, -3, -3), -torch.ones(3), torch.arange(3))
    close(objective("m2po")(falling).token_loss[0], 0.7, 6)  # tau = .05, the floor .3 holds


def test_m2po_areal_drops_the_largest():
    sizes = torch.tensor([0.05, 0.1, 0.3, 0.6], dtype=torch.float64)
    logprob = torch.full_like(sizes, -3).requires_grad_()
    batch = TokenBatch(
        logprob, logprob.detach() - sizes, torch.ones(4), torch.arange(4), proximal_logprob=logprob.detach()
    )
    assert run("m2po", batch, variant="areal")[0].keep.tolist() == [True, True, True, False]
    assert run("m2po", batch, variant="areal", budget=0.0)[0].keep.tolist() == [True, False, False, False]


def test_m2po_areal_is_strict():
    logprob = column(-3, -3)
    batch = TokenBatch(logprob, column(-3.25, -3.5), torch.ones(2), torch.arange(2), proximal_logprob=logprob)
    assert objective("m2po", variant="areal", budget=0.15625)(batch).keep.tolist() == [True, False]
    assert objective("m2po", variant="areal", budget=0.15626)(batch).keep.all()


@pytest.mark.parametrize(
    ("name", "mu", "pi", "advantage", "kept"),
    [
        ("dppo_tv", 0.001, 0.05, 1, True),
        ("dppo_kl", 0.001, 0.05, 1, True),
        ("dppo_tv", 0.5, 0.7, 1, False),
        ("dppo_kl", 0.5, 0.7, 1, False),
        ("dppo_tv", 0.5, 0.7, -1, True),
        ("dppo_kl", 0.5, 0.7, -1, True),
        ("dppo_tv", 0.99, 0.9, -1, True),
        ("dppo_kl", 0.99, 0.9, -1, False),
        ("dppo_tv", 0.7, 0.5, 0, False),
        ("dppo_kl", 0.7, 0.5, 0, False),
    ],
)
def test_dppo(name, mu, pi, advantage, kept):
    assert bool(objective(name)(token(mu, pi, advantage)).keep) is kept


def test_dppo_caps_the_weight():
    out, g = run("dppo_kl", token(0.001, 0.03, 1.0))
    assert out.weight.item() == pytest.approx(20)
    close(g, [20])


@pytest.mark.parametrize(
    ("advantage", "delta", "kept"), [(-1, 0.5, False), (1, 0.5, True), (-1, 0.602, True), (-1, None, True)]
)
def test_opsm(advantage, delta, kept):
    batch = TokenBatch(column(0.2, 0.3).log(), column(0.5, 0.4).log(), column(advantage), torch.tensor([0, 0]))
    assert objective("opsm", delta=delta)(batch).keep.tolist() == [kept, kept]


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [
        (1, 0.5, None, 0.470007),
        (1, 1.0, -2.0, 1.0),
        (1, 2.0, None, 1.572895),
        (-1, 0.5, None, -0.467070),
        (-1, 1.0, 1.904762, -1.0),
        (-1, 2.0, None, -1.536220),
    ],
)
def test_sapo(advantage, ratio, loss, gradient):
    out, g = run("sapo", token(0.3, 0.3 * ratio, advantage))
    close(g, [gradient], 6)
    if loss is not None:
        close(out.token_loss, [loss], 6)


@pytest.mark.parametrize(
    ("staleness", "proximal", "update", "behavior"),
    [(4, 0.336359, 1.189207, 1.681793), (1, 0.2, 2.0, 1.0), (0, 0.2, 2.0, 1.0)],
)
def test_a3po_interpolates(staleness, proximal, update, behavior):
    batch = token(0.2, 0.4, -1.0, version=5 - staleness, target_version=5)
    out, g = run("a3po", batch)
    close(out.weight, [behavior], 6)
    close(out.token_loss, [behavior * update], 6)
    close(g, [-behavior * update], 6)
    close(0.4 / update, proximal, 5)


@pytest.mark.parametrize(
    ("mu", "proximal", "pi", "advantage", "loss", "gradient"),
    [
        (0.2, 0.25, 0.35, 1, -1.5, 0),
        (0.2, 0.25, 0.28, 1, -1.4, 1.4),
        (0.2, 0.25, 0.15, -1, 1.0, 0),
        (0.001, 0.25, 0.28, 1, -100, 100),
    ],
)
def test_ppo_ewma(mu, proximal, pi, advantage, loss, gradient):
    out, g = run("ppo_ewma", token(mu, pi, advantage, proximal_logprob=math.log(proximal)))
    close(out.token_loss, [loss])
    close(g, [gradient])


def topk(mu, pi, y, advantage):
    """One token whose sampler shows ``mu`` over all ids, the learner ``pi``; the id ``y`` was sampled."""
    mu, pi = column(*mu).unsqueeze(0), column(*pi).unsqueeze(0)
    log_pi = pi.log().requires_grad_()
    return TokenBatch(
        pi[:, y].log().requires_grad_(),
        mu[:, y].log(),
        column(advantage),
        torch.tensor([0]),
        topk_ids=torch.arange(mu.shape[1]).unsqueeze(0),
        behavior_topk_logprob=mu.log(),
        topk_logprob=log_pi,
    )


@pytest.mark.parametrize(("y", "advantage", "kept"), [(1, 1, True), (1, -1, False), (2, 1, False), (0, 1, True)])
def test_pdm(y, advantage, kept):
    batch = topk((0.5, 0.3, 0.2), (0.1, 0.32, 0.58), y, advantage)
    assert bool(objective("pdm", delta=0.5724)(batch).keep) is kept
    assert objective("pdm", delta=0.5725)(batch).keep.all()


@pytest.mark.parametrize(("y", "kept"), [(1, False), (0, True)])
def test_pdm_aggregated_tail(y, kept):
    batch = topk((0.5, 0.2), (0.2, 0.5), y, 1)
    assert bool(objective("pdm", delta=0.2748)(batch).keep) is kept
    assert objective("pdm", delta=0.2749)(batch).keep.all()


def test_pdm_tail_changes_the_prediction():
    mu, pi = (0.3, 0.3), (0.29, 0.01)  # the tail's mass grew from .4 to .7
    batch = topk(mu, pi, 0, 1)
    change = -0.01 + 0.29 * 0.01 + 0.01 * 0.29
    tail = 0.7 * (0.4 - 0.7)
    assert change + tail < change < 0
    flipped = topk(mu, pi, 0, -1)
    assert objective("pdm", delta=0.1)(batch).keep.all()
    assert not objective("pdm", delta=0.1, tail="none")(flipped).keep.any()
    assert not objective("pdm", delta=0.1, tail="uniform", vocabulary=100)(flipped).keep.any()


@pytest.mark.parametrize(
    ("mu", "pi", "y", "advantage", "weight", "coefficients"),
    [
        ((0.5, 0.3), (0.4, 0.4), 0, 1, "none", (0.9, 0.1)),
        ((0.5, 0.3), (0.4, 0.4), 0, 1, "truncate", (0.8, 0.0)),
        ((0.6, 0.1), (0.5, 0.4), 1, 1, "truncate", (0.0, 2.2)),
        ((0.6, 0.1), (0.5, 0.4), 1, 1, "none", (0.9, 2.1)),
        ((0.6, 0.1), (0.5, 0.4), 1, 1, "band", (-0.5, 3.6)),
        ((0.6, 0.1), (0.5, 0.4), 0, -1, "truncate", (-0.833333, -0.2)),
    ],
)
def test_score_centering_coefficients(mu, pi, y, advantage, weight, coefficients):
    batch = topk(mu, pi, y, advantage)
    out = objective("score_centering", weight=weight)(batch)
    own, head = torch.autograd.grad(out.loss, (batch.logprob, batch.topk_logprob))
    total = -head[0]
    total[y] -= own[0]
    close(total, coefficients, 6)


def test_score_centering_ignores_ids_outside_the_support():
    batch = topk((0.5, 0.3, 1e-300), (0.4, 0.4, 0.1), 0, 1)
    batch.behavior_topk_logprob[0, 2] = -torch.inf
    out = objective("score_centering")(batch)
    (head,) = torch.autograd.grad(out.loss, batch.topk_logprob)
    assert out.loss.isfinite()
    assert head[0, 2] == 0


def test_dar_weights_and_loss():
    old, reference, advantage = column(-22, -19, -21), column(-20, -20, -20), column(0.1, 0.2, -0.1)
    logprob = old.clone().requires_grad_()
    batch = TokenBatch(logprob, old, advantage, torch.arange(3), reference_logprob=reference)
    out, _ = run("dar", batch)
    close(out.weight, [9.0250135, 20, 0.14956862], 7)
    assert out.loss.item() == pytest.approx(193.8970793304087, abs=1e-9)
    assert out.metrics["clip/fraction"] == pytest.approx(1 / 3)


def test_dar_sums_over_the_sequence():
    parts = [[-10.0, -12.0], [-9.0, -10.0], [-21.0, 0.0]]
    old = torch.tensor(parts, dtype=torch.float64).flatten()
    index = torch.tensor([0, 0, 1, 1, 2, 2])
    batch = TokenBatch(
        old.clone().requires_grad_(), old, column(0.1, 0.2, -0.1), index, reference_logprob=torch.full_like(old, -10)
    )
    assert objective("dar")(batch).loss.item() == pytest.approx(193.8970793304087, abs=1e-9)


def test_dar_normalizes_advantages():
    old = column(-1, -1, -1)
    batch = TokenBatch(old.clone(), old, column(1, 3, 2), torch.arange(3), reference_logprob=old)
    out = objective("dar", adv_norm=True, beta=2.0)(batch)
    close(out.weight, [math.exp(-0.5), math.exp(0.5), 1], 5)


def covariance_batch():
    old = column(-0.1, -2, -0.5, -0.2, -3)
    new = column(-0.05, -1.8, -0.6, -0.25, -3.2).requires_grad_()
    return TokenBatch(new, old, column(1, 1, 1, -1, -1), torch.tensor([0, 0, 0, 1, 1]))


def test_kl_cov():
    batch = covariance_batch()
    out = objective("kl_cov", ratio=0.4, coef=1)(batch)
    assert out.loss.item() == pytest.approx(-0.23151021899869165, abs=1e-12)
    (gradient,) = torch.autograd.grad(out.loss, batch.logprob)
    close(gradient, [-0.01025422, -0.24428055, -0.18096748, 0.19024588, -0.03625385], 8)
    assert objective("kl_cov", ratio=0.4, coef=0)(batch).loss.item() == pytest.approx(-0.28151021899869166, abs=1e-12)


def test_kl_cov_ties_share_the_penalty():
    logprob = column(-1, -1, -1, -1).requires_grad_()
    batch = TokenBatch(logprob, column(-1.5, -1.5, -1.5, -1.5), torch.ones(4), torch.arange(4))
    out = objective("kl_cov", ratio=0.5)(batch)  # two of four equal tokens: half the penalty each
    close(out.token_loss, [-math.exp(0.5) + 0.25] * 4, 9)


def test_clip_cov():
    batch = covariance_batch()
    options = {"ratio": 0.9, "low": 0.5, "high": 2, "clip_low": 0.2, "clip_high": 0.2}
    out = objective("clip_cov", **options)(batch)
    assert out.keep.tolist() == [False, True, True, True, True]
    assert out.loss.item() == pytest.approx(-0.06697544809145276, abs=1e-12)
    no_candidates = objective("clip_cov", **{**options, "low": 1.9})(batch)
    assert no_candidates.loss.item() == pytest.approx(-0.27722966736665755, abs=1e-12)


def test_high_entropy():
    entropy = column(0.05, 0.1, 0.02, 1.5, 0.3, 0.9, 0.01, 0.2, 0.15, 2.0)
    batch = token([0.5] * 10, [0.5] * 10, entropy=entropy)
    out = objective("high_entropy")(batch)
    assert out.keep.tolist() == [False] * 3 + [True] + [False] * 5 + [True]
    assert out.loss.item() == pytest.approx(-0.2)  # the denominator stays all tokens
    close(quantile(entropy, 0.8), 1.02, 9)


def test_erc_keeps_the_value_and_drops_the_gradient():
    batch = token([0.5] * 5, [0.5] * 5, entropy=column(1, 1.04, 1.06, 0.94, 0.96), behavior_entropy=torch.ones(5))
    out = objective("erc")(batch)
    assert out.keep.tolist() == [True, True, False, False, True]
    assert out.weight.tolist() == [1, 1, 0, 0, 1]
    assert out.loss.item() == pytest.approx(-1)
    (gradient,) = torch.autograd.grad(out.loss, batch.logprob)
    close(gradient, [-0.2, -0.2, 0, 0, -0.2], 9)


def test_erc_prefers_the_entropy_of_q():
    batch = token(
        [0.5] * 2,
        [0.5] * 2,
        entropy=column(1, 1),
        proximal_entropy=column(1, 2),
        behavior_entropy=column(float("nan"), 1),
    )
    assert objective("erc")(batch).keep.tolist() == [True, False]


def test_erc_gppo_gives_clipped_tokens_a_bounded_gradient():
    batch = token([0.2, 0.2, 0.2], [0.5, 0.05, 0.21], [1, -1, 1], entropy=torch.ones(3), behavior_entropy=torch.ones(3))
    _, g = run("erc", batch, base="gppo")
    close(g, [1.28, -0.8, 1.05])
    _, g = run("erc", batch)
    close(g, [0, 0, 1.05])


def espo(entropy, ratio, **options):
    n = len(entropy)
    old = torch.full((n,), -1.0, dtype=torch.float64)
    logprob = (old + column(*ratio).log()).requires_grad_()
    batch = TokenBatch(
        logprob,
        old,
        torch.ones(n),
        torch.zeros(n, dtype=torch.int64),
        proximal_logprob=old,
        proximal_entropy=column(*entropy),
    )
    return run("espo", batch, alpha=0.5, vocabulary=10_000, **options)


def test_espo_segments():
    out, g = espo((0.05, 0.10), (1.02, 0.98))
    close(out.token_loss, [-0.999800] * 2, 6)
    out, g = espo((1.2, 2.0), (1.3, 0.7))
    close(out.token_loss, [-0.953939] * 2, 6)
    close(g, [0.953939] * 2, 6)
    out, g = espo((1.2, 2.0), (1.3, 1.1))  # beyond 1.086859
    close(out.token_loss, [-1.086859] * 2, 6)
    out, _ = espo((0.05, 0.10), (1.02, 1.02))
    close(out.token_loss, [-1.004072] * 2, 6)


def test_espo_averages_over_segments_first():
    out, _ = espo((0.05, 0.10, 1.5), (1.0, 1.0, 1.0))
    assert out.loss.item() == pytest.approx(-1)
    out, _ = espo((0.05, 0.10, 1.5), (1.0, 1.0, 0.5))
    assert out.loss.item() == pytest.approx(-(1 + 0.5) / 2)


def test_espo_falls_back_to_mu():
    batch = f8(proximal_logprob=None)
    assert objective("espo")(batch).loss.isfinite()


def test_topr_by_reward():
    batch = f8(reward=column(0, 1))
    _, g = run("topr", batch, sign="reward", positive_weight=2, negative_weight=3)
    close(g, [3, 3, 3, 3, -1, -1, -1, -1])


def test_clip_cov_drops_the_exact_count_among_twins() -> None:
    """Siblings with the same tokens look alike to a draw by content; only one of them may go."""
    logprob = torch.tensor([-0.1] * 4 + [-3.0] * 4)
    batch = TokenBatch(
        logprob=logprob,
        behavior_logprob=logprob,
        advantage=torch.tensor([1.0] * 4 + [-1.0] * 4),
        sequence=torch.arange(8),
    )
    recipe = objective("clip_cov", ratio=0.13, low=-0.5, high=5.0)
    dropped = set()
    for seed in range(40):
        keep = recipe(batch, generator=torch.Generator().manual_seed(seed)).keep
        assert int((~keep).sum()) == 1
        dropped.add(int((~keep).nonzero()))
    assert len(dropped) > 1
    whole = recipe.statistics(batch)
    parts = [batch.slice(0, 3), batch.slice(3, 8)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        outputs = [recipe(part, 8, 8, whole, generator) for part in parts]
        assert sum(int((~output.keep).sum()) for output in outputs) == 1


@pytest.mark.parametrize("name", [None, 3, ["estr"]])
def test_a_name_that_is_no_text_is_a_value_error(name: object) -> None:
    with pytest.raises(ValueError, match="unknown recipe"):
        objective(name)
    with pytest.raises(ValueError, match="unknown advantage"):
        advantage(name)
