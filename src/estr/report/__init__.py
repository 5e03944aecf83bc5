"""The HTML report of one or more runs, and a small picture of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from estr.errors import MissingExtraError


def write_report(runs: Sequence[Path], output: Path) -> Path:
    """Write one self-contained HTML file on the run directories ``runs`` to ``output`` and return its path.

    Unfinished runs and missing pieces are shown as such. Raises UsageError where a path is no run directory,
    RunError where ``output`` cannot be written, MissingExtraError where a drawing library is not installed.
    """
    try:
        from estr.report.page import build_page
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("estr"):
            raise
        raise MissingExtraError(error.name, "train") from error
    return build_page(runs, output)


__all__ = ["write_report"]
