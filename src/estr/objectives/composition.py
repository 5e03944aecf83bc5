"""An objective is gates (detached masks) x weights (detached) x one surrogate (differentiable) x one reduction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from estr.objectives.context import Context
from estr.objectives.hyperparameters import Parameter, choice

NONE: frozenset[str] = frozenset()
SCOPES = ("token", "segment", "sequence", "group")
REDUCTIONS = ("token-mean", "sequence-mean", "sequence-sum", "segment-mean")


@dataclass(frozen=True)
class Part:
    """One part of a composition.

    ``apply(context)`` returns a tensor [N]. A part that needs something of the whole optimizer batch (a quantile, a
    mean) says how to get it in ``measure(context)``; it is then handed over: ``apply(context, measured)``.
    ``edge`` names the ratios it reads ("B", "U", "E", several or none), ``scope`` over what it decides
    (token, sequence, segment, group). ``needs`` are batch fields that must be given, ``uses`` those read if given.
    ``factor`` names the ratios it multiplies the loss by, where they are not those it reads.
    """

    name: str
    edge: str
    scope: str
    apply: Callable[..., Tensor]
    needs: frozenset[str] = NONE
    uses: frozenset[str] = NONE
    measure: Callable[[Context], Any] | None = None
    factor: str | None = None

    def __post_init__(self) -> None:
        if not set(self.edge) <= set("BUE"):
            raise ValueError(f"edge of {self.name!r} must be made of the letters B, U, E, got {self.edge!r}")
        if self.scope not in SCOPES:
            raise ValueError(f"scope of {self.name!r} must be one of {', '.join(SCOPES)}, got {self.scope!r}")

    def __call__(self, context: Context, measured: Any) -> Tensor:
        return self.apply(context) if self.measure is None else self.apply(context, measured)


@dataclass(frozen=True)
class Gate(Part):
    """``apply`` gives bool [N], True where a token is kept; it runs without gradient mode.

    ``keeps_value``: the loss of what it drops stays in the sum as a number.
    """

    keeps_value: bool = False


@dataclass(frozen=True)
class Weight(Part):
    """``apply`` gives a factor [N]; it runs without gradient mode."""


@dataclass(frozen=True)
class Surrogate(Part):
    """``apply`` gives the loss [N] of each token, with graph."""


@dataclass(frozen=True)
class Composition:
    """``proximal`` derives log q [N] from the batch for methods that approximate it; it then need not be given.

    ``average`` is the decay of the average of the weights whose log-probabilities must come in as q; None: q is the
    weights at the start of the rollout batch.
    """

    surrogate: Surrogate
    gates: tuple[Gate, ...] = ()
    weights: tuple[Weight, ...] = ()
    reduction: str = "token-mean"
    proximal: Callable[[Context], Tensor] | None = None
    proximal_needs: frozenset[str] = NONE
    average: float | None = None

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {self.reduction!r}")

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*self.gates, *self.weights, self.surrogate)

    @property
    def edges(self) -> frozenset[str]:
        """The letters of all edges it reads."""
        return frozenset("".join(part.edge for part in self.parts))

    @property
    def counted_twice(self) -> frozenset[str]:
        """Edges among B and U whose ratio multiplies the loss more than once, E being both."""
        factors = [part.edge if part.factor is None else part.factor for part in (*self.weights, self.surrogate)]
        letters = "".join(factors).replace("E", "BU")
        return frozenset(edge for edge in "BU" if letters.count(edge) > 1)

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the batch that must be given beside the four that every batch has."""
        behavior_edge = {"proximal_logprob"} if "B" in self.edges and self.proximal is None else NONE
        return frozenset().union(behavior_edge, self.proximal_needs, *(part.needs for part in self.parts))

    @property
    def uses(self) -> frozenset[str]:
        """Fields that are read, whether they must be given or not."""
        update_edge = {"proximal_logprob"} if "U" in self.edges and self.proximal is None else NONE
        return frozenset().union(self.needs, update_edge, *(part.uses for part in self.parts))


@dataclass(frozen=True)
class Recipe:
    """One published method: what it attaches where, with which defaults, from which source, and how sure that is."""

    name: str
    description: str  # one line
    formula: str
    source: str
    confidence: str  # "official code", "framework code", "paper", "reading of the abstract" and the like
    parameters: Mapping[str, Parameter]
    compose: Callable[[SimpleNamespace], Composition]
    denominator: str = "all"
    note: str = ""  # where sources differ or are silent, and what was chosen
    all_parameters: Mapping[str, Parameter] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        other = "kept" if self.denominator == "all" else "all"
        full = {**self.parameters, "denominator": choice(self.denominator, other)}
        object.__setattr__(self, "all_parameters", full)

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Name to default."""
        return {name: parameter.default for name, parameter in self.all_parameters.items()}
