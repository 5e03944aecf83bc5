"""Tasks by name: the built-in table, and a user's own class as ``module:Class``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from estr.environments.base import Task
from estr.environments.calculator import CalculatorTask
from estr.environments.gsm8k import Gsm8kTask
from estr.environments.options import FIXED, Option
from estr.errors import UsageError, nearest, shown
from estr.own_code import file_of, import_own, is_own

_KINDS = ((bool, "true or false"), ((int, float), "a number"), (str, "text"))
_BUILT_IN = {task.name: task for task in (CalculatorTask, Gsm8kTask)}
_TASK_MEMBERS = ("name", "train_problem", "eval_problems", "environment", "demonstrations")
_ENVIRONMENT_MEMBERS = ("blocking", "stop", "reset", "step", "reward")


@dataclass(frozen=True)
class TaskInfo:
    """What ``estr tasks`` prints: one line on the task, and its options."""

    description: str
    options: Mapping[str, Option]


def tasks() -> dict[str, TaskInfo]:
    """The built-in tasks by name."""
    return {name: TaskInfo(task.description, task.options) for name, task in _BUILT_IN.items()}


def make_task(name: str, *, path: str = "", default_seed: int = 0, **options: Any) -> Task:
    """The task ``name`` (built in, or ``module:Class``) with its options.

    ``path`` is passed on where it is not empty; ``default_seed`` becomes the option ``seed`` of a task that has one
    and is not given it. Raises `UsageError` for an unknown name, option or value, or a class that is not a task.
    """
    task_class: Any = _BUILT_IN.get(name) or _own_class(name)
    known = task_class.options if name in _BUILT_IN else _keywords(task_class)
    if path:
        options["path"] = path
    if known is not None and "seed" in known:
        options.setdefault("seed", default_seed)
    return _built(name, task_class, known, options)


def _built(name: str, task_class: Any, known: Mapping[str, Any] | None, options: dict[str, Any]) -> Task:
    if name in _BUILT_IN:
        task: Task = task_class(**options)
        return task
    for key in options:
        if known is not None and key not in known:
            raise UsageError(f"task {name!r} has no option {shown(key)}{nearest(key, [*known, *FIXED])}")
        if known is not None:
            _check_kind(name, key, options[key], known[key].default)
    try:
        task = task_class(**options)
        _require(task, _TASK_MEMBERS, f"task {name!r} is not a task")
        _require(task.environment(), _ENVIRONMENT_MEMBERS, f"task {name!r} makes no environment")
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"task {name!r} cannot be made: {type(error).__name__}: {error}") from error
    return task


def _check_kind(task: str, key: str, value: Any, default: Any) -> None:
    """Refuse a value of another kind than the default's: text for a number, a number for true or false."""
    for kinds, words in _KINDS:
        if isinstance(default, kinds):
            if not isinstance(value, kinds) or isinstance(value, bool) is not isinstance(default, bool):
                raise UsageError(f"task.{key} of task {task!r} must be {words} like {default!r}, not {shown(value)}")
            return


def _require(thing: Any, members: Iterable[str], complaint: str) -> None:
    missing = [member for member in members if not hasattr(thing, member)]
    if missing:
        raise UsageError(f"{complaint}: {type(thing).__name__} has no {', '.join(missing)}")


def _keywords(task_class: Any) -> Mapping[str, Any] | None:
    """The keyword arguments of a class; None where it takes any."""
    try:
        parameters = inspect.signature(task_class).parameters
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return {key: p for key, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def _own_class(name: str) -> Any:
    if not is_own(name):
        hint = nearest(name, _BUILT_IN)
        own = "" if hint.endswith("?") else ", and module:Class for one of your own"
        raise UsageError(f"no task {shown(name)}{hint}{own}")
    try:
        module, class_name = import_own(name)
    except ValueError as error:
        raise UsageError(f"task {name!r}: {error}") from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise UsageError(
            f"module {module.__name__!r} ({file_of(module)}) has no class {class_name!r}{nearest(class_name, classes)}"
        )
    return found
