"""Closed-form losses and gradients on the fixture F8 of the method sheets, to the printed digits."""

import pytest
import torch

from objective_fixtures import MU, PI, H, Q, close, f8, run

A_ROW = [1, 1, 1, 1, -0.5, -0.5, -0.5, -0.5]
ICEPOP = ([-1, -1.08, -1.44, -1.5, 0.5211, 0.3733, 0, 0.3750], -0.468827, [1, 0, 0, 0, -0.5211, 0, 0, -0.375])
DECOUPLED = ([-1, -1.08, -1.44, -1.5, 0.5211, 0.3733, 7.5, 0.3750], 0.468673, [1, 0, 0, 0, -0.5211, 0, -7.5, -0.375])
TIS = ([-1, -1.08, -1.44, -1.5, 0.5211, 0.3733, 1.5, 0.3750], -0.281327, [1, 0, 0, 0, -0.5211, 0, -1.5, -0.375])
PPO_U = ([-1, -1.2, -1.2, -1.2, 0.5103, 0.4, 0.75, 0.45], -0.311211, [1, 0, 0, 0, -0.5103, 0, -0.75, -0.45])
PPO_E = ([-1, -1.1, -1.2, -1.2, 0.5211, 0.4, 7.5, 0.4], 0.540132, [1, 1.1, 0, 0, -0.5211, 0, -7.5, 0])
DUAL = ([-1, -1.1, -1.2, -1.2, 0.5211, 0.4, 1.5, 0.4], -0.209868, [1, 1.1, 0, 0, -0.5211, 0, 0, 0])
DPPO_G = [1, 1.1, 2, 0, -0.5211, 0, -7.5, -0.375]

# name, hyperparameters, token losses, their mean, g; None where the sheet does not print it
ROWS = [
    ("reinforce", {}, (-torch.tensor(A_ROW) * PI.log()).tolist(), None, A_ROW),
    ("grpo", {}, *PPO_E),
    ("grpo", {"dual_clip": 3}, *DUAL),
    ("estr", {}, [-1, -1.1, 0, -1.28, 0.5211, 0.4, 0, 0.4], -0.257368, [1, 1.1, 0, 0, -0.5211, 0, 0, 0]),
    ("estr", {"tau": 2}, [-1, -1.1, 0, -1.28, 0.5211, 0.4, 0, 0.4], -0.257368, [1, 1.1, 0, 0, -0.5211, 0, 0, 0]),
    ("estr", {"tau": 0.5}, [-1, -1.1, 0, 0, 0.5211, 0, 0, 0.4], -0.147368, [1, 1.1, 0, 0, -0.5211, 0, 0, 0]),
    ("sat", {}, *PPO_E),
    ("sat", {"hill": "continuous"}, *PPO_E),
    (
        "sat",
        {"alpha": 0.5},
        [-1, -1.1, -1.0667, -1.0332, 0.5211, 0.4834, 7.5, 0.4],
        0.588061,
        [1, 1.1, 0, 0, -0.5211, 0, -7.5, 0],
    ),
    ("sat", {"alpha": 0.5, "hill": "continuous"}, None, 0.566505, None),
    ("icepop", {}, *ICEPOP),
    ("icepop", {"low": 0, "high": 2}, *ICEPOP),
    ("kpop", {}, *DECOUPLED),
    ("tis", {}, *TIS),
    ("decoupled_ppo", {}, *DECOUPLED),
    ("cispo", {}, None, 0.342595, [1, 1.2, 1.2, 1.2, -0.5103, -0.4, -0.6, -0.45]),
    (
        "cispo",
        {"edge": "E", "clip_low": 1, "clip_high": 4},
        None,
        None,
        [1, 1.1, 2, 3, -0.5211, -0.1667, -2.5, -0.375],
    ),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.28}, [-1.28] * 4 + [0.418774] * 4, None, [0] * 4 + [-0.418774] * 4),
    ("gspo", {}, [-1.0004] * 4 + [0.49985] * 4, None, [0] * 8),
    ("topr", {}, None, None, [1, 1, 1, 1, -0.5, -0.1667, -0.5, -0.375]),
    ("topr", {"scope": "sequence"}, None, None, A_ROW),
    ("aipo", {}, None, None, [1, 1.1, 2, 2, -0.5211, -0.1667, -1, -0.375]),
    ("sapo", {}, None, -0.796067, [1, 1.2073, 1.4944, 1.5234, -0.5102, -0.1597, -0.7006, -0.4488]),
    ("dppo_tv", {}, None, None, DPPO_G),
    ("dppo_kl", {}, None, None, DPPO_G),
    ("skyrl_rollout_is", {}, None, None, [1, 1.1, 0, 0, -0.5211, 0, 0, 0]),
    ("m2po", {"variant": "areal"}, *ICEPOP),
    ("vespo", {}, None, None, [2.0495e-4] * 4 + [-0.164535] * 4),
    ("vespo", {"token_cap": 2}, None, None, [2.2026e-6] * 4 + [-0.5 * 0.738987] * 4),
    ("opsm", {}, *PPO_U),
    ("verl/decoupled_token_is", {}, *TIS),
    ("verl/decoupled_token_icepop", {}, *ICEPOP),
    ("verl/bypass_ppo_clip", {}, *DUAL),
    ("verl/disabled", {}, *PPO_U),
    ("verl/bypass_pg_is", {}, None, None, [2] * 4 + [-1] * 4),
    ("verl/bypass_pg_token_icepop", {}, None, None, [1, 1.1, 2, 3, -0.5211, 0, 0, -0.375]),
]


@pytest.mark.parametrize(("name", "hyperparameters", "losses", "mean", "gradient"), ROWS)
def test_f8_row(name, hyperparameters, losses, mean, gradient):
    out, g = run(name, **hyperparameters)
    if losses is not None:
        close(out.token_loss, losses)
    if mean is not None:
        close(out.loss, mean, 6)
    if gradient is not None:
        close(g, gradient, 6 if name in ("vespo", "gspo") else 4)


def test_estr_mask_and_masked_fraction():
    out, _ = run("estr")
    assert out.keep.tolist() == [True, True, False, True, True, True, False, True]
    assert out.metrics["gate/masked_fraction"] == pytest.approx(0.25)
    assert run("estr", tau=0.5)[0].metrics["gate/masked_fraction"] == pytest.approx(0.5)


def test_estr_scores_and_caps():
    delta = (PI / MU).log()
    close(delta.square() / (H + 0.01), [0, 0.0128, 6.8636, 0.9975, 0.0081, 0.7993, 244.4512, 0.1199])
    caps = torch.tensor([0.5831, 0.8426, 0.2646, 1.1000, 0.4583, 1.2288, 0.1732, 0.8307], dtype=torch.float64)
    for shift, kept in ((-1e-4, True), (1e-4, False)):  # the gate closes between these two
        batch = f8(logprob=(MU.log() - caps - shift).requires_grad_())
        assert run("estr", batch)[0].keep.tolist() == [kept] * 8


def test_tis_weights():
    close(run("tis")[0].weight, [1, 0.9, 1.2, 1.25, 1.0211, 0.9333, 2, 0.8333])
    assert run("tis")[0].weight.mean().item() == pytest.approx(1.142215, abs=1e-6)
    close(run("tis_sequence")[0].weight, [1.35] * 4 + [2] * 4)
    close(run("tis_sequence", aggregate="geometric")[0].weight, [1.077912] * 4 + [1.678711] * 4, 6)


def test_verl_batch_normalized_weights():
    out, _ = run("verl/decoupled_token_is", rollout_is_batch_normalize=True)
    close(out.weight, [0.8755, 0.7879, 1.0506, 1.0944, 0.8939, 0.8171, 1.7510, 0.7296])
    out, _ = run("verl/decoupled_seq_is", rollout_is_batch_normalize=True)
    close(out.weight, [0.8060] * 4 + [1.1940] * 4)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("decoupled_geo_rs", (False, False)),
        ("decoupled_geo_rs_seq_tis", (False, False)),
        ("decoupled_geo_rs_token_tis", (False, False)),
        ("decoupled_seq_is_rs", (True, False)),
        ("decoupled_k3_rs", (False, False)),
        ("bypass_ppo_clip_geo_rs", (False, False)),
        ("bypass_pg_geo_rs", (False, False)),
    ],
)
def test_verl_rejection(name, kept):
    assert run("verl/" + name)[0].keep.tolist() == [kept[0]] * 4 + [kept[1]] * 4


def test_verl_rejection_shrinks_the_denominator():
    fixed, _ = run("verl/decoupled_seq_is_rs", denominator="all")
    shrunk, _ = run("verl/decoupled_seq_is_rs")
    assert shrunk.loss.item() == pytest.approx(2 * fixed.loss.item())
    assert fixed.loss.item() == pytest.approx(fixed.token_loss.sum().item() / 8)


def test_verl_k1_band_is_that_of_the_reciprocal_ratio():
    options = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_1.1"}  # ratio inside [1/1.1, 2]
    kept = run("verl/decoupled_token_is", **options)[0].keep.tolist()
    assert kept == [True, False, True, True, True, True, False, False]


def test_verl_rejections_are_combined():
    options = {"rollout_rs": "token_k2,seq_max_k3", "rollout_rs_threshold": 0.02}
    kept = run("verl/decoupled_token_is", **options)[0].keep.tolist()
    x = (Q / MU).log()
    token = x.square() / 2 <= 0.02
    sequence = (x.expm1() - x).view(2, 4).amax(1).repeat_interleave(4) <= 0.02
    assert kept == (token & sequence).tolist()


@pytest.mark.parametrize(
    ("edge", "estimator", "statistic", "a", "b"),
    [
        ("B", "k2", "max", 0.02490, 2.65095),
        ("E", "k2", "max", 0.60347, 3.66677),
        ("E", "k2", "mean", 0.21206, 1.07812),
        ("E", "k3", "max", 0.90139, 11.29195),
        ("E", "k3", "mean", 0.30323, 2.94061),
    ],
)
def test_trm_statistics(edge, estimator, statistic, a, b):
    for sequence, value in ((0, a), (4, b)):
        options = {"edge": edge, "estimator": estimator, "statistic": statistic}
        assert not run("trm", delta=value - 1e-5, **options)[0].keep[sequence]
        assert run("trm", delta=value + 1e-5, **options)[0].keep[sequence]


def test_trm_drops_the_whole_sequence_and_its_place_in_the_denominator():
    out, _ = run("trm", delta=1, estimator="k2")
    assert out.keep.tolist() == [True] * 4 + [False] * 4
    assert out.loss.item() == pytest.approx(out.token_loss.sum().item() / 4)
    assert run("trm", delta=1, denominator="all")[0].loss.item() == pytest.approx(out.token_loss.sum().item() / 8)


def test_opsm_depends_on_mu_not_q():
    assert run("opsm", delta=0)[0].keep.all()  # b drifts by -.340750 from μ
    assert not run("opsm", f8(behavior_logprob=Q.log()), delta=1e-4)[0].keep[4:].any()  # +.177276 from q


@pytest.mark.parametrize(
    ("phi", "dropped"),
    [
        (2.0, []),
        (0.1, []),
        (0.025, [6]),
        (0.006, [3, 6, 7]),
        (0.0054, [3, 4, 6, 7]),
        (0.0001, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_kpop_drops_by_binary_kl(phi, dropped):
    assert [i for i, kept in enumerate(run("kpop", phi=phi)[0].keep.tolist()) if not kept] == dropped


def test_kpop_indicator_alone():
    close(run("kpop", weight=False)[0].token_loss, PPO_U[0])
    assert run("kpop", weight=False)[0].weight.tolist() == [1.0] * 8


def test_icepop_bands_separate_at_0_3_and_3():
    batch = f8(proximal_logprob=(MU * torch.tensor([0.3, 3, 1, 1, 1, 1, 1, 1])).log())
    assert run("icepop", batch)[0].weight.tolist()[:2] == pytest.approx([0, 3])
    assert run("icepop", batch, low=None, high=2)[0].weight.tolist()[:2] == pytest.approx([0.3, 0])


def test_a3po_row():
    batch = f8(version=torch.ones(8, dtype=torch.int64), target_version=5)
    out, g = run("a3po", batch)
    close(out.token_loss, [-1, -1.1, -2, -2.7354, 0.5211, 0.1755, 7.5, 0.375])
    close(out.loss, 0.217015, 6)
    close(g, [1, 1.1, 2, 0, -0.5211, 0, -7.5, -0.375])


def test_mis_modes():
    options = {"batch_normalize": False, "veto": None}
    close(run("mis", **options)[0].weight, [1, 0.9, 1.2, 1.25, 1.0211, 0.9333, 0, 0.8333])
    close(run("mis", mode="truncate", **options)[0].weight, [1, 0.9, 1.2, 1.25, 1.0211, 0.9333, 2, 0.8333])
    close(run("mis", mode="clip", lower=None, upper=1.1, **options)[0].weight[1:4], [1 / 1.1, 1.1, 1.1])
    close(run("mis", level="geometric", **options)[0].weight, [1.077912] * 4 + [1.678711] * 4, 6)
    close(run("mis", level="sequence", **options)[0].weight, [1.35] * 4 + [0] * 4)
    assert run("mis")[0].weight.sum().item() == pytest.approx(7)  # normalized over the seven tokens in the band


def test_mis_veto_drops_the_sequence():
    proximal = Q.log().clone()
    proximal[1] = MU.log()[1] - 9.3  # ratio 9.1e-5
    out, _ = run("mis", f8(proximal_logprob=proximal), mode="truncate")
    assert out.keep.tolist() == [False] * 4 + [True] * 4


def test_seq_mask_tis():
    assert not run("seq_mask_tis")[0].keep.any()
    out, _ = run("seq_mask_tis", high=1.1)
    close(out.weight, [1, 0.9, 1.2, 1.25, 0, 0, 0, 0])


def test_m2po_official_on_f8_uses_the_floors():
    out, _ = run("m2po")
    close(out.token_loss, [-1, -1.1, -1.5, -1.5, 0.5211, 0.35, 7.5, 0.375])
    assert run("m2po", budget=0.6)[0].metrics["clip/fraction"] == 0  # M2 = .597239


def test_espo_with_one_token_per_segment_clips_by_entropy():
    out, _ = run("espo", alpha=0.5, vocabulary=10_000)
    assert out.keep.all()
    assert out.loss.isfinite()
