"""Damaged input to everything that reads bytes (fuzz.py): a sentence or a value, in bounded time and memory."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

import fuzz
from estr.errors import EstrError
from fuzz_readers import Reader, _parquet, _pristine, _redigested, readers

READERS = readers()


def attempt(inputs, seed):
    """What a process of its own found, by reader; it dies alone where a reader brings it down."""
    command = [sys.executable, "-W", "ignore", fuzz.__file__, "--json", "--inputs", str(inputs), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    begun = [line["begin"] for line in lines if "begin" in line]
    found = {line["reader"]: line for line in lines if "reader" in line}
    assert begun == list(found), f"{begun[-1:]} ended the process ({done.returncode}): {done.stderr[-2000:]}"
    return found


def check(found, inputs):
    assert list(found) == list(READERS)
    assert [line["error"] for one in found.values() for line in one["wrong"]] == []
    assert all(one["tried"] >= inputs for one in found.values())
    assert all(one["read"] >= len(READERS[name].seeds) for name, one in found.items())


def test_damaged_input_is_read_or_refused_with_a_sentence():
    check(attempt(50, seed=0), 50)


@pytest.mark.slow
def test_much_damaged_input_is_read_or_refused_with_a_sentence():
    check(attempt(400, seed=1), 400)


# ---------------------------------------------------------------------- what fuzzing found once


def _bad_text():
    """A Parquet file whose text is no UTF-8, which Arrow does not look at when it reads."""
    rows = [b"\xff\xfe", b"ok"]
    text = pa.array(rows, pa.binary()).view(pa.string())
    return _parquet(pa.table({"question": text, "answer": text, "trajectory_id": text, "logprob": [[0.5]] * 2}), "none")


def _manifest_with(**changes):
    return _redigested(json.dumps(json.loads(_pristine()["trainer.json"]) | changes).encode())


def _ledger_without(key):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ledger.sqlite")
        path.write_bytes(READERS["ledger"].seeds[0])
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("DELETE FROM meta WHERE key = ?", (key,))
            connection.commit()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return path.read_bytes()


KNOWN = [
    ("ledger", _ledger_without("pruned_through")),
    ("ledger", _ledger_without("format")),
    ("set arguments", b"\r\nn.steps=20"),
    ("set arguments", b"[" * 3000),
    ("checkpoint manifests", b"7"),
    ("checkpoint manifests", _manifest_with(files=[])),
    ("checkpoint manifests", _manifest_with(files={"../../secret": {"size": 1, "blake2b": ""}})),
    ("checkpoint manifests", _manifest_with(files={"/etc/passwd": {"size": 1, "blake2b": ""}})),
    ("checkpoint manifests", _manifest_with(files={"a\0b": {"size": 1, "blake2b": ""}})),
    ("checkpoint manifests", _manifest_with(state={"loss": {"$float": []}})),
    ("checkpoint manifests", _manifest_with(state=None)),
    ("checkpoint tensors", b""),
    ("checkpoint tensors", b"\xff" * 8 + b"{}"),
    ("Parquet tasks", _bad_text()),
    ("Parquet rollouts", _bad_text()),
    ("Parquet dumps", _bad_text()),
]


@pytest.mark.parametrize(("name", "data"), KNOWN)
def test_known_damage_is_refused_with_a_sentence(name, data, tmp_path):
    with pytest.raises(EstrError) as caught:
        READERS[name].read(data, tmp_path)
    fuzz._check_sentence(str(caught.value))


@pytest.mark.parametrize("name", ["calls", "best.json"])
def test_known_damage_is_passed_over(name, tmp_path):
    READERS[name].read(b"[" * 100_000, tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "timeline.jsonl", "run.json", "JSONL dumps", "JSONL tasks"])
def test_deep_nesting_is_refused_with_a_sentence(name, tmp_path):
    with pytest.raises(EstrError):
        READERS[name].read(b"[" * 100_000 + b"\n", tmp_path)


# ---------------------------------------------------------------------- the fuzzer finds what it looks for


def _raises(text):
    def read(data, place):
        if b"<" in data:
            raise EstrError(text)

    return read


def _undocumented(data, place):
    data.index(b"<")


def _hangs(data, place):
    while b"<" in data:
        pass


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (_undocumented, "ValueError"),
        (_raises(""), "without a sentence"),
        (_raises("two\nlines"), "several lines"),
        (_raises("x" * 5000), "5000 characters"),
        (_hangs, "processor time"),
    ],
)
def test_the_fuzzer_finds(read, told, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    monkeypatch.setattr(fuzz, "MEMORY", 16 << 20)
    before = signal.signal(signal.SIGPROF, fuzz._too_slow)
    try:
        seeds = [b"<a>" if read is _undocumented else b"a"]
        found = fuzz.fuzz("planted", Reader(read, seeds, [b"<"], (EstrError,)), 100, 0, Path(tmp_path))
    finally:
        signal.signal(signal.SIGPROF, before)
    assert len(found.wrong) == 1
    assert told in found.wrong[0]["error"]
    assert (b"<" in bytes.fromhex(found.wrong[0]["input"])) == (read is not _undocumented)


HOARDERS = """
import json, mmap, resource, signal, sys
from pathlib import Path
import fuzz
from fuzz_readers import Reader

def touches(size):
    def read(data, place):
        if b"<" in data:
            with mmap.mmap(-1, size) as pages:
                for at in range(0, size, mmap.PAGESIZE):
                    pages[at] = 1
    return read

def asks_for_more_than_there_is(data, place):
    assert b"<" not in data or bytearray(fuzz.ADDRESS_SPACE)

resource.setrlimit(resource.RLIMIT_AS, (fuzz.ADDRESS_SPACE, fuzz.ADDRESS_SPACE))
signal.signal(signal.SIGPROF, fuzz._too_slow)
fuzz.MEMORY = 64 << 20
for read in (touches(8 << 20), touches(192 << 20), asks_for_more_than_there_is):
    found = fuzz.fuzz("planted", Reader(read, [b"a"], [b"<"], (ValueError,)), 200, 0, Path(sys.argv[1]))
    print(json.dumps(vars(found)))
"""


def test_the_fuzzer_finds_what_takes_too_much_memory(tmp_path):
    """Pages straight from the kernel, far from the bound, in a process of its own: no allocator has a say in it."""
    command = [sys.executable, "-W", "ignore", "-c", HOARDERS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(fuzz.__file__).parent)
    assert done.returncode == 0, done.stderr
    little, much, refused = map(json.loads, done.stdout.splitlines())
    assert little["wrong"] == []
    assert 7 << 20 <= little["memory"] < 64 << 20
    assert "of memory for" in much["wrong"][0]["error"]
    assert much["memory"] >= 190 << 20
    assert "MemoryError" in refused["wrong"][0]["error"]
    for found in (much, refused):
        assert [b"<" in bytes.fromhex(one["input"]) for one in found["wrong"]] == [True]
