"""Everything that reads bytes, as a table for fuzzing: what it reads when all is well, and how it is called.

A reader may refuse an input with one of its documented errors and a sentence; anything else is a finding.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from estr.config import Config
from estr.config.load import dump_config, load_config
from estr.config.sections import RolloutConfig
from estr.environments import gsm8k_data
from estr.environments.arithmetic import CalculatorError, calculate, evaluate
from estr.environments.tool_call import find_call
from estr.environments.verify import as_number, extract_answer, is_correct
from estr.errors import EstrError
from estr.inspect.read import read_dump
from estr.report.data import read_runs
from estr.runtime.calls import read_calls
from estr.storage import checkpoints
from estr.storage.ledger import Ledger
from estr.storage.metrics import MetricsWriter, read_metrics, read_timeline
from estr.storage.rollout_files import RolloutWriter, read_rollouts
from estr.storage.rollouts import Settlement, rows_from, to_table
from estr.storage.run_directory import RunDirectory
from estr.storage.run_record import RunRecord
from estr.storage.spool import decode_trajectory, encode_trajectory
from estr.trajectory import Segment, Trajectory

Read = Callable[[bytes, Path], None]
"""Reads an input, in an empty directory of its own."""


@dataclass(frozen=True)
class Reader:
    """``seeds`` are good inputs, ``words`` what its format is made of; ``text`` where inputs are text."""

    read: Read
    seeds: list[bytes]
    words: list[bytes] = field(default_factory=list)
    errors: tuple[type[Exception], ...] = (EstrError,)
    text: bool = True


def readers() -> dict[str, Reader]:
    """Every reader by name."""
    return _texts() | _json_files() | _parquet_files() | _state()


# ---------------------------------------------------------------------- what models and people write

NUMBERS = [
    b"0",
    b"-1",
    b"1e999",
    b"nan",
    b"9" * 400,
    b"0x10",
    b"1,200",
    b"1_000",
    b"\xe2\x88\x92",
    b"\xd9\xa3",
    b"1e-400",
]
JSON_WORDS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b":",
    b",",
    b"null",
    b"true",
    b"NaN",
    b"Infinity",
    b"\\ud800",
    b'{"$float": 3}',
    b"[" * 3000,
]
JSON_WORDS += NUMBERS
TOML_WORDS = [
    b"[",
    b"]",
    b"=",
    b"'''",
    b'"""',
    b"#",
    b"\n",
    b"run",
    b"learner",
    b".",
    b"1979-05-27",
    b"[[",
    b"{",
    b"}",
    b"[" * 3000,
]
TOML_WORDS += NUMBERS
CONFIGURATION = b"""[run]
seed = 3
steps = 20
[task]
name = "calculator"
levels = [1, 2]
[objective]
recipe = "estr"
tau = 0.1
[objective.grpo]
clip_low = 0.2
[learner]
learning_rate = 1e-4
"""
SETS = [
    b"run.steps=20",
    b"learner.learning_rate=1e-4",
    b"task.name=calculator",
    b"objective.estr.tau = 3",
    b'task.levels=[1, "a"]',
    b"objective.recipe=grpo",
]


def _texts() -> dict[str, Reader]:
    calls = [b"<calc>48/2</calc>", b"12 boxes <calc>12*5", b"</calc> so\n#### 60", b"<calc><calc>1</calc>"]
    answers = [b"so #### 24", b"#### $1,200.50", "#### −5 apples".encode(), b"#### 24 or 25", b"#### .5%"]
    sums = [b"48/2", b"-2^2", b"(1,200+.5)*50%", "3×4÷2−1".encode(), b"2**-3"]
    marks = [b"<calc>", b"</calc>", b"####", b"$", b"%", b",", b"."]
    signs = [b"(", b")", b"^", b"**", b"/", b"%", b"-", b"(" * 40, b"-" * 150, b"9^9^9", b"^64^64"]
    return {
        "configuration": Reader(_configuration, [CONFIGURATION, dump_config(Config()).encode()], TOML_WORDS),
        "set arguments": Reader(_set, SETS, [b"=", b".", b"run", b"steps", *TOML_WORDS]),
        "tool calls": Reader(_tool_call, calls, [*marks, *signs, *NUMBERS], ()),
        "verifier": Reader(_verifier, answers, [*marks, *NUMBERS], ()),
        "arithmetic": Reader(_arithmetic, sums, [*signs, *NUMBERS], (CalculatorError,)),
    }


def _configuration(data: bytes, place: Path) -> None:
    path = place / "run.toml"
    path.write_bytes(data)
    loaded = load_config(path)
    path.write_text(dump_config(loaded.config))
    assert load_config(path).config == loaded.config, "what was read is not what is written"


def _set(data: bytes, place: Path) -> None:
    load_config(None, [data.decode("utf-8", "surrogateescape")])


def _tool_call(data: bytes, place: Path) -> None:
    call = find_call(data.decode("utf-8", "replace"))
    assert call is None or isinstance(call.answer(), str)


def _verifier(data: bytes, place: Path) -> None:
    text = data.decode("utf-8", "surrogateescape")
    extract_answer(text)
    as_number(text)
    is_correct(text, text)


def _arithmetic(data: bytes, place: Path) -> None:
    text = data.decode("utf-8", "surrogateescape")
    assert len(calculate(text)) < 1000
    evaluate(text)


# ---------------------------------------------------------------------- JSON and JSON lines


def _json_files() -> dict[str, Reader]:
    tasks = [
        {"question": "How many?", "answer": "48/2=<<48/2=24>>24\n#### 24"},
        {"question": "é?", "answer": "#### 1,200"},
    ]
    metrics = [{"step": n, "wall_time": 1.5 * n, "reward/mean": 0.5, "eval/reward": 0.25} for n in range(1, 4)]
    spans = [{"actor": "engine-0", "kind": "generate", "start": 0.0, "end": 1.5, "version": n} for n in range(3)]
    lists = {
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4],
        "sampling_per_token_logps": [-0.5, -1.0],
        "entropies": [0, 1],
    }
    dump = [lists | {"completion_mask": [1, 1], "advantages": [0.5, 0.5], "reward": 1.0, "step": n} for n in range(2)]
    record = {
        "format": 1,
        "state": "finished",
        "reason": "",
        "fingerprint": {"task": {"name": "calculator", "size": 3}},
    }
    return {
        "JSONL tasks": Reader(_jsonl_tasks, [_lines(tasks)], [b"\n", b"####", b"<<1=1>>", *JSON_WORDS]),
        "metrics.jsonl": Reader(_metrics, [_lines(metrics)], [b"\n", b'"step"', *JSON_WORDS]),
        "timeline.jsonl": Reader(_timeline, [_lines(spans)], [b"\n", b'"start"', *JSON_WORDS]),
        "JSONL dumps": Reader(_dump("dump.jsonl"), [_lines(dump)], [b"\n", b'"completion_ids"', *JSON_WORDS]),
        "run.json": Reader(_run_record, [json.dumps(record).encode()], JSON_WORDS),
        "best.json": Reader(_best, [b'{"reward": 0.5, "step": 5}'], JSON_WORDS),
        "calls": Reader(_calls, [b'["3/0/0", "4/1/0"]\0'], JSON_WORDS, ()),
    }


def _lines(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def _jsonl_tasks(data: bytes, place: Path) -> None:
    path = place / "train.jsonl"
    path.write_bytes(data)
    rows = gsm8k_data.read_jsonl(path)
    gsm8k_data.agreement(rows)
    for row in rows:
        assert gsm8k_data.conversation(row)


def _metrics(data: bytes, place: Path) -> None:
    (place / "metrics.jsonl").write_bytes(data)
    read_runs([place], 10**6)
    read_metrics(place)
    with MetricsWriter(place / "metrics.jsonl") as writer:
        writer.withdraw_after(2)
        writer.write(3, {"reward/mean": 0.5})
    assert read_metrics(place)[-1]["step"] == 3


def _timeline(data: bytes, place: Path) -> None:
    (place / "metrics.jsonl").touch()
    (place / "timeline.jsonl").write_bytes(data)
    read_runs([place], 10**6)
    read_timeline(place)


def _dump(name: str) -> Read:
    def read(data: bytes, place: Path) -> None:
        (place / name).write_bytes(data)
        read_dump(place / name)

    return read


def _run_record(data: bytes, place: Path) -> None:
    (place / "run.json").write_bytes(data)
    record = RunRecord(RunDirectory(place))
    assert isinstance(record.state + record.reason, str)


def _best(data: bytes, place: Path) -> None:
    run = RunDirectory(place)
    (run.checkpoints / "step-000005").mkdir(parents=True)
    (run.checkpoints / "best.json").write_bytes(data)
    checkpoints.best_checkpoint(run)
    checkpoints.retain_checkpoints(run, 1)


def _calls(data: bytes, place: Path) -> None:
    (place / "calls").write_bytes(data)
    read_calls(place / "calls")


# ---------------------------------------------------------------------- Parquet


def _parquet_files() -> dict[str, Reader]:
    rows = [row for n in range(4) for row in rows_from(trajectory(n), _settled(n), RolloutConfig())]
    stored = [_parquet(to_table(rows), kind) for kind in ("zstd", "none")]
    tasks = pa.table({"question": ["How many?", "é?"] * 20, "answer": ["#### 24", "x #### 1,200"] * 20})
    ids = {"prompt_ids": [[1, 2]], "completion_ids": [[3, 4]], "completion_mask": [[1, 1]]}
    dump = pa.table(ids | {"sampling_per_token_logps": [[-0.5, -1.0]], "advantages": [0.5], "reward": [1.0]})
    return {
        "Parquet rollouts": Reader(_rollouts, stored, text=False),
        "Parquet tasks": Reader(_parquet_tasks, [_parquet(tasks, "snappy"), _parquet(tasks, "none")], text=False),
        "Parquet dumps": Reader(_dump("dump.parquet"), [_parquet(dump, "zstd"), *stored], text=False),
    }


def trajectory(group: int) -> Trajectory:
    """A finished trajectory of 6 tokens, 3 of them actions."""
    action = np.array([False, True, True, False, True, False])
    floats = np.where(action, np.float32(-0.5), np.float32("nan")).astype(np.float32)
    segment = Segment(np.arange(6, dtype=np.int32), action, floats, -floats, np.where(action, 1, -1).astype(np.int32))
    return Trajectory(group, 0, 0, f"task-{group}", "2+2?", 7, [segment], "#### 4", 1.0, "stop", 1, group_key="é")


def _settled(number: int) -> Settlement:
    columns = [np.full(6, 0.25, np.float32)]
    return Settlement("trained", None, number + 1, number, 0.5, columns, columns, columns)


def _parquet(table: pa.Table, compression: str) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression=compression)
    return buffer.getvalue()


def _rollouts(data: bytes, place: Path) -> None:
    folder = place / "rollouts"
    folder.mkdir()
    (folder / "step-000001.parquet").write_bytes(data)
    (place / "metrics.jsonl").touch()
    read_runs([place], 10**6)
    with RolloutWriter(folder) as writer:
        writer.withdraw_after(5)
    read_rollouts(folder).to_pylist()


def _parquet_tasks(data: bytes, place: Path) -> None:
    (place / "tasks.parquet").write_bytes(data)
    gsm8k_data.read_parquet(place / "tasks.parquet")


# ---------------------------------------------------------------------- the state of a run


def _state() -> dict[str, Reader]:
    manifest_words = [b'"files"', b'"size"', b'"../../etc/passwd"', b'"step"', b'"state"', *JSON_WORDS]
    payload, checkpoint = encode_trajectory(trajectory(0)), _pristine()
    return {
        "checkpoint manifests": Reader(_manifest, [checkpoint["trainer.json"]], manifest_words),
        "checkpoint tensors": Reader(
            _tensors, [checkpoint["trainer.safetensors"]], [b"F32", b"I64", *JSON_WORDS], text=False
        ),
        "checkpoint files": Reader(_torn, [checkpoint["trainer.safetensors"]], text=False),
        "ledger": Reader(_ledger, [_example_ledger()], [b"issued", b"trained", b"meta", b"CREATE"], text=False),
        "spool payloads": Reader(_payload, [payload], errors=(ValueError,), text=False),
        "spool contents": Reader(_payload_content, [zlib.decompress(payload)], JSON_WORDS, (ValueError,), text=False),
    }


def _made(folder: Path) -> RunDirectory:
    run = RunDirectory(folder)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    return run


def _saved(folder: Path, step: int = 5) -> Path:
    state = {"step": step, "nested": {"loss": float("nan")}}
    tensors = {"moment": torch.ones(3), "count": torch.tensor(5)}
    return checkpoints.save_checkpoint(_made(folder), step, None, None, tensors, state, "periodic")


@cache
def _pristine() -> dict[str, bytes]:
    """The files of a whole checkpoint by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = _saved(Path(folder))
        return {file.name: file.read_bytes() for file in path.iterdir()}


def _copy_of_checkpoint(place: Path) -> Path:
    """A checkpoint of step 5 beneath ``place``, written from memory."""
    path = place / "checkpoints" / "step-000005"
    path.mkdir(parents=True)
    for name, content in _pristine().items():
        (path / name).write_bytes(content)
    return path


def _manifest(data: bytes, place: Path) -> None:
    """As it is, and with the digest it should have: whoever writes one can compute it."""
    path = _copy_of_checkpoint(place)
    (path / "trainer.json").write_bytes(_redigested(data))
    checkpoints.latest_checkpoint(_made(place))
    checkpoints.retain_checkpoints(_made(place), 1)
    checkpoints.load_checkpoint(path).tensors()


def _redigested(data: bytes) -> bytes:
    try:
        manifest = json.loads(data)
        manifest["digest"] = checkpoints._digest_of(manifest)
        return json.dumps(manifest).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return data


def _tensors(data: bytes, place: Path) -> None:
    """Tensors whose digest is that of the damaged file."""
    path = _copy_of_checkpoint(place)
    (path / "trainer.safetensors").write_bytes(data)
    manifest = json.loads(_pristine()["trainer.json"])
    manifest["files"]["trainer.safetensors"] = {
        "size": len(data),
        "blake2b": checkpoints._digest(path / "trainer.safetensors"),
    }
    (path / "trainer.json").write_bytes(_redigested(json.dumps(manifest).encode()))
    checkpoints.load_checkpoint(path).tensors()


def _torn(data: bytes, place: Path) -> None:
    path = _copy_of_checkpoint(place)
    (path / "trainer.safetensors").write_bytes(data)
    found = checkpoints.latest_checkpoint(_made(place))
    intact = data == _pristine()["trainer.safetensors"]
    assert (found.checkpoint is not None) == intact, "a torn checkpoint passed for a whole one"
    checkpoints.load_checkpoint(path)


def _example_ledger() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ledger.sqlite")
        with Ledger(path) as ledger:
            names = [ledger.issue(n, 0, seed=7, group_size=1, task_id=f"task-{n}", prompt="2+2?") for n in range(6)]
            for number in range(4):
                ledger.finish(trajectory(number))
            ledger.settle(names[:2], 3)
            ledger.drop(names[2], "too long", 4)
            ledger.commit(3)
        return path.read_bytes()


def _ledger(data: bytes, place: Path) -> None:
    path = place / "ledger.sqlite"
    path.write_bytes(data)
    with Ledger(path) as ledger:
        ledger.counts()
        ledger.in_flight()
        ledger.history()
        ledger.finished()
        ledger.attempts(0)
        ledger.rewind_to(3)
        ledger.forget_groups(5)


def _payload(data: bytes, place: Path) -> None:
    decode_trajectory(data)


def _payload_content(data: bytes, place: Path) -> None:
    decode_trajectory(zlib.compress(data, 1))


def clear(place: Path) -> None:
    """An empty directory for the next input."""
    for entry in place.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
