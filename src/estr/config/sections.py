"""The sections of a run's configuration: one typed class a section, one line of description a field."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are checked when assigned, numbers are finite."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


_BOUNDS = (("ge", "at least"), ("gt", "greater than"), ("le", "at most"), ("lt", "less than"))


def bounds_in_words(field: FieldInfo) -> str:
    """What a number may be: "at least 0 and less than 1"; empty where it may be any."""
    bounds = {name: getattr(part, name) for part in field.metadata for name, _ in _BOUNDS if hasattr(part, name)}
    return " and ".join(f"{word} {_in_words(bounds[name])}" for name, word in _BOUNDS if name in bounds)


def _in_words(number: float) -> str:
    return f"{number:g}" if abs(number) < 10_000 or isinstance(number, float) else f"{number:,}"


class RunConfig(Section):
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Every random choice of the run is derived from it.")
    steps: int = Field(100, ge=0, le=1_000_000_000, description="Optimizer steps.")
    output: str = Field("", description="Run directory; empty: runs/TASK-RECIPE-TIME.")
    checkpoint_every: int = Field(
        50, ge=1, le=1_000_000_000, description="Optimizer steps between checkpoints, at the end of a batch."
    )
    keep_checkpoints: int = Field(
        2, ge=1, le=1_000_000_000, description="Newest checkpoints kept, beside the best and the last."
    )
    keep_rollouts: int = Field(
        0, ge=0, le=1_000_000_000, description="Optimizer steps whose stored rollouts are kept; 0: all."
    )
    module_directories: list[str] = Field(
        default_factory=list,
        description="Where modules of your own are looked for, beside the configuration's directory and the current "
        "one; where they were found is written here for `estr resume`.",
    )
    eval_every: int = Field(
        0, ge=0, le=1_000_000_000, description="Steps between evaluations, at the end of a batch; 0: never."
    )
    eval_prompts: int = Field(300, ge=1, le=1_000_000, description="Held-out problems per evaluation.")
    eval_temperature: float = Field(
        1.0, ge=0, le=100, description="Decoding temperature of evaluations; 0 is greedy, else at least 0.01."
    )
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default_factory=list, description="Where metrics go beside metrics.jsonl."
    )


class ModelConfig(Section):
    path: str = Field("builtin:tiny", description="builtin:tiny, builtin:micro, a model directory or a hub name.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Data type the weights are loaded in.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with a model.")
    warmup_steps: int = Field(
        -1,
        le=1_000_000_000,
        ge=-1,
        description="Supervised steps on the task's demonstrations before a builtin model is first used; "
        "-1: what the task and the model ask for.",
    )
    lora_rank: int = Field(
        0, ge=0, le=65_536, description="Rank of LoRA adapters (needs estr[peft]); 0 trains all weights."
    )
    lora_alpha: float = Field(16.0, gt=0, le=1_000_000, description="LoRA scale.")
    gradient_checkpointing: bool = Field(False, description="Recompute activations in backward to save memory.")


class TaskConfig(Section):
    """Keys that every task shares; a task's own keys stand beside them and are checked by the task."""

    model_config = ConfigDict(extra="allow", validate_assignment=True)

    name: str = Field("calculator", description="The task; one of your own is module:Class.")
    path: str = Field("", description="Local file with problems, for tasks that read one.")
    tool_timeout: float = Field(30.0, ge=0.001, le=1_000_000, description="Seconds one environment step may take.")

    def options(self) -> dict[str, Any]:
        """The task's own keys."""
        return dict(self.model_extra or {})


class RolloutConfig(Section):
    engine: Literal["local", "vllm"] = Field("local", description="What generates.")
    group_size: int = Field(8, ge=1, le=65_536, description="Trajectories of one prompt.")
    temperature: float = Field(1.0, ge=0.01, le=100, description="Sampling temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus: mass of the most likely tokens kept, after top_k.")
    top_k: int = Field(0, ge=0, le=1_000_000, description="Most likely tokens kept; 0: all.")
    min_p: float = Field(0.0, ge=0, le=1, description="Tokens less likely than this times the likeliest are left out.")
    max_support: int = Field(
        4096,
        ge=1,
        le=1_000_000,
        description="Most tokens kept by top_p and min_p where top_k is 0: what is recorded stays bounded.",
    )
    sampler: Literal["standard", "cuts", "mixed_cuts"] = Field(
        "standard",
        description="cuts: uniform over the few likely tokens (arXiv 2604.18493); mixed_cuts: in the second half of "
        "each group.",
    )
    cuts_k: int = Field(5, ge=1, le=1_000_000, description="CUTS: most likely tokens considered.")
    cuts_delta: float = Field(0.03, ge=0, le=1, description="CUTS: least probability at temperature 1 of a kept token.")
    cuts_warm: int = Field(
        5, ge=0, le=1_000_000_000, description="CUTS: first tokens of a turn that are sampled as usual."
    )
    cuts_empty: Literal["uniform", "argmax"] = Field(
        "uniform", description="CUTS where no token reaches cuts_delta: uniform over cuts_k, or the most likely one."
    )
    cuts_logprob: Literal["proposal", "policy"] = Field(
        "proposal",
        description="CUTS: record log μ, H and support of what sampled, or log μ and H of the policy before CUTS (the "
        "paper's uncorrected ratio).",
    )
    topk_logprobs: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Most likely tokens whose log μ is recorded, for recipes that need it; 0: none.",
    )
    max_new_tokens: int = Field(64, ge=1, le=1_000_000, description="Action tokens of one assistant turn.")
    max_turns: int = Field(6, ge=1, le=100_000, description="Assistant turns of one trajectory.")
    max_context: int = Field(
        0, ge=0, le=100_000_000, description="Tokens of one row; 0: what prompt, turns and model allow."
    )
    dtype: str = Field("float32", description="Engine precision; intN is simulated.")
    slots: int = Field(64, ge=1, le=65_536, description="Trajectories decoded at once by one engine.")
    parked: int = Field(
        -1, ge=-1, le=65_536, description="Further rows that keep the cache of waiting trajectories; -1: as slots."
    )
    kv: Literal["keep", "recompute"] = Field("keep", description="Cached keys and values after a weight update.")
    entropy: Literal["exact", "bounded"] = Field(
        "exact", description="vllm: H from the plugin, or an interval from the most likely tokens alone."
    )
    entropy_topk: int = Field(
        64, ge=1, le=1_000_000, description='vllm: most likely tokens that entropy = "bounded" is computed from.'
    )
    vllm_server: bool = Field(
        False, description="vllm: in a process of its own, behind a Unix socket (not proven yet, see docs/vllm.md)."
    )
    vllm: dict[str, Any] = Field(default_factory=dict, description="vllm: further arguments of its engine, by name.")

    def explores(self, sibling: int) -> bool:
        """Whether CUTS samples this sibling of a group."""
        return self.sampler == "cuts" or (self.sampler == "mixed_cuts" and 2 * sibling >= self.group_size)


class ScheduleConfig(Section):
    mode: Literal["sync", "async", "lockstep"] = Field("async", description="How generation and training interleave.")
    max_staleness: int = Field(
        4, ge=0, le=1_000_000, description="async: most optimizer steps between first token and training."
    )
    inter: int = Field(0, ge=0, le=1_000_000, description="lockstep: imposed staleness of the last token.")
    intra: int = Field(0, ge=0, le=1_000_000, description="lockstep: further imposed staleness of the first token.")
    intra_every: int = Field(1, ge=1, le=1_000_000, description="lockstep: action tokens per version.")
    attempts: int = Field(3, ge=1, le=1_000, description="Attempts at one trajectory before its group fails.")
    group_failure: Literal["drop"] = Field("drop", description="What a group does when a sibling failed for good.")
    max_failed_groups: int = Field(8, ge=1, le=1_000_000, description="Groups failed in a row that stop the run.")
    wait_timeout: float = Field(
        300.0, ge=0.01, le=1_000_000, description="Seconds the learner waits without any progress."
    )


class ObjectiveConfig(Section):
    """From rewards to the loss; the recipe's hyperparameters stand beside these keys and are checked by the recipe."""

    model_config = ConfigDict(extra="allow", validate_assignment=True)

    recipe: str = Field("estr", description="The objective.")
    advantage: str = Field("grpo", description="The advantage estimator.")
    advantage_options: dict[str, Any] = Field(default_factory=dict, description="The estimator's own settings.")
    reweighting: str = Field("none", description="Rule that changes advantages token by token.")
    reweighting_options: dict[str, Any] = Field(default_factory=dict, description="That rule's own settings.")
    regularizer: str = Field("none", description="What pays for entropy, under control of a target.")
    regularizer_options: dict[str, Any] = Field(default_factory=dict, description="The regularizer's own settings.")
    shaping: list[str] = Field(default_factory=list, description="Changes of the reward, in order.")
    shaping_options: dict[str, dict[str, Any]] = Field(default_factory=dict, description="Settings of each by name.")
    selection: str = Field("none", description="Rule that decides which trajectories train.")
    selection_options: dict[str, Any] = Field(default_factory=dict, description="That rule's own settings.")
    calibration: str = Field("", description='File of `estr calibrate` that tau = "calibrated" reads.')
    kl_coef: float = Field(0.0, ge=0, description="Weight of the KL divergence to the starting model.")
    kl_estimator: Literal["k1", "k3"] = Field("k3", description="Estimator of that divergence.")

    def hyperparameters(self) -> dict[str, Any]:
        """The recipe's own keys."""
        return dict(self.model_extra or {})


class LearnerConfig(Section):
    learning_rate: float = Field(1e-4, ge=0, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Learning rate after warm-up.")
    warmup_steps: int = Field(0, ge=0, le=1_000_000_000, description="Optimizer steps of linear learning-rate warm-up.")
    min_learning_rate_ratio: float = Field(0.0, ge=0, le=1, description="Floor of the decay, as a share of the peak.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta 1.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta 2.")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    prompts_per_step: int = Field(8, ge=1, le=1_000_000, description="Groups of one rollout batch.")
    minibatches: int = Field(1, ge=1, le=1_000_000, description="Optimizer steps one rollout batch is split into.")
    epochs: int = Field(1, ge=1, le=1_000_000, description="Passes over one rollout batch.")
    tokens_per_microbatch: int = Field(2048, ge=1, le=1_000_000_000, description="Tokens of one forward pass.")
    share_prompts: bool = Field(
        True,
        description="Siblings in one forward pass read their common prompt once, where the model allows it.",
    )
    max_grad_norm: float = Field(1.0, ge=0, description="Gradient norm above which gradients are scaled; 0: never.")
    controllers: list[str] = Field(default_factory=list, description="Rules on gradient and learning rate, in order.")
    controller_options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Settings of each controller by name."
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Autocast type; master weights stay float32.")
    truncated: Literal["keep", "mask", "penalize"] = Field("keep", description="What trains of cut-off trajectories.")
    truncation_penalty: float = Field(0.5, ge=0, description="Reward taken from them when penalized.")
    ranks: int = Field(
        1, ge=1, le=4_096, description="Processes that share out weights, gradients and moments (FSDP2) and each batch."
    )
    rank_timeout: float = Field(
        600.0, ge=1, le=1_000_000, description="Seconds a rank waits for the others before the run fails."
    )
    max_skipped_steps: int = Field(
        5, ge=1, le=1_000_000, description="Skipped steps in a row that count as divergence."
    )
    on_divergence: Literal["stop", "rollback"] = Field(
        "stop", description="stop with a checkpoint, or go back to the last good one with a smaller learning rate."
    )
    rollback_factor: float = Field(0.5, gt=0, lt=1, description="Learning rate after a rollback, as a share.")
    max_rollbacks: int = Field(3, ge=1, le=1_000_000, description="Rollbacks after which divergence stops the run.")


class RuntimeConfig(Section):
    kind: Literal["local", "ray"] = Field("local", description="Where processes run; ray needs estr[ray].")
    address: str = Field(
        "",
        description="Ray: host:port of a cluster to join, or auto; there, engines = 0 stands for as many as it has "
        "room for at each moment. Empty: a cluster on this machine, for this run alone.",
    )
    engine_gpus: float = Field(
        0.0, ge=0, le=1_024, description="Ray: GPUs one engine reserves, beside engine_threads CPUs."
    )
    learner_gpus: float = Field(
        0.0,
        ge=0,
        le=1_024,
        description="Ray: GPUs one further rank of the learner reserves, beside learner_threads CPUs.",
    )
    engine_resources: dict[str, float] = Field(
        default_factory=dict, description="Ray: resources of your own that one engine reserves, by name."
    )
    object_store: float = Field(
        0.0,
        ge=0,
        le=1_000_000,
        description="Ray: GiB of shared memory of a cluster that is started; 0: four times the weights, plus 0.25.",
    )
    engines: int = Field(0, ge=0, le=1_024, description="Engine processes; 0: one in async, one per core in sync.")
    engine_timeout: float = Field(
        120.0,
        ge=1,
        le=1_000_000,
        description="Seconds without a sign of life after which an engine process is replaced.",
    )
    start_timeout: float = Field(
        300.0, ge=1, le=1_000_000, description="Seconds an engine process may take to load its model."
    )
    engine_memory: float = Field(
        0.0, ge=0, le=1_000_000, description="GiB of data one engine process may hold; 0: no limit."
    )
    engine_threads: int = Field(1, ge=1, le=1_024, description="Threads of one engine process.")
    learner_threads: int = Field(
        0, ge=0, le=1_024, description="Threads of the learner; 0: one in async, one per core in sync."
    )


class Config(Section):
    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
