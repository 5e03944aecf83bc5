"""TRL 1.16's own ``GRPOTrainer._compute_loss`` against ours on random batches, to 1e-5.

The trainer is made without its constructor, which wants a model, data and rewards; log π and entropies are handed to it
in place of a forward pass. Everything after that is TRL's code.

Where we differ, and why:

* ``epsilon_high`` of ``cispo`` is the cap itself in TRL, a distance from 1 here: epsilon_high = 5 is clip_high = 4 with
  clip_low = 1 (no floor).
* The sequence form ("gspo") differentiates the sequence's ratio itself in TRL, ours each token's own: the same gradient
  where the advantage is constant in the sequence. TRL has no clamp at 10.
* ``delta`` (two-sided clipping) is dual clip.
* A token whose sampling log-probability is NaN gets ratio 1 in TRL; here it is dropped and counted, since a ratio of 1
  would say that nothing had changed.
* ``dr_grpo`` divides by batch × maximal completion length; no recipe has such a denominator, so the two are compared up
  to that factor.
* The default of vLLM's correction is "sequence_mask", which drops; ``tis`` is "token_truncate", ``tis_sequence``
  "sequence_truncate". Their weights are computed inside the generation step, so they are written out here.
* Where old log-probabilities are missing TRL takes log π itself; here q falls back to μ.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from batches import SEEDS, Batch, agree, gradient_of, ours, random_batch
from torch import Tensor
from trl import GRPOTrainer

from estr import TokenBatch
from estr.objectives import kl_penalty


def trl(batch: Batch, old: Tensor, *, inputs: dict[str, Tensor] | None = None, **options: Any) -> tuple[float, Tensor]:
    """Loss and gradient [B, T] of TRL's trainer with these settings."""
    pi = batch.pi.clone().requires_grad_()
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    settings = {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "aux_loss_enabled": False,
        "max_completion_length": batch.mask.shape[1],
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "model": SimpleNamespace(training=True),
        "accelerator": Accelerator(cpu=True),
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (pi, batch.entropy, None),
        "args": SimpleNamespace(
            delta=options.pop("delta", None),
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            steps_per_generation=1,
        ),
        **options,
    }
    vars(trainer).update(settings)
    ids = torch.zeros(batch.mask.shape, dtype=torch.int64)
    given = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": batch.mask.double(),
        "advantages": batch.advantage,
        "old_per_token_logps": old,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": batch.mask.sum(),
        **(inputs or {}),
    }
    return gradient_of(trainer._compute_loss(None, given), pi)


@pytest.fixture(params=SEEDS)
def batch(request: pytest.FixtureRequest) -> Batch:
    return random_batch(request.param)


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_clip_higher(batch: Batch, loss_type: str) -> None:
    agree(ours("grpo", batch, clip_low=0.2, clip_high=0.28), trl(batch, batch.mu, loss_type=loss_type))


def test_two_sided_clipping_is_dual_clip(batch: Batch) -> None:
    agree(ours("grpo", batch, clip_low=0.2, clip_high=0.28, dual_clip=1.5), trl(batch, batch.mu, delta=1.5))


def test_dr_grpo_up_to_its_denominator(batch: Batch) -> None:
    loss, gradient = trl(batch, batch.mu, loss_type="dr_grpo")
    scale = batch.mask.numel() / float(batch.mask.sum())
    agree(ours("grpo", batch, clip_low=0.2, clip_high=0.28), (loss * scale, gradient * scale))


def test_gspo(batch: Batch) -> None:
    options = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15}
    agree(ours("gspo", batch, clip_low=0.1, clip_high=0.15), trl(batch, batch.q, **options))


def test_cispo(batch: Batch) -> None:
    got = ours("cispo", batch, clip_low=1.0, clip_high=1.0)
    agree(got, trl(batch, batch.q, loss_type="cispo", epsilon_high=2.0))


def test_sapo(batch: Batch) -> None:
    agree(ours("sapo", batch), trl(batch, batch.q, loss_type="sapo"))


def test_vespo(batch: Batch) -> None:
    agree(ours("vespo", batch), trl(batch, batch.q, loss_type="vespo"))


def test_vespo_with_truncated_weights_of_the_behavior_edge(batch: Batch) -> None:
    weight = torch.where(batch.mask, (batch.q - batch.mu).exp().clamp(max=2.0), 1.0)
    want = trl(batch, batch.q, loss_type="vespo", inputs={"importance_sampling_ratio": weight})
    agree(ours("vespo", batch, token_cap=2.0), want)


def test_truncated_importance_sampling(batch: Batch) -> None:
    difference = (batch.q - batch.mu) * batch.mask
    vllm = {"use_vllm": True, "vllm_importance_sampling_correction": True}
    token = {"importance_sampling_ratio": difference.exp().clamp(max=3.0)}
    agree(ours("tis", batch, cap=3.0, clip_high=0.28), trl(batch, batch.q, inputs=token, **vllm))
    sequence = {"importance_sampling_ratio": difference.sum(-1, keepdim=True).exp().clamp(max=3.0)}
    agree(ours("tis_sequence", batch, cap=3.0, clip_high=0.28), trl(batch, batch.q, inputs=sequence, **vllm))


@pytest.mark.parametrize("delta", [0.0, 0.1, 0.5])
def test_off_policy_sequence_mask(batch: Batch, delta: float) -> None:
    sampling = {"sampling_per_token_logps": batch.mu}
    want = trl(batch, batch.q, off_policy_mask_threshold=delta, inputs=sampling)
    agree(ours("opsm", batch, delta=delta, clip_high=0.28), want)


@pytest.mark.parametrize("rho", [0.2, 0.5])
def test_high_entropy_mask(batch: Batch, rho: float) -> None:
    single = Batch(**{**vars(batch), "entropy": batch.entropy.float().double()})  # TRL takes the quantile in float32
    agree(ours("high_entropy", single, rho=rho), trl(single, single.q, top_entropy_quantile=rho))


def test_kl_to_the_reference(batch: Batch) -> None:
    with_kl, without = trl(batch, batch.mu, beta=0.3), trl(batch, batch.mu)
    pi = batch.pi.clone().requires_grad_()
    fields = {"behavior_logprob": batch.mu, "advantage": batch.advantage, "reference_logprob": batch.reference}
    term = kl_penalty(TokenBatch.from_padded(batch.mask, logprob=pi, **fields), 0.3, "k3")
    agree(gradient_of(term, pi), (with_kl[0] - without[0], with_kl[1] - without[1]))
