"""Another library in an environment of its own: a process that answers lines of JSON, so that both can alternate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "answer: "


class Peer:
    """A running peer; ``ask`` sends a request and waits for its answer."""

    def __init__(
        self, environment: str, module: str, threads: int, cores: set[int] | None = None, **variables: str
    ) -> None:
        python = ROOT / environment / "bin" / "python"
        settings = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [str(python), "-m", module],
            cwd=ROOT,
            env=os.environ | settings | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not os.environ.get("PEER_DEBUG") else None,
            text=True,
        )
        if cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self._process.pid, cores)

    @staticmethod
    def installed(environment: str) -> bool:
        return (ROOT / environment / ".installed").exists()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        raise RuntimeError(f"the peer ended with status {self._process.wait()}; PEER_DEBUG=1 shows why")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def serve(commands: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """The peer's side: answer requests until the pipe is closed."""
    for line in sys.stdin:
        request = json.loads(line)
        answer = commands[request.pop("do")](**request)
        print(f"\n{MARK}{json.dumps(answer)}", flush=True)
