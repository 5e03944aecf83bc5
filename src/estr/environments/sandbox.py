"""Runs programs that nobody has read: what a model writes, in a process of its own behind walls and limits.

A tool calls `Sandbox.python` with the code of a turn, or `Sandbox.run` with any program or a function by its name, and
gets a `Result` within the limits' time, whatever the program does. ``python -m estr.environments.sandbox`` prints
which of the walls this system has.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import estr
from estr.environments.sandbox_walls import Limits, Request
from estr.errors import RunError, UsageError, nearest

__all__ = ["Limits", "Result", "Sandbox", "Wall", "sandbox_report"]

Status = Literal["ok", "error", "time", "memory", "output", "disk", "broken"]
_GRACE = 120.0  # seconds beyond the time limit in which the helper must have answered
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from estr.environments.sandbox_helper import main; main(int(sys.argv[2]))"
)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_AT_ONCE = max(2, os.cpu_count() or 1)  # programs that one process runs at a time; others wait their turn


@dataclass(frozen=True)
class Result:
    """What became of a program.

    ``status`` is ``ok`` (exit status 0), ``error`` (another one, or ended by a signal), the limit that ended it
    (``time``, ``memory``, ``output``, ``disk``), or ``broken`` where the sandbox itself failed; ``reason`` says it in
    one sentence, empty for ``ok``. Output is what had been written until then; bytes that are no UTF-8 are replaced.
    """

    status: Status
    stdout: str
    stderr: str
    seconds: float
    reason: str


@dataclass(frozen=True)
class Wall:
    """One line of `sandbox_report`: a limit, whether this system can apply it, and by what means, or why not."""

    limit: str
    applied: bool
    how: str


class Sandbox:
    """A place to run programs in. Cheap to make; runs of one process share a helper, which starts with the first.

    Args:
        limits: what each run may use.
        readable: files and directories that programs can see, besides the system's programs and libraries and Python.
        require: limits (names of `sandbox_report`) without which nothing is run.

    Raises:
        UsageError: a required limit is unknown, or cannot be applied on this system.
    """

    def __init__(
        self,
        limits: Limits = Limits(),
        *,
        readable: Sequence[str | os.PathLike[str]] = (),
        require: Collection[str] = (),
    ) -> None:
        self.limits = limits
        self.readable = [os.path.abspath(path) for path in readable]
        if require:
            _require(require)

    def python(self, code: str, input: str = "") -> Result:
        """Run a Python program; ``input`` is its standard input."""
        return self.run([sys.executable, "-I", "main.py"], input, files={"main.py": code})

    def run(
        self,
        program: Sequence[str] | str | Callable[[str], object],
        input: str = "",
        *,
        files: Mapping[str, str] | None = None,
    ) -> Result:
        """Run a program and wait for its end.

        Args:
            program: a program with its arguments; or a function of a module, as itself or as ``"module:name"``, which
                is called with ``input`` in a fresh process, and whose value is printed. For a function, the
                directories of ``sys.path`` are readable.
            input: standard input.
            files: texts to put into the working directory first, by name.

        Raises:
            UsageError: the program is none, or a file's name is not a plain name.
            RunError: the helper cannot be started.
        """
        texts = _plain_names(files or {})
        request = Request(_program(program), input, texts, self.limits, self.readable, _import_path(program))
        if sum(map(len, texts.values())) > self.limits.disk_mb << 20:
            return Result("disk", "", "", 0.0, f"its files are larger than {self.limits.disk_mb} MB")
        return _result(_helper.ask(dataclasses.asdict(request), self.limits.seconds + _GRACE))


def sandbox_report() -> list[Wall]:
    """Which limits can be applied on this system, as the helper found when it tried."""
    answer = _helper.ask(None, _GRACE)
    try:
        facts = json.loads(answer)
    except ValueError:
        raise RunError("the sandbox's helper gave no report; try again") from None
    return _walls(facts["missing"], facts["landlock"], facts["root"])


# ---------------------------------------------------------------------- asking


def _program(program: Sequence[str] | str | Callable[[str], object]) -> list[str] | str:
    if callable(program):
        program = f"{program.__module__}:{program.__qualname__}"
    if isinstance(program, str):
        module, _, name = program.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))) or module == "__main__":
            raise UsageError(f"a sandbox runs a function of a module, as 'module:name', not {program!r}")
        return program
    arguments = [str(argument) for argument in program]
    if not arguments or any("\0" in argument for argument in arguments):
        raise UsageError("a sandbox runs a program with arguments that are texts without zero bytes")
    return arguments


def _plain_names(files: Mapping[str, str]) -> dict[str, str]:
    for name in files:
        if not _PLAIN_NAME.fullmatch(name) or name in (".", ".."):
            raise UsageError(f"a file of a sandbox has a plain name of letters, digits and ._-, not {name[:100]!r}")
    return dict(files)


def _import_path(program: object) -> list[str]:
    return _search_path() if callable(program) or isinstance(program, str) else []


def _search_path() -> list[str]:
    own = str(Path(estr.__file__).resolve().parent.parent)
    return list(dict.fromkeys([os.path.abspath(path) for path in sys.path] + [own]))


def _result(answer: bytes) -> Result:
    line, _, output = answer.partition(b"\n")
    try:
        head = json.loads(line)
    except ValueError:
        return Result("broken", "", "", 0.0, "the sandbox's process ended without an answer")
    texts = output[: head["stdout"]], output[head["stdout"] :]
    stdout, stderr = (text.decode("utf-8", "replace") for text in texts)
    return Result(head["status"], stdout, stderr, head["seconds"], head["reason"])


class _Helper:
    """The helper of this process, started when it is first asked and again when it is gone."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start from nothing: in a process that was forked from the one whose helper this is."""
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(_AT_ONCE)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def ask(self, request: dict[str, Any] | None, patience: float) -> bytes:
        """The keeper's answer to ``request`` (None: which walls there are not); what there is of it after
        ``patience`` seconds."""
        content = json.dumps(request).encode()
        mine, theirs = socket.socketpair()
        with mine, self._turns:
            with theirs:
                self._send(theirs)
            mine.settimeout(patience)
            with suppress(OSError):
                mine.sendall(len(content).to_bytes(4, "big") + content)
            return _all(mine)

    def _send(self, channel: socket.socket) -> None:
        with self._lock:
            for attempt in range(2):
                control = self._running(anew=attempt > 0)
                try:
                    socket.send_fds(control, [b"+"], [channel.fileno()])
                    return
                except OSError:
                    continue
        raise RunError("the sandbox's helper process ends as soon as it is started; is there memory for it?")

    def _running(self, anew: bool) -> socket.socket:
        alive = self._process is not None and self._process.poll() is None
        if self._control is None or anew or not alive:
            self.close()
            mine, theirs = socket.socketpair()
            with theirs:
                self._process = _start(theirs.fileno())
            self._control = mine
        return self._control

    def close(self) -> None:
        """End the helper and whatever it runs."""
        control, process = self._control, self._process
        self._control = self._process = None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()


def _start(descriptor: int) -> subprocess.Popen[bytes]:
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _START, json.dumps(_search_path()), str(descriptor)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **kept},
            pass_fds=(descriptor,),
            start_new_session=True,
        )
    except OSError as error:
        raise RunError(f"the sandbox's helper process cannot be started: {error.strerror}") from error


def _all(channel: socket.socket) -> bytes:
    parts = []
    with suppress(OSError):
        while part := channel.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


_helper = _Helper()
atexit.register(_helper.close)
os.register_at_fork(after_in_child=_helper.forget)


# ---------------------------------------------------------------------- reporting


def _require(names: Collection[str]) -> None:
    walls = {wall.limit: wall for wall in sandbox_report()}
    for name in names:
        if name not in walls:
            raise UsageError(f"a sandbox has no limit {name!r}{nearest(name, walls)}")
        if not walls[name].applied:
            raise UsageError(f"this system cannot apply the limit {name!r} to a sandbox: {walls[name].how}")


def _walls(missing: Mapping[str, str], landlock: int, root: bool) -> list[Wall]:
    def first(limit: str, *means: tuple[str | bool, str]) -> Wall:
        """By the first of the steps that is there."""
        for step, how in means:
            if step is True or (isinstance(step, str) and step not in missing):
                return Wall(limit, True, how)
        reasons = dict.fromkeys(missing[step] for step, _ in means if isinstance(step, str))
        return Wall(limit, False, "; ".join(reasons))

    linux = sys.platform == "linux"
    return [
        first("time", (True, "the keeper's clock")),
        first("processor time", (True, "RLIMIT_CPU, each process")),
        Wall("memory", linux, "RLIMIT_AS, each process; the keeper's eye on all together" if linux else "no RLIMIT_AS"),
        first("output", (True, "counted by the keeper")),
        first("open files", (True, "RLIMIT_NOFILE")),
        first("disk", ("files", "RLIMIT_FSIZE; a file system of that size"), (True, "RLIMIT_FSIZE; the keeper's eye")),
        first(
            "processes",
            ("namespaces", "RLIMIT_NPROC in a user namespace"),
            ("uid", "RLIMIT_NPROC of a user of its own"),
            (not root, "RLIMIT_NPROC above what this user runs"),
        ),
        first("environment", (True, "started with nothing but PATH, HOME, TMPDIR, LANG")),
        first("writing outside", ("files", "a root directory of its own, read-only"), ("landlock", "Landlock")),
        first("reading outside", ("files", "a root directory of its own"), ("landlock", "Landlock")),
        first("network", ("namespaces", "a network namespace"), ("seccomp", "seccomp: no sockets")),
        first(
            "signals",
            ("namespaces", "a process namespace"),
            ("uid", "a user of its own"),
            (landlock >= 6, "Landlock"),
        ),
        first(
            "leftovers", ("namespaces", "end with their process namespace"), (True, "found by their parents and killed")
        ),
        first("system calls", ("seccomp", "seccomp through libseccomp")),
    ]


def _main() -> None:
    for wall in sandbox_report():
        print(f"{wall.limit:16} {'yes' if wall.applied else 'NO':4} {wall.how}")


if __name__ == "__main__":
    _main()
