"""What happens in the processes that a keeper starts: going inside, putting up the walls, becoming the tool."""

from __future__ import annotations

import importlib
import io
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any, NoReturn

from estr.environments import sandbox_kernel as kernel
from estr.environments import sandbox_walls as building
from estr.environments.sandbox_walls import BOX, Request, StepError, Walls, step

_SEARCH = "/usr/local/bin:/usr/bin:/bin"
_HIGHEST = 1 << 20  # no descriptor has a higher number


@dataclass
class Inside:
    """The ends of the pipes that stay inside, and what is to be run there.

    ``notes`` takes lines of JSON to the keeper; ``leash`` is closed by the keeper's death, and gives one byte when the
    keeper has mapped the users of the new namespace.
    """

    request: Request
    walls: Walls
    directory: str  # the working directory; empty where the walls bring their own
    key: int  # the keeper's process number: no two runs have the same at a time
    stdin: int
    stdout: int
    stderr: int
    notes: int
    leash: int

    def enter(self) -> NoReturn:
        """Never returns: the process ends when the tool has."""
        try:
            self._go_in()
        except StepError as error:
            self._note(step=error.step, reason=error.reason)
        except BaseException as error:
            self._note(step="", reason=f"the sandbox failed: {type(error).__name__}: {error}")
        finally:
            os._exit(1)

    def _go_in(self) -> None:
        _keep_only(self.stdin, self.stdout, self.stderr, self.notes, self.leash)
        os.setsid()
        building.offer_to_the_killer()
        if "namespaces" not in self.walls:
            self._first()
            return
        with step("namespaces"):
            kernel.unshare_everything()
        self._note(unshared=True)
        if os.read(self.leash, 1) and os.fork() == 0:  # the child is process 1 of the new namespace
            self._first()
        else:
            with suppress(ChildProcessError):
                os.waitpid(-1, 0)

    # ------------------------------------------------------------------ process 1

    def _first(self) -> None:
        signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup)
        self._put_up_walls()
        tool = os.fork()
        if tool == 0:
            self._become_tool()
        for descriptor in (self.stdin, self.stdout, self.stderr):
            os.close(descriptor)
        self._note(started=True)
        self._wait(tool, signals)

    def _put_up_walls(self) -> None:
        owner = self._owner()
        if "files" in self.walls:
            with step("files"):
                building.build_root(self.request, os.getuid() if owner is None else owner, "proc" in self.walls)
            self.directory = BOX
        elif owner is not None:
            os.chown(self.directory, owner, owner)
        if owner is not None:
            with step("uid"):
                building.become(owner)
        building.fill(self.directory, self.request.files)
        with suppress(OSError):
            kernel.drop_capabilities()
        with suppress(OSError):
            kernel.hide_memory()

    def _owner(self) -> int | None:
        """The user number the tool gets; None where it keeps the one it has."""
        if "uid" not in self.walls:
            return None
        with step("uid"):
            return building.own_id(self.key)

    def _wait(self, tool: int, signals: int) -> None:
        """Until the tool ends; what it leaves behind ends with process 1, or is the keeper's to find."""
        while True:
            ready, _, _ = select.select([self.leash, signals], [], [])
            if self.leash in ready:
                return
            os.read(signals, 4096)
            with suppress(ChildProcessError):
                while (found := os.wait4(-1, os.WNOHANG))[0]:
                    process, status, usage = found
                    if process == tool:
                        self._note(exit=status, cpu=usage.ru_utime + usage.ru_stime)
                        return

    # ------------------------------------------------------------------ the tool

    def _become_tool(self) -> NoReturn:
        code = 1
        try:
            for number, descriptor in enumerate((self.stdin, self.stdout, self.stderr)):
                os.dup2(descriptor, number)
            self.notes = os.dup2(self.notes, 3, inheritable=False)
            os.closerange(4, _HIGHEST)
            os.setsid()
            os.umask(0o077)
            os.chdir(self.directory)
            building.reset_signals()
            building.lock_down(self.request, self.walls, self.directory)
            if isinstance(self.request.program, str):
                os.close(self.notes)
                code = _call(self.request.program, self.request.import_path)
            else:
                self._execute([*self.request.program])
        except StepError as error:
            self._note(step=error.step, reason=error.reason)
        except BaseException as error:
            with suppress(OSError):
                self._note(step="", reason=f"the sandbox failed: {type(error).__name__}: {error}")
        finally:
            os._exit(code)

    def _execute(self, arguments: list[str]) -> None:
        try:
            os.execvpe(arguments[0], arguments, self._environment())
        except (OSError, ValueError) as error:
            cause = error.strerror if isinstance(error, OSError) else str(error)
            self._note(absent=f"the program {arguments[0]!r} cannot be started: {cause}")

    def _environment(self) -> dict[str, str]:
        """Nothing of the trainer's environment but where libraries are."""
        place = {"HOME": self.directory, "TMPDIR": self.directory}
        libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        path = f"{os.path.dirname(sys.executable)}:{_SEARCH}"
        return {"PATH": path, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", **place, **libraries}

    def _note(self, **content: Any) -> None:
        os.write(self.notes, json.dumps(content).encode() + b"\n")


def _keep_only(*descriptors: int) -> None:
    """Close every descriptor but these."""
    kept = sorted({0, 1, 2, *descriptors})
    for low, high in zip(kept, [*kept[1:], _HIGHEST], strict=True):
        os.closerange(low + 1, high)


def _call(reference: str, import_path: Sequence[str]) -> int:
    """Call ``module:name`` with the text of standard input and print what it returns; the exit status."""
    sys.stdin, sys.stdout, sys.stderr = (_text(number, mode) for number, mode in enumerate("rww"))
    try:
        sys.path[:] = import_path
        module, _, name = reference.partition(":")
        function: Any = reduce(getattr, name.split("."), importlib.import_module(module))
        result = function(sys.stdin.read())
        sys.stdout.write("" if result is None else str(result))
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()


def _text(descriptor: int, mode: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.FileIO(descriptor, mode, closefd=False), encoding="utf-8", errors="replace")
