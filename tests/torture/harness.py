"""Starts run processes, kills them and their engines, and goes on until a run is done."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from estr.cli.main import main
from estr.config.load import dump_config
from estr.environments.sandbox_keeper import children
from estr.learner.learner import Learner
from estr.runtime import pools
from loop_helpers import command_line, small
from torture import parts
from torture.points import POINTS, Point, Trap

STEPS = 10
LONGEST_LIFE = 120.0  # seconds after which a process counts as hanging
MODES: dict[str, dict[str, Any]] = {
    "async": {"mode": "async", "max_staleness": 3},
    "sync": {"mode": "sync"},
    "lockstep": {"mode": "lockstep", "inter": 2, "intra": 1},
}


def configuration(mode: str, *, engines: int = 2, start_timeout: float = 6.0, **learner: Any) -> Any:
    """A small run with minibatches, retries and checkpoints in all the wrong places."""
    return small(
        run={"steps": STEPS, "checkpoint_every": 2, "keep_checkpoints": 2},
        task={"name": "torture.parts:Torture"},
        rollout={"group_size": 2, "max_new_tokens": 6, "max_turns": 4, "slots": 3, "parked": 3},
        schedule=MODES[mode] | {"attempts": 2, "wait_timeout": 60.0},
        learner={"prompts_per_step": 2, "minibatches": 2, "learning_rate": 1e-3} | learner,
        runtime={
            "engines": 1 if mode == "lockstep" else engines,
            "engine_timeout": 3.0,
            "start_timeout": start_timeout,
            "learner_threads": 1,
        },
    )


class TortureError(AssertionError):
    """A promise was broken; the message says where to look."""


@dataclass
class Blow:
    """What is done to one process life: a trap inside it, or a signal from outside, ``delay`` seconds after whom it is
    for was first seen: the learner, an engine, or the helper that engines are forked from."""

    trap: Trap | None = None
    signal: int = 0
    to: Literal["", "learner", "engine", "helper", "helper with engines"] = ""
    delay: float = 0.0
    seen: float | None = None
    dealt: bool = False

    @property
    def phase(self) -> str:
        if self.trap is None:
            if not self.signal:
                return "no blow"
            return f"any time: {signal.Signals(self.signal).name} to the {self.to}"
        return "a file call" if self.trap.point is None else self.trap.point.phase


@dataclass
class Tally:
    kills: Counter[str] = field(default_factory=Counter)
    lives: int = 0  # run processes
    runs: Counter[str] = field(default_factory=Counter)
    facts: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.kills.total()


class Torturer:
    """Draws blows from a seed and deals them; ``pretended`` engines and learners, or the real ones.

    ``helper``: engines are forked from a helper as in earnest, and it is killed, too; the real ones then.
    """

    def __init__(self, directory: Path, seed: int, *, pretended: bool = True, helper: bool = False) -> None:
        self.directory, self.pretended, self.helper = directory, pretended, helper
        self.draw, self.tally = random.Random(seed), Tally()
        self._unused: dict[str, list[Point | None]] = {}
        self._count = 0
        torch.set_num_threads(1)

    # ------------------------------------------------------------------ one run

    def reference(self, mode: str) -> Path:
        """The same run, never touched."""
        path = self._create(mode, "reference")
        self._live(path, Blow(), fresh=True)
        return path

    def run(self, mode: str, most: int) -> Path:
        """A run that takes up to ``most`` blows and is then left alone to its end."""
        path, dealt = self._create(mode, "run"), 0
        fresh = True
        while True:
            blow = self._blow(mode, fresh) if dealt < most else Blow()
            hit, done = self._live(path, blow, fresh=fresh)
            fresh = False
            if hit:
                dealt += 1
                self.tally.kills[blow.phase] += 1
            if done:
                self.tally.runs[mode] += 1
                return path

    def _create(self, mode: str, name: str) -> Path:
        self._count += 1
        path = self.directory / f"{self._count:03d}-{mode}-{name}"
        (self.directory / f"{path.name}.toml").write_text(
            dump_config(configuration(mode, start_timeout=60.0 if self.helper else 6.0))
        )
        return path

    # ------------------------------------------------------------------ blows

    def _blow(self, mode: str, fresh: bool) -> Blow:
        if self.helper:
            return self._blow_to_a_family()
        kind = self.draw.random()
        if kind < 0.15:
            to: Literal["learner", "engine"] = "learner" if mode == "lockstep" or self.draw.random() < 0.5 else "engine"
            number = self.draw.choice(
                [signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP if to == "engine" else signal.SIGTERM]
            )
            return Blow(signal=number, to=to, delay=self.draw.uniform(0.05, 1.5))
        self._count += 1
        latch = self.directory / f"latch-{self._count}"
        if kind < 0.30:
            return Blow(Trap(None, self.draw.randint(1, 120), latch))
        point = self._next_point(mode, fresh)
        return Blow(Trap(point, self.draw.randint(1, point.most), latch))

    def _blow_to_a_family(self) -> Blow:
        """Three of five to the helper: while it imports, or when it has engines."""
        to = self.draw.choice(["helper", "helper with engines", "helper with engines", "engine", "learner"])
        longest = {"helper": 3.0, "learner": 8.0}.get(to, 1.5)
        return Blow(signal=signal.SIGKILL, to=to, delay=self.draw.uniform(0.0, longest))

    def _next_point(self, mode: str, fresh: bool) -> Point:
        """Every point comes once before one comes again; those of a resume only in a resume."""
        waiting = self._unused.setdefault(mode, [])
        fit = [point for point in waiting if point is not None and not (fresh and point.phase == "resuming")]
        if not fit:
            waiting[:] = [point for point in POINTS if mode in point.modes]
            fit = [point for point in waiting if point is not None and not (fresh and point.phase == "resuming")]
        point = self.draw.choice(fit)
        waiting.remove(point)
        return point

    # ------------------------------------------------------------------ one process life

    def _live(self, path: Path, blow: Blow, *, fresh: bool) -> tuple[bool, bool]:
        """(whether the blow was dealt, whether the run is done)"""
        self.tally.lives += 1
        fresh = fresh or not path.exists()
        log = path.with_suffix(".log")
        pid = self._fork(path, blow, fresh, log)
        status = self._watch(pid, blow, log)
        hit = blow.trap.latch.exists() if blow.trap is not None else blow.dealt
        _end_children_of(pid, log)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return hit, True
        expected = {-signal.SIGKILL} if hit and (blow.trap is not None or blow.to == "learner") else set()
        if blow.signal == signal.SIGTERM and hit:
            expected |= {130, -signal.SIGTERM}
        if code not in expected:
            raise TortureError(f"{path} ended with status {code} after {blow.trap or blow.phase}; see {log}")
        return hit, False

    def _fork(self, path: Path, blow: Blow, fresh: bool, log: Path) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for number in (1, 2):
                os.dup2(descriptor, number)
            what = str(blow.trap) if blow.trap is not None else blow.phase
            print(f"--- {'train' if fresh else 'resume'}, pid {os.getpid()}, {what}", flush=True)
            self._prepare(blow)
            config = self.directory / f"{path.name}.toml"
            arguments = ["train", str(config), "--output", str(path)] if fresh else ["resume", str(path)]
            code = main(arguments)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _prepare(self, blow: Blow) -> None:
        """In the run process: forked engines, pretended parts, the trap."""
        if not self.helper:
            real = multiprocessing.get_context
            multiprocessing.get_context = lambda kind=None: real("fork" if kind == "forkserver" else kind)  # type: ignore[assignment]
            pools.preload = lambda modules: None
        if self.pretended:
            from estr.runtime import builders, setup

            builders.LocalEngine = parts.PretendedEngine  # type: ignore[misc]
            setup.Learner = parts.PretendedLearner  # type: ignore[misc]
        else:
            parts.applying = Learner._apply  # type: ignore[assignment]
        if blow.trap is not None:
            blow.trap.arm()
            if not self.pretended:
                Learner._apply = parts.applying  # type: ignore[method-assign, assignment]

    def _watch(self, pid: int, blow: Blow, log: Path) -> int:
        started = time.monotonic()
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return status
            if blow.signal and not blow.dealt:
                self._strike(pid, blow)
            if time.monotonic() - started > LONGEST_LIFE:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise TortureError(f"a process hung for {LONGEST_LIFE:.0f} s; see {log}")
            time.sleep(0.005)

    def _strike(self, pid: int, blow: Blow) -> None:
        victims, now = _victims(pid, blow.to), time.monotonic()
        if not victims:
            return
        if blow.seen is None:
            blow.seen = now
        if now - blow.seen >= blow.delay:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.draw.choice(victims), blow.signal)
                blow.dealt = True


def _victims(pid: int, to: str) -> list[int]:
    if to == "learner":
        return [pid]
    below = [child for child in children(pid) if "resource_tracker" not in command_line(child)]
    helpers = [child for child in below if "multiprocessing.forkserver" in command_line(child)]
    if to == "helper":
        return helpers
    if to == "helper with engines":
        return [helper for helper in helpers if children(helper)]
    return [child for helper in helpers for child in children(helper)] if helpers else below


def _end_children_of(pid: int, log: Path) -> None:
    """Engine processes end with the run process; give them a moment, then say that they did not."""
    deadline = time.monotonic() + 10.0
    while members := _session(pid):
        if time.monotonic() > deadline:
            for member in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            raise TortureError(f"processes {members} outlived the run process {pid}; see {log}")
        time.sleep(0.01)


def _session(pid: int) -> list[int]:
    """Processes of the session that ``pid`` led, zombies left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(session) == pid and state != "Z":
            found.append(int(entry.parent.name))
    return found
