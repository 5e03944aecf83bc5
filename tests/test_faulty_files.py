"""File calls that fail, of our own code, of SQLite and of safetensors: it is done, or it is reported and the old state
is whole."""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent


@pytest.fixture(scope="session")
def faultio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler to make file calls of libraries fail")
    library = tmp_path_factory.mktemp("faultio") / "faultio.so"
    made = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, TESTS / "faultio.c", "-ldl"],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"the C compiler refuses the library that makes file calls fail: {made.stderr.splitlines()[0]}")
    return library


def experiments(faultio: Path, directory: Path, scenario: str, count: int, seed: int = 0) -> dict[str, Any]:
    place = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else directory
    work = place / f"estr-faulty-{os.getpid()}-{scenario}"
    work.mkdir()
    try:
        done = subprocess.run(
            [sys.executable, str(TESTS / "faulty_files.py"), scenario, str(count), str(seed), str(work)],
            env={**os.environ, "LD_PRELOAD": str(faultio), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return found


def judge(found: dict[str, Any]) -> collections.Counter[str]:
    """Nothing crashed, nothing was lost; every refusal is a sentence that names a file and a cause."""
    bad = [result for result in found["results"] if result["bad"]]
    assert not bad, json.dumps(bad[:3], indent=1)
    outcomes: collections.Counter[str] = collections.Counter()
    for result in found["results"]:
        refused = result["outcome"].get("refused")
        outcomes["done" if refused is None else "refused"] += 1
        if refused is not None:
            assert "\n" not in refused
            assert re.search(r"the disk is full|input/output error|locked|in use by|cannot be opened", refused), refused
    return outcomes


@pytest.mark.parametrize(("scenario", "count"), [("storage", 12), ("run", 2)])
def test_some_failing_file_calls_are_reported_or_made_good(
    faultio: Path, tmp_path: Path, scenario: str, count: int
) -> None:
    outcomes = judge(experiments(faultio, tmp_path, scenario, count))
    assert outcomes["refused"] > outcomes["done"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("scenario", "count"), [("storage", 0), ("run", 200)])
def test_every_failing_file_call_is_reported_or_made_good(
    faultio: Path, tmp_path: Path, scenario: str, count: int
) -> None:
    found = experiments(faultio, tmp_path, scenario, count, seed=1)
    outcomes = judge(found)
    print(f"{scenario}: {found['calls']} calls, {len(found['results'])} experiments, {dict(outcomes)}")
