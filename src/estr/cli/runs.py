"""``estr runs``: what became of the runs in a directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from estr.errors import EstrError, UsageError
from estr.storage.checkpoints import best_checkpoint, checkpoint_steps
from estr.storage.metrics import read_metrics
from estr.storage.run_directory import RunDirectory
from estr.storage.run_record import RunRecord

_MEAN_OVER = 10  # last steps of the mean reward


@dataclass(frozen=True)
class RunLine:
    """One run; rewards are None where there are none yet."""

    run: str
    state: str
    step: int
    steps: int | None
    reward: float | None  # mean training reward of the last steps
    held_out: float | None  # last evaluation
    best: float | None  # best evaluation that has a checkpoint
    size: int  # bytes
    reason: str  # why it ended, where it failed


def show_runs(directory: str, *, as_json: bool) -> None:
    """Print the runs at or below ``directory``; raises UsageError where there is none."""
    root = Path(directory)
    if not root.is_dir():
        raise UsageError(f"{directory} does not exist; give a directory with run directories in it")
    lines = [describe(path, root) for path in find_runs(root)]
    if as_json:
        print(json.dumps([asdict(line) for line in lines]))
        return
    if not lines:
        raise UsageError(f"{directory} holds no run directories; make one with: estr train CONFIG.toml --output DIR")
    _print(lines)


def find_runs(root: Path) -> Iterator[Path]:
    """Run directories at ``root`` or below it, by name; nothing inside a run is looked at."""
    if (root / "config.toml").is_file() and (root / "checkpoints").is_dir():
        yield root
        return
    for entry in sorted(root.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            yield from find_runs(entry)


def describe(path: Path, root: Path) -> RunLine:
    """What is known of one run; a damaged one is listed as that."""
    run = RunDirectory(path)
    name = path.name if path == root else str(path.relative_to(root))
    size = _size(path)
    try:
        config, metrics, record, best = run.config(), read_metrics(run), RunRecord(run), best_checkpoint(run)
    except EstrError as error:
        return RunLine(name, "damaged", 0, None, None, None, None, size, str(error))
    rewards = _numbers(metrics[-_MEAN_OVER:], "reward/mean")
    evaluations = _numbers(metrics, "eval/reward")
    step = int(next(iter(_numbers(metrics[-1:], "step")), 0))
    return RunLine(
        run=name,
        state=_state(run, record, step, config.run.steps),
        step=step,
        steps=config.run.steps,
        reward=sum(rewards) / len(rewards) if rewards else None,
        held_out=evaluations[-1] if evaluations else None,
        best=best.reward if best is not None else None,
        size=size,
        reason=record.reason,
    )


def _numbers(lines: list[dict[str, Any]], key: str) -> list[float]:
    values = (line.get(key) for line in lines)
    return [float(value) for value in values if isinstance(value, int | float)]


def _state(run: RunDirectory, record: RunRecord, step: int, steps: int) -> str:
    """What the record says; a run from before there were records is finished where it has all its steps."""
    done = not record.begun and not run.in_use and step >= steps and steps in checkpoint_steps(run)
    return "finished" if done else record.state


def _size(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.lstat().st_size
        except OSError:  # a run that goes on renames and removes files meanwhile
            continue
    return total


def _print(lines: list[RunLine]) -> None:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for column in ("run", "state", "step", "reward", "held-out", "best", "size"):
        table.add_column(column, justify="left" if column in ("run", "state") else "right", overflow="fold")
    for line in lines:
        steps = "?" if line.steps is None else str(line.steps)
        rewards = (_number(value) for value in (line.reward, line.held_out, line.best))
        table.add_row(line.run, line.state, f"{line.step}/{steps}", *rewards, _bytes(line.size))
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, width=160)
    console.print(table)
    for line in lines:
        if line.reason:
            console.print(f"{line.run}: {line.reason}", soft_wrap=True)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _bytes(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
