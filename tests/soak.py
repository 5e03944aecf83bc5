"""An asynchronous run whose engines are killed all the time: does memory stay flat, how much throughput is left, and is
everything accounted for?

    python tests/soak.py [--minutes 60] [--part 60] [--every 4] [--seed 0]        (or: make soak MINUTES=20)

The run is `estr train` in processes of its own. Parts of ``--part`` seconds alternate: in one nothing is touched, in
the next an engine gets a SIGKILL every ``--every`` seconds or so (half to one and a half times that, from the seed).
Throughput is trained action tokens a second; each disturbed part is compared with the mean of the undisturbed ones
around it. Memory is the proportional set size, once a second; its slope is a straight line through the means of
`BLOCKS` equal stretches of time, the first quarter left out, with the 95 % interval of that fit. At the end the run is
stopped by SIGINT, resumed for a few steps, and its ledger and rollouts must prove that nothing was lost.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from estr.config.load import load_config
from estr.environments.sandbox_keeper import children
from estr.storage.metrics import read_metrics
from loop_helpers import command_line, process_name
from torture.proof import Proof

AIM = 0.8  # of the undisturbed throughput
FLAT, SMALL = 0.02, 1.0  # of the mean, and MB: what a slope whose interval leaves zero out may add in the measured time
BLOCKS = 16
SETTLE = 2.0  # seconds after the start of a part that are not counted
T95 = {8: 2.306, 10: 2.228, 14: 2.145}  # Student's t, two-sided 95 %, by degrees of freedom
SETTINGS: dict[str, dict[str, Any]] = {
    "run": {"steps": 1_000_000, "checkpoint_every": 50, "keep_checkpoints": 2},
    "model": {"path": "builtin:tiny"},
    "task": {"name": "calculator"},
    "rollout": {"group_size": 8, "max_new_tokens": 24, "max_turns": 6, "slots": 64},
    "schedule": {"mode": "async", "max_staleness": 4},
    "learner": {"prompts_per_step": 8, "learning_rate": 1e-6},
}
Start = Callable[[list[str], Path], int]


@dataclass
class Part:
    """A stretch of time: ``tokens`` trained in ``seconds``, ``kills`` dealt."""

    disturbed: bool
    seconds: float = 0.0
    tokens: float = 0.0
    kills: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Soak:
    """``parts`` in their order; ``memory``: by kind of process, (seconds, bytes)."""

    path: Path
    parts: list[Part] = field(default_factory=list)
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    facts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def kills(self) -> int:
        return sum(part.kills for part in self.parts)

    @property
    def ratios(self) -> list[float]:
        """Each disturbed part against the undisturbed ones beside it."""
        found = []
        for before, part, after in zip(self.parts[:-1], self.parts[1:], [*self.parts[2:], None], strict=True):
            if part.disturbed:
                beside = [one.rate for one in (before, after) if one is not None]
                found.append(part.rate / statistics.mean(beside))
        return found


@dataclass
class Slope:
    """A straight line through memory: MB an hour with the half width of its 95 % interval, and the mean in MB."""

    megabytes_an_hour: float
    plus_minus: float
    mean: float
    hours: float

    @property
    def flat(self) -> bool:
        surely = abs(self.megabytes_an_hour) > self.plus_minus
        return not (surely and self.megabytes_an_hour * self.hours > max(SMALL, FLAT * self.mean))

    def __str__(self) -> str:
        verdict = "flat" if self.flat else "GROWS"
        return f"{self.mean:8.1f} MB, {self.megabytes_an_hour:+8.1f} ± {self.plus_minus:.1f} MB per hour: {verdict}"


def slope(samples: list[tuple[float, float]], blocks: int = BLOCKS) -> Slope:
    """The slope of (seconds, bytes), from ``blocks`` means, the first quarter of the time left out."""
    at, size = np.array(samples, float).T
    late = at >= at[0] + (at[-1] - at[0]) / 4
    at, size = at[late] / 3600, size[late] / 2**20
    parts = zip(np.array_split(at, blocks), np.array_split(size, blocks), strict=True)
    means = [(hours.mean(), megabytes.mean()) for hours, megabytes in parts]
    x, y = np.array(means).T
    spread = ((x - x.mean()) ** 2).sum()
    rate = float(((x - x.mean()) * (y - y.mean())).sum() / spread)
    rest = y - y.mean() - rate * (x - x.mean())
    error = math.sqrt(float((rest**2).sum()) / (blocks - 2) / spread)
    return Slope(rate, T95[blocks - 2] * error, float(size.mean()), float(at[-1] - at[0]))


# ---------------------------------------------------------------------- the run


def start_command(arguments: list[str], log: Path) -> int:
    """``estr ARGUMENTS`` in a process of its own."""
    with log.open("ab") as file:
        command = [sys.executable, "-m", "estr", *arguments]
        return subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True).pid


def soak(
    directory: Path,
    *,
    seconds: float,
    part: float,
    every: float,
    seed: int,
    settings: dict[str, dict[str, Any]] = SETTINGS,
    start: Start = start_command,
    say: Callable[[str], None] = lambda text: None,
) -> Soak:
    """Run, disturb, stop, resume, prove.

    Raises:
        AssertionError: the run ended by itself, or the proof fails.
    """
    config, path, log = directory / "soak.toml", directory / "run", directory / "soak.log"
    config.write_text(tomli_w.dumps(settings))
    found, draw = Soak(path), random.Random(seed)
    pid = start(["train", str(config), "--output", str(path)], log)
    try:
        _wait(pid, log, lambda: len(_lines(path)) >= 3)
        _measure(found, pid, log, draw, seconds, part, every, say)
        os.kill(pid, signal.SIGINT)
        assert _status(pid) in (130, -signal.SIGINT), f"SIGINT did not end the run as it should; see {log}"
    finally:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    _finish(path, log, start)
    proof = Proof(path)
    proof.check()
    found.facts = dict(sorted(proof.facts.items()))
    return found


def _measure(
    found: Soak,
    pid: int,
    log: Path,
    draw: random.Random,
    seconds: float,
    part: float,
    every: float,
    say: Callable[[str], None],
) -> None:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        now = Part(disturbed=len(found.parts) % 2 == 1)
        _one_part(now, found, pid, log, draw, part, every, began)
        found.parts.append(now)
        name = "disturbed  " if now.disturbed else "undisturbed"
        say(f"{(time.monotonic() - began) / 60:6.1f} min  {name} {now.rate:8.0f} tokens/s  {now.kills:3d} kills")
    assert found.kills, "there was no time to kill an engine; let it take longer"
    found.seconds = time.monotonic() - began


def _one_part(
    now: Part, found: Soak, pid: int, log: Path, draw: random.Random, part: float, every: float, began: float
) -> None:
    begun = time.monotonic()
    strike = begun + draw.uniform(0.5, 1.5) * every if now.disturbed else math.inf
    sample, counted, before = begun, False, 0.0
    while (clock := time.monotonic()) - begun < part:
        _still_runs(pid, log)
        if not counted and clock - begun >= min(SETTLE, part / 4):
            counted, before, since = True, _tokens(found.path), time.monotonic()
        if clock >= strike:
            now.kills += _kill_an_engine(pid, draw)
            strike = clock + draw.uniform(0.5, 1.5) * every
        if clock >= sample:
            for kind, size in memory(pid).items():
                found.memory[kind].append((clock - began, size))
            sample = clock + 1.0
        time.sleep(0.02)
    now.tokens, now.seconds = _tokens(found.path) - before, time.monotonic() - since


def _kill_an_engine(pid: int, draw: random.Random) -> int:
    engines = [child for child in family(pid) if process_name(child).startswith("engine-")]
    if not engines:
        return 0
    with suppress(ProcessLookupError):
        os.kill(draw.choice(engines), signal.SIGKILL)
        return 1
    return 0


def _finish(path: Path, log: Path, start: Start) -> None:
    """Resume for as many steps as everything on its way needs, so that all of it is settled."""
    loaded = load_config(path / "config.toml").config
    steps = len(_lines(path)) + 3 * loaded.schedule.max_staleness + 2
    text = (path / "config.toml").read_text()
    shorter = text.replace(f"steps = {loaded.run.steps}\n", f"steps = {steps}\n", 1)
    assert shorter != text, "config.toml does not say how many steps"
    (path / "config.toml").write_text(shorter)
    assert _status(start(["resume", str(path)], log)) == 0, f"the resumed run failed; see {log}"


def _status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _still_runs(pid: int, log: Path) -> None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    assert not ended, f"the run ended by itself with status {os.waitstatus_to_exitcode(status)}; see {log}"


def _wait(pid: int, log: Path, condition: Callable[[], bool]) -> None:
    while not condition():
        _still_runs(pid, log)
        time.sleep(0.05)


def _lines(path: Path) -> list[dict[str, Any]]:
    return read_metrics(path) if (path / "metrics.jsonl").exists() else []


def _tokens(path: Path) -> float:
    """Action tokens trained so far."""
    return sum(line["tokens/action"] for line in _lines(path))


# ---------------------------------------------------------------------- memory


def family(pid: int) -> list[int]:
    """A process and everything below it."""
    return [pid, *(other for child in children(pid) for other in family(child))]


def memory(pid: int) -> dict[str, float]:
    """Proportional set size in bytes: the learner, the helper, the engines together, and all."""
    sizes: dict[str, float] = defaultdict(float)
    for process in family(pid):
        size = _proportional(process)
        sizes[_kind(process, pid)] += size
        sizes["all"] += size
    return sizes


def _kind(process: int, learner: int) -> str:
    if process == learner:
        return "learner"
    if process_name(process).startswith("engine-"):
        return "engines"
    return "resource tracker" if "resource_tracker" in command_line(process) else "fork helper"


def _proportional(process: int) -> float:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return float(line.split()[1]) * 1024
    return 0.0


# ---------------------------------------------------------------------- the command


def report(found: Soak) -> bool:
    """Print what was measured; whether it is as it should be."""
    rates = {kind: [p.rate for p in found.parts if p.disturbed is kind] for kind in (False, True)}
    ratio = statistics.mean(found.ratios)
    print(f"{found.seconds / 60:.1f} min, {found.kills} engines killed, trajectories: {found.facts}")
    for kind, name in ((False, "undisturbed"), (True, "disturbed")):
        mean, least, most = statistics.mean(rates[kind]), min(rates[kind]), max(rates[kind])
        print(f"{name:12} {mean:8.0f} tokens/s ({least:.0f} to {most:.0f})")
    enough = ratio >= AIM
    spread = f"{min(found.ratios):.2f} to {max(found.ratios):.2f}"
    print(f"throughput while killed: {ratio:.2f} of undisturbed ({spread}); aim {AIM}: {'yes' if enough else 'NO'}")
    slopes = {kind: slope(samples) for kind, samples in sorted(found.memory.items()) if len(samples) >= 4 * BLOCKS}
    print(f"memory (PSS), {found.seconds * 0.75 / 60:.1f} min after the first quarter:")
    for whose, one in slopes.items():
        print(f"  {whose:18}{one}")
    print("ledger and rollouts: every issued trajectory was trained exactly once or dropped with a reason")
    return enough and all(one.flat for one in slopes.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--part", type=float, default=60.0, help="seconds of each part")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between kills, on average")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="estr-soak-"))
    print(f"seed {given.seed}, {given.minutes:g} min, in {directory}", flush=True)
    found = soak(
        directory,
        seconds=60 * given.minutes,
        part=given.part,
        every=given.every,
        seed=given.seed,
        say=lambda text: print(text, flush=True),
    )
    fine = report(found)
    print("verdict:", "as it should be" if fine else "NOT as it should be")
    if fine:
        shutil.rmtree(directory)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
