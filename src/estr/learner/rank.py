"""What one process of the learner has and does: the weights or its slices of them, and the passes over them.

With several ranks every method that computes is called on all of them at once, because gathering weights and adding up
gradients takes them all. Where one has less to do than another, ``None`` stands for its turn: it then works on a token
that counts for nothing, so that nobody waits for it in vain.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from estr.config.sections import Config
from estr.controllers import StepController
from estr.learner.average import AveragedWeights
from estr.learner.minibatch import Task
from estr.learner.optimizer import Optimizer, make_trainable_weights_wide
from estr.learner.packing import MicroBatch, Unit
from estr.learner.policy import Policy
from estr.learner.reference import Reference
from estr.learner.scoring import score_norms
from estr.learner.sharding import Shards, gathered_state, own_part, part_of, placed_like, release, whole
from estr.learner.step import Part, Whole, backward
from estr.models.forward import can_share_prompts, check_head, prepare_model
from estr.models.head import HeadValues
from estr.models.load import merged_state
from estr.objectives import Objective

Weights = Literal["policy", "average", "reference"]
Values = tuple[Tensor, Tensor]
"""log π and entropy of a micro-batch's action tokens, each ``[N]``."""


class Rank:
    """One process's part of the learner; alone (``device``: where ranks compute is None) it is all of it.

    ``reference`` is as for the learner; ``controllers`` are this process's own.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        objective: Objective,
        controllers: Sequence[StepController],
        *,
        needs_reference: bool = False,
        reference: nn.Module | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.model, self._config, self._objective, self._controllers = model, config, objective, controllers
        autocast = torch.bfloat16 if config.learner.dtype == "bfloat16" else None
        prepare_model(model, config.model.gradient_checkpointing)
        make_trainable_weights_wide(model)
        check_head(model)
        self.can_share_prompts = can_share_prompts(model)
        self.policy = Policy(model, config.rollout.temperature, autocast)
        self.reference = Reference(self.policy, reference) if needs_reference else None
        self._shards = None if device is None else self._share_out(device)
        self.device = next(model.parameters()).device
        self.optimizer = Optimizer(model, config.learner, self._shards)
        beta = objective.composition.average
        self.average = None if beta is None else AveragedWeights(model, beta)

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return 1 if self._shards is None else self._shards.count

    def _share_out(self, device: torch.device) -> Shards:
        shards = Shards(device)
        shards.share_out(self.policy)
        if self.reference is not None and self.reference.frozen is not None:
            shards.share_out(self.reference.frozen)
        return shards

    # ------------------------------------------------------------------ passes without gradient

    def score(self, microbatches: Sequence[MicroBatch | None], weights: Weights) -> list[Values]:
        """log π and entropy of each micro-batch under some of the weights."""
        with self._weights(weights) as policy, torch.no_grad():
            found = [policy(self._placed(microbatch)) for microbatch in microbatches]
            release(policy)
        return [self._out((v.logprob, v.entropy)) for v, m in zip(found, microbatches, strict=True) if m is not None]

    def values(self, microbatches: Sequence[MicroBatch | None], topk: bool, graph: bool = False) -> list[HeadValues]:
        """What the head gives for each micro-batch; with ``graph``, which only a rank alone keeps."""
        with torch.set_grad_enabled(graph):
            found = [self.policy(self._placed(m), topk and m is not None) for m in microbatches]
        release(self.policy)
        return [HeadValues(*self._out(v)) for v, m in zip(found, microbatches, strict=True) if m is not None]

    @torch.no_grad()
    def polarities(self, microbatches: Sequence[MicroBatch | None]) -> list[Tensor]:
        """Σ_v p_v² (log p_v + H) at the action tokens of each micro-batch."""
        found = [self.policy.polarity(self._placed(microbatch)) for microbatch in microbatches]
        release(self.policy)
        return [self._out((v,))[0] for v, m in zip(found, microbatches, strict=True) if m is not None]

    @contextmanager
    def _weights(self, weights: Weights) -> Iterator[Policy]:
        if weights == "policy":
            yield self.policy
        elif weights == "reference":
            assert self.reference is not None
            with self.reference.weights() as policy:
                yield policy
        else:
            assert self.average is not None
            with self.average.weights():
                yield self.policy

    def _placed(self, microbatch: MicroBatch | None) -> MicroBatch:
        return (_nothing() if microbatch is None else microbatch).to(self.device)

    def _out(self, values: Sequence[Any]) -> Any:
        """Values for the process that leads: on the CPU where there are several."""
        return tuple(values if self._shards is None else (v if v is None else v.cpu() for v in values))

    # ------------------------------------------------------------------ passes with gradient

    def backward(self, tasks: Sequence[Task | None], whole: Whole) -> list[Part]:
        """Add up the gradients of micro-batches."""
        parts = []
        for task in tasks:
            if task is None:
                (self.policy(self._placed(None)).logprob.sum() * 0.0).backward()
            else:
                parts.append(self._backward(task, whole))
        return parts

    def _backward(self, task: Task, whole: Whole) -> Part:
        placed = task.to(self.device)
        now = task.now or self.policy(placed.microbatch, "topk_logprob" in self._objective.uses)
        part = backward(placed, now, whole, self._objective, self._config.objective)
        logprob, entropy = self._out((part.logprob, part.entropy))
        return Part(logprob, entropy, part.loss, part.terms, part.metrics, part.tokens)

    def score_norms(self, units: Sequence[Unit]) -> tuple[Tensor, Tensor]:
        """Norm of each unit's score ∇ log π ``[S]``, log π of all action tokens in order ``[N]``; for a rank alone."""
        return score_norms(self.model, units, self.policy.temperature, self.policy.autocast)

    def score_norms_in_turn(self, turns: Sequence[MicroBatch | None]) -> list[tuple[float, Tensor | None]]:
        """Norm of the score of one micro-batch after the other, each of which one rank has; log π there."""
        found = []
        for microbatch in turns:
            logprob = self.policy(self._placed(microbatch)).logprob
            (logprob.sum() * float(microbatch is not None)).backward()
            found.append((self.optimizer.gradient_norm(), None if microbatch is None else logprob.detach().cpu()))
            self.optimizer.zero_grad()
        return found

    # ------------------------------------------------------------------ the update

    def transform(self, controller: int) -> dict[str, float]:
        """Let a controller change the gradients; its metrics."""
        reduce = None if self._shards is None else self._shards.sum
        return self._controllers[controller].transform(self.optimizer.gradients, reduce)

    def check(self) -> None:
        """Nothing: other ranks may die, this one is here."""

    def update_average(self) -> None:
        """Take the weights into their average, where one is kept."""
        if self.average is not None:
            self.average.update()

    # ------------------------------------------------------------------ what is kept

    def weights(self) -> Mapping[str, Tensor]:
        """The policy's plain weights by name, each once; the parameters' own storage where this rank is alone, else
        copies, and on the first rank only."""
        if self._shards is None:
            return merged_state(self.model)
        return gathered_state(self.policy, keep=self._shards.rank == 0)

    def trainable(self) -> dict[str, Tensor]:
        """The trainable weights by name, whole."""
        return self._whole(dict(self.optimizer.parameters))

    def state_tensors(self) -> dict[str, Tensor]:
        """Optimizer moments and averaged weights, no copies; with several ranks whole, and what controllers remember of
        gradients as well."""
        parts = {"optimizer": self.optimizer.state_tensors()}
        if self.average is not None:
            parts["average"] = {name: self._slice(name, part) for name, part in self.average.state_tensors().items()}
        for number, controller in enumerate(self._controllers if self._shards is not None else ()):
            remembered = controller.state_tensors().items()
            parts[f"extension/controller{number}"] = {name: self._slice_of_gradient(name, t) for name, t in remembered}
        return self._whole({f"{part}/{name}": t for part, tensors in parts.items() for name, t in tensors.items()})

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take back a learner's ``state`` and this rank's part of its tensors; of several ranks also the controllers'
        memory and adapters."""
        self.optimizer.load_state_tensors(under("optimizer/", tensors))
        if self.average is not None:
            self.average.load_state(state["average"], under("average/", tensors))
        if self._shards is None:
            return
        for number, controller in enumerate(self._controllers):
            controller.load_state_dict(state["extensions"][f"controller{number}"])
            controller.load_state_tensors(under(f"extension/controller{number}/", tensors))
        with torch.no_grad():
            for name, part in under("adapter/", tensors).items():
                own_part(self.optimizer.parameters[name]).copy_(part)

    def _slice(self, name: str, part: Tensor) -> Tensor:
        return placed_like(self.optimizer.parameters[name], part)

    def _slice_of_gradient(self, name: str, part: Tensor) -> Tensor:
        """Controllers number what they remember of gradients: ``previous.0``, ``previous.1``, …"""
        return placed_like(list(self.optimizer.parameters.values())[int(name.rpartition(".")[2])], part)

    def _whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._shards is None:
            return tensors
        found = {}
        for name, tensor in tensors.items():
            gathered = whole(tensor)
            if self._shards.rank == 0:
                found[name] = gathered
        return found


def _nothing() -> MicroBatch:
    """The turn of a rank that has no micro-batch: one token read and one predicted."""
    zero, number = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    return MicroBatch(zero, torch.tensor([0, 1]), zero, zero, zero, number, number, zero, (0,), ((0, 0, 1),))


def call(rank: Rank, name: str, arguments: Sequence[Any]) -> Any:
    """``rank.name(*arguments)``; ``name`` may lead through its parts, as ``optimizer.step`` does."""
    return operator.attrgetter(name)(rank)(*arguments)


def parts_of(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """The slices of whole tensors that belong to ``rank``."""
    return {name: part_of(tensor, rank, ranks) for name, tensor in tensors.items()}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
