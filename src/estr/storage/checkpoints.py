"""checkpoints/step-000050/: a Hugging Face model directory and the trainer's state, whole or not there.

A checkpoint is written aside, its files and directories are synced, and it is renamed to its name at last.
``trainer.json`` holds the trainer's state as JSON together with size and BLAKE2b digest of every other file, so that a
torn checkpoint is recognized; ``trainer.safetensors`` holds the trainer's tensors. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from estr.errors import RunError
from estr.storage import encoding
from estr.storage.files import disk_errors, rust_error, sync_directory, sync_file, write_atomic
from estr.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"step-(\d{6,})")
_MANIFEST, _TENSORS, _BEST = "trainer.json", "trainer.safetensors", "best.json"
_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was verified. ``path`` is a model directory for ``from_pretrained``."""

    path: Path
    step: int
    kind: str
    state: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """The trainer's tensors, on the CPU."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.path / _TENSORS
        try:
            with disk_errors("read", path):
                return load_file(path)
        except (SafetensorError, ValueError, KeyError) as error:  # a file that was damaged before its digest was taken
            raise RunError(f"cannot read {path}: {_one_line(error)}") from error


class Latest(NamedTuple):
    """The newest whole checkpoint (None: there is none), and sentences about torn ones that were passed over."""

    checkpoint: Checkpoint | None
    notices: list[str]


class Best(NamedTuple):
    """The checkpoint with the best held-out reward so far."""

    step: int
    reward: float


class _TornError(Exception):
    """A checkpoint is not what its manifest says; the message says in what."""


def save_checkpoint(
    run: RunDirectory,
    step: int,
    model: Any,
    tokenizer: Any,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    kind: str = "",
) -> Path:
    """Write ``checkpoints/step-<step>`` as one unit and return its path; one of the same step is replaced.

    Args:
        model: anything with ``save_pretrained`` that writes safetensors (tied weights are stored once), or None.
        tokenizer: likewise, or None.
        tensors: optimizer moments, random states and the like.
        state: plain JSON data (NaN and infinities allowed).
        kind: why it was written, for people (``"periodic"``, ``"interrupted"``, ``"final"``…).

    Raises:
        RunError: the disk failed; the checkpoints that were there are untouched.
        TypeError: ``state`` holds something that JSON cannot.
    """
    target = checkpoint_path(run, step)
    manifest = {"format": _FORMAT, "step": step, "kind": kind, "state": encoding.plain(dict(state))}
    with _writing(target):
        tidy_checkpoints(run)
        aside = run.checkpoints / f".tmp-{target.name}-{secrets.token_hex(6)}"
        try:
            aside.mkdir()
            _write_content(aside, model, tokenizer, tensors)
            _write_manifest(aside, manifest)
            _sync_tree(aside)
            _publish(aside, target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    return target


def latest_checkpoint(run: RunDirectory, good: Callable[[Checkpoint], bool] = lambda _: True) -> Latest:
    """The newest checkpoint whose every byte is as it was written and that is ``good``."""
    if run.locked:
        with disk_errors("read the checkpoints in", run.checkpoints):
            tidy_checkpoints(run)
    notices: list[str] = []
    for step in sorted(checkpoint_steps(run), reverse=True):
        path = checkpoint_path(run, step)
        try:
            found = _verify(path, digests=True)
        except _TornError as torn:
            notices.append(f"the checkpoint {path} is torn ({torn}) and was passed over for the one before")
            continue
        if good(found):
            return Latest(found, notices)
    return Latest(None, notices)


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """One checkpoint by its path.

    Raises:
        RunError: it is no checkpoint, or torn.
    """
    try:
        return _verify(Path(path), digests=True)
    except _TornError as torn:
        raise RunError(f"the checkpoint {os.fspath(path)} cannot be used: {torn}") from torn


def checkpoint_steps(run: RunDirectory) -> list[int]:
    """Steps under whose name a checkpoint stands, ascending (torn ones included)."""
    if not run.checkpoints.is_dir():
        return []
    matches = (_NAME.fullmatch(entry.name) for entry in run.checkpoints.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def checkpoint_path(run: RunDirectory, step: int) -> Path:
    return run.checkpoints / f"step-{step:06d}"


def mark_best(run: RunDirectory, step: int, reward: float) -> None:
    """Record that ``step``, which has a checkpoint, has the best held-out reward so far; retention keeps it.

    Raises:
        ValueError: there is no checkpoint of that step.
    """
    if not checkpoint_path(run, step).is_dir():
        raise ValueError(f"step {step} has no checkpoint to be the best")
    path = run.checkpoints / _BEST
    with disk_errors("write", path):
        write_atomic(path, (encoding.dumps({"step": step, "reward": float(reward)}) + "\n").encode())


def best_checkpoint(run: RunDirectory) -> Best | None:
    """What ``mark_best`` recorded last, while that checkpoint is there."""
    try:
        record = encoding.loads((run.checkpoints / _BEST).read_bytes())
        best = Best(int(record["step"]), float(record["reward"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return best if checkpoint_path(run, best.step).is_dir() else None


def retain_checkpoints(run: RunDirectory, keep: int, protect: Collection[int] = ()) -> list[int]:
    """Remove all but the ``keep`` newest whole checkpoints, the best one and those in ``protect``.

    Torn ones older than the newest whole one are removed as well. The newest whole one is never removed.

    Returns:
        The steps of the newest whole ones, ascending: what a resume may go back to (the first of them is what the
        ledger may prune through).
    """
    steps = checkpoint_steps(run)
    whole = [step for step in steps if _seems_whole(checkpoint_path(run, step))]
    best = best_checkpoint(run)
    recent = whole[-max(keep, 1) :]
    wanted = {*recent, *protect, *([best.step] if best else [])}
    newest = whole[-1] if whole else -1
    _remove(run, [step for step in steps if step not in wanted and step < newest])
    return recent


def newest_step(run: RunDirectory, good: Callable[[Checkpoint], bool]) -> int | None:
    """The step of the newest checkpoint that is ``good`` and of whose files none is missing or cut off."""
    for step in sorted(checkpoint_steps(run), reverse=True):
        with contextlib.suppress(_TornError):
            if good(_verify(checkpoint_path(run, step), digests=False)):
                return step
    return None


def withdraw_checkpoints_after(run: RunDirectory, step: int) -> None:
    """Remove checkpoints beyond ``step``, and the best marker where it names one of them."""
    best = best_checkpoint(run)
    if best is not None and best.step > step:
        with disk_errors("remove", run.checkpoints / _BEST):
            (run.checkpoints / _BEST).unlink(missing_ok=True)
    _remove(run, [other for other in checkpoint_steps(run) if other > step])


def tidy_checkpoints(run: RunDirectory) -> None:
    """Finish what a killed writer left: an old checkpoint without its successor gets its name back, the rest goes."""
    for entry in run.checkpoints.glob(".old-*"):
        target = run.checkpoints / entry.name.removeprefix(".old-")
        if _NAME.fullmatch(target.name) and not target.exists():
            os.rename(entry, target)
        else:
            shutil.rmtree(entry, ignore_errors=True)
    for entry in run.checkpoints.glob(".tmp-*"):
        shutil.rmtree(entry, ignore_errors=True)
    for entry in run.checkpoints.glob(".*.tmp"):
        entry.unlink(missing_ok=True)


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    with disk_errors("write the checkpoint", target):
        try:
            yield
        except SafetensorError as error:
            if rust_error(error) is not None:
                raise
            raise RunError(f"cannot write the checkpoint {target}: {error}") from error


def _write_content(aside: Path, model: Any, tokenizer: Any, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    for part in (model, tokenizer):
        if part is not None:
            part.save_pretrained(aside)
    save_file({name: _own_memory(tensor) for name, tensor in tensors.items()}, aside / _TENSORS)


def _own_memory(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor that shares its storage with no other, as safetensors wants it."""
    plain = tensor.detach().cpu().contiguous()
    whole = plain.untyped_storage().nbytes() == plain.numel() * plain.element_size()
    return plain if whole else plain.clone()


def _write_manifest(aside: Path, manifest: dict[str, Any]) -> None:
    manifest["files"] = {
        str(path.relative_to(aside)): {"size": path.stat().st_size, "blake2b": _digest(path)}
        for path in sorted(aside.rglob("*"))
        if path.is_file()
    }
    manifest["digest"] = _digest_of(manifest)
    write_atomic(aside / _MANIFEST, (json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _digest_of(manifest: Mapping[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _sync_tree(directory: Path) -> None:
    for folder, _, names in os.walk(directory):
        for name in names:
            sync_file(os.path.join(folder, name))
        sync_directory(folder)


def _publish(aside: Path, target: Path) -> None:
    old = target.parent / f".old-{target.name}"
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(aside, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise
    sync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _remove(run: RunDirectory, steps: list[int]) -> None:
    """Remove checkpoints so that a kill half-way leaves none of them torn under its name."""
    with disk_errors("remove old checkpoints in", run.checkpoints):
        for step in steps:
            trash = run.checkpoints / f".tmp-removed-{step}-{secrets.token_hex(6)}"
            os.rename(checkpoint_path(run, step), trash)
            shutil.rmtree(trash)


def _seems_whole(path: Path) -> bool:
    try:
        _verify(path, digests=False)
    except _TornError:
        return False
    return True


def _verify(path: Path, *, digests: bool) -> Checkpoint:
    manifest = _read_manifest(path)
    match = _NAME.fullmatch(path.name)
    if match and int(match[1]) != manifest["step"]:
        raise _TornError(f"{_MANIFEST} is that of step {manifest['step']}")
    for name, expected in manifest["files"].items():
        _verify_file(path, name, expected, digests)
    try:
        state = encoding.restore(manifest["state"])
    except (ValueError, RecursionError) as error:
        raise _TornError(f"{_MANIFEST} holds a state that cannot be read") from error
    return Checkpoint(path, manifest["step"], manifest["kind"], state)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        intact = manifest["digest"] == _digest_of(manifest)
    except OSError as error:
        raise _TornError(f"{_MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _TornError(f"{_MANIFEST} is not a manifest") from error
    if not intact:
        raise _TornError(f"{_MANIFEST} is not as it was written")
    if manifest.get("format") != _FORMAT:
        raise _TornError(f"its format is {str(manifest.get('format'))[:20]!r}, this version reads {_FORMAT}")
    if not _is_manifest(manifest):
        raise _TornError(f"{_MANIFEST} is not a manifest")
    return dict(manifest)


def _is_manifest(manifest: Mapping[str, Any]) -> bool:
    kinds = {"step": int, "kind": str, "state": dict, "files": dict}
    fits = all(isinstance(manifest.get(key), kind) for key, kind in kinds.items())
    return fits and all(_is_entry(name, entry) for name, entry in manifest["files"].items())


def _is_entry(name: str, entry: Any) -> bool:
    """Whether a file is described, and lies inside the checkpoint."""
    path = PurePosixPath(name)
    inside = name.isprintable() and not path.is_absolute() and ".." not in path.parts
    return inside and isinstance(entry, dict) and entry.keys() >= {"size", "blake2b"}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _verify_file(path: Path, name: str, expected: Mapping[str, Any], digests: bool) -> None:
    file = path / name
    try:
        size = file.stat().st_size
        if size != expected["size"]:
            raise _TornError(f"{name} has {size} bytes instead of {expected['size']}")
        if digests and _digest(file) != expected["blake2b"]:
            raise _TornError(f"{name} is not as it was written")
    except OSError as error:
        raise _TornError(f"{name} cannot be read: {error.strerror}") from error
