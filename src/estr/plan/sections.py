"""The sections of a plan: one typed class a section, one line of description a field."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from estr.config.sections import Section


class Distribution(Section):
    """A number that varies: always ``value``, or log-normal as a task's latency is."""

    kind: Literal["fixed", "lognormal"] = Field("fixed", description="fixed, or log-normal from median and p99.")
    value: float = Field(0.0, ge=0, description="The number (fixed).")
    median: float = Field(1.0, gt=0, description="Median (lognormal).")
    p99: float = Field(1.0, gt=0, description="99th percentile (lognormal).")
    cap: float = Field(1e9, gt=0, description="Most it can be (lognormal).")


class ClusterSection(Section):
    engines: int = Field(1, ge=1, description="Engines.")
    gpus_per_engine: int = Field(1, ge=1, description="GPUs of one engine.")
    learner_ranks: int = Field(1, ge=1, description="GPUs (or processes) of the learner.")
    slots: int = Field(64, ge=1, description="Trajectories decoded at once by one engine.")
    parked: int = Field(
        -1, ge=-1, description="Further rows that keep the cache of waiting trajectories; -1: as slots."
    )
    failure_hours: float = Field(0.0, ge=0, description="Mean hours between failures of one engine; 0: none fails.")
    restart_seconds: float = Field(120.0, ge=0, description="Seconds until a failed engine is there again.")


class WorkloadSection(Section):
    prompts_per_step: int = Field(8, ge=1, description="Groups of one rollout batch.")
    group_size: int = Field(8, ge=1, description="Trajectories of one prompt.")
    minibatches: int = Field(1, ge=1, description="Optimizer steps one rollout batch is split into.")
    epochs: int = Field(1, ge=1, description="Passes over one rollout batch.")
    attempts: int = Field(3, ge=1, description="Attempts at one trajectory before its group fails.")
    prompt_tokens: Distribution = Field(
        default_factory=lambda: Distribution(value=128), description="Tokens of a prompt, the same for its group."
    )
    turns: Distribution = Field(default_factory=lambda: Distribution(value=1), description="Assistant turns.")
    turn_tokens: Distribution = Field(
        default_factory=lambda: Distribution(value=128), description="Action tokens of one turn."
    )
    reply_tokens: Distribution = Field(
        default_factory=lambda: Distribution(value=16), description="Tokens of a tool's reply."
    )


class ToolsSection(Section):
    latency: Literal["none", "fixed", "lognormal"] = Field("none", description="Tool latency, as a task's.")
    latency_seconds: float = Field(0.2, ge=0, description="Seconds of every call (fixed).")
    latency_median: float = Field(0.2, gt=0, description="Median seconds of a call (lognormal).")
    latency_p99: float = Field(2.0, gt=0, description="99th percentile in seconds (lognormal).")
    latency_cap: float = Field(5.0, ge=0, description="Most seconds of a call (lognormal).")
    failure_rate: float = Field(0.0, ge=0, lt=1, description="Share of trajectories that fail in their environment.")


class EngineSection(Section):
    seconds_per_step: float = Field(0.01, ge=0, description="A decode step with no row: reading the weights, launches.")
    seconds_per_row: float = Field(0.0, ge=0, description="What each row adds to a decode step.")
    seconds_per_prefill_token: float = Field(0.0, ge=0, description="Reading one token of a prompt or reply.")
    prefill_tokens: int = Field(8192, ge=1, description="Tokens read between two decode steps, about.")


class LearnerSection(Section):
    seconds_per_step: float = Field(0.0, ge=0, description="An optimizer step apart from its tokens, on any ranks.")
    seconds_per_token: float = Field(1e-4, ge=0, description="One trained token (prompt and replies too) on one rank.")
    overhead_seconds: float = Field(0.0, ge=0, description="Time between optimizer steps: storing, metrics.")


class WeightsSection(Section):
    publish_seconds: float = Field(0.0, ge=0, description="Learner's time to publish weights.")
    sync_seconds: float = Field(0.0, ge=0, description="Pause of an engine that takes new weights.")


class ScheduleSection(Section):
    mode: Literal["sync", "async"] = Field("async", description="How generation and training interleave.")
    max_staleness: int = Field(4, ge=0, description="async: most optimizer steps between first token and training.")


class SimulationSection(Section):
    seed: int = Field(0, ge=0, description="Every random choice is derived from it.")
    steps: int = Field(40, ge=1, description="Optimizer steps that are measured.")
    warm_steps: int = Field(-1, ge=-1, description="Steps before them; -1: four more than max_staleness.")
    most_engines: int = Field(
        128, ge=1, description="A sweep simulates a slice of larger clusters: so many engines with their share of work."
    )
    most_trajectories: int = Field(
        200_000, ge=1, description="Where a sweep would train more, it measures fewer steps, at least three batches."
    )


class SweepSection(Section):
    gpus: list[int] = Field(default_factory=list, description="GPUs in all, shared out between engines and learner.")
    learner_shares: list[float] = Field(
        default_factory=lambda: [0.125, 0.25, 0.375, 0.5], description="Shares of gpus that the learner gets."
    )
    batch_exponent: float = Field(
        0.5, ge=0, le=1, description="With gpus: prompts_per_step grows with this power of them, from [cluster] on."
    )
    engines: list[int] = Field(default_factory=list, description="Numbers of engines (without gpus).")
    learner_ranks: list[int] = Field(default_factory=list, description="Numbers of learner ranks (without gpus).")
    slots: list[int] = Field(default_factory=list, description="Numbers of slots.")
    max_staleness: list[int] = Field(default_factory=list, description="Bounds on staleness.")
    worth: float = Field(
        0.03, ge=0, lt=1, description="Share of throughput that a larger max_staleness must add to be worth it."
    )


class PlanConfig(Section):
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    workload: WorkloadSection = Field(default_factory=WorkloadSection)
    tools: ToolsSection = Field(default_factory=ToolsSection)
    engine: EngineSection = Field(default_factory=EngineSection)
    learner: LearnerSection = Field(default_factory=LearnerSection)
    weights: WeightsSection = Field(default_factory=WeightsSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    simulation: SimulationSection = Field(default_factory=SimulationSection)
    sweep: SweepSection = Field(default_factory=SweepSection)

    @property
    def gpus(self) -> int:
        """GPUs in all; in sync engines and learner take turns on the same ones."""
        engines = self.cluster.engines * self.cluster.gpus_per_engine
        both = (engines, self.cluster.learner_ranks)
        return max(both) if self.schedule.mode == "sync" else sum(both)

    @property
    def steps_per_batch(self) -> int:
        return self.workload.minibatches * self.workload.epochs

    @property
    def staleness_bound(self) -> int:
        """max_staleness as the schedule gets it: in sync only what minibatches and epochs bring."""
        return self.schedule.max_staleness if self.schedule.mode == "async" else self.steps_per_batch - 1
