"""Wall-clock to a given held-out reward, sync against async, multi-turn tool task with log-normal latency.

    python -m benchmarks.study.wallclock [--seeds 0,1,2,3,4] [--steps 40] [--reward 0.7] [--output runs/study/wallclock]

Same machine, model, batch and number of steps; the latency is that of ``benchmarks/overlap.py`` (median 0.2 s, 99th
percentile 2 s, cap 5 s), as is the sync baseline, which has every core in both of its phases. Runs alternate, one at a
time. Nothing is evaluated meanwhile: checkpoints are, after their run.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from estr.compare.statistics import mean_interval, paired_differences

MODES = ("sync", "async")
CONFIG = """
[run]
steps = {steps}
eval_every = 0
checkpoint_every = 5
keep_checkpoints = 100
[model]
path = "builtin:tiny"
[task]
name = "calculator"
latency = "lognormal"
latency_median = 0.2
latency_p99 = 2.0
latency_cap = 5.0
[rollout]
group_size = 8
max_new_tokens = 24
max_turns = 6
slots = 64
parked = 448
[schedule]
max_staleness = 6
[objective]
recipe = "{recipe}"
[learner]
learning_rate = 5e-4
prompts_per_step = 8
"""


def train(mode: str, seed: int, steps: int, output: Path) -> Path:
    """One run; one that has ended before is not run again."""
    target = output / "runs" / f"{mode}-s{seed}"
    if (target / "report.html").exists():
        return target
    output.mkdir(parents=True, exist_ok=True)
    config = output / f"{mode}.toml"
    config.write_text(CONFIG.format(steps=steps, recipe="grpo" if mode == "sync" else "estr"))
    command = [sys.executable, "-m", "estr", "train", str(config), "--output", str(target)]
    done = subprocess.run(
        [*command, "--set", f"schedule.mode={mode}", "--set", f"run.seed={seed}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return target


def curve(run: Path) -> tuple[list[float], list[float]]:
    """Seconds since the start of training and held-out reward at each checkpoint, scored after the run."""
    wall = {line["step"]: line["wall_time"] for line in _lines(run / "metrics.jsonl")}
    scored = run / "scored.json"
    rewards: dict[str, float] = json.loads(scored.read_text()) if scored.exists() else {}
    for checkpoint in sorted((run / "checkpoints").glob("step-*")):
        step = checkpoint.name.removeprefix("step-").lstrip("0")
        if step and step not in rewards:
            rewards[step] = _score(checkpoint)
            scored.write_text(json.dumps(rewards))
    steps = sorted(int(step) for step in rewards)
    return [wall[step] for step in steps], [rewards[str(step)] for step in steps]


def _score(checkpoint: Path) -> float:
    command = [sys.executable, "-m", "estr", "eval", str(checkpoint), "--json", "--set", "task.name=calculator"]
    options = ["--set", "run.eval_prompts=200", "--set", "rollout.max_new_tokens=24", "--set", "rollout.max_turns=6"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["avg@1"])


def seconds_to(reward: float, seconds: list[float], rewards: list[float]) -> float:
    """When the curve first reaches ``reward``, on a straight line between checkpoints; infinite if it never does."""
    at = next((index for index, value in enumerate(rewards) if value >= reward), None)
    if at is None:
        return math.inf
    if at == 0:
        return seconds[0]
    share = (reward - rewards[at - 1]) / (rewards[at] - rewards[at - 1])
    return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])


def summarize(output: Path, seeds: list[int], reward: float) -> dict[str, Any]:
    """Curves, seconds per mode and seed, and the ratio's mean with its interval (in logarithms, over the seeds)."""
    runs = []
    for seed in seeds:
        for mode in MODES:
            seconds, rewards = curve(output / "runs" / f"{mode}-s{seed}")
            reached = seconds_to(reward, seconds, rewards)
            runs.append({"mode": mode, "seed": seed, "seconds": seconds, "rewards": rewards, "reached": reached})
    by = {(run["mode"], run["seed"]): run for run in runs}
    pairs = [(by["sync", seed], by["async", seed]) for seed in seeds]
    ratios = [math.log(s["reached"] / a["reached"]) for s, a in pairs if math.isfinite(s["reached"] + a["reached"])]
    final = paired_differences([[a["rewards"][-1] - s["rewards"][-1] for s, a in pairs]])[0]
    for run in runs:
        run["reached"] = run["reached"] if math.isfinite(run["reached"]) else None
    speed = None
    if ratios:
        found = mean_interval(ratios)
        ends = found.ends or (found.mean, found.mean)
        speed = {
            "mean": math.exp(found.mean),
            "low": math.exp(ends[0]),
            "high": math.exp(ends[1]),
            "pairs": len(ratios),
        }
    return {"reward": reward, "runs": runs, "speedup": speed, "final_difference": asdict(final)}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--reward", type=float, default=0.7)
    parser.add_argument("--output", type=Path, default=Path("runs/study/wallclock"))
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    for seed in seeds:
        for mode in MODES:
            print(train(mode, seed, arguments.steps, arguments.output), flush=True)
    result = summarize(arguments.output, seeds, arguments.reward)
    (arguments.output / "wallclock.json").write_text(json.dumps(result, indent=1) + "\n")
    for run in result["runs"]:
        print(f"{run['mode']:>5} seed {run['seed']}: {run['reached']} s, final reward {run['rewards'][-1]:.3f}")
    print(f"sync / async, seconds to a held-out reward of {arguments.reward}: {result['speedup']}")


if __name__ == "__main__":
    main()
