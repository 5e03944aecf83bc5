"""``estr recipes`` and ``estr tasks``."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from estr.errors import UsageError, nearest


def show_recipes() -> None:
    """One line an objective."""
    from estr import recipes

    table = _table("recipe", "what it does", "confidence")
    for name, recipe in recipes().items():
        table.add_row(name, recipe.description, recipe.confidence)
    _console().print(table)


def show_recipe(name: str) -> None:
    """One objective in full: formula, edge, source, confidence, defaults."""
    from estr import recipes

    known = recipes()
    if name not in known:
        raise UsageError(f"there is no recipe {name!r}{nearest(name, known)}")
    recipe = known[name]
    print(f"{name}: {recipe.description}")
    for label in ("formula", "edge", "operator", "scope", "source", "confidence"):
        if value := getattr(recipe, label, None):
            print(f"  {label:<11} {value}")
    for key, value in recipe.hyperparameters.items():
        print(f"  {key} = {value!r}")


def show_tasks() -> None:
    """Every task with its options."""
    from estr.environments.registry import tasks

    for name, task in tasks().items():
        print(f"{name}: {task.description}")
        for key, option in task.options.items():
            print(f"  {key} = {option.default!r}  {option.description}")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _console() -> Console:
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, width=160)
    return console
