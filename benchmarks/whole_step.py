"""A whole optimizer step, generation and all: estr in sync and async against TRL's GRPOTrainer.

    python -m benchmarks.whole_step [--repeats 3] [--steps 12] [--short] [--json PATH]

Same model (builtin:tiny's architecture, random weights, so that completions run to the limit), same prompts, 8 groups
of 8, up to 64 new tokens, float32, no KL term, library generate in TRL. On one core everybody has one thread and is
pinned to it; on all cores TRL has a thread for each, sync an engine for each, and async an engine on one core and the
learner on the other. Runs alternate; a step's time is the mean after the first two. TRL takes part where
``make bench-peers`` has installed it.
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
max_staleness = 4
[learner]
learning_rate = 1e-5
prompts_per_step = 8
"""


def contestants(
    result: results.Result, arguments: argparse.Namespace, folder: Path, stack: ExitStack
) -> dict[str, Any]:
    model = "builtin:micro" if arguments.short else "builtin:tiny"
    config = CONFIG.format(steps=arguments.steps, model=model)
    one = {0} if (os.cpu_count() or 1) > 1 else None
    lengths: dict[str, float] = {}

    def ours(name: str, cores: set[int] | None, **overrides: Any) -> float:
        run = runs.train(config, folder, cores=cores, **overrides)
        lengths[name] = runs.mean(run, "tokens/action") / 64
        return runs.seconds_per_step(run)

    result.settings["mean_length"] = lengths
    single = {"runtime__engines": 1, "runtime__learner_threads": 1}
    if arguments.short:
        return {"one core: estr sync": lambda: ours("estr", one, schedule__mode="sync", **single)}
    found: dict[str, Any] = {
        "one core: estr sync": lambda: ours("estr", one, schedule__mode="sync", **single),
        "all cores: estr sync": lambda: ours("estr", None, schedule__mode="sync"),
        "all cores: estr async": lambda: ours("estr", None, schedule__mode="async"),
    }
    if Peer.installed(ENVIRONMENT):
        path = str(_model(folder))
        for name, threads, cores in (("one core: TRL", 1, one), ("all cores: TRL", os.cpu_count() or 1, None)):
            peer = stack.enter_context(Peer(ENVIRONMENT, "benchmarks.peers.trl_peer", threads, cores))
            found[name] = lambda peer=peer, threads=threads: _trl(peer, path, arguments.steps, threads, lengths)
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


def _trl(peer: Peer, path: str, steps: int, threads: int, lengths: dict[str, float]) -> float:
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
    lengths["TRL"] = answer["mean_length"]
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
