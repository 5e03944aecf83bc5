"""Forward and backward of one optimizer step: micro-batches in, accumulated gradients and what was seen out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from estr.batch import TokenBatch
from estr.config.sections import ObjectiveConfig
from estr.controllers import entropy_term
from estr.errors import RunError
from estr.learner.extensions import Extensions, Prepared
from estr.learner.minibatch import Minibatch, Task
from estr.learner.packing import MicroBatch
from estr.models.head import HeadValues
from estr.objectives import Objective, Statistics, merge_metrics, reference_kl


@dataclass(frozen=True)
class Whole:
    """What every micro-batch of an optimizer step shares: the denominators, and the seed of recipes that draw."""

    token_count: int
    sequence_count: int
    seed: int


@dataclass(frozen=True)
class Part:
    """What the backward pass of one micro-batch saw, without graph; its loss and ``terms`` are shares of sums over the
    minibatch."""

    logprob: Tensor
    entropy: Tensor
    loss: float
    terms: dict[str, float]
    metrics: dict[str, float]
    tokens: int


class Passes(Protocol):
    """The passes of an optimizer step over its micro-batches, on one rank or several."""

    @property
    def count(self) -> int:
        """How many ranks there are."""
        ...

    def values(self, microbatches: Sequence[MicroBatch], topk: bool, graph: bool) -> list[HeadValues]: ...

    def polarities(self, microbatches: Sequence[MicroBatch]) -> list[Tensor]: ...

    def backward(self, tasks: Sequence[Task], whole: Whole) -> list[Part]: ...


@dataclass
class Seen:
    """What the pass over a minibatch saw, by micro-batch, without graph; the gradients are in the parameters."""

    logprob: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    advantage: list[Tensor] = field(default_factory=list)
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, part: Part, advantage: Tensor) -> None:
        """Take in one micro-batch."""
        self.logprob.append(part.logprob)
        self.entropy.append(part.entropy)
        self.advantage.append(advantage)
        self.loss += part.loss
        for name, value in part.terms.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value


@dataclass
class Gradient:
    """Computes the gradient of one minibatch's loss.

    The loss is the objective's, plus ``kl_coef`` times the mean KL to the reference over all action tokens, minus what
    an entropy regularizer pays. Any split into micro-batches, on any number of ranks, gives the same gradient:
    denominators and statistics are those of the whole minibatch.
    """

    passes: Passes
    objective: Objective
    extensions: Extensions

    @property
    def needs_statistics(self) -> bool:
        """Whether the recipe reads something of the whole optimizer batch beside the two counts."""
        measures = any(part.measure is not None for part in self.objective.composition.parts)
        return measures or self.objective.hyperparameters.get("denominator") == "kept"

    def __call__(self, minibatch: Minibatch, target_version: int, fresh: bool, seed: int) -> Seen:
        """Accumulate gradients. ``fresh``: the weights are still those that q was frozen at."""
        advantages = minibatch.advantages()
        tasks = [minibatch.task(i, advantage, target_version, fresh) for i, advantage in enumerate(advantages)]
        values = self._first_pass(minibatch)
        prepared = self._prepare(tasks, values, advantages)
        tasks = [replace(task, advantage=prepared.advantages[i]) for i, task in enumerate(tasks)]
        statistics = self._statistics(tasks, values, seed)
        for i, task in enumerate(tasks):
            weight = None if prepared.entropy_weights is None else prepared.entropy_weights[i]
            now = values[i] if self._keeps_graph(minibatch) else None
            tasks[i] = replace(task, entropy_weight=weight, statistics=statistics[i], now=now)
        parts = self.passes.backward(tasks, Whole(minibatch.token_count, minibatch.sequence_count, seed))
        seen = Seen(metrics=dict(prepared.metrics))
        for part, advantage in zip(parts, prepared.advantages, strict=True):
            seen.add(part, advantage)
        seen.metrics |= merge_metrics([(part.metrics, part.tokens) for part in parts]) | {"loss": seen.loss}
        return seen

    def _keeps_graph(self, minibatch: Minibatch) -> bool:
        """Whether one forward pass serves for everything."""
        return len(minibatch.microbatches) == 1 and self.passes.count == 1

    def _first_pass(self, minibatch: Minibatch) -> list[HeadValues]:
        """Values of the whole minibatch where they are needed before the loss."""
        graph, several = self._keeps_graph(minibatch), len(minibatch.microbatches) > 1
        if not (graph or self.extensions.need_values or (several and self.needs_statistics)):
            return []
        return self.passes.values(minibatch.microbatches, "topk_logprob" in self.objective.uses, graph)

    def _prepare(self, tasks: list[Task], values: list[HeadValues], advantages: list[Tensor]) -> Prepared:
        if not self.extensions.need_values:
            return Prepared(advantages, None, {})
        polarity = []
        if self.extensions.needs_polarity:
            polarity = self.passes.polarities([task.microbatch for task in tasks])
        return self.extensions.prepare(token_batches(tasks, values), polarity)

    def _statistics(self, tasks: list[Task], values: list[HeadValues], seed: int) -> Sequence[Statistics | None]:
        """What each micro-batch must know of all of them."""
        if len(tasks) < 2 or not self.needs_statistics:
            return [None] * len(tasks)
        batches = token_batches(tasks, values)
        with refusals(self.objective):
            if self.passes.count == 1:
                return [self.objective.statistics(batches)] * len(tasks)
            return self.objective.statistics_apart(batches, torch.Generator().manual_seed(seed))


def token_batches(tasks: list[Task], values: list[HeadValues]) -> list[TokenBatch]:
    """What the objective sees of each micro-batch, without graph."""
    return [task.token_batch(now).detach() for task, now in zip(tasks, values, strict=True)]


def backward(task: Task, now: HeadValues, whole: Whole, objective: Objective, config: ObjectiveConfig) -> Part:
    """Add the gradients of one micro-batch, whose values under π are ``now``, with graph."""
    batch = task.token_batch(now)
    generator = torch.Generator(now.logprob.device).manual_seed(whole.seed)
    with refusals(objective):
        output = objective(batch, whole.token_count, whole.sequence_count, task.statistics, generator)
    loss, terms = _with_terms(output.loss, batch, task.entropy_weight, config, whole.token_count)
    loss.backward()
    return Part(now.logprob.detach(), now.entropy.detach(), float(loss.detach()), terms, output.metrics, batch.tokens)


def _with_terms(
    loss: Tensor, batch: TokenBatch, entropy_weight: Tensor | None, config: ObjectiveConfig, token_count: int
) -> tuple[Tensor, dict[str, float]]:
    """The objective's loss with the terms beside it, none of which any ratio multiplies."""
    terms = {}
    if config.kl_coef > 0 and batch.reference_logprob is not None:
        kl = reference_kl(batch, config.kl_estimator).sum() / token_count
        loss = loss + config.kl_coef * kl
        terms["kl/reference"] = float(kl.detach())
    if entropy_weight is not None and batch.entropy is not None:
        loss = loss + entropy_term(entropy_weight, batch.entropy)
    return loss, terms


@contextmanager
def refusals(objective: Objective) -> Iterator[None]:
    """What a recipe refuses to go on with (estr with undecided = "error") ends the run with its sentence."""
    try:
        yield
    except ValueError as error:
        raise RunError(f"objective.recipe {objective.name}: {error}") from error
