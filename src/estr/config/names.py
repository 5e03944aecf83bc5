"""Names that other trainers give to our keys, and keys that were written into the wrong section."""

from __future__ import annotations

from collections.abc import Iterable

from estr.config.sections import Config
from estr.errors import nearest

_ELSEWHERE = {
    "run": {"steps": "max_steps num_steps total_steps train_steps iterations"},
    "model": {"path": "name model model_name model_path model_name_or_path checkpoint"},
    "rollout": {
        "group_size": "n num_generations generations samples samples_per_prompt n_samples_per_prompt num_samples",
        "max_new_tokens": "max_tokens max_length max_completion_length response_length max_response_length",
        "max_context": "max_seq_len max_model_len context_length",
        "temperature": "temp",
        "slots": "max_num_seqs",
    },
    "schedule": {"max_staleness": "staleness max_off_policy max_async_level off_policy_steps"},
    "objective": {
        "recipe": "loss loss_type algorithm algo objective",
        "advantage": "estimator adv_estimator advantage_estimator",
        "kl_coef": "kl beta kl_beta kl_loss_coef",
    },
    "learner": {
        "learning_rate": "lr",
        "prompts_per_step": "batch_size train_batch_size rollout_batch_size global_batch_size num_prompts prompts",
        "minibatches": "num_minibatches num_mini_batches mini_batches ppo_minibatches",
        "epochs": "ppo_epochs num_train_epochs num_epochs num_iterations",
        "max_grad_norm": "grad_clip clip_grad gradient_clip gradient_clipping grad_norm",
        "schedule": "lr_scheduler lr_scheduler_type scheduler",
        "tokens_per_microbatch": "micro_batch_size microbatch_size max_tokens_per_gpu",
    },
    "runtime": {"engines": "workers num_workers num_engines actors"},
}


def _keys(section: str) -> Iterable[str]:
    return Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]


def other_name(key: str) -> str | None:
    """The key of ours, with its section, that ``key`` is elsewhere, or that stands in another section."""
    for section in Config.model_fields:
        if key in _keys(section):
            return f"'{section}.{key}'"
    for section, keys in _ELSEWHERE.items():
        for ours, theirs in keys.items():
            if key in theirs.split():
                return f"'{section}.{ours}'"
    return None


def nearest_key(section: str, key: str, more: Iterable[str] = ()) -> str:
    """The end of a sentence about a ``key`` that is not in ``section``; ``more`` are names that are in it."""
    misplaced = next((name for name in Config.model_fields if key in _keys(name)), None)
    if misplaced is not None:
        return f"; did you mean '{misplaced}.{key}'?"
    known = [*_keys(section), *more]
    for ours, theirs in _ELSEWHERE.get(section, {}).items():
        if key in theirs.split():
            return f"; did you mean {ours!r}?"
    close = nearest(key, known)
    other = other_name(key)
    return f"; did you mean {other}?" if other and not close.startswith("; did") else close
