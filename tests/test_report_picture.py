"""The compact picture of a run."""

from __future__ import annotations

import pytest

from estr.errors import UsageError
from estr.report.picture import main, write_picture
from report_synthetic import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "run", 20)


def test_svg_and_png(run, tmp_path):
    svg = write_picture(run, tmp_path / "docs" / "run.svg")
    assert "prefers-color-scheme" in svg.read_text()
    assert "engine-0" in svg.read_text()
    png = write_picture(run, tmp_path / "run.png")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_without_a_timeline_there_is_the_reward(run, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    text = write_picture(tmp_path / "bare", tmp_path / "run.svg").read_text()
    assert "reward" in text
    assert "engine-0" not in text


def test_errors_are_one_sentence(run, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UsageError, match="nothing to draw"):
        write_picture(tmp_path, tmp_path / "run.svg")
    with pytest.raises(UsageError, match=r"\.svg or \.png"):
        write_picture(run, tmp_path / "run.jpg")
    assert main([str(run)]) == 2
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "x.svg")]) == 2
    assert "no run directory" in capsys.readouterr().err
    assert main([str(run), str(tmp_path / "x.png")]) == 0
