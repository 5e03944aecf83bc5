"""Which gate a run used on its tokens, for the pictures that show kept and dropped."""

from __future__ import annotations

from dataclasses import dataclass

from estr.diagnostics import DEFAULTS
from estr.report.data import Run

GATE_NAMES = {"estr": "ESTR", "icepop": "IcePop", "kpop": "KPop", "grpo": "PPO clip"}


@dataclass(frozen=True)
class Gate:
    """The gate that colors tokens; ``own`` False where the run's recipe has none this page knows."""

    recipe: str
    settings: dict[str, float]
    own: bool

    @property
    def words(self) -> str:
        settings = ", ".join(f"{key} {value:g}" for key, value in self.settings.items())
        return f"{GATE_NAMES[self.recipe]} ({settings})"


def gate_settings(run: Run, recipe: str) -> dict[str, float]:
    """Hyperparameters of a gate: the run's own where it names them for this recipe, else the defaults.

    PPO clip bounds are shared by recipes that clip inside, so those a run sets hold for its ``grpo`` line too.
    """
    defaults = DEFAULTS[recipe]
    if recipe not in (run.recipe, "grpo"):
        return dict(defaults)
    return {key: run.hyperparameter(key, value) for key, value in defaults.items()}


def own_gate(run: Run) -> Gate:
    """The run's gate, or ESTR at its defaults where the recipe drops nothing by token or is not known here."""
    own = run.recipe in DEFAULTS
    recipe = run.recipe if own else "estr"
    return Gate(recipe, gate_settings(run, recipe), own)
