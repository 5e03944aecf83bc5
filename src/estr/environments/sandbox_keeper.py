"""The keeper of one run: starts the tool behind its walls, watches it, and leaves nothing of it behind."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from estr.environments import sandbox_kernel as kernel
from estr.environments import sandbox_walls as building
from estr.environments.sandbox_inside import Inside
from estr.environments.sandbox_walls import Request, Walls

_LOOK_EVERY = 0.05  # seconds between looks at memory
_SETUP = 60.0  # seconds for putting up the walls, which takes milliseconds
_LAST_WORDS = 5.0  # seconds for the end of everything that was started
_MIB = 1 << 20


@dataclass
class Outcome:
    """What became of a run; ``step`` names the wall that could not be put up, where that is what failed."""

    status: str
    reason: str = ""
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0
    step: str = ""


class Keeper:
    """Runs one request in this process, which must have one thread and no other children.

    Args:
        channel: a descriptor; when its other end is closed, nobody wants the outcome and the run is stopped.
    """

    def __init__(self, request: Request, walls: Walls, channel: int) -> None:
        self._request = request
        self._walls = walls
        self._channel = channel
        self._limits = request.limits
        self._output = {"stdout": bytearray(), "stderr": bytearray()}
        self._input = request.input.encode("utf-8", "replace")
        self._notes = b""
        self._started = 0.0
        self._deadline = time.monotonic() + _SETUP
        self._outcome: Outcome | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> Outcome:
        """Start the tool, wait for it or for the first limit it breaks, end all that is left of it."""
        with suppress(OSError):
            kernel.adopt_orphans()
        self._directory = "" if "files" in self._walls else tempfile.mkdtemp(prefix="estr-sandbox-")
        try:
            self._start()
            while self._outcome is None:
                self._look()
            end_descendants(self._child)
            self._drain()
        finally:
            if self._directory:
                _remove(self._directory)
        self._outcome.stdout, self._outcome.stderr = bytes(self._output["stdout"]), bytes(self._output["stderr"])
        self._add_last_line(self._outcome)
        return self._outcome

    # ------------------------------------------------------------------ starting

    def _start(self) -> None:
        stdin, stdout, stderr, notes, leash = (os.pipe() for _ in range(5))
        inner = (stdin[0], stdout[1], stderr[1], notes[1], leash[0])
        key = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            Inside(self._request, self._walls, self._directory, key, *inner).enter()
        for descriptor in inner:
            os.close(descriptor)
        self._stdin, self._leash = stdin[1], leash[1]
        for descriptor, name in ((stdout[0], "stdout"), (stderr[0], "stderr")):
            self._listen(descriptor, partial(self._read, descriptor, name))
        self._notes_from = notes[0]
        self._listen(notes[0], self._read_notes)
        self._selector.register(self._channel, selectors.EVENT_READ, self._hang_up)
        os.set_blocking(self._stdin, False)
        self._selector.register(self._stdin, selectors.EVENT_WRITE, self._feed)

    def _listen(self, descriptor: int, handle: Callable[[], None]) -> None:
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, handle)

    # ------------------------------------------------------------------ watching

    def _look(self) -> None:
        left = self._deadline - time.monotonic()
        for key, _ in self._selector.select(max(0.0, min(_LOOK_EVERY, left))):
            if self._outcome is None:
                key.data()
        if self._outcome is not None:
            return
        if left <= 0 and self._started:
            self._end("time", f"it ran longer than {self._limits.seconds:g} s")
        elif left <= 0:
            self._end("broken", f"the sandbox was not ready after {_SETUP:g} s")
        elif self._started:
            self._check_family()

    def _end(self, status: str, reason: str, step: str = "") -> None:
        seconds = time.monotonic() - self._started if self._started else 0.0
        self._outcome = Outcome(status, reason, seconds=seconds, step=step)

    def _check_family(self) -> None:
        family = list(descendants(os.getpid()))
        if len(family) > 2 * self._limits.processes + 8:  # only where the kernel did not keep to the limit
            self._end("error", f"it started more than {self._limits.processes} processes")
        elif _memory(family) > self._limits.memory_mb * _MIB:
            self._end("memory", f"its processes held more than {self._limits.memory_mb} MB of memory together")
        elif self._directory and _size(self._directory) > self._limits.disk_mb * _MIB:
            self._end("disk", f"it wrote more than {self._limits.disk_mb} MB of files")

    def _read(self, descriptor: int, name: str) -> None:
        data = _read_some(descriptor)
        if data == b"":
            self._selector.unregister(descriptor)
            os.close(descriptor)
        elif data:
            self._keep(name, data)

    def _keep(self, name: str, data: bytes) -> None:
        kept, limit = self._output[name], self._limits.output_kb * 1024
        if len(kept) + len(data) > limit and self._outcome is None:
            self._end("output", f"it wrote more than {self._limits.output_kb} KB to {name}")
        kept += data[: limit - len(kept)]

    def _feed(self) -> None:
        try:
            self._input = self._input[os.write(self._stdin, self._input[:65536]) :] if self._input else b""
        except BlockingIOError:
            return
        except OSError:
            self._input = b""
        if not self._input:
            self._selector.unregister(self._stdin)
            os.close(self._stdin)

    def _hang_up(self) -> None:
        self._end("broken", "nobody waits for it any more")

    def _read_notes(self) -> None:
        data = _read_some(self._notes_from)
        if data is None:
            return
        self._notes += data
        *lines, self._notes = self._notes.split(b"\n")
        for line in lines:
            self._heed(json.loads(line))
        if data == b"" and self._outcome is None:
            self._end("broken", "the sandbox's own process inside was ended")

    def _heed(self, note: dict[str, Any]) -> None:
        if self._outcome is not None:
            return
        if "unshared" in note:
            self._let_in()
        elif "started" in note:
            self._started = time.monotonic()
            self._deadline = self._started + self._limits.seconds
        elif "step" in note:
            self._end("broken", note["reason"], note["step"])
        elif "absent" in note:
            self._end("error", note["absent"])
        else:
            self._end(*self._meaning(note["exit"], note["cpu"]))

    def _let_in(self) -> None:
        try:
            building.map_ids(self._child)
        except OSError as error:
            self._end("broken", str(error), "namespaces")
        else:
            os.write(self._leash, b"+")

    def _meaning(self, status: int, cpu: float) -> tuple[str, str]:
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return "ok", ""
        if code > 0:
            return "error", f"it ended with exit status {code}"
        if -code == signal.SIGXCPU or (-code == signal.SIGKILL and cpu >= self._limits.cpu_seconds):
            return "time", f"it used more than {self._limits.cpu_seconds} s of processor time"
        if -code == signal.SIGXFSZ:
            return "disk", f"it wrote a file of more than {self._limits.disk_mb} MB"
        return "error", f"it was ended by {_signal_name(-code)}"

    # ------------------------------------------------------------------ the end

    def _drain(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.events == selectors.EVENT_READ and isinstance(key.data, partial):
                descriptor, name = key.data.args
                while data := _read_some(descriptor):
                    self._keep(name, data)

    def _add_last_line(self, outcome: Outcome) -> None:
        """The last line of a traceback says more than an exit status."""
        if outcome.status != "error" or not outcome.reason.startswith("it ended with"):
            return
        lines = outcome.stderr.decode("utf-8", "replace").split("\n")
        last = next((" ".join(line.split()) for line in reversed(lines) if line.strip()), "")
        if last.startswith("MemoryError"):
            outcome.status, outcome.reason = "memory", f"it ran out of its {self._limits.memory_mb} MB of memory"
        elif last:
            outcome.reason += f" ({last[:200]})"


def _read_some(descriptor: int) -> bytes | None:
    """What is there; None where nothing is, empty at the end."""
    try:
        return os.read(descriptor, 65536)
    except BlockingIOError:
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---------------------------------------------------------------------- its processes


def children(process: int) -> list[int]:
    """The processes that ``process`` started or adopted and has not yet waited for, as far as /proc tells."""
    found: list[int] = []
    tasks = f"/proc/{process}/task"
    with suppress(OSError):
        for task in os.listdir(tasks):
            with suppress(OSError), open(f"{tasks}/{task}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def descendants(process: int) -> Iterator[int]:
    """Children of ``process``, their children, and so on."""
    for child in children(process):
        yield child
        yield from descendants(child)


def end_descendants(group: int) -> None:
    """Kill everything below this process, beginning with the process group ``group``, until nothing is left.

    Only its own children are killed, whose numbers nobody else can have before it has waited for them; what they leave
    behind is adopted by it and is next.
    """
    deadline = time.monotonic() + _LAST_WORDS
    with suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    while time.monotonic() < deadline:
        for process in children(os.getpid()):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _memory(processes: list[int]) -> int:
    """Bytes that the processes hold; what they share counts once where it can be told."""
    held = sum(map(_resident, processes))
    return held if held < 64 * _MIB else sum(map(_proportional, processes))


def _resident(process: int) -> int:
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _proportional(process: int) -> int:
    with suppress(OSError, ValueError), open(f"/proc/{process}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(process)


def _size(directory: str) -> int:
    """Bytes of the files below ``directory``, each as at least one block; symbolic links are not followed."""
    total, waiting = 0, [directory]
    while waiting:
        with suppress(OSError):
            for entry in os.scandir(waiting.pop()):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                with suppress(OSError):
                    total += max(4096, entry.stat(follow_symlinks=False).st_blocks * 512)
    return total


def _remove(directory: str) -> None:
    """Remove a directory however deep it is, which `shutil.rmtree` cannot."""
    with suppress(OSError):
        subprocess.run(["rm", "-rf", "--", directory], stderr=subprocess.DEVNULL, check=False)
    shutil.rmtree(directory, ignore_errors=True)
