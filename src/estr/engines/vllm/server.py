"""A vLLM server of our own: it listens on a Unix socket that only its owner can reach, and nowhere else.

vLLM's key guards the routes under /v1; those that update weights are open to whoever reaches the server. The socket
therefore lies in a directory that nobody else may enter, and no port is opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch

from estr.engines.vllm.engine import VllmSettings, engine_arguments, prepare_environment
from estr.errors import RunError

_POLL = 0.2  # seconds
_STOP = 10.0  # seconds
_PR_SET_PDEATHSIG = 1
_PREFIX = "estr-vllm-"


class VllmServer:
    """A process with vLLM's OpenAI-compatible server; ends with this process, whatever happens to it."""

    def __init__(self, settings: VllmSettings, *, timeout: float = 600.0) -> None:
        memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
        _remove_leftovers(memory)
        self.directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=memory))
        self.socket, self.key = self.directory / "socket", secrets.token_urlsafe(32)
        self._log = (self.directory / "log").open("wb")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self._options(settings)],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            self._wait(timeout)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def last_words(self) -> str:
        """The last line of its log."""
        lines = (self.directory / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _options(self, settings: VllmSettings) -> list[str]:
        options = ["--uds", str(self.socket), "--served-model-name", "policy", "--disable-uvicorn-access-log"]
        for name, value in engine_arguments(settings).items():
            flag = "--" + name.replace("_", "-")
            if name == "weight_transfer_config":
                options += [flag, json.dumps({"backend": value.backend})]
            elif name == "logits_processors":
                options += [flag, *(f"{c.__module__}:{c.__qualname__}" for c in value)] if value else []
            elif isinstance(value, bool):
                options.append(flag if value else "--no-" + flag[2:])
            else:
                options += [flag, str(value)]
        return options

    def _environment(self) -> dict[str, str]:
        prepare_environment()
        changed = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_API_KEY": self.key,
            "ESTR_END_WITH_PARENT": "1",
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            "VLLM_RPC_BASE_PATH": str(self.directory),
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }
        return {**os.environ, **changed}

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://vllm") as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        return
                if not self.alive:
                    raise RunError(f"the vLLM server ended before it was ready: {self.last_words()}")
                if time.monotonic() > deadline:
                    raise RunError(f"the vLLM server was not ready after {timeout:g} s: {self.last_words()}")
                time.sleep(_POLL)

    def close(self) -> None:
        """End the server and everything it started."""
        process = getattr(self, "_process", None)
        if process is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP)
        self._log.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _remove_leftovers(memory: Path) -> None:
    """Remove directories of processes that were killed."""
    for directory in memory.glob(f"{_PREFIX}*"):
        pid = directory.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(directory, ignore_errors=True)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def connection(server: VllmServer) -> dict[str, Any]:
    """Arguments of an httpx client that talks to ``server``."""
    return {
        "base_url": "http://vllm",
        "headers": {"Authorization": f"Bearer {server.key}"},
        "timeout": None,
    }
