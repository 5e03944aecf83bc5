"""run.json: what a run was started with, and how the last process that worked on it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from estr.errors import RunError
from estr.storage import encoding
from estr.storage.files import disk_errors, write_atomic
from estr.storage.run_directory import RunDirectory

Ending = Literal["finished", "interrupted", "diverged", "failed"]
Fingerprint = dict[str, dict[str, Any]]
"""Section → name → value, as JSON holds it."""

_RUNNING = "running"


class RunRecord:
    """The record of one run directory. Raises RunError where ``run.json`` is there and cannot be read."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self.path = run, run.path / "run.json"
        self._content = _read(self.path)

    @property
    def fingerprint(self) -> Fingerprint | None:
        """What the run was started with; None before it has started."""
        return self._content.get("fingerprint")

    @property
    def begun(self) -> bool:
        """Whether there is a record; versions of this package before there were any have left none."""
        return bool(self._content)

    @property
    def reason(self) -> str:
        """Why it ended as it did, in a sentence; empty where nothing was said."""
        return str(self._content.get("reason", ""))

    @property
    def ending(self) -> str:
        """How the last process ended; empty where none has, or it had no time to say."""
        state = str(self._content.get("state", ""))
        return "" if state == _RUNNING else state

    @property
    def state(self) -> str:
        """``running``, ``finished``, ``interrupted``, ``diverged``, ``failed``, or ``killed``."""
        if self._run.in_use:
            return _RUNNING
        return self.ending or "killed"

    def begin(self, fingerprint: Fingerprint) -> None:
        """A process starts to work on the run."""
        self._write({"format": 1, "state": _RUNNING, "fingerprint": fingerprint})

    def end(self, ending: Ending, reason: str = "") -> None:
        """The process ends; raises RunError where that cannot be written."""
        self._write({**self._content, "state": ending, "reason": encoding.clean_text(reason)})

    def _write(self, content: dict[str, Any]) -> None:
        with disk_errors("write", self.path):
            write_atomic(self.path, (encoding.dumps(content, indent=1) + "\n").encode())
        self._content = content


def _read(path: Path) -> dict[str, Any]:
    try:
        content = encoding.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict) or not _is_fingerprint(content.get("fingerprint", {})):
        raise RunError(f"{path} is damaged; remove it to go on without the check of what the run was started with")
    return content


def _is_fingerprint(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(section, dict) for section in value.values())
