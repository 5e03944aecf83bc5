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
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from estr.errors import MissingExtraError, RunError, UsageError

LOOPBACK = "127.0.0.1"
_PREFIX = "estr-ray-"
_SMALLEST_STORE = 80 << 20  # bytes; Ray refuses less than 75 MiB
_QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}


class Cluster:
    """A connection to Ray; ``owned``: it was started by this object and ends with it."""

    def __init__(self, *, owned: bool, directory: Path | None = None, connected: bool = True) -> None:
        import ray

        self.owned, self._directory, self._connected = owned, directory, connected
        self.node: str = ray.get_runtime_context().get_node_id()
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        """Leave the cluster, and end it where it is owned."""
        import ray

        if not self._connected:
            return
        self._connected = False
        ray.shutdown()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def connect(address: str, *, cpus: float, gpus: float, resources: dict[str, float], store: int) -> Cluster:
    """Join the cluster at ``address``; where it is empty, start one on this machine with these resources and ``store``
    bytes of shared memory. A process that is connected already stays so.

    Raises:
        MissingExtraError: Ray is not installed.
        UsageError: there is no cluster at ``address``, or it wants another token.
        RunError: no cluster could be started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address:
        return _join(address)
    with _loopback():
        ray = _import_ray()
        if ray.is_initialized():
            return Cluster(owned=False, connected=False)
        return _start(ray, {"num_cpus": cpus, "num_gpus": gpus, "resources": resources, "object_store_memory": store})


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    return ray


def _join(address: str) -> Cluster:
    ray = _import_ray()
    if ray.is_initialized():
        return Cluster(owned=False, connected=False)
    try:
        with _own_signals():
            ray.init(address=address, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split(". ")[0].split())
        raise UsageError(
            f"runtime.address: no Ray cluster could be joined at {address!r}: {reason}; start one with `ray start`, "
            "and where it wants a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
        ) from error
    return Cluster(owned=False)


def _start(ray: Any, sizes: dict[str, Any]) -> Cluster:
    _remove_leftovers()
    directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))  # its sockets want a short path
    os.environ["RAY_AUTH_MODE"] = "token"  # for the whole life of this process: Ray reads them once
    if not Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "")).is_file():
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(_new_token(directory))
    os.environ.pop("RAY_AUTH_TOKEN", None)
    sizes["object_store_memory"] = max(sizes["object_store_memory"], _SMALLEST_STORE)
    try:
        with _own_signals():
            ray.init(address="local", _temp_dir=str(directory), **_QUIET, **sizes)
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise RunError(f"no Ray cluster could be started on this machine: {' '.join(str(error).split())}") from error
    cluster = Cluster(owned=True, directory=directory)
    if ray.util.get_node_ip_address() != LOOPBACK:
        cluster.close()
        raise RunError(
            "a Ray cluster of this machine would listen to other machines, because ray was imported before estr could "
            "tell it not to; import estr.runtime.cluster.connection first or join a cluster with runtime.address"
        )
    return cluster


def _new_token(directory: Path) -> Path:
    """A file with a fresh token that only this user can read."""
    path = directory / "token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    return path


def _remove_leftovers() -> None:
    """Directories of clusters whose driver was killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Ray's own switch for machines where it should never be reached from others; on Linux it is off by default."""
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray installs handlers of its own; what signals mean is decided by the run."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(ValueError):  # not the main thread: Ray installed none
                signal.signal(number, handler)
