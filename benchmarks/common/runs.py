"""Whole runs in processes of their own, and what their metrics say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.peer import ROOT

WARM = 2  # first steps that are left out, where nothing else is said: everything is still cold


def train(config: str, directory: Path, *, cores: set[int] | None = None, **overrides: Any) -> Path:
    """One run of a TOML configuration; returns its directory. ``cores``: the only ones it may use."""
    number = len(list(directory.iterdir()))
    path, target = directory / f"config-{number}.toml", directory / f"run-{number}"
    path.write_text(config)
    arguments = ["train", str(path), "--output", str(target)]
    for key, value in overrides.items():
        arguments += ["--set", f"{key.replace('__', '.')}={value}"]
    status, errors = execute(arguments, cores)
    if status:
        sys.exit(errors or f"estr {' '.join(arguments)} ended with status {status}")
    return target


def execute(arguments: list[str], cores: set[int] | None) -> tuple[int, str]:
    """The command line in a process of its own: its exit status and what it wrote to standard error."""
    pin = [] if cores is None or not shutil.which("taskset") else ["taskset", "-c", ",".join(map(str, sorted(cores)))]
    command = [*pin, sys.executable, "-m", "estr", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def seconds_per_step(run: Path, first: int = WARM, last: int | None = None) -> float:
    """Between the ends of steps ``first`` and ``last`` (1-based; default: the last one)."""
    chosen = lines(run)[first - 1 : last]
    return (chosen[-1]["wall_time"] - chosen[0]["wall_time"]) / (len(chosen) - 1)


def mean(run: Path, key: str, first: int = WARM, last: int | None = None) -> float:
    """Of a metric, over the steps after ``first`` and up to ``last``."""
    values = [line[key] for line in lines(run)[first:last] if key in line]
    return sum(values) / max(1, len(values))
