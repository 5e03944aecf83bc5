"""Sync against async on `calculator` with log-normal tool latency, same machine, same number of optimizer steps.

    python benchmarks/overlap.py [--steps 20] [--repeats 3] [--short]

The latency is fixed here and not tuned: median 0.2 s, 99th percentile 2 s, cap 5 s. The sync baseline is a strong one:
one engine process per core while it generates, all cores for the learner while it trains, all slots busy, and tool
waits overlap inside its batch. Runs alternate; what is printed is the median and range of seconds per optimizer step
after the first two, and the ratio of each pair. Pictures of the last pair's timelines go to --output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from estr.report.picture import write_picture

WARM = 2
CONFIG = """
[run]
steps = {steps}
checkpoint_every = 100000
[model]
path = "{model}"
[task]
name = "calculator"
latency = "lognormal"
latency_median = 0.2
latency_p99 = 2.0
latency_cap = 5.0
[rollout]
group_size = 8
max_new_tokens = 24
slots = 64
parked = 448
[schedule]
max_staleness = {staleness}
[learner]
learning_rate = 1e-5
prompts_per_step = 8
"""


def run(mode: str, steps: int, staleness: int, model: str, directory: Path) -> Path:
    """One run in a process of its own; returns its directory."""
    config = directory / "overlap.toml"
    config.write_text(CONFIG.format(steps=steps, model=model, staleness=staleness))
    target = directory / f"{mode}-{len(list(directory.iterdir()))}"
    command = [sys.executable, "-m", "estr", "train", str(config), "--output", str(target)]
    done = subprocess.run([*command, "--set", f"schedule.mode={mode}"], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return target


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def seconds_per_step(run: Path) -> float:
    metrics = lines(run)
    return (metrics[-1]["wall_time"] - metrics[WARM - 1]["wall_time"]) / (len(metrics) - WARM)


def mean(run: Path, key: str) -> float:
    return statistics.mean(line[key] for line in lines(run)[WARM:])


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--staleness", type=int, default=6)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--short", action="store_true", help="a few steps of a tiny model, to show that it works")
    arguments = parser.parse_args()
    steps, repeats, model = arguments.steps, arguments.repeats, arguments.model
    if arguments.short:
        steps, repeats, model = 4, 1, "builtin:micro"
    runs: dict[str, list[Path]] = {"sync": [], "async": []}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(repeats):
            for mode in runs:
                runs[mode].append(run(mode, steps, arguments.staleness, model, Path(name)))
        times = {mode: [seconds_per_step(path) for path in paths] for mode, paths in runs.items()}
        ratios = [a / b for a, b in zip(times["sync"], times["async"], strict=True)]
        print(
            f"{platform.machine()}, {os.cpu_count()} cores, {steps} steps, {repeats} pairs, max_staleness "
            f"{arguments.staleness}; engines 1 thread each; learner {os.cpu_count()} in sync, 1 in async"
        )
        for mode, paths in runs.items():
            idle = {
                key: statistics.mean(mean(path, f"time/{key}_idle_fraction") for path in paths)
                for key in ("engine", "learner")
            }
            tokens = statistics.mean(mean(path, "tokens/action") for path in paths)
            print(
                f"{mode:>5}: {spread(times[mode])} s a step, {tokens:.0f} action tokens a step, "
                f"engines idle {idle['engine']:.0%}, learner idle {idle['learner']:.0%}"
            )
        print(f"sync / async: {spread(ratios)}")
        arguments.output.mkdir(parents=True, exist_ok=True)
        for mode, paths in runs.items():
            print(write_picture(paths[-1], arguments.output / f"overlap-{mode}.svg"))


if __name__ == "__main__":
    main()
