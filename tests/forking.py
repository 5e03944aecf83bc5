"""Processes as copies of the test process, which has everything imported: they start in a fraction of a second.

Only for tests: the product starts a new interpreter for a run, and forks engines from a helper process without threads
(see estr.runtime.handles.preload), which takes seconds. The tests of that are in test_runtime_pools.py.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from estr.cli.main import main
from estr.runtime import pools


@contextmanager
def forked_engines() -> Iterator[None]:
    """Inside, engine processes are forked."""
    real = multiprocessing.get_context
    torch.set_num_threads(1)
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda kind=None: real("fork" if kind == "forkserver" else kind))
        patch.setattr(pools, "preload", lambda modules: None)
        yield
    gc.unfreeze()


class Forked:
    """A fork of this process that calls ``work`` and ends with the status it returns; used like a ``Popen``.

    It leads a session of its own and writes to ``out`` and ``err``.
    """

    def __init__(
        self,
        work: Callable[[], int | None],
        out: int,
        err: int,
        *,
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            self._become(work, out, err, directory, environment)

    @staticmethod
    def _become(
        work: Callable[[], int | None],
        out: int,
        err: int,
        directory: Path | None,
        environment: Mapping[str, str] | None,
    ) -> None:
        code = 1
        try:
            os.setsid()
            os.chdir(directory or ".")
            if environment is not None:
                os.environ.clear()
                os.environ.update(environment)
            for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
                os.dup2(stream, number)
            sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, 1, closefd=False) for n, mode in enumerate("rww"))
            with forked_engines():
                code = _status(work)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(9)


def forked_estr(
    arguments: Sequence[str], out: int, err: int, directory: Path, environment: Mapping[str, str]
) -> Forked:
    """``estr arguments`` in a fork."""
    return Forked(lambda: main(list(arguments)), out, err, directory=directory, environment=environment)


def _status(work: Callable[[], int | None]) -> int:
    """As the interpreter does it."""
    try:
        return work() or 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
