"""``estr report``."""

from __future__ import annotations

from pathlib import Path

from estr.errors import UsageError
from estr.report import write_report
from estr.storage.run_directory import RunDirectory


def report(runs: list[str], output: str | None) -> None:
    """Write the report of one or more runs and print where it is."""
    paths = [RunDirectory.open(run).path for run in runs]
    if output is None and len(paths) > 1:
        raise UsageError("the report of several runs needs --html OUT")
    target = Path(output) if output is not None else paths[0] / "report.html"
    if not target.absolute().parent.is_dir():
        raise UsageError(f"--html {target}: the directory {target.absolute().parent} does not exist; make it first")
    print(write_report(paths, target))
