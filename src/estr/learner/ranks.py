"""A learner of several ranks, as the process that leads it sees it: rank 0 is here, the others are elsewhere.

The leader has the whole batch, everything that is decided about it and all that is written down. It hands each rank
its micro-batches and gets back log-probabilities, entropies and metrics; weights, gradients and moments stay with the
ranks, which share them out (``sharding``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from estr.errors import EstrError, RunError
from estr.learner.minibatch import Task
from estr.learner.packing import MicroBatch, Unit, pack
from estr.learner.rank import Rank, Values, Weights, call, parts_of
from estr.learner.step import Part, Whole
from estr.models.head import HeadValues

Item = TypeVar("Item", MicroBatch, Task)


class Others(Protocol):
    """The processes of ranks 1, 2, …"""

    @property
    def device(self) -> torch.device:
        """Where each rank computes."""
        ...

    def ask(self, name: str, arguments: Sequence[Sequence[Any]]) -> None:
        """Have every rank call ``name`` (``rank.call``) with its own arguments; raises RunError where one is dead."""
        ...

    def answers(self) -> list[Any]:
        """What they returned, in order; raises RunError where one died or said why it could not."""
        ...

    def explain(self, error: Exception) -> EstrError | None:
        """Why a collective failed here, where it was not this process's own doing."""
        ...

    def check(self) -> None:
        """Raises RunError where a rank has died."""
        ...


class Ranks:
    """Does on all ranks what ``Rank`` does on one."""

    def __init__(self, own: Rank, others: Others) -> None:
        self._own, self._others, self.count = own, others, own.count
        self._failure: EstrError | None = None
        self.device = torch.device("cpu")
        self.model, self.reference, self.average = own.model, own.reference, own.average
        self.optimizer = SharedOptimizer(self.every, own)

    def every(self, name: str, *arguments: Any) -> list[Any]:
        """What ``name`` gives on each rank for the same arguments."""
        return self.each(name, [arguments] * self.count)

    def each(self, name: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """What ``name`` gives on each rank for its own arguments.

        Raises RunError where a rank fails, and ever after: the others are somewhere in the middle then.
        """
        if self._failure is not None:
            raise RunError(str(self._failure))
        try:
            self._others.ask(name, arguments[1:])
            return [call(self._own, name, arguments[0]), *self._others.answers()]
        except EstrError as error:
            self._failure = error
            raise
        except Exception as error:
            self._failure = self._others.explain(error) or RunError(f"the learner failed: {error}")
            if isinstance(error, RuntimeError):
                raise self._failure from error
            raise

    def check(self) -> None:
        """Raises RunError where a rank has died."""
        self._others.check()

    def _share(
        self, name: str, items: Sequence[Item], microbatch: Callable[[Item], MicroBatch], *more: Any
    ) -> list[Any]:
        """``name`` over items that each belong to a rank, the largest first; results in the order of the items."""
        if not items:
            return []
        places: list[list[int]] = [[] for _ in range(self.count)]
        for place in sorted(range(len(items)), key=lambda place: -len(microbatch(items[place]).tokens)):
            places[microbatch(items[place]).rank].append(place)
        turns = max(map(len, places))
        found: list[Any] = [None] * len(items)
        answers = self.each(name, [(_padded([items[place] for place in own], turns), *more) for own in places])
        for own, answer in zip(places, answers, strict=True):
            for place, value in zip(own, answer, strict=True):
                found[place] = value
        return found

    # ------------------------------------------------------------------ passes

    def score(self, microbatches: Sequence[MicroBatch], weights: Weights) -> list[Values]:
        """See :meth:`Rank.score`."""
        return self._share("score", microbatches, _itself, weights)

    def values(self, microbatches: Sequence[MicroBatch], topk: bool, graph: bool = False) -> list[HeadValues]:
        """See :meth:`Rank.values`; never with graph."""
        assert not graph
        return self._share("values", microbatches, _itself, topk)

    def polarities(self, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        """See :meth:`Rank.polarities`."""
        return self._share("polarities", microbatches, _itself)

    def backward(self, tasks: Sequence[Task], whole: Whole) -> list[Part]:
        """See :meth:`Rank.backward`."""
        return self._share("backward", tasks, lambda task: task.microbatch, whole)

    def score_norms(self, units: Sequence[Unit]) -> tuple[Tensor, Tensor]:
        """See :meth:`Rank.score_norms`; the ranks take turns."""
        turns = [pack([unit], sum(len(row.tokens) for row in unit)) for unit in units]
        single = [found[0] for found in turns if found]
        owners = [number % self.count for number in range(len(single))]
        asked = [
            ([m if owner == rank else None for m, owner in zip(single, owners, strict=True)],)
            for rank in range(self.count)
        ]
        answers = self.each("score_norms_in_turn", asked) if single else []
        found = iter([answers[owner][number] for number, owner in enumerate(owners)])
        norms, logprobs = [], [torch.zeros(0)]
        for turn in turns:
            norm, logprob = next(found) if turn else (0.0, torch.zeros(0))
            norms.append(norm)
            logprobs.append(logprob)
        return torch.tensor(norms, dtype=torch.float64), torch.cat(logprobs)

    # ------------------------------------------------------------------ the update, and what is kept

    def transform(self, controller: int) -> dict[str, float]:
        """See :meth:`Rank.transform`."""
        return dict(self.every("transform", controller)[0])

    def update_average(self) -> None:
        """See :meth:`Rank.update_average`."""
        self.every("update_average")

    def weights(self) -> Mapping[str, Tensor]:
        """See :meth:`Rank.weights`."""
        return dict(self.every("weights")[0])

    def trainable(self) -> dict[str, Tensor]:
        """See :meth:`Rank.trainable`."""
        return dict(self.every("trainable")[0])

    def state_tensors(self) -> dict[str, Tensor]:
        """See :meth:`Rank.state_tensors`."""
        return dict(self.every("state_tensors")[0])

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Give each rank its part of a learner's state, from a checkpoint of any number of ranks."""
        state = {name: state[name] for name in ("extensions", "average") if name in state}
        self.each("load_state", [(state, parts_of(tensors, rank, self.count)) for rank in range(self.count)])


class SharedOptimizer:
    """An ``Optimizer`` on every rank, by the same names."""

    def __init__(self, every: Callable[..., list[Any]], own: Rank) -> None:
        self._every, self._own = every, own

    @property
    def parameters(self) -> dict[str, Any]:
        """The trainable weights, sharded."""
        return self._own.optimizer.parameters

    def gradient_norm(self) -> float:
        """Euclidean norm over all gradients."""
        return float(self._every("optimizer.gradient_norm")[0])

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale gradients of global norm ``norm`` down to ``max_norm``."""
        self._every("optimizer.clip", norm, max_norm)

    def step(self, learning_rate: float) -> None:
        """One update, then no gradients."""
        self._every("optimizer.step", learning_rate)

    def finite(self) -> bool:
        """Whether every trainable weight is a finite number."""
        return bool(self._every("optimizer.finite")[0])

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._every("optimizer.zero_grad")


def _padded(items: Sequence[Any], turns: int) -> list[Any]:
    return [*items, *[None] * (turns - len(items))]


def _itself(microbatch: MicroBatch) -> MicroBatch:
    return microbatch
