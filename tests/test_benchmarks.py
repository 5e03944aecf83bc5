"""The benchmarks run, compare and make their page; nothing here asserts a time.

Each runs in a fork of the test process, which has torch imported; so do their runs and engines.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.common import runs

from estr.cli.main import main as estr
from estr.schedule import Schedule, ScheduleRules
from forking import Forked
from loop_helpers import write_config

ROOT = Path(__file__).resolve().parents[1]
KEYS = {"name", "settings", "machine", "measurements", "ratios", "profile", "notes", "seconds"}


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def run(folder: Path, module: str, *arguments: str) -> Done:
    """``python -m module arguments``, in the checkout."""
    number = len(list(folder.glob("*.stdout")))
    paths = folder / f"{number}.stdout", folder / f"{number}.stderr"

    def work() -> int | None:
        sys.argv = [module, *arguments]
        _without_new_processes()
        return importlib.import_module(module).main()  # type: ignore[no-any-return]

    with paths[0].open("w") as out, paths[1].open("w") as err:
        status = Forked(work, out.fileno(), err.fileno(), directory=ROOT).wait()
    return Done(status, *(path.read_text(encoding="utf-8") for path in paths))


def _without_new_processes() -> None:
    """In the fork, which is thrown away: nothing is put back."""
    fork: Callable[[str | None], Any] = multiprocessing.get_context
    multiprocessing.get_context = lambda kind=None: fork("forkserver" if kind == "spawn" else kind)  # type: ignore[assignment]
    one = ["--set", "runtime.learner_threads=1"]  # a fork has none of the threads that torch believes in
    runs.execute = lambda arguments, cores: (estr([*arguments, *one]), "")


def test_a_run_of_a_benchmark_that_fails_says_why(tmp_path: Path) -> None:
    """The one run in a process of its own."""
    config = write_config(tmp_path / "config.toml", task={"name": "no-such-task"})
    with pytest.raises(SystemExit, match="no-such-task"):
        runs.train(config.read_text(), tmp_path, cores={min(os.sched_getaffinity(0))})


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("generation", "one turn: estr / generate"),
        ("learner", "d128: estr / padded loop, tokens/s"),
        ("publication", "1M, 1 engine: stall in decode steps"),
        ("bookkeeping", "in memory: cost late / early"),
        ("overlap", "50 ms: bound / async"),
        ("gpu", "generation: estr / generate"),
        ("objectives", "estr / grpo"),
        ("durability", "ledger and storage / a step"),
        ("whole_step", None),
    ],
)
def test_the_short_form_of_a_benchmark_runs(name: str, ratio: str | None, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.json"
    done = run(tmp_path, f"benchmarks.{name}", "--short", "--json", str(path))
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert set(result) == KEYS
    assert result["machine"]["gemm_float32_gflops"] > 0
    assert all(
        value > 0 or (value == 0 and name == "durability")  # not every kind of write occurs in two steps
        for m in result["measurements"]
        for value in m["values"]
        if not {"idle", "memory"} & set(m["name"].replace(",", "").split())
    )
    assert all(value > 0 for r in result["ratios"] for value in r["values"])
    if ratio is not None:
        assert ratio in {r["name"] for r in result["ratios"]}
        assert ratio in done.stdout


def stored(path: Path, values: list[float], name: str = "x / y", benchmark: str = "demo", higher: bool = True) -> Path:
    machine = {
        "processor": "p",
        "cores": 2,
        "threads": 1,
        "torch": "2",
        "load_before": 0.0,
        "gemm_float32_gflops": 1.0,
        "gemm_bfloat16_gflops": 1.0,
        "memory_gb_per_s": 1.0,
    }
    ratio = {"name": name, "values": values, "aim": 2.0, "higher": higher}
    content = {"name": benchmark, "settings": {}, "machine": machine, "ratios": [ratio]}
    path.write_text(json.dumps(content))
    return path


def test_a_ratio_that_fell_beyond_both_ranges_is_worse(tmp_path: Path) -> None:
    old = stored(tmp_path / "old.json", [2.0, 2.1, 2.2])
    worse = stored(tmp_path / "worse.json", [1.5, 1.6, 1.7])
    noisy = stored(tmp_path / "noisy.json", [1.5, 1.6, 2.05])
    done = run(tmp_path, "benchmarks.compare_results", str(old), str(worse))
    assert done.returncode == 1
    assert "worse" in done.stdout
    assert run(tmp_path, "benchmarks.compare_results", str(old), str(noisy)).returncode == 0
    back = run(tmp_path, "benchmarks.compare_results", str(worse), str(old))
    assert back.returncode == 0
    assert "better" in back.stdout


def test_where_less_is_better_a_rise_is_worse(tmp_path: Path) -> None:
    old = stored(tmp_path / "old.json", [0.5], higher=False)
    new = stored(tmp_path / "new.json", [0.7], higher=False)
    assert run(tmp_path, "benchmarks.compare_results", str(old), str(new)).returncode == 1
    assert run(tmp_path, "benchmarks.compare_results", str(new), str(old)).returncode == 0


def test_results_of_two_benchmarks_or_no_result_are_refused(tmp_path: Path) -> None:
    old = stored(tmp_path / "old.json", [2.0])
    other = stored(tmp_path / "other.json", [2.0], benchmark="another")
    done = run(tmp_path, "benchmarks.compare_results", str(old), str(other))
    assert done.returncode == 1
    assert "two benchmarks" in done.stderr
    (tmp_path / "broken.json").write_text("{}")
    done = run(tmp_path, "benchmarks.compare_results", str(old), str(tmp_path / "broken.json"))
    assert "no result" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_page_is_what_the_stored_results_say(tmp_path: Path) -> None:
    done = run(tmp_path, "benchmarks.performance_page", "--check")
    assert done.returncode == 0, done.stderr


def test_counts_of_deadlines_follow_the_groups() -> None:
    """What the schedule counts is what walking over its groups would find."""
    schedule = Schedule(ScheduleRules(prompts_per_step=2, group_size=1, max_staleness=3))
    for version in (0, 0, 1, 2):
        schedule.admit(version)
    schedule.readmit(1, 2)
    schedule.drop(0)
    found: dict[int, int] = {}
    for group in schedule.outstanding:
        batch = group.deadline - 2
        found[batch] = found.get(batch, 0) + 1
    assert schedule._due_counts(2) == found
