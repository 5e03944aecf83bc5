"""A resume that is refused leaves everything as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop_helpers import estr, write_config


def files_of(run: Path) -> dict[str, bytes]:
    paths = [run / "metrics.jsonl", run / "timeline.jsonl", *sorted((run / "rollouts").glob("*.parquet"))]
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


def test_a_resume_without_its_checkpoints_deletes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Metrics and rollouts were withdrawn before the ledger said that it has let go of what a start needs."""
    config = write_config(tmp_path / "run.toml", run={"steps": 4, "checkpoint_every": 1}, schedule={"mode": "lockstep"})
    run = tmp_path / "run"
    assert estr(capsys, "train", config, "--output", run).status == 0
    before = files_of(run)
    assert len(before) > 2
    (run / "checkpoints").rename(tmp_path / "away")
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("steps = 4", "steps = 6"))
    refused = estr(capsys, "resume", run, "--accept-changes")
    assert refused.status == 1
    assert "cannot go back to step 0" in refused.err
    assert files_of(run) == before
    (run / "checkpoints").rmdir()
    (tmp_path / "away").rename(run / "checkpoints")
    assert estr(capsys, "resume", run, "--accept-changes").status == 0
    assert all(name in files_of(run) for name in before)
