"""VCPO: shorten the step when few trajectories carry the importance weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from estr.controllers.base import StepController, steps
from estr.registry import choose, within


def sequence_log_weight(logprob: Tensor, behavior_logprob: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """log of the product of token ratios of each sequence, float64 [S], without graph; no clamp, no length mean.

    ``logprob`` [N] is that of the proximal policy, or of the current one where there is none. Tokens with a value that
    is not finite are left out.
    """
    ratio = logprob.detach().double() - behavior_logprob.detach().double()
    ratio = torch.where(ratio.isfinite(), ratio, 0.0)
    return ratio.new_zeros(sequences).index_add_(0, sequence, ratio)


def effective_sample_size(log_weight: Tensor, eps: float = 1e-8) -> dict[str, float]:
    """(sum w)^2 / (sum w^2 + eps) as ``ess`` and its share of the number of trajectories as ``ess_ratio``.

    ``log_weight`` [S] of the *whole* optimizer batch, all ranks together. NaN and +inf are left out; none left gives 0.
    """
    log_weight = log_weight.detach().double()
    log_weight = log_weight[~log_weight.isnan() & (log_weight < float("inf"))]
    if log_weight.numel() == 0 or log_weight.max() == float("-inf"):
        return {"ess": 0.0, "ess_ratio": 0.0}
    top = log_weight.max()
    weight = (log_weight - top).exp()
    ess = float(weight.sum().square() / (weight.square().sum() + eps * (-2 * top).exp()))
    return {"ess": ess, "ess_ratio": ess / log_weight.numel()}


@steps.register(
    "vcpo",
    description="Scale the learning rate by the effective sample size of the batch.",
    formula="scale = min(1, ess_ratio / base_ess_ratio); lr *= sqrt(scale) or scale",
    source="VCPO, arXiv 2602.17616; mit-han-lab/vcpo megatron_actor.py, staleness_utils.py",
    confidence="official code",
    scope="batch",
    edge="E",
    operator="learning rate",
)
@dataclass
class EffectiveSampleSizeRate(StepController):
    """``scale_learning_rate({"ess_ratio": ...})`` with ``effective_sample_size(sequence_log_weight(...))``.

    ``scaling`` "sqrt" goes with AdamW, "linear" with plain gradient descent. The baseline of the same paper is the
    advantage estimator ``opob``.
    """

    base_ess_ratio: float = 1.0
    scaling: str = "sqrt"

    def __post_init__(self) -> None:
        within("base_ess_ratio", self.base_ess_ratio, 0.0, 1.0, open_low=True)
        choose("scaling", self.scaling, ("sqrt", "linear"))

    @property
    def needs(self) -> tuple[str, ...]:
        return ("ess_ratio",)

    def scale_learning_rate(self, statistics: Mapping[str, float]) -> float:
        if "ess_ratio" not in statistics:
            raise ValueError("vcpo needs the statistic 'ess_ratio'; compute it with effective_sample_size")
        scale = min(1.0, statistics["ess_ratio"] / self.base_ess_ratio)
        return float(scale**0.5 if self.scaling == "sqrt" else scale)
