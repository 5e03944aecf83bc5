"""From a TOML file and ``--set`` arguments to a plan, with the place of what is wrong."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from estr.config.sections import Section
from estr.config.toml import line_of, parse_set, read_toml, shown
from estr.errors import UsageError, nearest
from estr.plan.sections import Distribution, PlanConfig

_SECTIONS: dict[str, type[Section]] = {name: field.annotation for name, field in PlanConfig.model_fields.items()}  # type: ignore[misc]


def load_plan(path: str | os.PathLike[str], sets: Sequence[str] = ()) -> PlanConfig:
    """Read a plan's TOML file and apply ``sets`` in order.

    Raises:
        UsageError: file and line, or ``--set``, and the key are named, with the nearest valid name.
    """
    values, text = read_toml(path)
    name = os.fspath(path)
    try:
        _check_names(values)
        plan = PlanConfig.model_validate(values)
        _check(plan)
    except ValidationError as error:
        keys, sentence = _first(error)
        raise UsageError(f"{_place(name, text, keys)}{sentence}") from None
    except _WrongKeyError as error:
        raise UsageError(f"{_place(name, text, error.keys)}{error}") from None
    return change_plan(plan, sets)


def change_plan(plan: PlanConfig, sets: Sequence[str]) -> PlanConfig:
    """``plan`` with ``--set`` arguments applied; raises UsageError as ``load_plan``."""
    if not sets:
        return plan
    values = plan.model_dump()
    try:
        for argument in sets:
            keys, value = parse_set(argument)
            _put(values, keys, value, argument)
        _check_names(values)
        changed = PlanConfig.model_validate(values)
        _check(changed)
    except ValidationError as error:
        raise UsageError(f"--set {_first(error)[1]}") from None
    except _WrongKeyError as error:
        raise UsageError(f"--set {error}") from None
    return changed


class _WrongKeyError(Exception):
    """A key that is not right, and the sentence about it."""

    def __init__(self, keys: tuple[str, ...], sentence: str) -> None:
        super().__init__(sentence)
        self.keys = keys


def _check_names(values: Mapping[str, Any]) -> None:
    for name, section in values.items():
        if name not in _SECTIONS:
            raise _WrongKeyError((name,), f"there is no section {name!r}{nearest(name, _SECTIONS)}")
        if not isinstance(section, dict):
            raise _WrongKeyError((name,), f"{name} must be a section: write [{name}] on a line of its own")
        for key in section:
            known = _SECTIONS[name].model_fields
            if key not in known:
                raise _WrongKeyError((name, key), f"{name}.{key} is not a known key{nearest(key, known)}")


def _check(plan: PlanConfig) -> None:
    """What single values cannot say."""
    if plan.schedule.mode == "async" and plan.schedule.max_staleness < plan.steps_per_batch - 1:
        raise _WrongKeyError(
            ("schedule", "max_staleness"),
            f"schedule.max_staleness = {plan.schedule.max_staleness} cannot hold: a rollout batch takes "
            f"{plan.steps_per_batch} optimizer steps and the last is {plan.steps_per_batch - 1} behind; set it to "
            f"{plan.steps_per_batch - 1} or more",
        )
    if plan.tools.latency_median > plan.tools.latency_p99:
        raise _WrongKeyError(("tools", "latency_median"), "tools.latency_median must be at most tools.latency_p99")
    for key in ("prompt_tokens", "turns", "turn_tokens", "reply_tokens"):
        spread: Distribution = getattr(plan.workload, key)
        if spread.kind == "lognormal" and spread.median > spread.p99:
            raise _WrongKeyError(("workload", key), f"workload.{key}: median must be at most p99")
    for key, low in (("gpus", 2), ("engines", 1), ("learner_ranks", 1), ("slots", 1), ("max_staleness", 0)):
        if any(value < low for value in getattr(plan.sweep, key)):
            raise _WrongKeyError(("sweep", key), f"sweep.{key} must hold numbers of at least {low}")
    if not plan.sweep.learner_shares or not all(0 < share < 1 for share in plan.sweep.learner_shares):
        raise _WrongKeyError(("sweep", "learner_shares"), "sweep.learner_shares must hold shares between 0 and 1")


def _put(values: dict[str, Any], keys: tuple[str, ...], value: Any, argument: str) -> None:
    target: Any = values
    for key in keys[:-1]:
        if not isinstance(target, dict) or key not in target:
            raise UsageError(f"--set {shown(argument)}: there is no {key!r}{nearest(key, values)}")
        target = target[key]
    if not isinstance(target, dict):
        raise UsageError(f"--set {shown(argument)}: {keys[-2]} is a value, not a table")
    target[keys[-1]] = value


def _first(error: ValidationError) -> tuple[tuple[str, ...], str]:
    problem = error.errors(include_url=False)[0]
    keys = tuple(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return keys, f"{'.'.join(keys)} is not a known key{nearest(keys[-1], Distribution.model_fields)}"
    reason = problem["msg"][:1].lower() + problem["msg"][1:]
    return keys, f"{'.'.join(keys)} is not valid: {reason}, got {_show(problem['input'])}"


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _place(name: str, text: str, keys: tuple[str, ...]) -> str:
    for length in range(len(keys), 0, -1):
        line = line_of(text, keys[:length])
        if line is not None:
            return f"{name}, line {line}: "
    return f"{name}: "
