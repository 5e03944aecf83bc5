"""`make soak` in seconds, which shows only that it works, and whether its verdict can fail."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from estr.cli.main import main
from forking import forked_engines
from loop_helpers import SMALL, sections
from soak import BLOCKS, Part, Soak, report, slope, soak

HOUR = 3600


def start_forked(arguments: list[str], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
        with forked_engines():
            code = main(arguments)
    finally:
        os._exit(code)


def test_a_short_soak_counts_kills_measures_and_proves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = sections(
        run={"steps": 1_000_000, "checkpoint_every": 20},
        schedule={"mode": "async", "max_staleness": 2},
        runtime=SMALL["runtime"] | {"engines": 2},
    )
    found = soak(tmp_path, seconds=3.0, part=1.5, every=0.4, seed=0, settings=settings, start=start_forked)
    assert [part.disturbed for part in found.parts] == [False, True]
    assert found.kills >= 1
    assert all(part.tokens >= 0 and part.seconds > 0 for part in found.parts)
    assert found.memory.keys() >= {"learner", "engines", "all"}
    assert all(size > 1 << 20 for _, size in found.memory["learner"])
    assert found.facts["trained"] > 0
    if found.parts[0].tokens:  # else this machine was too busy for a whole step
        report(found)
        assert "engines killed" in capsys.readouterr().out


def soaked(*, grown: float, slowed: float) -> Soak:
    """An hour in which memory grows by a share of it and kills leave a share of the throughput."""
    found = Soak(Path("run"), seconds=HOUR, facts={"trained": 1})
    found.parts = [Part(bool(i % 2), 60.0, 60_000.0 * (slowed if i % 2 else 1.0), i % 2) for i in range(8)]
    noise = np.random.default_rng(0).normal(0, 2 << 20, HOUR)
    found.memory["learner"] = [(t, (1 << 29) * (1 + grown * t / HOUR) + noise[t]) for t in range(HOUR)]
    return found


@pytest.mark.parametrize(
    ("grown", "slowed", "fine"), [(0.0, 1.0, True), (0.0, 0.85, True), (0.2, 1.0, False), (0.0, 0.7, False)]
)
def test_the_verdict(grown: float, slowed: float, fine: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(soaked(grown=grown, slowed=slowed)) is fine
    said = capsys.readouterr().out
    assert ("GROWS" in said) is (grown > 0)
    assert f"{slowed:.2f} of undisturbed" in said


def test_the_slope_of_a_straight_line_is_exact() -> None:
    line = slope([(t, (100 + 12 * t / HOUR) * 2**20) for t in range(0, 2 * HOUR, 10)])
    assert line.megabytes_an_hour == pytest.approx(12.0)
    assert line.plus_minus == pytest.approx(0.0, abs=1e-6)
    assert line.hours == pytest.approx(1.5, rel=0.01)
    assert line.mean == pytest.approx(100 + 12 * 1.25, rel=0.01)


def test_the_interval_holds_the_slope_of_noise() -> None:
    """19 of 20 times in the long run; here of 100."""
    draw = np.random.default_rng(1)
    lines = [slope([(t, s) for t, s in enumerate(draw.normal(1e8, 1e6, 50 * BLOCKS))]) for _ in range(100)]
    assert 88 <= sum(abs(line.megabytes_an_hour) <= line.plus_minus for line in lines) <= 100
