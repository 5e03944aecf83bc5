"""``objective(name, ...)``: a recipe with its hyperparameters, ready to be called on batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from estr.batch import TokenBatch
from estr.errors import nearest, shown
from estr.objectives import metrics as measures
from estr.objectives.composition import Part, Recipe
from estr.objectives.context import Context
from estr.objectives.covariance import Draw
from estr.objectives.hyperparameters import resolve
from estr.objectives.reductions import Denominator, reduce
from estr.objectives.table import RECIPES
from estr.own_code import file_of, import_own, is_own

_BUILT_IN = frozenset(RECIPES)


@dataclass(frozen=True)
class Statistics:
    """What a recipe needs of the whole optimizer batch, without graph; from ``Objective.statistics``."""

    recipe: str
    measured: tuple[Any, ...]  # one entry per part of the composition, None where it needs nothing
    kept_tokens: Tensor
    kept_sequences: Tensor

    def to(self, device: torch.device | str) -> Statistics:
        """The same with its tensors on ``device``."""
        measured = tuple(_moved(value, device) for value in self.measured)
        return replace(
            self,
            measured=measured,
            kept_tokens=self.kept_tokens.to(device),
            kept_sequences=self.kept_sequences.to(device),
        )


def _moved(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    return value.to(device) if isinstance(value, Tensor | Draw) else value


@dataclass(eq=False)
class Output:
    """What an objective returns; only ``loss`` and ``token_loss`` carry a graph."""

    loss: Tensor  # scalar to minimize
    token_loss: Tensor  # [N] before normalization
    keep: Tensor  # bool [N], the final mask
    weight: Tensor  # [N], the detached weight; 1 where there is none, 0 where a token is dropped
    measured: Tensor  # [M] values of the metrics, still on the device

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Finite numbers by name (see ``estr.objectives.metrics``); read once, so that a step costs one transfer."""
        return dict(zip(measures.NAMES, self.measured.tolist(), strict=True))


class Objective:
    """A recipe with hyperparameters. Call it on a ``TokenBatch``."""

    def __init__(self, recipe: Recipe, hyperparameters: dict[str, Any]) -> None:
        self.recipe = recipe
        self.name = recipe.name
        values = resolve(recipe.name, recipe.all_parameters, hyperparameters)
        self.hyperparameters: dict[str, Any] = vars(values)
        try:
            self.composition = recipe.compose(values)
        except ValueError as error:
            raise ValueError(f"{recipe.name}: {error}") from None
        self.needs = self.composition.needs
        self.uses = self.composition.uses
        self.edges = self.composition.edges

    def __repr__(self) -> str:
        return f"objective({self.name!r}, {', '.join(f'{k}={v!r}' for k, v in self.hyperparameters.items())})"

    @property
    def update_edge_only(self) -> bool:
        """Whether every ratio it reads is on edge U: with q given, one minibatch and one epoch it then does nothing."""
        return self.edges == {"U"}

    def __call__(
        self,
        batch: TokenBatch,
        token_count: int | None = None,
        sequence_count: int | None = None,
        statistics: Statistics | None = None,
        generator: torch.Generator | None = None,
    ) -> Output:
        """The loss of a batch, or of one micro-batch of it.

        ``token_count`` and ``sequence_count`` are the denominators of the whole optimizer batch (defaults: this batch's
        N and S); ``statistics`` is what ``self.statistics`` found in all of it. ``generator`` serves recipes that draw.
        """
        context = self._context(batch, generator)
        measured = self._measured(context, statistics)
        keep, frozen = self._masks(context, measured)
        weight = self._weight(context, measured, keep)
        token_loss = self._token_loss(context, measured, weight, keep, frozen)
        denominator = Denominator(
            mode=self.hyperparameters["denominator"],
            tokens=batch.tokens if token_count is None else token_count,
            sequences=batch.sequence_count if sequence_count is None else sequence_count,
            kept_tokens=None if statistics is None else statistics.kept_tokens,
            kept_sequences=None if statistics is None else statistics.kept_sequences,
        )
        loss = reduce(self.composition.reduction, context, token_loss, keep, denominator)
        return Output(loss, token_loss, keep, weight, measures.measure(context, keep, loss))

    @torch.no_grad()
    def statistics(self, batches: TokenBatch | Iterable[TokenBatch]) -> Statistics:
        """What the recipe needs of the whole optimizer batch: quantiles, means, thresholds, kept counts; no graph."""
        parts = [batches] if isinstance(batches, TokenBatch) else list(batches)
        context = self._context(TokenBatch.concatenate([part.detach() for part in parts]), torch.Generator())
        measured = self._measured(context, None)
        keep, _ = self._masks(context, tuple(map(copy, measured)))  # a draw is left to the first call
        sequences = (context.sequence_sum(keep.to(context.dtype)) > 0).sum()
        return Statistics(self.name, measured, keep.sum(), sequences)

    def statistics_apart(self, batches: Sequence[TokenBatch], generator: torch.Generator) -> list[Statistics]:
        """``statistics`` for micro-batches that are worked on in several processes: for each its own.

        They differ where a recipe draws among the tokens of all of them: each then knows what came before it.
        """
        shared = self.statistics(batches)
        draws = [value for value in shared.measured if isinstance(value, Draw)]
        if not draws:
            return [shared] * len(batches)
        for draw in draws:
            draw.decide(generator)
        apart = []
        for batch in batches:
            apart.append(replace(shared, measured=tuple(map(copy, shared.measured))))
            self._masks(self._context(batch.detach(), None), shared.measured)
        return apart

    def _context(self, batch: TokenBatch, generator: torch.Generator | None) -> Context:
        for name in sorted(self.needs):
            if getattr(batch, name) is None:
                raise ValueError(f"recipe {self.name!r} needs {name}; give it to the TokenBatch")
        checked = self.uses
        if batch.proximal_entropy is not None and "proximal_entropy" in self.uses:
            checked = checked - ({"behavior_entropy"} - self.needs)  # only the fallback of the former
        return Context(batch, checked, self.composition.proximal, generator)

    @torch.no_grad()
    def _measured(self, context: Context, statistics: Statistics | None) -> tuple[Any, ...]:
        if statistics is None:
            return tuple(_measure(part, context) for part in self.composition.parts)
        if not isinstance(statistics, Statistics):
            raise ValueError(f"statistics must come from this objective's statistics(batches), got {shown(statistics)}")
        if statistics.recipe != self.name:
            raise ValueError(f"these statistics were taken by recipe {statistics.recipe!r}, not by {self.name!r}")
        return statistics.measured

    @torch.no_grad()
    def _masks(self, context: Context, measured: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
        """The final mask, and where a dropped token keeps its value (both bool [N])."""
        keep, frozen = context.valid, None
        for gate, value in zip(self.composition.gates, measured, strict=False):
            passed = gate(context, value)
            if gate.keeps_value:
                frozen = ~passed if frozen is None else frozen | ~passed
            keep = keep & passed
        return keep, frozen

    @torch.no_grad()
    def _weight(self, context: Context, measured: tuple[Any, ...], keep: Tensor) -> Tensor:
        weight = None
        offset = len(self.composition.gates)
        for part, value in zip(self.composition.weights, measured[offset:], strict=False):
            factor = part(context, value)
            weight = factor if weight is None else weight * factor
        return keep.to(context.dtype) if weight is None else torch.where(keep, weight, weight.new_zeros(()))

    def _token_loss(
        self, context: Context, measured: tuple[Any, ...], weight: Tensor, keep: Tensor, frozen: Tensor | None
    ) -> Tensor:
        loss = self.composition.surrogate(context, measured[-1])
        if self.composition.weights:
            loss = weight * loss
        dropped = loss.new_zeros(())
        if frozen is not None:
            dropped = torch.where(frozen & context.valid, loss.detach(), dropped)
        return torch.where(keep, loss, dropped)


def _measure(part: Part, context: Context) -> Any:
    return None if part.measure is None else part.measure(context)


def objective(name: str, **hyperparameters: Any) -> Objective:
    """The objective of a recipe, built in or of your own as ``module:name``; see ``recipes()`` and ``find_recipe``."""
    return Objective(find_recipe(name), hyperparameters)


def find_recipe(name: str) -> Recipe:
    """The recipe ``name``: one of ``recipes()``, or ``module:name`` for one that the module defines or registers.

    Raises:
        ValueError: there is none; the sentence names the nearest, or where the module was looked for.
    """
    if isinstance(name, str) and name in RECIPES:
        return RECIPES[name]
    if not is_own(name):
        raise ValueError(f"unknown recipe {name!r}{nearest(name, RECIPES)}")
    module, short = import_own(name)
    defined = {recipe.name: recipe for recipe in vars(module).values() if isinstance(recipe, Recipe)}
    known = {key: recipe for key, recipe in RECIPES.items() if key not in _BUILT_IN} | defined
    found = known.get(short, vars(module).get(short))
    if not isinstance(found, Recipe):
        raise ValueError(
            f"module {module.__name__!r} ({file_of(module)}) defines no recipe {short!r}{nearest(short, known)}"
        )
    return found


def recipes() -> dict[str, Recipe]:
    """All recipes by name."""
    return dict(RECIPES)


def register(recipe: Recipe) -> Recipe:
    """Makes a recipe available by its name."""
    if recipe.name in RECIPES:
        raise ValueError(f"there is already a recipe named {recipe.name!r}; choose another name")
    RECIPES[recipe.name] = recipe
    return recipe
