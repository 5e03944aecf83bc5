"""Small runs: configurations, the command line in this process and in one of its own, and what runs leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from torch import Tensor

from estr.cli.main import main
from estr.config import Config
from estr.runtime.interrupts import Interrupts
from estr.runtime.reporter import SilentReporter
from estr.runtime.run import Run
from estr.runtime.setup import Parts, prepared
from estr.storage.checkpoints import latest_checkpoint
from estr.storage.metrics import read_metrics
from estr.storage.rollout_files import read_rollouts
from estr.storage.run_directory import RunDirectory
from forking import Forked, forked_estr

TESTS = Path(__file__).parent
SCRIPT = Path(sys.executable).with_name("estr")
COMMAND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "estr"]
CLOCK = ("wall_time", "time/", "throughput/")
SMALL: dict[str, dict[str, Any]] = {
    "run": {"steps": 6, "checkpoint_every": 100},
    "model": {"path": "builtin:micro"},
    "task": {"name": "loop_tasks:Echo"},
    "rollout": {"group_size": 2, "max_new_tokens": 8, "max_turns": 3, "slots": 3, "parked": 3},
    "schedule": {"mode": "lockstep"},
    "learner": {"prompts_per_step": 2, "learning_rate": 0.01},
    "runtime": {"learner_threads": 1},
}


def sections(**changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of a small run, with changes to them."""
    names = SMALL.keys() | changes.keys()
    return {name: {**SMALL.get(name, {}), **changes.get(name, {})} for name in sorted(names)}


def small(**changes: Mapping[str, Any]) -> Config:
    return Config(**sections(**changes))


def write_config(path: Path, **changes: Mapping[str, Any]) -> Path:
    """A TOML file of a small run."""
    path.write_text(tomli_w.dumps(sections(**changes)), encoding="utf-8")
    return path


@dataclass
class Outcome:
    status: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The error that was told, checked for its form: at most two lines, no traceback."""
        assert "Traceback" not in self.err + self.out, self.err
        lines = [line for line in self.err.splitlines() if line.strip()]
        starts = [i for i, line in enumerate(lines) if line.startswith("estr: ")]
        assert len(starts) == 1, self.err
        assert len(lines) - starts[0] <= 2, self.err
        assert "should have been a better sentence" not in self.err, self.err
        return "\n".join(lines[starts[0] :]).removeprefix("estr: ")


def estr(capsys: pytest.CaptureFixture[str], *arguments: object) -> Outcome:
    """The command line in this process."""
    capsys.readouterr()
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    captured = capsys.readouterr()
    return Outcome(status, captured.out, captured.err)


@dataclass
class Command:
    """The command line in a process of its own, leader of its own process group."""

    process: subprocess.Popen[str] | Forked
    err_path: Path
    out_path: Path

    def send(self, number: int, *, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.process.pid, number)

    def finish(self, timeout: float = 200.0) -> Outcome:
        status = self.process.wait(timeout)
        return Outcome(status, self.out_path.read_text(), self.err_path.read_text())

    @property
    def children(self) -> list[int]:
        """Process ids of its engine processes."""
        return [pid for pid in descendants(self.process.pid) if process_name(pid).startswith("engine-")]


@contextmanager
def started(directory: Path, *arguments: object, forked: bool = False, **environment: str) -> Iterator[Command]:
    """``estr ARGUMENTS`` in ``directory``, which holds a copy of the tests' own tasks.

    ``forked``: as a copy of this process, which starts in a fraction of the time; else a new interpreter.
    """
    (directory / "loop_tasks.py").write_text((TESTS / "loop_tasks.py").read_text())
    err, out = directory / "stderr.txt", directory / "stdout.txt"
    words, variables = [str(word) for word in arguments], {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with err.open("w") as err_file, out.open("w") as out_file:
        process: subprocess.Popen[str] | Forked
        if forked:
            process = forked_estr(words, out_file.fileno(), err_file.fileno(), directory, variables)
        else:
            process = subprocess.Popen(
                [*COMMAND, *words],
                cwd=directory,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                text=True,
                start_new_session=True,
            )
        command = Command(process, err, out)
        try:
            yield command
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 200.0) -> Any:
    """The first true value of ``condition``; fails the test where there is none in time."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout:.0f} s for {what}")
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            child = int(entry.parent.name)
            found += [child, *descendants(child)]
    return found


def shared_files(pid: int) -> list[Path]:
    """The weight files in shared memory that the process ``pid`` published."""
    return sorted(Path("/dev/shm").glob(f"estr-{pid}-*.weights"))


def metrics_without_clock(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith(CLOCK)} for line in read_metrics(run)]


def rollouts(run: Path) -> list[dict[str, Any]]:
    """All stored rows, by id; numbers as text, so that NaN equals NaN."""
    rows = sorted(read_rollouts(run).to_pylist(), key=lambda row: row["trajectory_id"])
    return [{k: repr(v) if isinstance(v, list | float) else v for k, v in row.items()} for row in rows]


@dataclass
class Stored:
    """One stored row with arrays."""

    row: dict[str, Any] = field(repr=False)

    def __getattr__(self, name: str) -> Any:
        value = self.row[name]
        return np.array(value) if isinstance(value, list) else value


def stored(run: Path, state: str = "trained") -> list[Stored]:
    return [Stored(row) for row in read_rollouts(run).to_pylist() if row["state"] == state]


def snapshot(directory: Path) -> dict[str, bytes]:
    """Every file below a directory with its content."""
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


def plain_model(path: Path, weights: Mapping[str, Tensor]) -> Any:
    """The model of a directory by the library's own means (eager attention), with other weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model.eval()


def replay(models: Mapping[int, Any], row: Any, temperature: float = 1.0) -> list[Tensor]:
    """log μ over the vocabulary [V] at each action of a row, teacher-forced under kv = "keep": the keys and values of
    position p are computed under the version that samples the next action after p, and never again."""
    from transformers import DynamicCache

    cache, distributions, start = DynamicCache(), [], 0
    ids = torch.as_tensor(np.asarray(row.tokens)).long()
    with torch.no_grad():
        for at in np.flatnonzero(np.asarray(row.action)).tolist():
            model = models[int(row.version[at])]
            logits = model(ids[None, start:at], cache=cache, use_cache=True).logits[0, -1]
            distributions.append(torch.log_softmax(logits.float() / temperature, -1))
            start = at
    return distributions


def assert_replays(models: Mapping[int, Any], row: Any, tolerance: float = 1e-4) -> None:
    """Stored log μ and H equal those of the replay."""
    at = np.flatnonzero(np.asarray(row.action))
    distributions = replay(models, row)
    logprob = [float(d[int(token)]) for d, token in zip(distributions, np.asarray(row.tokens)[at], strict=True)]
    entropy = [float(torch.special.entr(d.exp()).sum()) for d in distributions]
    np.testing.assert_allclose(np.asarray(row.logprob)[at], logprob, atol=tolerance)
    np.testing.assert_allclose(np.asarray(row.entropy)[at], entropy, atol=tolerance)


class Watcher(SilentReporter):
    """Keeps what a run tells, and calls ``on_step`` and ``on_notice`` as it is told."""

    def __init__(
        self, on_step: Callable[[int], None] = lambda step: None, on_notice: Callable[[str], None] = lambda text: None
    ) -> None:
        super().__init__()
        self._on_step, self._on_notice = on_step, on_notice

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        self._on_step(step)

    def notice(self, sentence: str) -> None:
        super().notice(sentence)
        self._on_notice(sentence)


def ask_to_stop() -> None:
    signal.raise_signal(signal.SIGINT)


def train(
    config: Config, path: Path, watcher: Watcher | None = None, hook: Callable[[Parts], None] | None = None
) -> Path:
    """A whole run in this process; ``hook`` sees its parts before it starts."""
    with (
        RunDirectory.create(path, config) as directory,
        Interrupts() as interrupts,
        prepared(config, directory, watcher or Watcher(), interrupts) as parts,
    ):
        if hook is not None:
            hook(parts)
        Run(parts, interrupts).go()
    return path


def go_on(path: Path) -> None:
    """What ``estr resume`` does, without the report."""
    with (
        RunDirectory.open(path, lock=True) as directory,
        Interrupts() as interrupts,
        prepared(
            directory.config(), directory, Watcher(), interrupts, latest_checkpoint(directory).checkpoint
        ) as parts,
    ):
        Run(parts, interrupts).go()


def published(parts: Parts) -> dict[int, dict[str, Tensor]]:
    """The weights of every version, filled in as the run publishes them."""
    versions: dict[int, dict[str, Tensor]] = {}
    publish = parts.pool.publish

    def keep(version: int, tensors: Mapping[str, Tensor], canary: Any) -> None:
        versions[version] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        publish(version, tensors, canary)

    parts.pool.publish = keep  # type: ignore[method-assign]
    return versions
