"""Running many runs over a few cores: each a process and a run directory of its own, resumable, failures survived."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, Protocol

from estr.compare.plan import PlannedRun, identity
from estr.config.load import dump_config
from estr.errors import EstrError, UsageError
from estr.runtime.interrupts import Interrupted, Interrupts
from estr.storage.files import disk_errors, write_atomic
from estr.storage.run_directory import RunDirectory
from estr.storage.run_record import RunRecord

State = Literal["waiting", "running", "finished", "diverged", "failed"]
ENDED: tuple[State, ...] = ("finished", "diverged")
POLL = 0.2  # seconds
GRACE = 120.0  # seconds that interrupted runs have for their last checkpoint


@dataclass
class Status:
    """Where one run stands."""

    run: PlannedRun
    path: Path
    state: State = "waiting"
    steps_before: int = 0  # of an earlier call, when this one took it up
    reason: str = ""

    @property
    def steps(self) -> int:
        """Optimizer steps that are in metrics.jsonl."""
        try:
            with open(self.path / "metrics.jsonl", "rb") as file:
                return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 16), b""))
        except OSError:
            return 0

    @property
    def total(self) -> int:
        return self.run.config.run.steps


class Observer(Protocol):
    """What watches the runs: a line on each change, and now and then on all of them."""

    def changed(self, status: Status, statuses: Sequence[Status]) -> None: ...

    def tick(self, statuses: Sequence[Status], seconds: float) -> None: ...


class Silent:
    def changed(self, status: Status, statuses: Sequence[Status]) -> None: ...

    def tick(self, statuses: Sequence[Status], seconds: float) -> None: ...


Command = Callable[[PlannedRun, Path, Path], list[str]]
"""(run, its configuration file, its directory) → the process that trains it, or goes on where the directory exists."""


def estr_command(run: PlannedRun, config: Path, directory: Path) -> list[str]:
    """``estr train``, or ``estr resume`` where the run has begun."""
    estr = [sys.executable, "-m", "estr"]
    if directory.exists():
        return [*estr, "resume", str(directory)]
    return [*estr, "train", str(config), "--output", str(directory)]


@dataclass
class Driver:
    """Runs what has not finished yet; the study goes on when a run fails.

    Under ``output``: ``runs/NAME`` is a run directory, ``configs/NAME.toml`` what it is started from, ``logs/NAME.log``
    what its process said.
    """

    output: Path
    workers: int
    observer: Observer = field(default_factory=Silent)
    command: Command = estr_command
    keep_checkpoints: bool = True
    modules: Path | None = None  # where modules of the user's own lie
    train: bool = True  # False: leave what has not ended as it is

    def __call__(self, runs: Iterable[PlannedRun]) -> dict[str, Status]:
        """Run them all; name → status, each finished, diverged or failed.

        Raises:
            UsageError: a run directory of that name was made from another configuration.
            Interrupted: SIGINT, SIGTERM or SIGHUP came; the runs have written their checkpoints.
        """
        statuses = [self._status(run) for run in runs]
        waiting = [status for status in statuses if status.state == "waiting" and self.train]
        active: list[_Active] = []
        started = time.monotonic()
        with Interrupts() as interrupts:
            try:
                while waiting or active:
                    while waiting and len(active) < self.workers:
                        active.append(self._start(waiting.pop(0)))
                        self.observer.changed(active[-1].status, statuses)
                    active = [one for one in active if not self._ended(one, statuses)]
                    self.observer.tick(statuses, time.monotonic() - started)
                    interrupts.check()
                    time.sleep(POLL)
            except Interrupted:
                _stop(active)
                raise Interrupted("interrupted; the same command goes on where it stopped") from None
            except BaseException:
                _stop(active)
                raise
        return {status.run.name: status for status in statuses}

    def _status(self, run: PlannedRun) -> Status:
        path = self.output / "runs" / run.name
        status = Status(run, path)
        if not path.exists():
            return status
        directory = RunDirectory.open(path)
        if identity(directory.config()) != identity(run.config):
            raise UsageError(
                f"{path} was made from another configuration than this study now asks for; choose another --output, or "
                "remove it to train it again"
            )
        ending = RunRecord(directory).ending
        if not directory.in_use and ending in ENDED:
            status.state = "finished" if ending == "finished" else "diverged"
            status.reason = RunRecord(directory).reason
        status.steps_before = status.steps
        return status

    def _start(self, status: Status) -> _Active:
        name = status.run.name
        config, log = self.output / "configs" / f"{name}.toml", self.output / "logs" / f"{name}.log"
        with disk_errors("write to", self.output):
            config.parent.mkdir(parents=True, exist_ok=True)
            log.parent.mkdir(parents=True, exist_ok=True)
            (self.output / "runs").mkdir(exist_ok=True)
            write_atomic(config, dump_config(status.run.config).encode())
            file = open(log, "ab")  # noqa: SIM115  (closed with its process)
        status.state = "running"
        if status.path.exists() and RunDirectory(status.path).in_use:
            return _Active(status, None, file)  # a process of an earlier call still works on it
        process = subprocess.Popen(
            self.command(status.run, config, status.path),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=self._environment(),
            start_new_session=True,  # Ctrl-C on the terminal comes here alone, and is passed on
        )
        return _Active(status, process, file)

    def _environment(self) -> dict[str, str]:
        paths = [str(self.modules.resolve())] if self.modules is not None else []
        paths += [path for path in (os.environ.get("PYTHONPATH"),) if path]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}

    def _ended(self, one: _Active, statuses: Sequence[Status]) -> bool:
        if one.running:
            return False
        one.file.close()
        status = one.status
        status.state, status.reason = _outcome(status.path, one)
        if status.state == "finished" and not self.keep_checkpoints:
            _strip(status.path)
        self.observer.changed(status, statuses)
        return True


@dataclass
class _Active:
    status: Status
    process: subprocess.Popen[bytes] | None
    file: IO[bytes]

    @property
    def running(self) -> bool:
        if self.process is not None:
            return self.process.poll() is None
        return RunDirectory(self.status.path).in_use


def _outcome(path: Path, one: _Active) -> tuple[State, str]:
    """How a run ended, by its own record, and why."""
    code = one.process.returncode if one.process is not None else 0
    try:
        record = RunRecord(RunDirectory.open(path))
    except EstrError:
        return "failed", _last_words(one.file.name) or f"its process ended with status {code}"
    if record.ending == "finished":
        return "finished", ""
    if record.ending == "diverged":
        return "diverged", record.reason
    return "failed", record.reason or _last_words(one.file.name) or f"its process ended with status {code}"


def _last_words(log: str) -> str:
    """The last line that a process said."""
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _strip(path: Path) -> None:
    """Remove what only a resume or an evaluation of the model would need."""
    for part in ("checkpoints", "spool"):
        shutil.rmtree(path / part, ignore_errors=True)


def _stop(active: Iterable[_Active]) -> None:
    """Ask for checkpoints, wait for them, and end what does not come to an end."""
    processes = [one.process for one in active if one.process is not None]
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for one in active:
        one.file.close()
