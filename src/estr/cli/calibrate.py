"""``estr calibrate``: a short run at learning rate 0 whose ratios are all noise, and thresholds from it."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from estr.config import Config
from estr.config.load import load_config
from estr.config.validate import validate_config
from estr.errors import UsageError
from estr.inspect.calibration import Calibration, calibrate
from estr.inspect.read import read_dump
from estr.report.series import number
from estr.runtime.interrupts import Interrupts
from estr.runtime.reporter import SilentReporter
from estr.runtime.run import Run
from estr.runtime.setup import prepared
from estr.storage.checkpoints import latest_checkpoint
from estr.storage.files import disk_errors, write_atomic
from estr.storage.run_directory import RunDirectory

STILL = (
    "learner.learning_rate=0.0",
    "learner.weight_decay=0.0",
    "learner.minibatches=1",
    "learner.epochs=1",
    'schedule.mode="lockstep"',
    "schedule.inter=0",
    "schedule.intra=0",
    "run.eval_every=0",
    "run.checkpoint_every=1000000",
    'objective.recipe="grpo"',
)
"""What makes every token free of staleness; everything else stays as the configuration has it."""

AGAIN = (
    "Calibrate again when the engine, its precision, its kernels, the sampling parameters, the model or the task "
    "change, and when training has moved the entropies far from those above."
)


def calibrate_command(
    source: str, sets: list[str], *, share: float, steps: int, output: str | None, as_json: bool
) -> None:
    """Calibrate on a configuration's starting weights or a run's last ones; write and print the result."""
    if not 0 < share < 1:
        raise UsageError(f"--share must lie between 0 and 1, got {share:g}")
    config, target = _still_config(source, sets, steps)
    path = Path(output) if output else target
    with tempfile.TemporaryDirectory(prefix="estr-calibrate-") as folder:
        run = Path(folder) / "run"
        _generate(config, run)
        found = calibrate(read_dump(run, "estr"), share)
    value = found.to_json() | {"source": source, "engine": config.rollout.dtype, "learner": config.model.dtype}
    with disk_errors("write the calibration", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(value, indent=1) + "\n").encode())
    if as_json:
        print(json.dumps(value, allow_nan=False))
    else:
        _print(found, config, path)


def _generate(config: Config, path: Path) -> None:
    with (
        RunDirectory.create(path, config) as directory,
        Interrupts() as interrupts,
        prepared(config, directory, _Quiet(), interrupts, None) as parts,
    ):
        Run(parts, interrupts).go()


def _still_config(source: str, sets: list[str], steps: int) -> tuple[Config, Path]:
    """The configuration of the short run, and where its result goes by default."""
    directory, extra = Path(source), [f"run.steps={steps}", *STILL]
    target = Path("calibration.json")
    config_path, stored = directory, (directory / "config.toml").is_file()
    if stored:
        run = RunDirectory.open(directory)
        checkpoint = latest_checkpoint(run).checkpoint
        if checkpoint is not None:
            extra.append(f"model.path={json.dumps(str(checkpoint.path))}")
        config_path, target = run.config_path, directory / "calibration.json"
    config, notices = load_config(config_path, [*sets, *extra], stored=stored)
    kept = [*(notice for notice in notices if "left out" not in notice), *validate_config(config)]
    for notice in kept:
        print(f"note: {notice}", file=sys.stderr)
    return config, target


class _Quiet(SilentReporter):
    """Says what it waits for, and nothing of steps that teach nothing."""

    def notice(self, sentence: str) -> None:
        print(f"note: {sentence}", file=sys.stderr)

    def phase(self, sentence: str) -> None:
        print(f"{sentence} …", file=sys.stderr, flush=True)

    def start(self, directory: Path, step: int, steps: int) -> None:
        print(f"{steps} steps at learning rate 0 …", file=sys.stderr, flush=True)


def _print(found: Calibration, config: Config, path: Path) -> None:
    print(
        f"engine ({config.rollout.dtype}) against learner ({config.model.dtype}), same weights, {found.tokens:,} "
        f"tokens: mean δ² {number(found.delta_squared)}, as noise of {number(found.logit_noise)} on every logit gives"
    )
    print(f"{'H (nats)':>18} {'tokens':>8} {'mean δ²':>11} {'median S':>11} {f'S at {found.share:g}':>11}")
    for one in found.bins:
        span = f"{number(one.low)} – {number(one.high)}"
        columns = (number(one.delta_squared), number(one.score_median), number(one.score_share))
        print(f"{span:>18} {one.count:>8,} " + " ".join(f"{column:>11}" for column in columns))
    print(f"tau {found.tau:.4g}, eps {found.eps:.4g} keep {found.share:.2%} of tokens without staleness")
    for note in found.notes:
        print(f"note: {note}")
    print(f'written to {path}; use it with  [objective]  tau = "calibrated"  calibration = "{path}"')
    print(AGAIN)
