"""Names of the columns of rollout dumps: ours, and those of other trainers as their public code writes them.

Sources (read in August 2026): TRL ``GRPOTrainer`` (the batch it trains on, and ``completions/*.parquet`` of
``log_completions``); verl ``RayPPOTrainer`` (``DataProto`` batches, and the JSONL of ``trainer.rollout_data_dir``);
prime-rl ``TokenExporter`` (``token_exports/step_*/rank_*.jsonl`` of ``enable_token_export``); slime
``Sample.to_dict()`` and the samples of ``--save-debug-train-data``, written as JSON lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from estr.errors import UsageError, nearest

TOKEN_FIELDS: dict[str, str] = {
    "tokens": "token ids of prompt, actions and tool text",
    "prompt_tokens": "token ids of the prompt, where they are stored apart",
    "prompt_mask": "which of prompt_tokens are no padding",
    "response_tokens": "token ids after the prompt, where they are stored apart",
    "action": "which tokens the policy sampled",
    "tool_mask": "a second mask to combine with action (0 at tool text)",
    "logprob": "log μ of the sampled token, from the engine",
    "learner_logprob": "log π of the sampled token, from the learner",
    "proximal_logprob": "log q of the sampled token",
    "entropy": "H of μ in nats",
    "entropy_upper": "upper end, where H is known as an interval",
    "learner_entropy": "H of π in nats",
    "token_advantage": "advantage by token",
    "sequence": "which trajectory a token belongs to, in flat layouts",
}
ROW_FIELDS: dict[str, str] = {
    "trajectory_id": "name of the trajectory",
    "parent_id": "trajectory whose history forked",
    "group_id": "the prompt's group",
    "prompt": "prompt as text",
    "text": "what was generated, as text",
    "reward": "reward (a list is added up)",
    "advantage": "advantage (a list is taken by token)",
    "version": "weights that sampled a token: a list, or one number a trajectory",
    "versions": "weights of each generation call of the trajectory, a list",
    "version_first": "weights of the first action token",
    "version_last": "weights of the last action token",
    "target_version": "the learner's version when it trained the row",
    "trained_step": "optimizer step that trained the row",
    "temperature": "sampling temperature",
    "top_p": "nucleus sampling",
    "top_k": "top-k sampling, 0 for none",
    "min_p": "min-p sampling, 0 for none",
    "sampler": "how tokens were drawn; only rows that say standard, or nothing, are checked for faults",
    "entropy_kind": "exact, bounded or proxy",
}
FIELDS = TOKEN_FIELDS | ROW_FIELDS

Fields = dict[str, str]

PRESETS: dict[str, dict[str, tuple[str, ...]]] = {
    "estr": {name: (name,) for name in FIELDS},
    "trl": {
        "prompt_tokens": ("prompt_ids",),
        "prompt_mask": ("prompt_mask",),
        "response_tokens": ("completion_ids",),
        "action": ("completion_mask",),
        "tool_mask": ("tool_mask", "env_mask"),
        "logprob": ("sampling_per_token_logps",),
        "learner_logprob": ("per_token_logps", "old_per_token_logps"),
        "proximal_logprob": ("old_per_token_logps",),
        "learner_entropy": ("entropies",),
        "advantage": ("advantages", "advantage"),
        "reward": ("reward", "rewards"),
        "prompt": ("prompt",),
        "text": ("completion",),
        "trained_step": ("step",),
    },
    "verl": {
        "prompt_tokens": ("prompts",),
        "response_tokens": ("responses",),
        "action": ("response_mask", "loss_mask"),
        "logprob": ("rollout_log_probs",),
        "learner_logprob": ("log_probs", "old_log_probs"),
        "proximal_logprob": ("old_log_probs",),
        "learner_entropy": ("entropys", "entropy"),
        "advantage": ("advantages",),
        "reward": ("score", "reward", "token_level_scores", "rm_scores"),
        "group_id": ("uid",),
        "trajectory_id": ("request_id",),
        "version_first": ("param_version_start",),
        "version_last": ("param_version_end",),
        "prompt": ("input",),
        "text": ("output",),
        "trained_step": ("step",),
    },
    "prime-rl": {
        "tokens": ("token_ids", "input_ids"),
        "action": ("loss_mask", "mask"),
        "logprob": ("inference_logprobs", "logprobs"),
        "learner_logprob": ("trainer_logprobs",),
        "learner_entropy": ("entropy",),
        "advantage": ("advantages",),
        "temperature": ("temperatures",),
        "trained_step": ("step",),
    },
    "slime": {
        "tokens": ("tokens",),
        "action": ("loss_mask", "loss_masks"),
        "logprob": ("rollout_log_probs",),
        "learner_logprob": ("log_probs",),
        "learner_entropy": ("entropy",),
        "advantage": ("advantages",),
        "reward": ("reward", "raw_reward"),
        "group_id": ("group_index",),
        "trajectory_id": ("index", "sample_index"),
        "versions": ("weight_versions",),
        "prompt": ("prompt",),
        "text": ("response",),
    },
}
"""Preset → our name → names to look for, the first one that is there."""

SIGNATURES: dict[str, tuple[frozenset[str], ...]] = {
    "estr": (frozenset({"logprob", "action"}), frozenset({"logprob", "learner_logprob"}), frozenset({"logprob"})),
    "trl": (
        frozenset({"completion_ids"}),
        frozenset({"sampling_per_token_logps"}),
        frozenset({"prompt", "completion"}),
    ),
    "prime-rl": (frozenset({"inference_logprobs"}), frozenset({"token_ids", "mask", "logprobs"})),
    "slime": (frozenset({"response_length", "tokens"}), frozenset({"rollout_log_probs", "tokens"})),
    "verl": (frozenset({"responses"}), frozenset({"rollout_log_probs"}), frozenset({"input", "output", "score"})),
}
"""Columns that give a preset away; tried in this order."""


def parse_mapping(pairs: Sequence[str]) -> Fields:
    """``["logprob=old_logp", …]`` as ours → theirs. Raises UsageError for what is no pair or names no field of ours."""
    mapping: Fields = {}
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        ours, theirs = ours.strip(), theirs.strip()
        if not equals or not theirs:
            raise UsageError(f"--map wants ours=theirs, for example logprob=rollout_log_probs, got {pair!r}")
        if ours not in FIELDS:
            raise UsageError(f"--map: there is no field {ours!r}{nearest(ours, FIELDS)}")
        mapping[ours] = theirs
    return mapping


def detect(names: Sequence[str]) -> str | None:
    """The preset whose columns these are, or None."""
    given = set(names)
    for preset, signatures in SIGNATURES.items():
        if any(signature <= given for signature in signatures):
            return preset
    return None


def resolve(preset: str | None, mapping: Mapping[str, str], names: Sequence[str], source: str) -> tuple[str, Fields]:
    """The preset that was used and ours → theirs for the columns that are there.

    Raises:
        UsageError: an unknown preset, a mapped column that is not there, or nothing that tells what the file is.
    """
    if preset is not None and preset not in PRESETS:
        raise UsageError(f"there is no preset {preset!r}{nearest(preset, PRESETS)}")
    for ours, theirs in mapping.items():
        if theirs not in names:
            raise UsageError(f"--map {ours}={theirs}: {source} has no column {theirs!r}{nearest(theirs, names)}")
    used = preset or detect(names) or ("estr" if mapping else None)
    if used is None:
        raise UsageError(
            f"{source} has no column that is known here (its columns are {_listed(names)}); name the format with "
            f"--preset {'|'.join(PRESETS)} or the columns with --map logprob=…"
        )
    fields = {
        ours: next(name for name in candidates if name in names)
        for ours, candidates in PRESETS[used].items()
        if any(name in names for name in candidates)
    } | dict(mapping)
    if not fields.keys() & {"logprob", "learner_logprob", "reward", "advantage"}:
        raise UsageError(
            f"{source} has none of the columns of preset {used!r} (its columns are {_listed(names)}); "
            "name them with --map logprob=…"
        )
    return used, fields


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:12])
    return shown + (", …" if len(names) > 12 else "")
