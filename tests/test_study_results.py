"""The page of the study's results, and what it is made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.study import results

INTERVAL = {"mean": 0.5, "low": 0.4, "high": 0.6, "count": 5}


def study(mean: float) -> dict[str, Any]:
    """A compare.json of one recipe."""
    run = {"seed": 0, "collapse_step": None, "curve": {"step": [0, 10], "reward": [0.3, mean]}, "run": "grpo-0"}
    measures = {name: INTERVAL | {"mean": mean} for name in ("final", "auc", "masked_fraction", "ratio_deviation")}
    row = {"entry": "grpo", "axis": None, "point": None, "value": None, "differences": {}, "runs": [run]}
    row["measures"] = measures | {"collapsed": INTERVAL | {"mean": 0.0}}
    return {"rows": [row], "failed": [], "notes": [], "run_seconds": 1.0, "config": "much more"}


def test_collecting_one_study_keeps_the_others(tmp_path: Path) -> None:
    for name, mean in (("default", 0.5), ("aggressive", 0.25)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "compare.json").write_text(json.dumps(study(mean)))
        found = results.collect(tmp_path, {"default": {"rows": [], "machine": "old"}, "intra": {"machine": "another"}})
    assert found["intra"] == {"machine": "another"}
    assert found["default"]["rows"][0]["measures"]["final"]["mean"] == 0.5
    assert found["aggressive"]["rows"][0]["measures"]["final"]["mean"] == 0.25
    assert "cores" in found["aggressive"]["machine"]
    assert "config" not in found["default"]
    page = results.page({"aggressive": found["aggressive"]})
    assert "0.250 (0.400 to 0.600)" in page
    assert page.count("**not run yet**") == 8


@pytest.mark.skipif(not results.STORED.exists(), reason="no study has been stored yet")
def test_the_page_is_what_its_command_makes_of_the_stored_results() -> None:
    assert results.PAGE.read_text() == results.page(results.stored())
