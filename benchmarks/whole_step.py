"""A whole optimizer step, generation and all: estr in sync and async against TRL's GRPOTrainer.

    python -m benchmarks.whole_step [--repeats 3] [--steps 12] [--short] [--json PATH]

Same model (builtin:tiny's architecture, random weights, so that completions run to the limit), same prompts, 8 groups
of 8, up to 64 new tokens, float32, no KL term, library generate in TRL. On one core everybody has one thread and is
pinned to it; on all cores TRL has a thread for each, sync an engine for each, and async an engine on one core and the
learner on the other. Runs alternate; a step's time is the mean after the first two, in async in the steady state: after
the engines have filled what the staleness bound allows, and before the last groups have been admitted. TRL takes part
where ``make bench-peers`` has installed it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import results, runs
from benchmarks.common.peer import Peer
from benchmarks.common.tasks import prompt
from benchmarks.common.timing import Spread, alternate, ratio

ENVIRONMENT = ".venv-trl"
STALENESS = 4
CONFIG = """
[run]
steps = {steps}
checkpoint_every = 100000
[model]
path = "{model}"
warmup_steps = 0
[task]
name = "benchmarks.common.tasks:DigitsTask"
[rollout]
group_size = 8
max_new_tokens = 64
max_turns = 1
slots = 64
[schedule]
max_staleness = {staleness}
[learner]
learning_rate = 1e-5
prompts_per_step = 8
"""


def contestants(
    result: results.Result, arguments: argparse.Namespace, folder: Path, stack: ExitStack
) -> dict[str, Any]:
    model = "builtin:micro" if arguments.short else "builtin:tiny"
    one = {0} if (os.cpu_count() or 1) > 1 else None
    lengths: dict[str, float] = {}
    steps = {"sync": arguments.steps, "async": arguments.steps + 2 * (STALENESS + 1)}
    windows = {"sync": (runs.WARM, None), "async": (STALENESS + 2, -STALENESS)}

    def ours(name: str, cores: set[int] | None, mode: str, **overrides: Any) -> float:
        config = CONFIG.format(steps=steps[mode], model=model, staleness=STALENESS)
        run = runs.train(config, folder, cores=cores, schedule__mode=mode, **overrides)
        lengths[name] = round(runs.mean(run, "tokens/action", *windows[mode]) / 64, 1)
        return runs.seconds_per_step(run, *windows[mode])

    result.settings["mean_length"] = lengths
    single = {"runtime__engines": 1, "runtime__learner_threads": 1}
    alone = "one core: estr sync"
    if arguments.short:
        return {alone: lambda: ours(alone, one, "sync", **single)}
    found: dict[str, Any] = {alone: lambda: ours(alone, one, "sync", **single)}
    for mode in ("sync", "async"):
        name = f"all cores: estr {mode}"
        found[name] = lambda name=name, mode=mode: ours(name, None, mode)
    if Peer.installed(ENVIRONMENT):
        path = str(_model(folder))
        for name, threads, cores in (("one core: TRL", 1, one), ("all cores: TRL", os.cpu_count() or 1, None)):
            peer = stack.enter_context(Peer(ENVIRONMENT, "benchmarks.peers.trl_peer", threads, cores))
            found[name] = lambda name=name, peer=peer, threads=threads: _trl(
                name, peer, path, arguments.steps, threads, lengths
            )
    else:
        result.notes.append("TRL did not take part: not installed (make bench-peers)")
    return found


def _model(folder: Path) -> Path:
    """The model and tokenizer that our runs start from."""
    from estr.config import Config
    from estr.models import resolve_model
    from estr.runtime.builders import build_task

    config = Config.model_validate(
        {"model": {"warmup_steps": 0}, "task": {"name": "benchmarks.common.tasks:DigitsTask"}}
    )
    return resolve_model(config.model, build_task(config))


def _trl(name: str, peer: Peer, path: str, steps: int, threads: int, lengths: dict[str, float]) -> float:
    prompts = [[{"role": "user", "content": prompt(i)}] for i in range(8 * steps)]
    answer = peer.ask(
        do="train",
        path=path,
        prompts=prompts,
        steps=steps,
        threads=threads,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=64,
    )
    lengths[name] = round(answer["mean_length"], 1)
    return statistics.mean(answer["seconds"][runs.WARM :])


def main() -> None:
    options = results.parser(__doc__, repeats=3)
    options.add_argument("--steps", type=int, default=12, help="optimizer steps of each run")
    arguments = options.parse_args()
    if arguments.short:
        arguments.steps, arguments.repeats = 3, 1
    result = results.begin("whole_step", arguments, steps=arguments.steps, groups="8 of 8", max_new_tokens=64)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        seconds = alternate(contestants(result, arguments, folder, stack), arguments.repeats, warm=0)
    for name, spread in seconds.items():
        result.measured(name, spread, "s a step")
    _ratios(result, seconds)
    results.finish(result, arguments.json)


def _ratios(result: results.Result, seconds: dict[str, Spread]) -> None:
    for ours, theirs, aim in (
        ("one core: estr sync", "one core: TRL", 0.5),
        ("all cores: estr sync", "all cores: TRL", 0.5),
        ("all cores: estr async", "all cores: TRL", 0.5),
        ("all cores: estr async", "all cores: estr sync", 1.0),
    ):
        if ours in seconds and theirs in seconds:
            result.ratio(
                f"{ours} / {theirs.split(': ')[1]}, time", ratio(seconds[ours], seconds[theirs]), aim, higher=False
            )


if __name__ == "__main__":
    main()
