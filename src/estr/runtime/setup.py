"""Everything a run consists of, made from its configuration and put together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from estr.config import Config
from estr.environments.base import Task
from estr.environments.runner import EnvironmentFailure, start_reset
from estr.errors import UsageError
from estr.learner.learner import Learner, needs_reference
from estr.learner.ranks import Others
from estr.learner.rollouts import minibatch_plan
from estr.models.builtin import resolve_model
from estr.models.forward import base_model
from estr.models.load import LoadedModel, load_model
from estr.runtime.accounting import Accounting
from estr.runtime.builders import build_rollout_worker, build_task, canary_tokens, load_policy, think_end
from estr.runtime.cluster.connection import Cluster
from estr.runtime.collector import Collector
from estr.runtime.divergence import Rollbacks
from estr.runtime.evaluation import Evaluation, Evaluator
from estr.runtime.fingerprint import check_fits, fingerprint, package_changes
from estr.runtime.gaps import gaps
from estr.runtime.interrupts import Interrupts
from estr.runtime.journal import RunJournal
from estr.runtime.pools import InlinePool, Pool, ProcessPool
from estr.runtime.position import Position
from estr.runtime.reporter import Reporter
from estr.runtime.saving import CheckpointStore
from estr.runtime.selecting import doubled_groups
from estr.runtime.trackers import Tracker, make_trackers
from estr.schedule import Schedule, ScheduleRules
from estr.storage.checkpoints import Checkpoint, withdraw_checkpoints_after
from estr.storage.ledger import Ledger
from estr.storage.metrics import JsonLinesWriter, MetricsWriter, TimelineWriter
from estr.storage.rollout_files import RolloutWriter
from estr.storage.run_directory import RunDirectory
from estr.storage.run_record import RunRecord


class EvaluationLog:
    """evaluations.jsonl: one line per held-out evaluation, with how it was decoded."""

    def __init__(self, directory: RunDirectory) -> None:
        self._writer = JsonLinesWriter(directory.path / "evaluations.jsonl")

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._writer.append(
            {
                "step": step,
                "reward": evaluation.mean,
                "problems": len(evaluation.rewards),
                "temperature": evaluation.temperature,
                "failed": evaluation.failed,
            }
        )

    def withdraw_after(self, step: int) -> None:
        self._writer.withdraw_beyond("step", step)

    def close(self) -> None:
        self._writer.close()


@dataclass
class Parts:
    """What :class:`estr.runtime.run.Run` drives."""

    config: Config
    directory: RunDirectory
    reporter: Reporter
    position: Position
    learner: Learner
    loaded: LoadedModel
    schedule: Schedule
    pool: Pool
    collector: Collector
    accounting: Accounting
    journal: RunJournal
    metrics: MetricsWriter
    evaluator: Evaluator | None
    store: CheckpointStore
    directory_log: EvaluationLog
    trackers: list[Tracker]
    canary_tokens: list[int]
    rollbacks: Rollbacks
    published: int = -1
    collecting: int | None = None  # while a rollout batch is waited for: the first group admitted since the last one

    @property
    def steps_per_batch(self) -> int:
        return self.config.learner.minibatches * self.config.learner.epochs

    def weights(self) -> Mapping[str, Tensor]:
        """The policy's plain weights by name, each once; the parameters' own storage, of several ranks copies."""
        return self.learner.weights()


def learner_threads(config: Config) -> int:
    """Threads of the learner process: what is configured, else all cores in sync and one otherwise."""
    if config.runtime.learner_threads:
        return config.runtime.learner_threads
    return os.cpu_count() or 1 if config.schedule.mode == "sync" else 1


def engine_count(config: Config) -> int:
    """Engine processes: what is configured, else one per core in sync and one fewer, at least one, in async."""
    cores = os.cpu_count() or 1
    if config.runtime.engines:
        return config.runtime.engines
    return {"sync": cores, "async": max(1, cores - 1)}.get(config.schedule.mode, 1)


@contextmanager
def prepared(
    config: Config,
    directory: RunDirectory,
    reporter: Reporter,
    interrupts: Interrupts,
    checkpoint: Checkpoint | None = None,
    *,
    accept_changes: bool = False,
) -> Iterator[Parts]:
    """All parts of a run, from its start or from ``checkpoint``; closed on the way out.

    ``accept_changes``: go on although configuration, task or model are not what the run was started with.

    Raises:
        UsageError: the model, the task or their combination cannot be used, or are not those of the run.
    """
    interrupts.immediate = True
    torch.set_num_threads(learner_threads(config))
    position = Position.of(checkpoint) if checkpoint is not None else Position()
    task = build_task(config)
    reporter.phase("loading the model")
    base = resolve_model(config.model, task, progress=_warmup_progress(reporter, interrupts))
    record = _Beginning(directory, task, base, reporter, accept_changes)
    path = base if checkpoint is None or config.model.lora_rank else checkpoint.path
    loaded = load_policy(config, path)
    loaded.model.load_state_dict(position.adapters, strict=False)
    _check_first_problems(config, task, loaded)
    reference = load_model(base, "float32", config.model.trust_remote_code).model if needs_reference(config) else None
    with ExitStack() as stack:
        ledger = Ledger(directory)
        stack.callback(ledger.close)
        ledger.check_whole()
        cluster = stack.enter_context(_cluster(config, loaded))
        others = None
        if config.learner.ranks > 1:
            reporter.phase("starting the ranks of the learner")
            others = stack.enter_context(_other_ranks(config, cluster, path, base, loaded))
        learner = Learner(
            loaded.model, config, reference=reference, think_end=think_end(loaded.tokenizer), others=others
        )
        if position.learner is not None:
            learner.load_state(position.learner, position.learner_tensors)
        metrics, timeline = MetricsWriter(directory.path / "metrics.jsonl"), TimelineWriter(directory.timeline_path)
        rollouts, log = RolloutWriter(directory, background=True), EvaluationLog(directory)
        for writer in (metrics, timeline, rollouts, log):
            stack.callback(writer.close)
        accounting = Accounting(timeline, engine_count(config), offset=position.elapsed)
        reporter.phase("starting the engines")
        pool = _make_pool(config, cluster, task, loaded, learner.weights(), path, position, directory.spool)
        stack.callback(pool.close)
        interrupts.immediate = False
        rollouts.after_store = ledger.move_log
        journal = RunJournal(config, ledger, rollouts, position.step)
        journal.dropped_groups = position.dropped_groups
        schedule = _make_schedule(config, position)

        def check() -> None:
            interrupts.check()
            learner.check()

        collector = Collector(
            config,
            schedule,
            pool,
            task,
            journal,
            accounting,
            notice=reporter.notice,
            minibatch_of=_minibatches(config).__getitem__,
            check=check,
            extra_temperature=learner.extensions.extra_temperature,
        )
        redo_from = position.next_group if config.schedule.mode == "lockstep" else None
        schedule.next_group = ledger.next_group if redo_from is None else redo_from
        backlog = journal.rewind(position.step, position.ledger, redo_from=redo_from)
        journal.check_backlog(backlog, task)
        record.accept()
        # Only now: the ledger may refuse to go back, and then nothing may be gone.
        for writer in (metrics, timeline, rollouts, log):
            writer.withdraw_after(position.step)
        withdraw_checkpoints_after(directory, position.step)
        for sentence in gaps(directory, ledger, position.step, config.run.keep_rollouts):
            reporter.notice(sentence)
        collector.take_up(backlog, learner.version)
        yield Parts(
            config=config,
            directory=directory,
            reporter=reporter,
            position=position,
            learner=learner,
            loaded=loaded,
            schedule=schedule,
            pool=pool,
            collector=collector,
            accounting=accounting,
            journal=journal,
            metrics=metrics,
            evaluator=_make_evaluator(config, task, base, loaded),
            store=CheckpointStore(directory, config, pool, position.step),
            directory_log=log,
            trackers=make_trackers(config.run.trackers, directory.path, stack),
            canary_tokens=_canary(loaded),
            rollbacks=Rollbacks(directory, config),
        )


class _Beginning:
    """Writes down what the run is started with, or checks that it is still the same; what has changed is written down
    only by ``accept``, when nothing refuses it any more."""

    def __init__(
        self, directory: RunDirectory, task: Task, base: Path, reporter: Reporter, accept_changes: bool
    ) -> None:
        self._record = RunRecord(directory)
        self._found = fingerprint(directory.config(), task, base)
        known = self._record.fingerprint
        if known is not None:
            if not accept_changes:
                check_fits(self._found, known, directory.path)
            if changed := package_changes(self._found, known):
                reporter.notice(f"the run was started with other versions, bits may differ: {', '.join(changed)}")
        self._record.begin(self._found if known is None else known)

    def accept(self) -> None:
        if self._record.fingerprint != self._found:
            self._record.begin(self._found)


def _minibatches(config: Config) -> dict[int, int]:
    """A group's place in its rollout batch → the minibatch that trains it first."""
    plan = minibatch_plan(config.learner.prompts_per_step, config.learner.minibatches, 1, 0)
    return {place: minibatch for minibatch, places in enumerate(plan) for place in places}


def _canary(loaded: LoadedModel) -> list[int]:
    return canary_tokens(loaded.model.get_input_embeddings().weight.shape[0])


def _check_first_problems(config: Config, task: Task, loaded: LoadedModel) -> None:
    """Refuse a configuration under which the very first prompts do not fit the context."""
    from estr.models.conversation import Conversation
    from estr.runtime.builders import context_length, training_problem

    room = context_length(config, loaded.model)
    for index in range(config.learner.prompts_per_step):
        problem = training_problem(task, index)
        environment = task.environment()
        if getattr(environment, "blocking", True):
            return
        messages = start_reset(environment, problem, 0).wait()
        if isinstance(messages, EnvironmentFailure):  # the run knows what to do with it
            return
        prompt = Conversation(loaded.tokenizer, messages).prompt_ids
        if len(prompt) >= room:
            raise UsageError(
                f"problem {problem.task_id} has a prompt of {len(prompt)} tokens, which leaves no room in a context of "
                f"{room}; raise rollout.max_context, filter the task, or take a model with a longer context"
            )


def _cluster(config: Config, loaded: LoadedModel) -> AbstractContextManager[Cluster | None]:
    """The Ray cluster of the run, where it has one."""
    if config.runtime.kind != "ray":
        return nullcontext()
    from estr.runtime.cluster.start import ray_cluster

    return ray_cluster(config, loaded.model.parameters(), **_sizes(config))


def _sizes(config: Config) -> dict[str, int]:
    return {"engines": engine_count(config), "learner_threads": learner_threads(config)}


def _other_ranks(
    config: Config, cluster: Cluster | None, path: Path, base: Path, loaded: LoadedModel
) -> AbstractContextManager[Others]:
    """The processes of the learner's other ranks, which load the same model."""
    reference, threads = base if needs_reference(config) else None, learner_threads(config)
    if cluster is not None:
        from estr.runtime.cluster.ranks import ray_ranks

        return ray_ranks(cluster, config, path, reference, threads=threads)
    from estr.runtime.ranks import rank_processes

    module = type(base_model(loaded.model)).__module__
    return rank_processes(config, path, reference, threads=threads, preloaded=[module])


def _make_pool(
    config: Config,
    cluster: Cluster | None,
    task: Task,
    loaded: LoadedModel,
    tensors: Mapping[str, Tensor],
    path: Path,
    position: Position,
    spool: Path,
) -> Pool:
    if cluster is not None:
        from estr.runtime.cluster.start import ray_pool

        return ray_pool(cluster, config, path, position.window, **_sizes(config))
    if config.schedule.mode != "lockstep":
        threads, modules = config.runtime.engine_threads, [type(base_model(loaded.model)).__module__]
        return ProcessPool(
            config, path, tensors, spool, engines=engine_count(config), threads=threads, preloaded=modules
        )
    engine = load_model(
        path, "bfloat16" if config.rollout.dtype == "bfloat16" else "float32", config.model.trust_remote_code
    )
    worker = build_rollout_worker(config, task, engine.model, loaded.tokenizer, wait_for_tools=False)
    steps = config.learner.minibatches * config.learner.epochs
    window = config.schedule.inter + config.schedule.intra + steps
    pool = InlinePool(worker, _canary(loaded), window=window)
    for version, tensors in position.window.items():
        pool.restore(version, tensors)
    return pool


def _make_schedule(config: Config, position: Position) -> Schedule:
    learner, steps = config.learner, config.learner.minibatches * config.learner.epochs
    rules = ScheduleRules(
        prompts_per_step=learner.prompts_per_step,
        group_size=config.rollout.group_size,
        steps_per_batch=steps,
        max_staleness=config.schedule.max_staleness if config.schedule.mode == "async" else steps - 1,
        attempts=config.schedule.attempts,
        max_failed_groups=config.schedule.max_failed_groups,
        doubled=doubled_groups(config),
    )
    batches = -(-max(0, config.run.steps - position.step) // steps)
    return Schedule(rules, next_group=position.next_group, total_groups=batches * learner.prompts_per_step)


def _warmup_progress(reporter: Reporter, interrupts: Interrupts) -> Callable[[int, int, float], None]:
    def progress(done: int, total: int, loss: float) -> None:
        interrupts.check()
        reporter.progress(f"warming up on demonstrations, loss {loss:.2f}", done, total)

    return progress


def _make_evaluator(config: Config, task: Task, path: Path, loaded: LoadedModel) -> Evaluator | None:
    if not config.run.eval_every:
        return None
    model = load_model(path, "float32", config.model.trust_remote_code).model
    return Evaluator(config, task, model, loaded.tokenizer, problems=config.run.eval_prompts)
