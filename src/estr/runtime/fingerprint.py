"""What a run was started with: configuration, task and model, to be compared when it goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from estr.config import Config
from estr.environments.base import Task
from estr.errors import UsageError
from estr.storage.run_record import Fingerprint

FREE = (
    "run.steps",
    "run.output",
    "run.module_directories",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.keep_rollouts",
    "run.eval_every",
    "run.eval_prompts",
    "run.eval_temperature",
    "run.trackers",
    "schedule.wait_timeout",
    "schedule.max_failed_groups",
    "learner.ranks",
    "learner.rank_timeout",
    "learner.max_skipped_steps",
    "learner.on_divergence",
    "learner.rollback_factor",
    "learner.max_rollbacks",
)
"""Keys that may differ between the processes of one run, beside all of [runtime]: none changes what is learned from
what. More steps, for example, make a run longer."""

_PROBLEMS = 4  # first training problems that are compared
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_WHOLE = 1 << 26  # bytes; of larger files the size, the head and the tail are compared
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py")
_PACKAGES = ("estr", "torch", "transformers")


def fingerprint(config: Config, task: Task, model: Path) -> Fingerprint:
    """The fingerprint of a run of ``config`` on ``task`` that starts from the model directory ``model``."""
    return {
        "configuration": {key: value for key, value in _keys(config) if key not in FREE},
        "task": dict(_task_parts(config, task)),
        "model": {path.name: _digest(path) for path in _model_files(model)},
        "packages": dict(_versions()),
    }


def check_fits(found: Fingerprint, recorded: Fingerprint, directory: Path) -> None:
    """Raises UsageError naming the differences in configuration, task and model."""
    differences = list(_differences(found, recorded))
    if differences:
        shown = "; ".join(differences[:4]) + (f"; and {len(differences) - 4} more" if len(differences) > 4 else "")
        raise UsageError(
            f"{directory} no longer fits what it was started with: {shown}. Put that back, or accept it with: "
            f"estr resume {directory} --accept-changes"
        )


def package_changes(found: Fingerprint, recorded: Fingerprint) -> list[str]:
    """Packages whose version is another one now, as the end of a sentence."""
    before = recorded.get("packages", {})
    now = found["packages"]
    return [f"{name} {now[name]} (was {before[name]})" for name in before if name in now and before[name] != now[name]]


def _differences(found: Fingerprint, recorded: Fingerprint) -> Iterator[str]:
    """Keys that only one of the two has are new in, or gone from, a version of this package: their defaults act."""
    before = recorded.get("configuration", {})
    for key, value in found["configuration"].items():
        if key in before and before[key] != value:
            yield f"{key} is {_show(value)}, it was {_show(before[key])}"
    for section, word in (("task", "the task's"), ("model", "the model's")):
        before, now = recorded.get(section, {}), found[section]
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                how = "is new" if name not in before else "is missing" if name not in now else "has changed"
                yield f"{word} {name} {how}"


def _keys(config: Config) -> Iterator[tuple[str, Any]]:
    for section, values in config.model_dump(mode="json").items():
        if section != "runtime":
            yield from ((f"{section}.{key}", value) for key, value in values.items())


def _task_parts(config: Config, task: Task) -> Iterator[tuple[str, str]]:
    yield "sequence of problems", _hash(_problem(task, index) for index in range(_PROBLEMS))
    module = sys.modules.get(type(task).__module__)
    source = inspect.getsourcefile(type(task)) if module is not None else None
    if source is not None and not type(task).__module__.startswith("estr."):
        yield f"source {Path(source).name}", _digest(Path(source))
    path = Path(config.task.path) if config.task.path else None
    for file in sorted(path.rglob("*")) if path is not None and path.is_dir() else [path]:
        if file is not None and file.is_file():
            yield f"file {file}", _digest(file)


def _problem(task: Task, index: int) -> bytes:
    try:
        problem = task.train_problem(index)
        answer = _canonical(problem.answer)
    except Exception as error:  # whoever needs the problem will say what is wrong with it
        return type(error).__name__.encode()
    return json.dumps([problem.task_id, problem.prompt, answer]).encode()


def _canonical(value: Any) -> str:
    """The ``repr`` of plain data, but the same in every process: sets in order, objects without their addresses."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({', '.join(sorted(map(_canonical, value)))})"
    if type(value) is dict:
        return f"{{{', '.join(f'{_canonical(key)}: {_canonical(item)}' for key, item in value.items())}}}"
    if type(value) is list:
        return f"[{', '.join(map(_canonical, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(_canonical, value))}{',' if len(value) == 1 else ''})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{field.name}={_canonical(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__qualname__}({', '.join(fields)})"
    return _ADDRESS.sub("", repr(value))


def _model_files(model: Path) -> list[Path]:
    return sorted({path for pattern in _MODEL_FILES for path in model.glob(pattern) if path.is_file()})


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _digest(path: Path) -> str:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if size <= _WHOLE:
                return f"{size} {_hash([file.read()])}"
            head = file.read(_WHOLE // 2)
            file.seek(-_WHOLE // 2, 2)
            return f"{size} {_hash([head, file.read()])}"
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _hash(parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
