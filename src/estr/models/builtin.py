"""The builtin models, real Qwen3 architectures small enough for two CPU cores, and where they are kept.

``python -m estr.models.builtin rebuild`` makes the shipped tokenizer and warmed-up model anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from estr.config.sections import ModelConfig
from estr.environments.base import Task
from estr.errors import UsageError, nearest
from estr.models.load import locate, save_model
from estr.models.tokenizer import CONTEXT, SHIPPED, builtin_tokenizer, train_tokenizer
from estr.models.warmup import Progress, WarmupConfig, warm_up

log = logging.getLogger("estr.models")

VERSION = 1
"""Part of every cache key: raised when this package would warm up another model from the same inputs."""
MANIFEST = "estr.json"
_SAMPLE = 512  # demonstrations that stand for a task's stream of them in a cache key


@dataclass(frozen=True)
class Architecture:
    """Sizes of a builtin model, and the supervised steps it gets where nothing else is asked for."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    warmup_steps: int


ARCHITECTURES = {
    "builtin:tiny": Architecture(hidden=128, layers=3, heads=4, kv_heads=2, head_dim=32, mlp=384, warmup_steps=700),
    "builtin:micro": Architecture(hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, mlp=128, warmup_steps=0),
}


def resolve_model(config: ModelConfig, task: Task, *, progress: Progress | None = None) -> Path:
    """The model directory that ``config.path`` means for ``task``.

    A builtin model is made on first use and cached (`cache_directory`): weights from a fixed seed, then
    ``config.warmup_steps`` supervised steps on the task's demonstrations (-1: 700 for tiny, or what the task's
    ``warmup_steps`` says; none for micro). Progress goes to ``progress``, or to stderr. For the calculator task as it
    stands the warmed-up model comes with the package. Anything else is a local directory or a hub name.
    """
    if not config.path.startswith("builtin:"):
        return locate(config.path, config.trust_remote_code)
    if config.path not in ARCHITECTURES:
        raise UsageError(f"model.path: there is no {config.path!r}{nearest(config.path, ARCHITECTURES)}")
    steps = _warmup_steps(config, task)
    manifest = _manifest(config.path, task, steps)
    if _is_model_of(SHIPPED, manifest):
        return SHIPPED
    directory = cache_directory() / f"{config.path.partition(':')[2]}-{_digest(manifest)}"
    if not _is_model_of(directory, manifest):
        with _lock(directory.with_suffix(".lock")):
            if not _is_model_of(directory, manifest):
                _make(directory, config.path, task, manifest, progress)
    return directory


def cache_directory() -> Path:
    """Where builtin models are kept: $ESTR_CACHE, else estr/ under $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("ESTR_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "estr"


def new_model(name: str, tokenizer: Any, seed: int = 0) -> Qwen3ForCausalLM:
    """The builtin model ``name`` for the ids of ``tokenizer``: float32 weights that depend on ``seed`` alone."""
    size = ARCHITECTURES[name]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        intermediate_size=size.mlp,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=size.hidden**-0.5 / 2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float()


def _warmup_steps(config: ModelConfig, task: Task) -> int:
    if config.warmup_steps >= 0:
        return config.warmup_steps
    default = ARCHITECTURES[config.path].warmup_steps
    if not default:
        return 0
    if next(task.demonstrations(WarmupConfig.seed), None) is None:
        log.warning("task %r has no demonstrations, so %s starts from random weights", task.name, config.path)
        return 0
    return int(getattr(task, "warmup_steps", default))


def _manifest(name: str, task: Task, steps: int) -> dict[str, Any]:
    """Everything that determines a builtin model, in plain values."""
    return {
        "version": VERSION,
        "name": name,
        "architecture": asdict(ARCHITECTURES[name]),
        "tokenizer": hashlib.sha256((SHIPPED / "tokenizer.json").read_bytes()).hexdigest(),
        "warmup": asdict(WarmupConfig(steps=steps)) if steps else None,
        "task": task.name if steps else None,
        "demonstrations": _demonstrations_hash(task) if steps else None,
    }


def _demonstrations_hash(task: Task) -> str:
    sample = list(itertools.islice(task.demonstrations(WarmupConfig.seed), _SAMPLE))
    return hashlib.sha256(json.dumps(sample, sort_keys=True).encode()).hexdigest()


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]


def _is_model_of(directory: Path, manifest: dict[str, Any]) -> bool:
    path = directory / MANIFEST
    return path.is_file() and json.loads(path.read_text(encoding="utf-8")) == manifest


def _make(directory: Path, name: str, task: Task, manifest: dict[str, Any], progress: Progress | None) -> None:
    workplace = directory.with_suffix(".partial")
    _publish(_warmed(name, task, manifest, workplace, progress), builtin_tokenizer(), manifest, directory)
    shutil.rmtree(workplace, ignore_errors=True)


def _warmed(name: str, task: Task, manifest: dict[str, Any], workplace: Path, progress: Progress | None) -> Any:
    tokenizer = builtin_tokenizer()
    model = new_model(name, tokenizer)
    if manifest["warmup"]:
        warm_up(model, tokenizer, task, WarmupConfig(**manifest["warmup"]), workplace, progress)
    return model


def _publish(model: Any, tokenizer: Any, manifest: dict[str, Any], directory: Path) -> None:
    """Write a model directory that appears whole, by rename."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    save_model(model, tokenizer, staging)
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    staging.chmod(0o755)
    for path in staging.iterdir():
        path.chmod(0o644)
    shutil.rmtree(directory, ignore_errors=True)
    staging.rename(directory)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; a killed one lets go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _rebuild(progress: Progress | None = None) -> None:
    """Train the shipped tokenizer on the calculator task, then the shipped model on its demonstrations."""
    from estr.environments.calculator import CalculatorTask

    task, name = CalculatorTask(), "builtin:tiny"
    train_tokenizer(_texts(task)).save_pretrained(SHIPPED)
    manifest = _manifest(name, task, _warmup_steps(ModelConfig(path=name), task))
    model = _warmed(name, task, manifest, cache_directory() / "rebuild.partial", progress)
    _publish(model.bfloat16(), builtin_tokenizer(), manifest, SHIPPED)


def _texts(task: Task) -> Iterator[str]:
    for seed in range(4):
        for messages in itertools.islice(task.demonstrations(seed), 1000):
            yield from (message["content"] for message in messages)


if __name__ == "__main__":
    if sys.argv[1:] != ["rebuild"]:
        sys.exit("usage: python -m estr.models.builtin rebuild")
    _rebuild()
