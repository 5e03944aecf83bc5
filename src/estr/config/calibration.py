"""``[objective] tau = "calibrated"``: thresholds from the file that ``estr calibrate`` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from estr.errors import UsageError

CALIBRATED = "calibrated"


def apply_calibration(path: Any, hyperparameters: dict[str, Any], given: set[str]) -> list[str]:
    """Put tau and eps of the calibration into ``hyperparameters``, in place, where tau asks for it.

    ``given`` are the keys that were written by hand; returns notices.

    Raises:
        UsageError: no file is named, it is not there, or it holds no calibration.
    """
    if hyperparameters.get("tau") != CALIBRATED:
        return []
    if not path:
        raise UsageError(
            'objective.tau = "calibrated" needs objective.calibration, the file that this writes: '
            "estr calibrate CONFIG.toml --output calibration.json"
        )
    tau, eps = _thresholds(Path(str(path)))
    notices = []
    if "eps" in given and hyperparameters["eps"] != eps:
        notices.append(f"objective.eps = {hyperparameters['eps']} is left out: tau was calibrated with eps {eps:g}")
    hyperparameters |= {"tau": tau, "eps": eps}
    return notices


def _thresholds(path: Path) -> tuple[float, float]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        tau, eps = float(value["tau"]), float(value["eps"])
    except OSError as error:
        raise UsageError(f"objective.calibration: {path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"objective.calibration: {path} holds no calibration (an object with tau and eps); make one with: "
            "estr calibrate CONFIG.toml"
        ) from None
    return tau, eps
