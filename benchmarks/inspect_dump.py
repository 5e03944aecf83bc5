"""``estr inspect`` on a dump of a given size, from the command to its JSON object, in seconds.

    python benchmarks/inspect_dump.py [--tokens 1000000] [--format parquet|jsonl] [--threads 1]

The tokens are drawn from peaked and flat distributions, with stale weights and noise, so that every analysis has work
to do; nothing in them is wrong, so the findings must be empty.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LENGTH = 250  # tokens of a row, the first 50 of them prompt
PROMPT = 50
VOCABULARY = 32


def make_rows(tokens: int) -> dict[str, list]:
    """Columns of about ``tokens`` action tokens."""
    rng = np.random.default_rng(0)
    rows = max(1, tokens // (LENGTH - PROMPT))
    columns: dict[str, list] = {
        name: [] for name in ("tokens", "action", "logprob", "entropy", "version", "learner_logprob", "learner_entropy")
    }
    for _ in range(rows):
        n = LENGTH - PROMPT
        z = rng.normal(0, 1, (n, VOCABULARY)) * rng.uniform(0.3, 4, (n, 1))
        mu, pi = _log_softmax(z), _log_softmax(z + rng.normal(0, 0.02, z.shape))
        token = (mu + rng.gumbel(size=mu.shape)).argmax(1)
        version = np.sort(rng.integers(0, 3, n))
        at = np.arange(n)
        front = np.full(PROMPT, np.nan)
        columns["tokens"].append(np.concatenate([rng.integers(0, VOCABULARY, PROMPT), token]))
        columns["action"].append(np.arange(LENGTH) >= PROMPT)
        columns["version"].append(np.concatenate([np.full(PROMPT, -1), version]))
        for name, values in (
            ("logprob", mu[at, token]),
            ("learner_logprob", pi[at, token]),
            ("entropy", -(np.exp(mu) * mu).sum(1)),
            ("learner_entropy", -(np.exp(pi) * pi).sum(1)),
        ):
            columns[name].append(np.concatenate([front, values]).astype(np.float32))
    columns |= {
        "trajectory_id": [f"t{i}" for i in range(rows)],
        "group_id": [f"g{i // 8}" for i in range(rows)],
        "reward": (reward := rng.integers(0, 2, rows).astype(float)).tolist(),
        "advantage": (reward - 0.5).tolist(),
        "target_version": rng.integers(3, 7, rows).tolist(),
        "trained_step": (np.arange(rows) // 64 + 1).tolist(),
        "temperature": [1.0] * rows,
        "top_p": [1.0] * rows,
        "top_k": [0] * rows,
        "entropy_kind": ["exact"] * rows,
    }
    return columns


def write(columns: dict[str, list], path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
        return
    with path.open("w") as file:
        for index in range(len(columns["tokens"])):
            row = {name: _plain(values[index]) for name, values in columns.items()}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"dump.{arguments.format}"
        write(make_rows(arguments.tokens), path)
        environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "estr", "inspect", str(path), "--json"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        seconds = time.perf_counter() - begin
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        value = json.loads(done.stdout)
        print(f"{platform.machine()}, {os.cpu_count()} cores, {arguments.threads} thread(s)")
        print(
            f"{value['tokens']:,} tokens in {value['trajectories']:,} rows, {path.stat().st_size / 1e6:.0f} MB of "
            f"{arguments.format}: {seconds:.1f} s, of which processor {used.ru_utime + used.ru_stime:.1f} s, "
            f"{len(value['recipes'])} recipes, findings {value['findings']}"
        )


def _log_softmax(z: np.ndarray) -> np.ndarray:
    top = z.max(1, keepdims=True)
    return z - top - np.log(np.exp(z - top).sum(1, keepdims=True))


def _plain(value: object) -> object:
    if not isinstance(value, np.ndarray):
        return value
    return [None if isinstance(entry, float) and entry != entry else entry for entry in value.tolist()]


if __name__ == "__main__":
    main()
