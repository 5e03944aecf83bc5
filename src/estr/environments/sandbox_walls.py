"""The walls around one tool program: what is asked for, which walls this system has, and putting them up.

The steps, in their order; each can be missing on a system, and a step that worked when the helper tried it must work in
every later run, or that run is refused:

* ``namespaces``: own users, processes, mounts, network, IPC. ``files``: a root directory of its own, in which little is
  to be seen and nothing can be written but the working directory. ``proc``: a /proc that shows its own processes only.
* ``uid``: a user number that nobody else has (only root can give it).
* ``landlock``: the same for files once more, and all there is for files where namespaces are forbidden.
* ``seccomp``: system calls that a tool has no use for.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from estr.environments import sandbox_kernel as kernel

STEPS = ("namespaces", "files", "proc", "uid", "landlock", "seccomp")
BOX = "/box"  # the working directory inside a root of its own
_MIB = 1 << 20
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime"),
)
_DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
_NEW_ROOT = "/sys"  # any directory that nothing readable lies in
_OWN_UIDS = 0x70000000  # user numbers from here on are given to nobody by convention
_OVERHEAD = 2  # processes of the sandbox itself that count with the tool's


@dataclass(frozen=True)
class Limits:
    """What a tool may use. Times in seconds; output counts for standard output and standard error each."""

    seconds: float = 10.0  # from its start to its end, on the clock
    cpu_seconds: int = 10  # of each process
    memory_mb: int = 512  # address space of each process, and memory of all together
    disk_mb: int = 16  # each file, and its working directory as a whole
    output_kb: int = 64
    processes: int = 16  # at a time, threads count
    open_files: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, int) or (name == "seconds" and isinstance(value, float))
            if not number or isinstance(value, bool) or not 0 < value < 1 << 30:
                raise ValueError(f"the limit {name} of a sandbox must be a positive number, not {value!r}")


@dataclass(frozen=True)
class Request:
    """One program to run: ``program`` is its arguments, or a callable as ``module:name``."""

    program: Sequence[str] | str
    input: str = ""
    files: Mapping[str, str] = field(default_factory=dict)  # put into the working directory
    limits: Limits = field(default_factory=Limits)
    readable: Sequence[str] = ()
    import_path: Sequence[str] = ()  # sys.path for a callable


class StepError(Exception):
    """A wall could not be put up: the step, and why."""

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(step, reason)
        self.step = step
        self.reason = reason


@contextmanager
def step(name: str) -> Iterator[None]:
    """Name the step in which the system refused something."""
    try:
        yield
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        raise StepError(name, f"{error.strerror or error}{place}") from None


@dataclass
class Walls:
    """Which steps this system does not have, with the reason."""

    missing: dict[str, str] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name not in self.missing

    def remove(self, name: str, reason: str) -> None:
        """Do without a step from now on, and without what builds on it."""
        self.missing[name] = reason
        for needed, other in (("namespaces", "files"), ("files", "proc")):
            if needed in self.missing:
                self.missing.setdefault(other, self.missing[needed])


def readable_paths(request: Request) -> list[str]:
    """What the tool can see, shortest first: the system's programs and libraries, Python, and what was asked for."""
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    python |= {os.path.dirname(os.path.realpath(sys.executable))}
    asked = [os.path.abspath(path) for path in (*request.readable, *request.import_path)]
    paths = {*_SYSTEM, *python, *map(os.path.realpath, python), *asked}
    return sorted((path for path in paths if path != "/" and os.path.exists(path)), key=len)


# ---------------------------------------------------------------------- who it is


def id_ranges(kind: str) -> list[tuple[int, int]]:
    """(first, count) of the user numbers (``uid``) or group numbers (``gid``) that this process can name."""
    lines = Path(f"/proc/self/{kind}_map").read_text().splitlines()
    return [(int(first), int(count)) for first, _, count in map(str.split, lines)]


def own_id(key: int) -> int:
    """A user number that no other process has while the process ``key`` lives; ``nobody`` where that is not to be had.

    Raises:
        OSError: there is no other number than this process's.
    """
    if os.geteuid() != 0:
        raise PermissionError("only root can give a user number away")
    for candidate in (_OWN_UIDS + key, 65534):
        ranges = [*id_ranges("uid")], [*id_ranges("gid")]
        if all(any(first <= candidate < first + count for first, count in found) for found in ranges):
            return candidate
    raise PermissionError("this user namespace has no user numbers to give away")


def map_ids(process: int) -> None:
    """Give the new user namespace of ``process`` the numbers of this one, or, where not root, this user alone."""
    mine = {"uid": os.geteuid(), "gid": os.getegid()}
    for kind, number in mine.items():
        if os.geteuid() == 0:
            content = "\n".join(f"{first} {first} {count}" for first, count in id_ranges(kind))
        else:
            content = f"1000 {number} 1"
            if kind == "gid":
                _write(f"/proc/{process}/setgroups", "deny")
        _write(f"/proc/{process}/{kind}_map", content + "\n")


def become(number: int) -> None:
    """Change to user and group ``number``, for good."""
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def offer_to_the_killer() -> None:
    """When the machine runs out of memory, the kernel ends this process first."""
    with suppress(OSError):
        _write("/proc/self/oom_score_adj", "1000")


# ---------------------------------------------------------------------- what it sees


def build_root(request: Request, owner: int, proc: bool) -> None:
    """In new namespaces: a root directory with the readable paths (read-only), a few devices and an empty box."""
    with suppress(OSError):
        _write("/proc/sys/user/max_user_namespaces", "0")  # of this namespace: no further ones inside
    kernel.make_mounts_private()
    kernel.mount("tmpfs", _NEW_ROOT, "size=1m,mode=755")
    _new_place(BOX, directory=True)
    size = f"size={request.limits.disk_mb}m,nr_inodes=4096,mode=700,uid={owner},gid={owner}"
    kernel.mount("tmpfs", _NEW_ROOT + BOX, size)
    for path in readable_paths(request):
        _show(path)
    for device in _DEVICES:
        if os.path.exists(device):
            _new_place(device, directory=False)
            kernel.bind_read_only(device, _NEW_ROOT + device, devices=True)
    for name in ("/tmp", "/dev/shm"):
        if not os.path.lexists(_NEW_ROOT + name):
            os.symlink(BOX, _NEW_ROOT + name)
    if proc:
        _new_place("/proc", directory=True)
        with step("proc"):
            kernel.mount("proc", _NEW_ROOT + "/proc", "subset=pid", executable=False)
    kernel.change_root(_NEW_ROOT)
    kernel.make_read_only("/")


def _show(path: str) -> None:
    if os.path.lexists(_NEW_ROOT + path):  # inside something that is shown already
        return
    if path in _SYSTEM and os.path.islink(path) and os.path.dirname(path) == "/":
        os.symlink(os.readlink(path), _NEW_ROOT + path)
        return
    _new_place(path, directory=os.path.isdir(path))
    kernel.bind_read_only(os.path.realpath(path), _NEW_ROOT + path)


def _new_place(path: str, *, directory: bool) -> None:
    place = Path(_NEW_ROOT + path)
    place.parent.mkdir(parents=True, exist_ok=True)
    if directory:
        place.mkdir()
    else:
        place.touch()


def fill(directory: str, files: Mapping[str, str]) -> None:
    """Put the request's files into the working directory."""
    for name, text in files.items():
        Path(directory, name).write_text(text, encoding="utf-8", errors="replace")


# ---------------------------------------------------------------------- what it may use


def _limit_resources(limits: Limits, others: int) -> None:
    """Set the kernel's limits on this process and on each that it starts; ``others`` run under its user number too."""
    wanted = {
        "CPU": limits.cpu_seconds,
        "AS": limits.memory_mb * _MIB,
        "FSIZE": limits.disk_mb * _MIB,
        "NOFILE": limits.open_files,
        "NPROC": limits.processes + others,
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
    }
    for name, value in wanted.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            hard = value + 1 if name == "CPU" else value  # the signal first, then the end
            _limit(kind, value, hard)


def _limit(kind: int, soft: int, hard: int) -> None:
    _, present = resource.getrlimit(kind)
    if present != resource.RLIM_INFINITY:
        soft, hard = min(soft, present), min(hard, present)
    with suppress(OSError, ValueError):  # macOS refuses some; the report names them
        resource.setrlimit(kind, (soft, hard))


def _tasks_of(user: int) -> int:
    count = 0
    for entry in os.scandir("/proc") if os.path.isdir("/proc") else ():
        with suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == user:
                count += len(os.listdir(f"{entry.path}/task"))
    return count


def lock_down(request: Request, walls: Walls, directory: str) -> None:
    """The last steps before the tool runs in this process."""
    own = "namespaces" in walls or "uid" in walls
    others = _OVERHEAD if own else _tasks_of(os.getuid())
    with suppress(OSError):
        kernel.no_new_privileges()
    if "landlock" in walls:
        extra = ("/proc",) if "proc" in walls else ()
        with step("landlock"):
            kernel.landlock((*readable_paths(request), *extra), (directory, *_DEVICES))
    if "seccomp" in walls:
        with step("seccomp"):
            kernel.filter_system_calls(unix_sockets="namespaces" in walls)
    _limit_resources(request.limits, others)


def reset_signals() -> None:
    """Default handling of every signal, none blocked: what a program expects to start with."""
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals():
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
