"""The table of recipes: every published method as a few lines."""

from __future__ import annotations

from estr.objectives.composition import Recipe
from estr.objectives.table import clipping, corrections, entropy, reweighting, verl

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for module in (clipping, corrections, reweighting, entropy, verl) for recipe in module.RECIPES
}
