"""A Ray cluster for one run: one that is joined, or one on this machine that is started for it and stopped after it.

This module alone decides how Ray is imported: before ``import ray`` is the only time at which it can be told to stay on
the loopback device.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from estr.errors import MissingExtraError, RunError, UsageError

_TOKEN = secrets.token_hex(32)  # one for all clusters that this process starts: Ray reads it once
_PREFIX = "estr-ray-"
_SMALLEST_STORE = 80 << 20  # bytes; Ray refuses less than 75 MiB
_KNOCK = 10.0  # seconds
_QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}


class Cluster:
    """A connection to Ray; ``owned``: it was started by this object and ends with it."""

    def __init__(self, *, owned: bool, directory: Path | None = None, connected: bool = True) -> None:
        import ray

        self.owned, self._directory, self._connected = owned, directory, connected
        self.node: str = ray.get_runtime_context().get_node_id()
        self.scratch = directory or Path(tempfile.gettempdir())  # a directory that every node has

    def close(self) -> None:
        """Leave the cluster, and end it where it is owned."""
        import ray

        if not self._connected:
            return
        self._connected = False
        ray.shutdown()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def connect(address: str, *, cpus: float, gpus: float | None, resources: dict[str, float], store: int) -> Cluster:
    """Join the cluster at ``address``; where it is empty, start one on this machine with these resources (``gpus``
    None: those it has) and ``store`` bytes of shared memory. A process that is connected already stays so.

    Raises:
        MissingExtraError: Ray is not installed.
        UsageError: there is no cluster at ``address``, or it wants another token.
        RunError: no cluster could be started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # engines matter as much as the learner; Ray's default is 15
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")  # the run says it itself
    if _connected():
        return Cluster(owned=False, connected=False)
    if address:
        return _join(address)
    return _start({"num_cpus": cpus, "num_gpus": gpus, "resources": resources, "object_store_memory": store})


def _connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    return ray


def _join(address: str) -> Cluster:
    _knock(address)
    ray = _import_ray()
    try:
        with _own_signals():
            ray.init(address=address, **_QUIET)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise _not_joined(address, error) from error
    return Cluster(owned=False)


def _knock(address: str) -> None:
    """Refuse host:port where nobody answers, which takes Ray minutes to find out."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK).close()
        except (OSError, OverflowError) as error:
            raise _not_joined(address, error) from error


def _not_joined(address: str, error: Exception) -> UsageError:
    reason = " ".join(str(error).split(". ")[0].split())
    return UsageError(
        f"runtime.address: no Ray cluster could be joined at {address!r}: {reason}; start one with `ray start`, "
        "and where it wants a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
    )


def _start(sizes: dict[str, Any]) -> Cluster:
    _remove_leftovers()
    directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))  # its sockets want a short path
    try:
        _keep_to_ourselves(directory)
        ray = _import_ray()
        sizes["object_store_memory"] = max(sizes["object_store_memory"], _SMALLEST_STORE)
        with _own_signals():
            ray.init(address="local", _temp_dir=str(directory), **_QUIET, **sizes)
    except (RuntimeError, ValueError, OSError) as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise RunError(f"no Ray cluster could be started on this machine: {' '.join(str(error).split())}") from error
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return Cluster(owned=True, directory=directory)


def _keep_to_ourselves(directory: Path) -> None:
    """Have Ray, when it is imported, stay on the loopback device and want a token that only this user can read.

    The switch for the loopback device is Ray's own, made for systems on which it is no cluster; on Linux it is off.
    """
    switches = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
    if "ray" in sys.modules and any(os.environ.get(name) != value for name, value in switches.items()):
        raise RunError(
            "a Ray cluster started here would listen to other machines, because ray was imported before estr could "
            "tell it not to; set runtime.address to a cluster of your own, or leave importing ray to estr"
        )
    path = directory / "token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(_TOKEN)
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update(switches, RAY_AUTH_TOKEN_PATH=str(path))


def _remove_leftovers() -> None:
    """Directories of clusters whose driver was killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray installs handlers of its own; what signals mean is decided by the run. Its processes must outlive a terminal
    that is closed, as they are needed for the last checkpoint."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            with contextlib.suppress(ValueError):  # not the main thread: Ray installed none
                signal.signal(number, handler)
