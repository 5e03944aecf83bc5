"""A trainer that follows a script instead of training: writes the files of a run directory, without estr or torch.

``python compare_trainer.py CALLS CONFIG DIRECTORY`` notes each call in the file CALLS. What it does depends on the
configuration: recipe, seed and staleness decide the held-out curve, ``run.keep_rollouts`` the fate: 0 finishes, 1 fails
the first time and finishes when it is taken up again, 2 diverges, 3 waits for SIGINT, 4 fails before there is a run
directory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tomllib
from pathlib import Path

LEVELS = {"grpo": 0.5, "estr": 0.6, "icepop": 0.7, "reinforce": 0.2}


def main(calls: str, config_path: str, directory: str) -> int:
    config = tomllib.loads(Path(config_path).read_text())
    fate = config["run"]["keep_rollouts"]
    resumed = Path(directory).exists()
    with open(calls, "a") as file:
        threads = os.environ["OMP_NUM_THREADS"]
        file.write(json.dumps({"name": Path(directory).name, "resumed": resumed, "threads": threads}) + "\n")
    if fate == 4:
        print("estr: nothing can begin", file=sys.stderr)
        return 2
    write_run(Path(directory), config, config_path)
    if fate == 3:
        signal.signal(signal.SIGINT, lambda *_: finish(directory, "interrupted", 130))
        Path(directory, "ready").touch()
        signal.pause()
    if fate == 1 and not resumed:
        return finish(directory, "failed", 1, "the verifier broke")
    if fate == 2:
        return finish(directory, "diverged", 1, "the loss is not finite")
    return finish(directory, "finished", 0)


def write_run(directory: Path, config: dict, config_path: str) -> None:
    (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    (directory / "config.toml").write_text(Path(config_path).read_text())
    steps, seed = config["run"]["steps"], config["run"]["seed"]
    objective, schedule = config["objective"], config["schedule"]
    height = LEVELS[objective["recipe"]] + 0.01 * seed - 0.01 * schedule["inter"] + 0.1 * objective.get("tau", 0.0)
    fallen = schedule["inter"] >= 8 and objective["recipe"] == "grpo"
    with open(directory / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            line = {"step": step, "wall_time": float(step), "tokens/action": 100.0 * step, "reward/mean": height}
            line |= {"gate/masked_fraction": 0.1 * step, "mismatch/kl": 0.01, "mismatch/ratio_deviation": 0.02}
            file.write(json.dumps(line | {"mismatch/delta_abs": 0.03, "policy/entropy": 0.5}) + "\n")
    with open(directory / "evaluations.jsonl", "w") as file:
        for step, reward in ((0, 0.2), (steps // 2, height), (steps, 0.1 if fallen else height)):
            file.write(json.dumps({"step": step, "reward": reward, "problems": 10, "temperature": 1.0}) + "\n")


def finish(directory: str, state: str, code: int, reason: str = "") -> int:
    Path(directory, "run.json").write_text(json.dumps({"format": 1, "state": state, "reason": reason}))
    if state == "interrupted":
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
