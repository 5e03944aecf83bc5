"""Sync against async on `calculator` with tool latency, same machine, same work in a step.

    python -m benchmarks.overlap [--steps 10] [--repeats 2] [--short] [--json PATH]

Latencies: none, 50 ms, 200 ms, and log-normal with median 0.2 s, 99th percentile 2 s, cap 5 s; 64 slots, for the
log-normal one also 16 and 128. The sync baseline is a strong one: one engine process per core while it generates, all
cores for the learner while it trains, all slots busy, and tool waits overlap inside its batch. Runs alternate. Seconds
per optimizer step are taken in the steady state: in sync after the first two steps, in async after the engines have
filled what the staleness bound allows, and before the last groups have been admitted. The bound is that of perfect
overlap with the wait that the staleness bound itself imposes (benchmarks/common/bound.py), for the work the async run
had: ``bound`` with the engine's time in that run, beside the learner; ``bound, engine alone`` with what an engine needs
that has the machine to itself (benchmarks/common/alone.py), the wait as before. Pictures of the last log-normal pair's
timelines go to --output.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import results, runs
from benchmarks.common.alone import engine_alone
from benchmarks.common.bound import bound
from benchmarks.common.timing import Spread, ratio
from estr.environments.latency import Latency
from estr.report.picture import write_picture

GROUPS = GROUP_SIZE = 8
MODES = ("sync", "async")
CONFIG = """
[run]
checkpoint_every = 100000
[model]
path = "{model}"
[task]
name = "calculator"
latency = "{latency.kind}"
latency_seconds = {latency.seconds}
latency_median = {latency.median}
latency_p99 = {latency.p99}
latency_cap = {latency.cap}
[rollout]
group_size = 8
max_new_tokens = 24
slots = {slots}
parked = 448
[schedule]
max_staleness = {staleness}
[learner]
learning_rate = 1e-5
prompts_per_step = 8
"""


@dataclass(frozen=True)
class Setting:
    title: str
    latency: Latency
    slots: int = 64
    aim: float | None = None  # of sync / async


LOGNORMAL = Latency("lognormal")
SETTINGS = [
    Setting("no latency", Latency()),
    Setting("50 ms", Latency("fixed", 0.05)),
    Setting("200 ms", Latency("fixed", 0.2)),
    Setting("log-normal", LOGNORMAL, aim=2.6),
    Setting("log-normal, 16 slots", LOGNORMAL, slots=16),
    Setting("log-normal, 128 slots", LOGNORMAL, slots=128),
]


def measure(result: results.Result, setting: Setting, arguments: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Pairs of runs of one setting; the last pair."""
    staleness = arguments.staleness
    windows = {"sync": (runs.WARM, None), "async": (staleness + 2, -staleness)}
    steps = {"sync": arguments.steps, "async": 2 * (staleness + 1) + 2 * arguments.steps}
    config = CONFIG.format(
        model=arguments.model,
        latency=setting.latency,
        slots=setting.slots,
        staleness=staleness,
    )
    found: dict[str, list[Path]] = {mode: [] for mode in MODES}
    for _ in range(arguments.repeats):
        for mode in MODES:
            found[mode].append(runs.train(config, folder, schedule__mode=mode, run__steps=steps[mode]))
    times = {
        mode: Spread(tuple(runs.seconds_per_step(path, *windows[mode]) for path in paths))
        for mode, paths in found.items()
    }
    for mode, paths in found.items():
        result.measured(f"{setting.title}: {mode}", times[mode], "s a step")
        for actor in ("engine", "learner"):
            idle = Spread(tuple(runs.mean(path, f"time/{actor}_idle_fraction", *windows[mode]) for path in paths))
            result.measured(f"{setting.title}: {mode}, {actor} idle", idle, "of the time")
    result.ratio(f"{setting.title}: sync / async", ratio(times["sync"], times["async"]), setting.aim)
    bounds = [bound(path, setting.latency, GROUPS, GROUP_SIZE, staleness, *windows["async"]) for path in found["async"]]
    least = Spread(tuple(max(one.waiting, one.engines) for one in bounds))
    result.measured(f"{setting.title}: bound", least, "s a step")
    aim = None if arguments.short else 0.85
    result.ratio(f"{setting.title}: bound / async", ratio(least, times["async"]), aim)
    batch = GROUPS * GROUP_SIZE
    alone = [engine_alone(path, (staleness + 1) * batch, batch, arguments.steps) for path in found["async"]]
    result.measured(f"{setting.title}: engine alone", Spread(tuple(alone)), "s a step")
    least = Spread(tuple(max(one.waiting, engine) for one, engine in zip(bounds, alone, strict=True)))
    result.ratio(f"{setting.title}: bound, engine alone / async", ratio(least, times["async"]))
    return {mode: paths[-1] for mode, paths in found.items()}


def main() -> None:
    options = results.parser(__doc__, repeats=2)
    options.add_argument("--steps", type=int, default=10, help="of a sync run; async takes twice as many")
    options.add_argument("--staleness", type=int, default=6, help="max_staleness of async")
    options.add_argument("--model", default="builtin:tiny")
    options.add_argument("--output", type=Path, help="folder for pictures of the timelines")
    arguments = options.parse_args()
    settings = SETTINGS
    if arguments.short:
        arguments.steps, arguments.repeats, arguments.model = 3, 1, "builtin:micro"
        arguments.staleness = 1
        settings = [Setting("50 ms", Latency("fixed", 0.05))]
    result = results.begin("overlap", arguments, steps=arguments.steps, max_staleness=arguments.staleness)
    result.settings["threads of processes"] = "engines 1 each; learner all cores in sync, 1 in async"
    with tempfile.TemporaryDirectory() as name:
        for setting in settings:
            pair = measure(result, setting, arguments, Path(name))
            if arguments.output is not None and setting.title in ("log-normal", settings[0].title):
                arguments.output.mkdir(parents=True, exist_ok=True)
                for mode, path in pair.items():
                    write_picture(path, arguments.output / f"overlap-{mode}.svg")
    closest = [r.median for r in result.ratios if r.name.endswith("bound / async")]
    result.notes.append(f"of the bound, over all settings: {statistics.median(closest):.2f}, least {min(closest):.2f}")
    results.finish(result, arguments.json)


if __name__ == "__main__":
    main()
