"""Damaged inputs for everything that reads bytes: ``python tests/fuzz.py --inputs 3000`` (``make fuzz``).

Each reader gets inputs made by Hypothesis: good ones with bytes changed, cut, doubled or replaced by what its format is
made of, and arbitrary ones. Counted as a finding is an error that is not documented, one without a sentence, and more
processor time or memory than is stated here. The process that runs this may not use more memory than `ADDRESS_SPACE`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from fuzz_readers import Reader, clear, readers

SECONDS = 5.0  # processor time an input may take
MEMORY = 256 << 20  # bytes an input may add to the process
ADDRESS_SPACE = 4 << 30
LARGEST = 1 << 16  # bytes of an input
LONGEST_SENTENCE = 1000
EXTREMES = [b"\0", b"\xff", b"\xff" * 4, b"\0" * 8, b"\xff\xff\xff\x7f", b"\xff" * 7 + b"\x7f", b"\x80\x80\x80\x80\x08"]
EXTREMES += [b"\xed\xa0\x80", b"\xef\xbb\xbf", "é".encode(), b"\r\n", b"\x85", b"\xe2\x80\xa8"]


@dataclass
class Finding:
    """What one reader did: how many inputs, how many it read, how many it refused; what is wrong, and the input."""

    reader: str
    tried: int = 0
    read: int = 0
    refused: int = 0
    slowest: float = 0.0  # seconds of processor time
    memory: int = 0  # bytes, the most that an input added
    wrong: list[dict[str, str]] = field(default_factory=list)


class TooSlowError(BaseException):
    """An input took longer than `SECONDS`."""


def inputs(reader: Reader) -> st.SearchStrategy[bytes]:
    """Good inputs with up to 6 changes, sequences of the format's words, and anything."""
    words = st.sampled_from([*EXTREMES, *reader.words]) | st.binary(max_size=8)
    change = st.tuples(st.integers(0, 65535), st.integers(0, 65535), st.sampled_from("rrricdt"), words)
    good = st.sampled_from(reader.seeds)
    once = st.builds(_changed, good, change.map(lambda one: [one]))
    damaged = st.builds(_changed, good, st.lists(change, max_size=6))
    composed = st.lists(words, max_size=12).map(b"".join)
    return (once | once | damaged | composed | st.binary(max_size=200)).map(lambda data: data[:LARGEST])


def _changed(data: bytes, changes: list[tuple[int, int, str, bytes]]) -> bytes:
    for first, second, kind, word in changes:
        at = first * (len(data) + 1) >> 16
        end = min(len(data), at + 1 + second % (len(data) // 4 + 16))
        if kind == "r":  # over what is there
            data = data[:at] + word + data[at + len(word) :]
        elif kind == "i":
            data = data[:at] + word + data[at:]
        elif kind == "c":  # cut out
            data = data[:at] + data[end:]
        elif kind == "d":  # doubled
            data = data[:end] + data[at:]
        else:  # cut off
            data = data[:at]
    return data


def fuzz(name: str, reader: Reader, count: int, seed: int, place: Path) -> Finding:
    """Try ``count`` inputs; the first wrong one of a kind is made as small as it gets."""
    finding = Finding(name)

    @seeded(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(inputs(reader))
    def run(data: bytes) -> None:
        _try(finding, reader, data, place)

    try:
        for good in reader.seeds:
            _try(finding, reader, good, place)
            assert not finding.refused, "it refuses a good input"
        run()
    except BaseExceptionGroup as errors:
        finding.wrong += [{"error": _told(error), "input": _input(error)} for error in errors.exceptions]
    except (Exception, TooSlowError) as error:
        finding.wrong.append({"error": _told(error), "input": _input(error)})
    return finding


def _try(finding: Finding, reader: Reader, data: bytes, place: Path) -> None:
    clear(place)
    finding.tried += 1
    before, started = _memory_now(), time.process_time()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        _read(finding, reader, data, place)
        finding.slowest = max(finding.slowest, time.process_time() - started)
        added = _peak() - before
        finding.memory = max(finding.memory, added)
        assert added <= MEMORY, f"{added >> 20} MB of memory for {len(data)} bytes"
    except (Exception, TooSlowError) as error:
        error.damaged_input = data.hex()  # type: ignore[union-attr]
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _read(finding: Finding, reader: Reader, data: bytes, place: Path) -> None:
    try:
        reader.read(data, place)
        finding.read += 1
    except reader.errors as error:
        finding.refused += 1
        _check_sentence(str(error))


def _check_sentence(text: str) -> None:
    assert text.strip(), "an error without a sentence"
    assert len(text.splitlines()) == 1, f"an error of several lines: {text[:300]!r}"
    assert len(text) <= LONGEST_SENTENCE, f"an error of {len(text)} characters: {text[:200]!r}"


def _told(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-4:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(last))
    return f"{type(error).__name__}: {str(error)[:500]} ({places})"


def _input(error: BaseException) -> str:
    return getattr(error, "damaged_input", "")


def _memory_now() -> int:
    """Resident bytes; the highest value is forgotten."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS:")


def _peak() -> int:
    return _status("VmHWM:")


def _status(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def _too_slow(*_: object) -> None:
    raise TooSlowError(f"more than {SECONDS:g} s of processor time")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=3000, help="for each reader")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--json", action="store_true", help="one line of JSON a reader")
    parser.add_argument("readers", nargs="*", help="default: all")
    given_ = parser.parse_args()
    seed = int.from_bytes(os.urandom(4), "big") if given_.seed is None else given_.seed
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    signal.signal(signal.SIGPROF, _too_slow)
    if not given_.json:
        print(
            f"seed {seed}; {'reader':22}{'inputs':>8}{'read':>8}{'refused':>9}{'slowest':>10}{'memory':>9}", flush=True
        )
    wrong = tried = 0
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base, prefix="estr-fuzz-") as folder:
        for name, reader in readers().items():
            if given_.readers and name not in given_.readers:
                continue
            print(json.dumps({"begin": name}) if given_.json else "", end="\n" if given_.json else "", flush=True)
            finding = fuzz(name, reader, given_.inputs, seed, Path(folder))
            wrong, tried = wrong + len(finding.wrong), tried + finding.tried
            print(json.dumps(vars(finding)) if given_.json else _row(finding), flush=True)
    if not given_.json:
        print(f"{tried} inputs; {wrong} findings" if wrong else f"{tried} inputs, none amiss")
    return min(wrong, 1)


def _row(finding: Finding) -> str:
    row = f"{finding.reader:38}{finding.tried:>8}{finding.read:>8}{finding.refused:>9}"
    row += f"{finding.slowest:>8.2f} s{finding.memory >> 20:>6} MB"
    return row + "".join(f"\n  WRONG {one['error']}\n    input {_shown(one['input'])}" for one in finding.wrong)


def _shown(hexadecimal: str) -> str:
    """The input as bytes where it is short, else the file it was put into."""
    data = bytes.fromhex(hexadecimal)
    if len(data) <= 200:
        return repr(data)
    path = Path(tempfile.gettempdir(), f"estr-fuzz-{hashlib.sha256(data).hexdigest()[:12]}")
    path.write_bytes(data)
    return f"{data[:60]!r}… ({len(data)} bytes, in {path})"


if __name__ == "__main__":
    sys.exit(main())
