"""Thresholds at which all recipes drop the same share: bisection, and whole studies with real runs."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from estr.cli.main import main
from estr.compare import driver
from estr.compare.matching import THRESHOLDS, bisect
from estr.objectives import recipes
from forking import Forked, forked_estr

MICRO = """[run]
steps = 3
eval_every = 3
eval_prompts = 4
[model]
path = "builtin:micro"
warmup_steps = 5
[rollout]
group_size = 4
max_new_tokens = 8
max_turns = 2
dtype = "int3"
[schedule]
mode = "lockstep"
inter = 1
[learner]
prompts_per_step = 2
learning_rate = 1e-3
[compare]
recipes = ["estr", "icepop"]
seeds = [0]
[compare.match]
target = 0.3
rounds = 1
"""


def test_bisection_finds_where_a_falling_share_meets_the_target() -> None:
    threshold, share, reached = bisect(lambda x: math.exp(-x), 0.2)
    assert threshold == pytest.approx(-math.log(0.2), rel=0.01)
    assert share == pytest.approx(0.2, abs=1e-3)
    assert reached


@pytest.mark.parametrize(("share", "target"), [(0.05, 0.2), (0.5, 0.2)])
def test_a_target_out_of_reach_is_told(share: float, target: float) -> None:
    assert bisect(lambda _: share, target)[1:] == (share, False)


def test_a_share_that_jumps_over_the_target_is_told() -> None:
    assert not bisect(lambda x: 0.5 if x < 1 else 0.0, 0.2)[2]


@pytest.mark.parametrize("name", list(THRESHOLDS))
@pytest.mark.parametrize("threshold", [1e-6, 1.0, 1e6])
def test_thresholds_are_hyperparameters_of_their_recipes(name: str, threshold: float) -> None:
    defaults = recipes()[name].hyperparameters
    settings = THRESHOLDS[name].settings(threshold, defaults)
    assert settings.keys() <= defaults.keys()
    assert all(math.isfinite(value) for value in settings.values())


def test_the_band_of_icepop_keeps_its_shape() -> None:
    at = {"low": 0.5, "high": 5.0}
    assert THRESHOLDS["icepop"].settings(1.0, at) == pytest.approx(at)
    half = THRESHOLDS["icepop"].settings(0.5, at)
    assert half == pytest.approx({"low": math.sqrt(0.5), "high": math.sqrt(5.0)})


def forked_run(command: list[str], stdout: IO[bytes], env: dict[str, str], **_: Any) -> Forked:
    """What the driver starts, without the seconds that a new interpreter takes to import torch."""
    assert command[1:3] == ["-m", "estr"]
    return forked_estr(command[3:], stdout.fileno(), stdout.fileno(), Path.cwd(), env)


def test_a_real_study_matches_what_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    replaced = {**vars(subprocess), "Popen": forked_run}
    monkeypatch.setattr(driver, "subprocess", SimpleNamespace(**replaced))
    Path("study.toml").write_text(MICRO)
    assert main(["compare", "study.toml", "--output", "out", "--match", "masked_fraction"]) == 0
    result = json.loads(Path("out/compare.json").read_text())
    assert result["matching"]["target"] == 0.3
    for one in result["matching"]["entries"]:
        assert one["replayed"][-1] == pytest.approx(0.3, abs=0.05)  # few tokens: the share moves in steps
        own = (Path("out/runs") / f"{one['entry']}-s0" / "config.toml").read_text()
        assert all(f"{key} = {value!r}" in own for key, value in one["settings"].items())
    rows = {row["entry"]: row for row in result["rows"]}
    assert rows["estr"]["measures"]["masked_fraction"]["mean"] > 0.05
    assert rows["icepop"]["differences"]["final"]["count"] == 1
    before = Path("out/compare.json").read_text()
    assert main(["compare", "study.toml", "--output", "out", "--match", "masked_fraction"]) == 0
    assert Path("out/compare.json").read_text() == before  # nothing was run again
