"""The real loop in memory: collector, schedule, local engine and learner, without files; for tests of every method.

Lockstep with inter = 4, intra = 2, an int5 engine and two minibatches. What the starting weights generate is kept and
handed out again, which changes nothing: the logical clock says that it is the same.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from estr.config import Config
from estr.config.load import load_config
from estr.config.validate import validate_config
from estr.environments.base import Problem
from estr.learner import Learner, StepResult
from estr.models.builtin import resolve_model
from estr.models.load import load_model, merged_state
from estr.runtime.accounting import Accounting
from estr.runtime.builders import build_rollout_worker, build_task, canary_tokens, think_end
from estr.runtime.collector import Collector
from estr.runtime.interrupts import Interrupts
from estr.runtime.messages import Event, Finished, KeptTurn
from estr.runtime.pools import InlinePool
from estr.runtime.position import Position
from estr.runtime.reporter import SilentReporter
from estr.runtime.run import Run
from estr.runtime.setup import _make_schedule, _minibatches, prepared
from estr.schedule import Group, Ticket
from estr.storage.checkpoints import latest_checkpoint
from estr.storage.run_directory import RunDirectory
from loop_helpers import small

LOOP = (
    "run.steps=6",
    "model.path=builtin:micro",
    "task.name=loop_tasks:Echo",
    "rollout.group_size=4",
    "rollout.max_new_tokens=8",
    "rollout.max_turns=2",
    "rollout.slots=16",
    "rollout.dtype=int5",
    "schedule.mode=lockstep",
    "schedule.inter=4",
    "schedule.intra=2",
    "learner.prompts_per_step=2",
    "learner.minibatches=2",
    "learner.learning_rate=0.02",
    "learner.max_grad_norm=0",
)

CALCULATOR = (
    *(text for text in LOOP if text.startswith(("rollout.slots", "rollout.dtype", "schedule.", "learner."))),
    "run.steps=20",
    "model.path=builtin:tiny",
    "task.name=calculator",
    "rollout.group_size=6",
    "rollout.max_new_tokens=40",
    "rollout.max_turns=3",
    "learner.learning_rate=0.001",
)
"""Twenty steps of the builtin model on its task, 12 trajectories a rollout batch."""


def configured(*sets: str, base: Sequence[str] = LOOP) -> Config:
    """The configuration of the loop with changes to it, checked as ``estr train`` does."""
    config = load_config(None, [*base, *sets]).config
    validate_config(config)
    return config


@dataclass
class Silent:
    """A journal and a timeline that keep what was dropped and nothing else."""

    dropped_groups: list[tuple[int, str]] = field(default_factory=list)

    def batch(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def issued(self, tickets: Sequence[Ticket], problem: Problem, version: int) -> None: ...

    def finished(self, results: Sequence[Finished]) -> None: ...

    def went_on(self, turns: Sequence[KeptTurn]) -> None: ...

    def failed(self, ticket: Ticket, reason: str) -> None: ...

    def dropped(self, group: int, reason: str) -> None:
        self.dropped_groups.append((group, reason))

    def write(
        self, actor: str, kind: str, start: float, end: float, version: int | None = None, work: object = None
    ) -> None: ...


class Remembering(InlinePool):
    """Hands out again what the starting weights made of the same jobs, all of one round, under the same settings."""

    settings = ""
    known: ClassVar[dict[tuple[str, str], list[Finished]]] = {}

    def events(self, timeout: float) -> list[Event]:
        key, busy = (self.settings, repr(self._jobs)), bool(self._jobs)
        found = self.known.get(key)
        if busy and found is not None:
            self._jobs = []
            self._events.extend(copy.deepcopy(found))
            return super().events(timeout)
        events = super().events(timeout)
        finished = [event for event in events if isinstance(event, Finished)]
        if busy and not any(event.trajectory.action_versions.any() for event in finished):
            self.known[key] = copy.deepcopy(finished)
        return events


@cache
def _starting_model(path: str, task: str, warmup: int) -> Any:
    config = load_config(None, [f"model.path={path}", f"task.name={task}", f"model.warmup_steps={warmup}"]).config
    return load_model(resolve_model(config.model, build_task(config)), "float32", False)


class Loop:
    """One run in memory; ``step_results`` after :meth:`go`."""

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(1)
        self.config, self.journal = config, Silent()
        task = build_task(config)
        start = _starting_model(config.model.path, config.task.name, config.model.warmup_steps)
        self.model, self._tokenizer = copy.deepcopy(start.model), start.tokenizer
        self.learner = Learner(self.model, config, think_end=think_end(start.tokenizer))
        worker = build_rollout_worker(config, task, copy.deepcopy(start.model), start.tokenizer, wait_for_tools=False)
        self._canary = canary_tokens(self.model.get_input_embeddings().weight.shape[0])
        steps = config.learner.minibatches * config.learner.epochs
        window = config.schedule.inter + config.schedule.intra + steps
        self.pool = Remembering(worker, self._canary, window=window)
        self.pool.settings = repr((config.rollout, config.task, config.model))
        self.collector = Collector(
            config,
            _make_schedule(config, Position()),
            self.pool,
            task,
            self.journal,
            Accounting(self.journal, 1),
            notice=lambda sentence: None,
            minibatch_of=_minibatches(config).__getitem__,
            extra_temperature=self.learner.extensions.extra_temperature,
        )
        self.results: list[StepResult] = []
        self.batches: list[list[Group]] = []

    def go(self, steps: int | None = None) -> Loop:
        wanted = self.config.run.steps if steps is None else steps
        self._publish()
        while len(self.results) < wanted:
            groups = self.collector.next_batch(self.learner.version)
            self.batches.append(groups)
            for result in self.learner.train([group.trajectories for group in groups]):
                self.results.append(result)
                self._publish()
        return self

    def _publish(self) -> None:
        self.pool.publish(self.learner.version, merged_state(self.model), self.learner.canary(self._canary))

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [result.metrics for result in self.results]


def path_of(metrics: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Loss and gradient norm by step, float64 [steps, 2]."""
    return np.array([[line["loss"], line["grad/norm"]] for line in metrics])


def run(directory: Path, steps: int, stop: int | None = None, **changes: Any) -> Path:
    """A run in this process; with ``stop`` it is resumed from that step's checkpoint by a second process' parts."""
    config = small(run={"steps": steps, "checkpoint_every": 2}, **changes)
    with RunDirectory.create(directory, config) as made:
        _go(config, made, stop)
    if stop is not None:
        with RunDirectory.open(directory, lock=True) as made:
            _go(config, made, None, latest_checkpoint(made).checkpoint)
    return directory


class Stop(Exception):  # noqa: N818
    pass


def _go(config: Any, directory: RunDirectory, stop: int | None, checkpoint: Any = None) -> None:
    with Interrupts() as interrupts, prepared(config, directory, SilentReporter(), interrupts, checkpoint) as parts:
        loop = Run(parts, interrupts)
        if stop is None:
            loop.go()
            return
        write = parts.metrics.write

        def leave(step: int, metrics: Any) -> None:
            write(step, metrics)
            if step == stop:
                raise Stop

        parts.metrics.write = leave  # type: ignore[method-assign]
        with pytest.raises(Stop):
            loop.go()
