"""Forward and backward of one optimizer step: micro-batches in, accumulated gradients and what was seen out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from estr.batch import TokenBatch
from estr.config.sections import ObjectiveConfig
from estr.controllers import entropy_term
from estr.errors import RunError
from estr.learner.extensions import Extensions, Prepared
from estr.learner.minibatch import Minibatch
from estr.learner.packing import MicroBatch
from estr.learner.scoring import polarities, values
from estr.models.head import HeadValues
from estr.objectives import Objective, Statistics, merge_metrics, reference_kl


@dataclass
class Seen:
    """What the pass over a minibatch saw, by micro-batch, without graph; the gradients are in the parameters."""

    logprob: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    advantage: list[Tensor] = field(default_factory=list)
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, logprob: Tensor, entropy: Tensor, advantage: Tensor, loss: float, terms: dict[str, float]) -> None:
        """Take in one micro-batch; its loss and ``terms`` are shares of sums over the minibatch."""
        self.logprob.append(logprob.detach())
        self.entropy.append(entropy.detach())
        self.advantage.append(advantage)
        self.loss += loss
        for name, value in terms.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value


@dataclass
class Gradient:
    """Computes the gradient of one minibatch's loss.

    The loss is the objective's, plus ``kl_coef`` times the mean KL to the reference over all action tokens, minus what
    an entropy regularizer pays. Any split into micro-batches gives the same gradient: denominators and statistics are
    those of the whole minibatch.
    """

    model: nn.Module
    objective: Objective
    config: ObjectiveConfig
    extensions: Extensions
    temperature: float
    autocast: torch.dtype | None

    @property
    def needs_statistics(self) -> bool:
        """Whether the recipe reads something of the whole optimizer batch beside the two counts."""
        measures = any(part.measure is not None for part in self.objective.composition.parts)
        return measures or self.objective.hyperparameters.get("denominator") == "kept"

    def __call__(self, minibatch: Minibatch, target_version: int, fresh: bool, seed: int) -> Seen:
        """Accumulate gradients. ``fresh``: the weights are still those that q was frozen at."""
        step = _Step(minibatch, target_version, fresh)
        passes = self._first_pass(minibatch)
        prepared = self._prepare(step, passes)
        statistics = self._statistics(step, passes, prepared)
        seen, parts = Seen(metrics=dict(prepared.metrics)), []
        for i, microbatch in enumerate(minibatch.microbatches):
            now = passes[0] if len(minibatch.microbatches) == 1 else self._forward(microbatch)
            batch = step.token_batch(i, now, prepared.advantages[i])
            generator = torch.Generator(now.logprob.device).manual_seed(seed)
            with self._refusals():
                output = self.objective(batch, minibatch.token_count, minibatch.sequence_count, statistics, generator)
            loss, terms = self._with_terms(output.loss, batch, prepared, i, minibatch.token_count)
            loss.backward()
            parts.append((output.metrics, batch.tokens))
            seen.add(now.logprob, now.entropy, prepared.advantages[i], float(loss.detach()), terms)
        seen.metrics |= merge_metrics(parts) | {"loss": seen.loss}
        return seen

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """What a recipe refuses to go on with (estr with undecided = "error") ends the run with its sentence."""
        try:
            yield
        except ValueError as error:
            raise RunError(f"objective.recipe {self.objective.name}: {error}") from error

    def _forward(self, microbatch: MicroBatch) -> HeadValues:
        topk = "topk_logprob" in self.objective.uses
        return values(self.model, microbatch, self.temperature, self.autocast, topk)

    def _first_pass(self, minibatch: Minibatch) -> list[HeadValues]:
        """Values of the whole minibatch where they are needed before the loss; one micro-batch keeps its graph."""
        if len(minibatch.microbatches) == 1:
            return [self._forward(minibatch.microbatches[0])]
        if not (self.needs_statistics or self.extensions.need_values):
            return []
        with torch.no_grad():
            return [self._forward(microbatch) for microbatch in minibatch.microbatches]

    def _prepare(self, step: _Step, passes: list[HeadValues]) -> Prepared:
        advantages = step.minibatch.advantages()
        if not self.extensions.need_values:
            return Prepared(advantages, None, {})
        polarity = []
        if self.extensions.needs_polarity:
            polarity = polarities(self.model, step.minibatch.microbatches, self.temperature, self.autocast)
        return self.extensions.prepare(step.token_batches(passes, advantages), polarity)

    def _statistics(self, step: _Step, passes: list[HeadValues], prepared: Prepared) -> Statistics | None:
        if len(passes) < 2 or not self.needs_statistics:
            return None
        with self._refusals():
            return self.objective.statistics(step.token_batches(passes, prepared.advantages))

    def _with_terms(
        self, loss: Tensor, batch: TokenBatch, prepared: Prepared, place: int, token_count: int
    ) -> tuple[Tensor, dict[str, float]]:
        """The objective's loss with the terms beside it, none of which any ratio multiplies."""
        terms = {}
        if self.config.kl_coef > 0 and batch.reference_logprob is not None:
            kl = reference_kl(batch, self.config.kl_estimator).sum() / token_count
            loss = loss + self.config.kl_coef * kl
            terms["kl/reference"] = float(kl.detach())
        if prepared.entropy_weights is not None and batch.entropy is not None:
            loss = loss + entropy_term(prepared.entropy_weights[place], batch.entropy)
        return loss, terms


@dataclass
class _Step:
    """One optimizer step's minibatch and the version it is trained at."""

    minibatch: Minibatch
    target_version: int
    fresh: bool

    def token_batch(self, place: int, now: HeadValues, advantage: Tensor) -> TokenBatch:
        microbatch = self.minibatch.microbatches[place]
        return self.minibatch.token_batch(microbatch, now, advantage, self.target_version, self.fresh)

    def token_batches(self, passes: list[HeadValues], advantages: list[Tensor]) -> list[TokenBatch]:
        return [self.token_batch(i, now, advantages[i]).detach() for i, now in enumerate(passes)]
