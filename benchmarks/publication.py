"""Weights from the learner to running engines: seconds from publishing to the first token under them, bytes, stalls.

    python -m benchmarks.publication [--repeats 5] [--short] [--json PATH]

The learner's side publishes into shared memory while 1, 2 or 4 engine processes decode; 1M, 10M and 135M parameters.
Measured are the seconds that ``publish`` takes, the seconds until an engine has sampled its first token under the new
weights, and the stall: how much longer than the median decode step the step with the new weights' first token took,
weights taken and canary computed, in decode steps. Every number is of the engine that was last. Where engines and
learner are more than the cores, a step is mostly waiting for a turn; the stall is therefore also given in processor
time. The first two publications, which touch both buffers for the first time, do not count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import results
from benchmarks.common.timing import Spread
from benchmarks.common.workload import new_model
from estr.engines.local import EngineSettings, LocalEngine
from estr.transport import WeightPublisher, WeightReader
from estr.transport.shared_weights import shared_directory

SIZES = {
    "1M": {"width": 128, "layers": 5, "vocabulary": 1024},
    "10M": {"width": 384, "layers": 6, "vocabulary": 1024},
    "135M": {"width": 768, "layers": 18, "vocabulary": 16384},
}
WARM = 2  # publications that touch memory for the first time
CANARY = [3, 10, 17, 24, 31, 38, 45, 52]
ROWS = {"1M": 64, "10M": 64, "135M": 4}


def engine_process(size: str, manifest: str, reader: int, threads: int, connection: Connection) -> None:
    """Decode without end; after every new version say when its first token came and how long the pause was."""
    torch.set_num_threads(threads)
    model = new_model(**SIZES[size])
    engine = LocalEngine(model, EngineSettings(slots=ROWS[size], parked=0, max_context=1024))
    weights, steps, work, number = WeightReader(manifest, reader), list[float](), list[float](), 0
    connection.send("ready")
    last, last_work = time.monotonic(), time.thread_time()
    while not connection.poll(0):
        fresh = None
        if weights.latest not in (weights.version, -1) and (fresh := weights.poll()) is not None:
            engine.set_weights(fresh.version, fresh.tensors)
            engine.canary(CANARY)
        if engine.version < 0:
            time.sleep(0.001)
            last, last_work = time.monotonic(), time.thread_time()
            continue
        while engine.running < ROWS[size]:
            number += 1
            engine.start(str(number), [1, 2, 3, number % 100], seed=number, limit=900)
        for turn in engine.step():
            engine.release(turn.key)
        now, now_work = time.monotonic(), time.thread_time()
        if fresh is None:
            steps.append(now - last)
            work.append(now_work - last_work)
        else:
            usual = statistics.median(steps[-50:] or [now - last])
            usual_work = statistics.median(work[-50:] or [now_work - last_work])
            stalls = (now - last) / usual - 1, (now_work - last_work) / usual_work - 1
            connection.send((now, *stalls, usual))
        last, last_work = now, now_work


def measure(size: str, engines: int, repeats: int, threads: int, folder: Path) -> dict[str, Spread]:
    """Seconds, stalls and bytes of ``repeats`` publications, each after the engines have decoded for a while."""
    tensors = {name: p.detach().clone() for name, p in new_model(**SIZES[size]).named_parameters()}
    bytes_copied = sum(t.numel() * t.element_size() for t in tensors.values())
    publisher = WeightPublisher(tensors, shared_directory(2 * bytes_copied, folder), readers=engines)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for reader in range(engines):
        ours, theirs = context.Pipe()
        arguments = (size, publisher.manifest, reader, threads, theirs)
        processes.append(context.Process(target=engine_process, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    found: dict[str, list[float]] = {name: [] for name in ("publish", "first token", "stall", "work", "decode step")}
    for version in range(repeats + WARM):
        canary = np.zeros(len(CANARY) - 1, np.float32)
        start = time.monotonic()
        publisher.publish(version, tensors, canary, gone=lambda: [])
        published = time.monotonic()
        answers = [pipe.recv() for pipe in pipes]
        if version >= WARM:
            found["publish"].append(published - start)
            found["first token"].append(max(a[0] for a in answers) - start)
            found["stall"].append(max(a[1] for a in answers))
            found["work"].append(max(a[2] for a in answers))
            found["decode step"].append(statistics.median(a[3] for a in answers))
        time.sleep(max(0.3, 6 * max(a[3] for a in answers)))
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("stop")
        process.join(10)
        process.kill()
    publisher.close()
    return {name: Spread(tuple(values)) for name, values in found.items()} | {"bytes": Spread((bytes_copied / 2**20,))}


def report(result: results.Result, size: str, engines: int, found: dict[str, Spread], aim: float | None) -> None:
    name = f"{size}, {engines} engine{'s' * (engines > 1)}"
    if engines == 1:
        result.measured(f"{size}: copied, once for all engines", found["bytes"], "MiB")
    result.measured(f"{name}: publish", found["publish"], "s")
    result.measured(f"{name}: first token", found["first token"], "s")
    result.measured(f"{name}: decode step", found["decode step"], "s")
    crowded = engines + 1 > (os.cpu_count() or 1)
    result.ratio(f"{name}: stall in decode steps", found["stall"], None if crowded else aim, higher=False)
    result.ratio(f"{name}: stall in decode steps, processor time", found["work"], aim, higher=False)


def main() -> None:
    arguments: argparse.Namespace = results.parser(__doc__).parse_args()
    plan: list[tuple[str, int]] = [(size, engines) for size in SIZES for engines in (1, 2, 4)]
    if arguments.short:
        plan, arguments.repeats = [("1M", 1)], 2
    settings: dict[str, Any] = {"rows": ROWS, "dtype": "float32"}
    result = results.begin("publication", arguments, **settings)
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        for size, engines in plan:
            found = measure(size, engines, arguments.repeats, arguments.threads, Path(folder))
            report(result, size, engines, found, None if arguments.short else 2.0)
    results.finish(result, arguments.json)


if __name__ == "__main__":
    main()
