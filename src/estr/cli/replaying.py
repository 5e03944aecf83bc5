"""``estr replay``: stored optimizer steps under another recipe, without generating."""

from __future__ import annotations

import json
import sys
from typing import Any

from estr.cli.replay_gradient import parameter_norms
from estr.config import Config
from estr.config.load import load_config
from estr.config.objective_section import build_objective
from estr.errors import UsageError
from estr.inspect.inspection import plain
from estr.inspect.read import read_dump
from estr.inspect.replay import ReplayedStep, replay
from estr.objectives import Objective
from estr.report.series import number, percent
from estr.storage.run_directory import RunDirectory
from estr.trajectory import derive_seed


def replay_command(directory: str, recipe: str | None, sets: list[str], *, as_json: bool) -> None:
    """Every stored step of a run under ``recipe``, beside the run's own."""
    run = RunDirectory.open(directory)
    own = run.config()
    choice = [f"objective.recipe={json.dumps(recipe)}"] if recipe else []
    other, notices = load_config(run.config_path, [*choice, *sets], stored=True)
    for notice in notices:
        if "left out" not in notice:
            print(f"note: {notice}", file=sys.stderr)
    dump = read_dump(run.path, "estr")
    results = {}
    for name, config in (("own", own), ("replayed", other)):
        chosen = build_objective(config.objective.recipe, config.objective.hyperparameters())
        try:
            steps = replay(dump, chosen, lambda version: derive_seed(own.run.seed, "objective", version))
        except ValueError as error:
            if name == "own":  # a run whose own recipe reads what is not stored can still be replayed under another
                continue
            raise UsageError(f"{chosen.name} cannot be replayed: {error}") from error
        results[name] = (chosen, steps, *parameter_norms(run, own, dump, steps))
    if as_json:
        print(json.dumps(plain({"source": directory} | _json(results)), allow_nan=False))
    else:
        _print(results, own)


Result = tuple[Objective, list[ReplayedStep], dict[int, float], str]


def _json(results: dict[str, Result]) -> dict[str, Any]:
    return {
        name: {
            "recipe": recipe.name,
            "hyperparameters": recipe.hyperparameters,
            "steps": [
                {
                    "step": step.step,
                    "target_version": step.target_version,
                    "tokens": step.tokens,
                    "seen": step.seen,
                    "loss": step.loss,
                    "masked_fraction": step.masked_fraction,
                    "clip_fraction": step.clip_fraction,
                    "gradient_norm": step.gradient_norm,
                    "parameter_gradient_norm": norms.get(step.step),
                }
                for step in steps
            ],
        }
        for name, (recipe, steps, norms, _) in results.items()
    }


def _print(results: dict[str, Result], own: Config) -> None:
    for name, (recipe, _, _, _) in results.items():
        print(f"{name}: {recipe!r}")
    if "own" not in results:
        print(f"own: {own.objective.recipe} reads what runs do not store")
    columns = ("loss", "masked", "‖∂loss/∂log π‖", "‖∂loss/∂θ‖")
    print()
    print(f"{'':>6} " + " ".join(f"{name:^47}" for name in results))
    print(f"{'step':>6} " + " ".join(f"{column:>{width}}" for _ in results for column, width in _widths(columns)))
    for steps in zip(*(steps for _, steps, _, _ in results.values()), strict=True):
        cells = [
            cell for (_, _, norms, _), step in zip(results.values(), steps, strict=True) for cell in _cells(step, norms)
        ]
        widths = [width for _ in results for _, width in _widths(columns)]
        print(f"{steps[0].step:>6} " + " ".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))
    why = next(iter(results.values()))[3]
    if why:
        print(f"no ‖∂loss/∂θ‖: {why}")


def _widths(columns: tuple[str, ...]) -> list[tuple[str, int]]:
    return list(zip(columns, (11, 8, 14, 11), strict=True))


def _cells(step: ReplayedStep, norms: dict[int, float]) -> tuple[str, ...]:
    return (
        f"{step.loss:+.3e}",
        percent(step.masked_fraction),
        number(step.gradient_norm),
        number(norms.get(step.step)),
    )
