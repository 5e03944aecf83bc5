"""verl 0.9.1's own loss, weight, mask and advantage functions against ours on random batches, to 1e-5.

Where we differ, and why:

* ``grpo`` advantage of a group of one: verl takes mean 0 and deviation 1, so the advantage is the reward; ours is 0,
  because a group of one has no baseline.
* ``rloo`` advantage of a group of one: verl leaves the reward as it is; ours is 0, for the same reason.
* Advantages of equal rewards are exactly 0 here; verl's are rounding errors divided by 1e-6.
* Bypass mode with PPO's clip: verl computes importance weights for its metrics and does not apply them; here such a
  configuration is refused (``estr train``), and without them the two agree.
* ``kl_cov`` with ties at the threshold: verl takes the first k, ours share the penalty between them.
* Clip-Cov picks at random: compared where every candidate is picked.
* Our binary KL clamps probabilities to [1e-6, 1 - 1e-6], verl adds 1e-8 inside the logarithm: ``dppo_kl`` may differ on
  a token within that of the threshold.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batches import SEEDS, Batch, agree, gradient_of, ours, random_batch
from torch import Tensor
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config.actor import ActorConfig, PolicyLossConfig

from estr import advantage, recipes

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def actor(policy_loss: PolicyLossConfig | None = None, **options: Any) -> ActorConfig:
    sizes = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    return ActorConfig(**sizes, policy_loss=policy_loss or PolicyLossConfig(), **options)


def clipped(low: float = 0.2, high: float = 0.28, **options: Any) -> ActorConfig:
    return actor(clip_ratio_low=low, clip_ratio_high=high, **options)


def verl(
    name: str,
    batch: Batch,
    config: ActorConfig,
    old: Tensor,
    aggregate: str = "token-mean",
    mask: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[float, Tensor]:
    pi = batch.pi.clone().requires_grad_()
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=old,
        log_prob=pi,
        advantages=batch.wide_advantage,
        response_mask=(batch.mask if mask is None else mask).double(),
        loss_agg_mode=aggregate,
        config=config,
        rollout_is_weights=weights,
    )
    return gradient_of(loss, pi)


@pytest.fixture(params=SEEDS)
def batch(request: pytest.FixtureRequest) -> Batch:
    return random_batch(request.param)


def test_ppo_clip_with_dual_clip(batch: Batch) -> None:
    agree(ours("grpo", batch, dual_clip=3.0, **CLIP), verl("vanilla", batch, clipped(), batch.mu))
    agree(ours("verl/disabled", batch, **CLIP), verl("vanilla", batch, clipped(), batch.q))


def test_gspo(batch: Batch) -> None:
    got = ours("gspo", batch, clip_low=0.05, clip_high=0.1)
    agree(got, verl("gspo", batch, clipped(0.05, 0.1), batch.q, "seq-mean-token-mean"))


def test_sapo(batch: Batch) -> None:
    agree(ours("sapo", batch), verl("sapo", batch, actor(), batch.q, "seq-mean-token-mean"))


@pytest.mark.parametrize(("edge", "low"), [("U", 0.2), ("U", 1.0), ("E", 0.2)])
def test_cispo(batch: Batch, edge: str, low: float) -> None:
    got = ours("cispo", batch, edge=edge, clip_low=low, clip_high=0.28)
    agree(got, verl("cispo", batch, clipped(low), batch.q if edge == "U" else batch.mu))


def test_dppo_tv(batch: Batch) -> None:
    config = actor(clip_ratio=0.15, clip_ratio_low=0.15, clip_ratio_high=0.1, clip_ratio_c=5.0)
    agree(ours("dppo_tv", batch, low=0.15, high=0.1, cap=5.0), verl("dppo_tv", batch, config, batch.mu))


def test_dppo_kl(batch: Batch) -> None:
    config = actor(clip_ratio=0.05, clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=20.0)
    agree(ours("dppo_kl", batch, delta=0.05, cap=20.0), verl("dppo_kl", batch, config, batch.mu))


def test_kl_cov(batch: Batch) -> None:
    config = actor(PolicyLossConfig(kl_cov_ratio=0.1, ppo_kl_coef=0.7))
    agree(ours("kl_cov", batch, ratio=0.1, coef=0.7), verl("kl_cov", batch, config, batch.q))


def test_clip_cov_where_every_candidate_is_picked(batch: Batch) -> None:
    config = clipped(1.0, 1.0, policy_loss=PolicyLossConfig(clip_cov_ratio=1.0, clip_cov_lb=0.3, clip_cov_ub=2.0))
    got = ours("clip_cov", batch, ratio=1.0, low=0.3, high=2.0)
    agree(got, verl("clip_cov", batch, config, batch.q))


PRESETS = {
    "decoupled_token_is": RolloutCorrectionConfig.decoupled_token_is(),
    "decoupled_seq_is": RolloutCorrectionConfig.decoupled_seq_is(),
    "decoupled_token_icepop": RolloutCorrectionConfig.decoupled_token_icepop(),
    "decoupled_seq_is_rs": RolloutCorrectionConfig.decoupled_seq_is_rs(),
    "decoupled_geo_rs": RolloutCorrectionConfig.decoupled_geo_rs(),
    "decoupled_geo_rs_seq_tis": RolloutCorrectionConfig.decoupled_geo_rs_seq_tis(),
    "decoupled_geo_rs_token_tis": RolloutCorrectionConfig.decoupled_geo_rs_token_tis(),
    "decoupled_k3_rs": RolloutCorrectionConfig.decoupled_k3_rs(),
    "decoupled_k3_rs_seq_tis": RolloutCorrectionConfig.decoupled_k3_rs_seq_tis(),
    "decoupled_k3_rs_token_tis": RolloutCorrectionConfig.decoupled_k3_rs_token_tis(),
    "bypass_ppo_clip": RolloutCorrectionConfig.bypass_ppo_clip(),
    "bypass_ppo_clip_geo_rs": RolloutCorrectionConfig.bypass_ppo_clip_geo_rs(),
    "bypass_ppo_clip_k3_rs": RolloutCorrectionConfig.bypass_ppo_clip_k3_rs(),
    "bypass_pg_is": RolloutCorrectionConfig.bypass_pg_is(),
    "bypass_pg_geo_rs": RolloutCorrectionConfig.bypass_pg_geo_rs(),
    "bypass_pg_geo_rs_seq_tis": RolloutCorrectionConfig.bypass_pg_geo_rs_seq_tis(),
    "bypass_pg_geo_rs_token_tis": RolloutCorrectionConfig.bypass_pg_geo_rs_token_tis(),
    "bypass_pg_token_icepop": RolloutCorrectionConfig.bypass_pg_token_icepop(),
    "disabled": RolloutCorrectionConfig.disabled(),
}


def test_every_preset_is_here_and_means_the_same() -> None:
    assert {f"verl/{name}" for name in PRESETS} == {name for name in recipes() if name.startswith("verl/")}
    for name, preset in PRESETS.items():
        ours = recipes()[f"verl/{name}"].hyperparameters
        assert ours["rollout_is"] == (preset.rollout_is or "none"), name
        assert ours["rollout_rs"] == (preset.rollout_rs or "none"), name
        if preset.rollout_is:
            assert bounds(ours["rollout_is_threshold"]) == bounds(preset.rollout_is_threshold), name
        if preset.rollout_rs:
            assert bounds(ours["rollout_rs_threshold"]) == bounds(preset.rollout_rs_threshold), name


def bounds(threshold: Any) -> list[float]:
    return [float(part) for part in str(threshold).split("_")]


def corrected(batch: Batch, **options: Any) -> tuple[float, Tensor]:
    """verl's decoupled mode: weights and rejection of q/μ, PPO's clip on π/q."""
    proto, mask, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=batch.q, rollout_log_prob=batch.mu, response_mask=batch.mask.double(), **options
    )
    weights = None if proto is None else proto.batch["rollout_is_weights"]
    return verl("vanilla", batch, clipped(), batch.q, mask=mask, weights=weights)


NEAR = {"geo": {"rollout_rs_threshold": "0.85_1.2"}, "k3": {"rollout_rs_threshold": 0.08}}


def loosened(name: str) -> dict[str, Any]:
    """Thresholds at which these batches are neither kept nor rejected as a whole."""
    if name == "decoupled_seq_is_rs":
        return {"rollout_rs_threshold": "0.3_3.0"}
    return next((options for word, options in NEAR.items() if f"{word}_rs" in name), {})


DECOUPLED = [name for name in PRESETS if name.startswith("decoupled")]


@pytest.mark.parametrize(
    ("name", "normalize"),
    [(name, False) for name in DECOUPLED] + [(name, True) for name in DECOUPLED if PRESETS[name].rollout_is],
)
def test_decoupled_presets(batch: Batch, name: str, normalize: bool) -> None:
    preset, options = PRESETS[name], loosened(name)
    want = corrected(
        batch,
        rollout_is=preset.rollout_is,
        rollout_is_threshold=preset.rollout_is_threshold,
        rollout_is_batch_normalize=normalize,
        rollout_rs=preset.rollout_rs,
        rollout_rs_threshold=options.get("rollout_rs_threshold", preset.rollout_rs_threshold),
    )
    agree(ours(f"verl/{name}", batch, rollout_is_batch_normalize=normalize, **CLIP, **options), want)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("bypass")])
def test_bypass_presets(batch: Batch, name: str) -> None:
    preset, options = PRESETS[name], loosened(name)
    correction = {
        "loss_type": preset.loss_type,
        "rollout_is": preset.rollout_is,
        "rollout_is_threshold": preset.rollout_is_threshold,
        "rollout_rs": preset.rollout_rs,
        "rollout_rs_threshold": options.get("rollout_rs_threshold", preset.rollout_rs_threshold),
    }
    config = clipped(policy_loss=PolicyLossConfig(rollout_correction=correction))
    near = Batch(batch.mask, batch.mu, batch.q, batch.mu + (batch.pi - batch.mu) / 3, *list(vars(batch).values())[4:])
    clip = CLIP if preset.loss_type == "ppo_clip" else {}
    agree(ours(f"verl/{name}", near, **clip, **options), verl("bypass_mode", near, config, near.mu))


STATISTICS = {
    "token_k1": "0.6_1.5",
    "token_k2": 0.1,
    "token_k3": 0.1,
    "seq_sum_k1": "0.3_3.0",
    "seq_sum_k2": 2.0,
    "seq_sum_k3": 2.0,
    "seq_mean_k1": "0.85_1.2",
    "seq_mean_k2": 0.1,
    "seq_mean_k3": 0.1,
    "seq_max_k2": 1.0,
    "seq_max_k3": 1.0,
}


@pytest.mark.parametrize("name", STATISTICS)
def test_rejection_statistics(batch: Batch, name: str) -> None:
    options = {"rollout_rs": name, "rollout_rs_threshold": STATISTICS[name]}
    agree(ours("verl/disabled", batch, denominator="kept", **CLIP, **options), corrected(batch, **options))


# ---------------------------------------------------------------------- advantages


def rewards(seed: int, groups: int = 5, size: int = 4) -> tuple[Tensor, np.ndarray, Tensor]:
    """Rewards [S] with spread in every group, group ids in no order, and masks [S, T]."""
    generator = torch.Generator().manual_seed(seed)
    group = np.arange(groups * size) % groups
    reward = torch.randn(groups * size, generator=generator, dtype=torch.float64)
    mask = torch.rand(groups * size, 7, generator=generator) < 0.7
    mask[:, -1] = True
    return reward, group, mask


def at_the_end(reward: Tensor, mask: Tensor) -> Tensor:
    """Token rewards [S, T] with the whole reward on the last column, which every mask holds."""
    token = torch.zeros(mask.shape, dtype=torch.float64)
    token[:, -1] = reward
    return token


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "options", "function", "extra"),
    [
        ("grpo", {}, core_algos.compute_grpo_outcome_advantage, {}),
        ("dr_grpo", {}, core_algos.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
        ("rloo", {}, core_algos.compute_rloo_outcome_advantage, {}),
        (
            "reinforce_pp",
            {"baseline": "group"},
            core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage,
            {},
        ),
    ],
)
def test_advantages(seed: int, name: str, options: dict, function: Any, extra: dict) -> None:
    reward, group, mask = rewards(seed)
    want, _ = function(token_level_rewards=at_the_end(reward, mask), response_mask=mask.double(), index=group, **extra)
    got = advantage(name, **options)(reward, torch.from_numpy(group), length=mask.sum(-1))
    torch.testing.assert_close(got.unsqueeze(-1) * mask, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(seed: int, gamma: float) -> None:
    reward, group, mask = rewards(seed)
    config = type("Config", (), {"gamma": gamma})()
    want, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        token_level_rewards=at_the_end(reward, mask), response_mask=mask.double(), config=config
    )
    sequence = torch.arange(len(reward)).unsqueeze(-1).expand_as(mask)[mask]
    got = advantage("reinforce_pp", gamma=gamma).tokens(reward, torch.from_numpy(group), sequence)
    torch.testing.assert_close(got, want[mask], rtol=1e-5, atol=1e-5)
