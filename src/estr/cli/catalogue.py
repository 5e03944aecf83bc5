"""Every method of every family in one list, with its place on edge × operator × scope."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from estr.objectives import Gate, Objective, Recipe, Weight, find_recipe, recipes
from estr.objectives.composition import Part
from estr.own_code import is_own
from estr.registry import Method


@dataclass(frozen=True)
class Place:
    """One thing a method attaches: what it does, by which ratios (letters of edges), over what it decides."""

    operator: str
    edge: str
    scope: str
    name: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.operator, "+".join(self.edge), self.scope) if part)


@dataclass(frozen=True)
class Entry:
    """One method as the tables and the pages show it."""

    family: str
    name: str
    description: str
    formula: str
    source: str
    confidence: str
    places: tuple[Place, ...]
    hyperparameters: Mapping[str, Any]
    allowed: Mapping[str, str]  # what each hyperparameter may be, where it is said in words
    choose: str  # the line of TOML that chooses it
    needs: tuple[str, ...] = ()
    reduction: str = ""
    note: str = ""


@dataclass(frozen=True)
class Family:
    """Methods of one kind: the heading they stand under, and a sentence about them."""

    title: str
    about: str
    entries: tuple[Entry, ...]


def catalogue() -> list[Family]:
    """All families in the order a trajectory meets them: objectives first, then what stands around them."""
    from estr.advantages import advantages, reweightings
    from estr.controllers import controllers, regularizers
    from estr.engines.samplers import samplers
    from estr.shaping import selections, shapings

    def family(title: str, about: str, table: Mapping[str, Method], choose: str) -> Family:
        word = title.rstrip("s").lower()
        return Family(title, about, tuple(_from_method(word, method, choose) for method in table.values()))

    objectives = tuple(_from_recipe(recipe) for recipe in recipes().values())
    return [
        Family("Objectives", "What a token's loss is. Chosen by `objective.recipe`.", objectives),
        family("Advantages", "From rewards to one number a trajectory.", advantages(), '[objective] advantage = "{}"'),
        family(
            "Re-weightings",
            "Rules that change advantages token by token, inside the optimizer step.",
            reweightings(),
            '[objective] reweighting = "{}"',
        ),
        family(
            "Entropy regularizers",
            "A term of the loss that pays for entropy, its coefficient steered to a target.",
            regularizers(),
            '[objective] regularizer = "{}"',
        ),
        family(
            "Reward shapings",
            "Changes of the reward between verifier and advantage; several in a row.",
            shapings(),
            '[objective] shaping = ["{}"]',
        ),
        family("Selections", "Which trajectories train.", selections(), '[objective] selection = "{}"'),
        family(
            "Step controllers",
            "Rules on gradient and learning rate between backward and optimizer; several in a row.",
            controllers(),
            '[learner] controllers = ["{}"]',
        ),
        Family(
            "Samplers",
            "The distribution a token is drawn from; log μ and H are read off it.",
            tuple(_from_sampler(method) for method in samplers.table().values()),
        ),
        Family("Diagnostics", "Read off a run, no part of training.", (_ENTROPY_LAW,)),
    ]


def find(name: str) -> list[Entry]:
    """The methods of that name, one or more families, or the recipe ``module:name`` of the user's own.

    Raises:
        ValueError: there is no such module, or no such recipe in it.
    """
    if is_own(name):
        return [_from_recipe(find_recipe(name), name)]
    return [entry for family in catalogue() for entry in family.entries if entry.name == name]


def names() -> list[str]:
    """All names."""
    return [entry.name for family in catalogue() for entry in family.entries]


def _from_recipe(recipe: Recipe, reference: str = "") -> Entry:
    built = Objective(recipe, {})
    return Entry(
        family="objective",
        name=recipe.name,
        description=recipe.description,
        formula=recipe.formula,
        source=recipe.source,
        confidence=recipe.confidence,
        places=tuple(Place(_operator(part), part.edge, part.scope, part.name) for part in built.composition.parts),
        hyperparameters=recipe.hyperparameters,
        allowed={name: parameter.allowed for name, parameter in recipe.all_parameters.items()},
        choose=f'[objective] recipe = "{reference or recipe.name}"',
        needs=tuple(sorted(built.needs)),
        reduction=built.composition.reduction,
        note=recipe.note,
    )


def _operator(part: Part) -> str:
    return "gate" if isinstance(part, Gate) else "weight" if isinstance(part, Weight) else "surrogate"


def _from_method(family: str, method: Method, choose: str) -> Entry:
    return Entry(
        family=family,
        name=method.name,
        description=method.description,
        formula=method.formula,
        source=method.source,
        confidence=method.confidence,
        places=(Place(method.operator, method.edge, method.scope),),
        hyperparameters=method.hyperparameters,
        allowed={},
        choose=choose.format(method.name),
    )


_SAMPLER_KEYS: dict[str, Callable[[str], str]] = {
    "standard": lambda option: option,
    "cuts": lambda option: {"temperature": "temperature", "record": "cuts_logprob"}.get(option, f"cuts_{option}"),
}


def _from_sampler(method: Method) -> Entry:
    """Under the keys that [rollout] gives its options."""
    key = _SAMPLER_KEYS["standard" if method.name == "standard" else "cuts"]
    entry = _from_method("sampler", method, '[rollout] sampler = "{}"')
    renamed = {key(option): default for option, default in method.hyperparameters.items()}
    return Entry(**{**vars(entry), "hyperparameters": renamed})


_ENTROPY_LAW = Entry(
    family="diagnostic",
    name="entropy_law",
    description="What score a policy reaches by spending its entropy: a least-squares fit over checkpoints of a run.",
    formula="R = b - a·e^H; ceiling at H = 0: b - a",
    source="arXiv 2505.22617; verl docs/algo/entropy.md",
    confidence="official documentation",
    places=(Place("fit", "", "run"),),
    hyperparameters={},
    allowed={},
    choose="estr.controllers.fit_entropy_law(entropy, score)",
)
