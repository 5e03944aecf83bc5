"""Metrics of one optimizer step that do not depend on the objective."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from estr.trajectory import Trajectory


def staleness_metrics(trajectories: Sequence[Trajectory], target_version: int) -> dict[str, float]:
    """Δ_inter = target version − version of the last action token, Δ_intra = last − first, over the trajectories.

    After a crash, versions may be those of weights that were lost: higher than the target's, or falling inside a
    trajectory. Such a difference counts as 0, and ``staleness/lost_versions`` is the share of these trajectories.
    """
    versions = [v for v in (t.action_versions for t in trajectories) if len(v)]
    if not versions:
        return {}
    inter = [max(0, target_version - int(v[-1])) for v in versions]
    intra = [max(0, int(v[-1] - v[0])) for v in versions]
    lost = sum(int(v.max()) > target_version for v in versions) / len(versions)
    return ({"staleness/lost_versions": lost} if lost else {}) | {
        "staleness/inter_mean": sum(inter) / len(inter),
        "staleness/inter_max": float(max(inter)),
        "staleness/intra_mean": sum(intra) / len(intra),
        "staleness/intra_max": float(max(intra)),
    }


def reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean reward as the verifier gave it, and how many trajectories have none."""
    rewards = [t.reward for t in trajectories]
    finite = [r for r in rewards if math.isfinite(r)]
    metrics = {"reward/mean": sum(finite) / len(finite)} if finite else {}
    return {**metrics, "reward/invalid": float(len(rewards) - len(finite))}


def policy_entropy(entropies: Iterable[Tensor]) -> dict[str, float]:
    """Mean entropy in nats of the learner's policy at the action tokens that entered the loss, no other position."""
    parts = [e for e in entropies if e.numel()]
    if not parts:
        return {}
    values = torch.cat(parts).double()
    values = values[values.isfinite()]
    return {"policy/entropy": float(values.mean())} if values.numel() else {}


def finite_only(metrics: Mapping[str, float]) -> dict[str, float]:
    """``metrics`` without the values that are not finite."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
