"""For every test: builtin models are made in a directory of the session's own, not in the user's cache, and a run's
report is drawn where it may matter."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import estr.report.page

DRAW_REPORTS = (
    "test_cli_commands",
    "test_loop_processes",
    "test_loop_signals",
    "test_report_",
    "test_soak",
    "test_torture",
)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("ESTR_CACHE")
    session = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one for all workers
        session = session.parent
    os.environ["ESTR_CACHE"] = str(session / "builtin-models")
    yield
    os.environ.pop("ESTR_CACHE")
    if before is not None:
        os.environ["ESTR_CACHE"] = before


@pytest.fixture(autouse=True)
def drawn_reports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen drawings take two seconds, more than most runs of tests: elsewhere an empty page stands for them."""

    def write_page(paths: Sequence[Path], output: Path) -> Path:
        output.write_text("<title>not drawn</title>")
        return output

    if not request.module.__name__.startswith(DRAW_REPORTS):
        monkeypatch.setattr(estr.report.page, "build_page", write_page)
