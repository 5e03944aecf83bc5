"""How δ² grows with entropy, and what happens where new weights arrive: measured on stored rollouts, and simulated.

    python -m benchmarks.study.law runs/study/law [--json PATH]

The runs are those of ``estr compare benchmarks/study/law.toml``. For each, ``estr inspect``'s fit and switches; over
the seeds, means with 95 % intervals (Student t). The simulation asks the same of logits disturbed by independent
noise, for which the answer is known: E[δ²] over the distribution that sampled, σ²·(1 − Σp²), against the same law seen
through one drawn token a position, as rollouts see it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from estr.compare.statistics import mean_interval
from estr.diagnostics import fit_power_law
from estr.inspect import inspect_path


def of_run(run: Path) -> dict[str, Any]:
    """The numbers of one run."""
    found = inspect_path(run)
    fit, switches = found.fit, found.switches
    return {
        "exponent": fit.exponent if fit else None,
        "r2": fit.r2 if fit else None,
        "slope": fit.slope if fit else None,
        "delta_squared": found.delta.squared,
        "bins": [] if fit is None else np.stack([fit.bins.entropy, fit.bins.delta_squared], 1).tolist(),
        "entropy_change": switches.entropy_change.mean,
        "delta_change": switches.delta_change.mean,
        "switches": switches.count,
        "tokens": found.delta.tokens,
        "around": {
            "offsets": switches.offsets.tolist(),
            "entropy": _known(switches.entropy),
            "delta_abs": _known(switches.delta_abs),
        },
    }


def of_study(study: Path) -> list[dict[str, Any]]:
    """One row for each entry and engine precision of a finished study: its runs and their intervals over the seeds."""
    result = json.loads((study / "compare.json").read_text())
    rows = []
    for row in result["rows"]:
        runs = [of_run(study / "runs" / run["run"]) | {"seed": run["seed"]} for run in row["runs"]]
        means = {key: _interval([run[key] for run in runs]) for key in runs[0] if isinstance(runs[0][key], float)}
        rows.append({"entry": row["entry"], "dtype": row["value"], "runs": runs, "intervals": means})
    return rows


def simulated(positions: int = 200_000, vocabulary: int = 64, noise: float = 0.1, seed: int = 0) -> dict[str, Any]:
    """Exponents of the fit for logits with independent noise, exactly and through one drawn token a position."""
    generator = np.random.default_rng(seed)
    scale = np.exp(generator.uniform(np.log(0.3), np.log(12.0), (positions, 1)))
    logits = generator.standard_normal((positions, vocabulary)) * scale
    log_mu = _log_softmax(logits)
    delta = _log_softmax(logits + noise * generator.standard_normal(logits.shape)) - log_mu
    p = np.exp(log_mu)
    entropy = -(p * log_mu).sum(1)
    drawn = (p.cumsum(1) > generator.random((positions, 1))).argmax(1)
    sampled, exact = delta[np.arange(positions), drawn], np.sqrt((p * delta**2).sum(1))
    fits = {name: fit_power_law(values, entropy) for name, values in (("exact", exact), ("sampled", sampled))}
    return {name: {"exponent": fit.exponent, "r2": fit.r2} for name, fit in fits.items() if fit is not None}


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def _known(values: np.ndarray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def _interval(values: list[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None]
    return asdict(mean_interval(known)) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows, simulation = of_study(arguments.study), simulated()
    for row in rows:
        found = row["intervals"]["exponent"]
        print(
            f"{row['entry']:8} {row['dtype']:9} exponent {found['mean']:.2f} ({found['low']:.2f}–{found['high']:.2f})"
        )
    print("simulated", simulation)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "simulated": simulation}, indent=1) + "\n")


if __name__ == "__main__":
    main()
