"""`estr plan` against real runs: parameters from one run, predictions for it and for others, relative errors.

    python benchmarks/plan_validation.py [--steps 120] [--repeats 1] [--output DIR] [--short]

Run A is `calculator` without latency (64 slots); B has log-normal tool latency (median 0.2 s, 99th percentile 2 s, cap
5 s); C has 8 slots instead of 64. All are asynchronous, with one engine and one learner process. Only A's parameters
are used: what changes for B and C is what their configuration says. Each of B and C is then also predicted from its
own parameters, which tells errors of the simulation from a machine that was not equally fast in both runs.
The learning rate is so small that lengths stay what they are. Throughput should be within 15 % of what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from estr.plan.calibrate import Calibration, calibrate
from estr.plan.cluster import simulate
from estr.plan.load import change_plan

TARGET = 0.15
CONFIG = """
[run]
steps = {steps}
checkpoint_every = 100000
[model]
path = "{model}"
[task]
name = "calculator"
[rollout]
group_size = 8
max_new_tokens = 24
slots = 64
parked = 448
[schedule]
max_staleness = 6
[learner]
learning_rate = 1e-6
prompts_per_step = 8
[runtime]
engines = 1
learner_threads = 1
"""
LATENCY = ("latency=lognormal", "latency_median=0.2", "latency_p99=2.0", "latency_cap=5.0")
RUNS: dict[str, tuple[str, list[str], list[str]]] = {
    "A": ("no latency, 64 slots", [], []),
    "B": ("log-normal latency", [f"task.{key}" for key in LATENCY], [f"tools.{key}" for key in LATENCY]),
    "C": ("8 slots", ["rollout.slots=8"], ["cluster.slots=8"]),
}
RELATIVE = {"seconds_per_step": "s a step", "trained_tokens_per_second": "tokens/s"}
ABSOLUTE = {
    "engine_idle_fraction": "engine idle",
    "learner_idle_fraction": "learner idle",
    "inter_mean": "Δ inter",
    "intra_mean": "Δ intra",
}


def run(name: str, number: int, config: Path, directory: Path) -> Calibration:
    """One real run in a process of its own, read back."""
    target = directory / f"{name}-{number}"
    command = [sys.executable, "-m", "estr", "train", str(config), "--output", str(target)]
    for change in RUNS[name][1]:
        command += ["--set", change]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return calibrate(target)


def predict(calibration: Calibration, name: str) -> dict[str, float]:
    """What ``calibration`` says about run ``name``."""
    plan = change_plan(calibration.plan, RUNS[name][2])
    outcome = simulate(plan, calibration.workload(plan))
    return {key: getattr(outcome, key) for key in (*RELATIVE, *ABSOLUTE)}


def show(label: str, predicted: dict[str, float], measured: dict[str, float]) -> float:
    """Print predicted against measured; returns the largest relative error of throughput."""
    errors = {key: predicted[key] / measured[key] - 1 for key in RELATIVE}
    words = [f"{RELATIVE[key]} {predicted[key]:.4g} / {measured[key]:.4g} ({errors[key]:+.1%})" for key in RELATIVE]
    words += [f"{text} {predicted[key]:.2f} / {measured[key]:.2f}" for key, text in ABSOLUTE.items()]
    print(f"{label:<34} {', '.join(words)}", flush=True)
    return max(map(abs, errors.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--output", type=Path, help="keep the runs and the numbers (plan_validation.json) here")
    parser.add_argument("--short", action="store_true", help="a few steps of a tiny model, to show that it works")
    arguments = parser.parse_args()
    steps, model = (16, "builtin:micro") if arguments.short else (arguments.steps, arguments.model)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, {steps} steps, "
        f"{arguments.repeats} repeats; each value predicted / measured; parameters of run A unless it says otherwise"
    )
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.output or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        config = directory / "plan_validation.toml"
        config.write_text(CONFIG.format(steps=steps, model=model))
        rows: list[dict[str, object]] = []
        for number in range(arguments.repeats):
            runs = {name: run(name, number, config, directory) for name in RUNS}
            for name, calibration in runs.items():
                measured = asdict(calibration.measured)
                sources = {"A": runs["A"]} if name == "A" else {"A": runs["A"], name: calibration}
                for source, from_run in sources.items():
                    predicted = predict(from_run, name)
                    own = "" if source == "A" else ", own parameters"
                    error = show(f"{name}: {RUNS[name][0]}{own}", predicted, measured)
                    rows.append(
                        {
                            "run": name,
                            "parameters": source,
                            "predicted": predicted,
                            "measured": measured,
                            "error": error,
                        }
                    )
        worst = max(float(str(row["error"])) for row in rows if row["parameters"] == "A")
        print(f"largest relative error of throughput from run A's parameters: {worst:.1%}, target {TARGET:.0%}")
        if arguments.output:
            (directory / "plan_validation.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
