"""What happens when several optimizer steps in a row could not be applied: stop, or go back with a smaller rate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from estr.config import Config
from estr.errors import RunError
from estr.storage import encoding
from estr.storage.checkpoints import Checkpoint, checkpoint_steps, latest_checkpoint
from estr.storage.files import disk_errors, write_atomic
from estr.storage.run_directory import RunDirectory

DIVERGED = "diverged"  # the kind of a checkpoint written when a run stops for divergence


class Divergence(RunError):  # noqa: N818
    """Several optimizer steps in a row, up to ``step``, were skipped; the message is the diagnosis."""

    def __init__(self, diagnosis: str, step: int) -> None:
        super().__init__(diagnosis)
        self.step = step


class Rollbacks:
    """``rollbacks.json`` of a run: every time it went back, from where, to where, and why.

    The file is written before anything is rewound, so that a run killed in between goes on with the smaller rate.
    """

    def __init__(self, directory: RunDirectory, config: Config) -> None:
        self._directory, self._config = directory, config
        self._path: Path = directory.path / "rollbacks.json"
        self._records = self._read()

    @property
    def left(self) -> int:
        """How many more times the run may go back."""
        learner = self._config.learner
        return max(0, learner.max_rollbacks - len(self._records)) if learner.on_divergence == "rollback" else 0

    @property
    def factor(self) -> float:
        """What the learning rate is multiplied with after all rollbacks so far."""
        return math.prod(float(record["factor"]) for record in self._records)

    def slowed(self, config: Config) -> Config:
        """``config`` with the learning rate that the rollbacks so far have left."""
        slowed = config.model_copy(deep=True)
        slowed.learner.learning_rate *= self.factor
        return slowed

    def go_back(self, diagnosis: Divergence) -> Checkpoint | None:
        """The last good checkpoint (None: the start of the run), recorded as what the run goes on from.

        Raises:
            RunError: no checkpoint from before the trouble is left.
            Divergence: the run may not go back any more.
        """
        if not self.left:
            raise diagnosis
        good = latest_checkpoint(self._directory, is_good).checkpoint
        if good is None and checkpoint_steps(self._directory):
            raise RunError(f"{diagnosis}; no checkpoint from before that is left to go back to") from diagnosis
        record = {
            "step": diagnosis.step,
            "to": good.step if good is not None else 0,
            "factor": self._config.learner.rollback_factor,
            "reason": str(diagnosis),
        }
        self._write([*self._records, record])
        return good

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        try:
            records = encoding.loads(self._path.read_bytes())["rollbacks"]
            return [{**record, "factor": float(record["factor"])} for record in records]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RunError(
                f"{self._path} cannot be read ({type(error).__name__}); restore it, or remove it to start again with "
                "the full learning rate"
            ) from error

    def _write(self, records: list[dict[str, Any]]) -> None:
        with disk_errors("write", self._path):
            write_atomic(self._path, (encoding.dumps({"rollbacks": records}, indent=1) + "\n").encode())
        self._records = records


def is_good(checkpoint: Checkpoint) -> bool:
    """Whether a rollback may go back to it: it was not written amid skipped steps."""
    return checkpoint.kind != DIVERGED and not checkpoint.state["learner"]["skipped_in_row"]
