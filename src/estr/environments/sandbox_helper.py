"""The sandbox's helper: a small process, started anew, that starts tools so that nobody else has to fork.

The process that trains holds one end of a socket. For each run it sends the descriptor of a channel over it; the helper
forks a keeper for that run, and the keeper answers over the channel. The helper ends when the socket is closed, the
keeper and its tool when the channel is: also when the process that trains is killed.

    trainer ──socket──▶ helper ──fork──▶ keeper ──fork──▶ [outside ──fork──▶] first ──fork──▶ the tool

``outside`` goes into new namespaces and waits; ``first`` is process 1 in there, puts up the walls, starts the tool, and
takes everything with it when it ends. Without namespaces the keeper hunts down what the tool started.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress

from estr.environments import sandbox_kernel as kernel
from estr.environments.sandbox_keeper import Keeper, Outcome
from estr.environments.sandbox_walls import STEPS, Limits, Request, Walls

_LARGEST_REQUEST = 1 << 26  # bytes
_PATIENCE = 60.0  # seconds for what takes milliseconds on a machine that is not busy


def main(descriptor: int) -> None:
    """Serve until the socket ``descriptor`` is closed at its other end."""
    os.chdir("/")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    parent = os.getppid()
    with socket.socket(fileno=descriptor) as control:
        with suppress(OSError):
            kernel.load_seccomp()
        walls = find_walls()
        while os.getppid() == parent:
            if not select.select([control], [], [], 1.0)[0]:
                continue
            message, received, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            with socket.socket(fileno=received[0]) as channel:
                if os.fork() == 0:
                    control.close()
                    _serve(channel, walls)


def find_walls() -> Walls:
    """Try a run, and again without the step that failed, until one works.

    A trial that only took too long says nothing about the system, so it takes no wall away.
    """
    walls = Walls()
    request = Request([sys.executable, "-I", "-S", "-c", ""], limits=Limits(seconds=_PATIENCE, cpu_seconds=10))
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        for _ in range(2 * len(STEPS)):
            outcome = _tried(request, walls)
            if outcome.status == "ok":
                break
            culprit = _culprit(outcome, walls)
            if culprit is not None:
                walls.remove(culprit, outcome.reason)
    finally:
        signal.signal(signal.SIGCHLD, before)
    return walls


def _culprit(outcome: Outcome, walls: Walls) -> str | None:
    """The step that failed; where Python itself did not start behind the walls, the next that may be the cause."""
    if outcome.step in STEPS:
        return outcome.step
    suspects = ("uid", "landlock", "seccomp", "files", "namespaces") if outcome.status == "error" else ()
    return next((suspect for suspect in suspects if suspect in walls), None)


def facts(walls: Walls) -> dict[str, object]:
    """What `estr.environments.sandbox.sandbox_report` tells about."""
    version = kernel.landlock_version() if "landlock" in walls else 0
    return {"missing": walls.missing, "landlock": version, "root": os.geteuid() == 0}


def _tried(request: Request, walls: Walls) -> Outcome:
    """One run by a keeper of its own, as in earnest."""
    mine, theirs = socket.socketpair()
    with mine:
        child = os.fork()
        if child == 0:
            mine.close()
            _answer(theirs, Keeper(request, walls, theirs.fileno()).run())
            os._exit(0)
        theirs.close()
        with mine.makefile("rb") as answer:
            head = json.loads(answer.readline() or b'{"status": "broken", "reason": "the keeper died"}')
        os.waitpid(child, 0)
    return Outcome(head["status"], head["reason"], step=head.get("step", ""))


def _serve(channel: socket.socket, walls: Walls) -> None:
    """In a keeper: read the request, run it, answer, end."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        content = json.loads(_receive(channel))
        if content is None:
            channel.sendall(json.dumps(facts(walls)).encode())
        else:
            request = Request(**(content | {"limits": Limits(**content["limits"])}))
            _answer(channel, Keeper(request, walls, channel.fileno()).run())
    except BaseException as error:
        with suppress(OSError):
            _answer(channel, Outcome("broken", f"the sandbox failed: {type(error).__name__}: {error}"))
    finally:
        os._exit(0)


def _receive(channel: socket.socket) -> bytes:
    channel.settimeout(_PATIENCE)
    size = int.from_bytes(_exactly(channel, 4), "big")
    if size > _LARGEST_REQUEST:
        raise ValueError(f"a request of {size} bytes")
    content = _exactly(channel, size)
    channel.settimeout(None)
    return content


def _exactly(channel: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = channel.recv(min(size - len(content), 1 << 16))
        if not part:
            raise EOFError("the request is cut off")
        content += part
    return bytes(content)


def _answer(channel: socket.socket, outcome: Outcome) -> None:
    """One line of JSON, then standard output, then standard error."""
    head = dataclasses.asdict(outcome) | {"stdout": len(outcome.stdout), "stderr": len(outcome.stderr)}
    channel.sendall(json.dumps(head).encode() + b"\n" + outcome.stdout + outcome.stderr)
