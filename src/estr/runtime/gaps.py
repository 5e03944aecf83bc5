"""What a run directory lacks of the steps that its checkpoint has behind it, said when the run goes on."""

from __future__ import annotations

from estr.storage.ledger import Ledger
from estr.storage.metrics import read_metrics
from estr.storage.rollout_files import stored_steps
from estr.storage.run_directory import RunDirectory


def gaps(directory: RunDirectory, ledger: Ledger, step: int, keep_rollouts: int) -> list[str]:
    """Sentences about lines and rows up to ``step`` that somebody has removed; the run can do without them.

    ``keep_rollouts``: steps whose rollouts are kept on purpose; 0: all.
    """
    found = []
    lines = {line.get("step") for line in read_metrics(directory)}
    if missing := [number for number in range(1, step + 1) if number not in lines]:
        found.append(_sentence(directory.metrics_path.name, missing, step))
    oldest = step - keep_rollouts + 1 if keep_rollouts else 1
    expected = [number for number in ledger.trained_steps(step) if number >= oldest]
    if missing := [number for number in expected if number not in stored_steps(directory)]:
        found.append(_sentence(f"{directory.rollouts.name}/", missing, step))
    return found


def _sentence(name: str, missing: list[int], step: int) -> str:
    steps = f"step {missing[0]}" if len(missing) == 1 else f"{len(missing)} steps, {missing[0]} to {missing[-1]},"
    return f"{name} lacks {steps} of the {step} up to the checkpoint: was it removed? The run goes on without"
