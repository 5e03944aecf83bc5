"""The table of recipes: every published method as a few lines."""

from __future__ import annotations

from estr.objectives.composition import Recipe
from estr.objectives.table import clipping, corrections

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (*clipping.RECIPES, *corrections.RECIPES)}
