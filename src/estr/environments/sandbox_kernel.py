"""The calls to Linux that a sandbox needs and Python does not have: namespaces, mounts, Landlock, seccomp.

Every function raises `OSError` where the system has no such call or refuses it; nothing here decides what to do then.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable
from typing import Any

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_CLONE_NEWNS, _CLONE_NEWCGROUP, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 36, 38
_SYS_MOUNT_SETATTR, _SYS_LANDLOCK = 442, 444  # the same on every architecture

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> int:
    function = getattr(_libc, name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"{name} is not on this system")
    result = int(function(*arguments))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _system_call(number: int, name: str, *arguments: Any) -> int:
    """A call by its number; integers are passed as longs, as the kernel wants them."""
    if not hasattr(os, "pidfd_open"):  # not Linux, where the number would mean something else
        raise OSError(errno.ENOSYS, f"{name} is not on this system")
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    try:
        return _call("syscall", ctypes.c_long(number), *wide)
    except OSError as error:
        raise OSError(error.errno, f"{name}: {os.strerror(error.errno or 0)}") from None


def unshare_everything() -> None:
    """New user, mount, process, network, IPC, host-name and control-group namespaces for this process's children."""
    other = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS | _CLONE_NEWCGROUP
    _call("unshare", ctypes.c_int(_CLONE_NEWUSER | other))


def mount(kind: str, target: str, options: str = "", *, executable: bool = True) -> None:
    """Mount a new file system without devices or set-user-id programs."""
    flags = _MS_NOSUID | _MS_NODEV | (0 if executable else _MS_NOEXEC)
    _call("mount", kind.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def make_mounts_private() -> None:
    """Keep later mounts from reaching other namespaces."""
    _call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)


def bind_read_only(source: str, target: str, *, devices: bool = False) -> None:
    """Show ``source``, with what is mounted beneath it, at ``target``: read-only, without set-user-id programs."""
    _call("mount", source.encode(), target.encode(), None, ctypes.c_ulong(_MS_BIND | _MS_REC), None)
    _set_attributes(target, _ATTR_RDONLY | _ATTR_NOSUID | (0 if devices else _ATTR_NODEV), _AT_RECURSIVE)


def make_read_only(target: str) -> None:
    """Make the mount at ``target`` read-only, and none beneath it."""
    _set_attributes(target, _ATTR_RDONLY, 0)


def _set_attributes(target: str, attributes: int, flags: int) -> None:
    given = struct.pack("=QQQQ", attributes, 0, 0, 0)
    _system_call(_SYS_MOUNT_SETATTR, "mount_setattr", _AT_FDCWD, target.encode(), flags, given, len(given))


def change_root(new_root: str) -> None:
    """Make the mount at ``new_root`` the root directory and take the old one away."""
    os.chdir(new_root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", ctypes.c_int(_MNT_DETACH))
    os.chdir("/")


def _control(option: int, value: int) -> None:
    _call("prctl", ctypes.c_int(option), *(ctypes.c_ulong(argument) for argument in (value, 0, 0, 0)))


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends."""
    _control(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Refuse debuggers and readers of /proc of the same user."""
    _control(_PR_SET_DUMPABLE, 0)


def no_new_privileges() -> None:
    """Programs that this process starts gain nothing from set-user-id bits or file capabilities."""
    _control(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Give up every capability of this process."""
    _call("capset", struct.pack("=Ii", 0x20080522, 0), bytes(24))


# ---------------------------------------------------------------------- Landlock

_READ_RIGHTS = 0b1101  # execute, read a file, read a directory
_FILE_RIGHTS = 1 | 2 | 4 | 1 << 14 | 1 << 15  # execute, write, read, truncate, device control
_RIGHTS_BY_VERSION = (13, 14, 15, 15, 16)  # how many rights on files versions 1, 2, ... know
_NO_DEVICES = ~(1 << 6 | 1 << 11)
_TCP_RIGHTS, _SCOPES = 0b11, 0b11


def landlock_version() -> int:
    """The version of Landlock in this kernel, from 1."""
    return _system_call(_SYS_LANDLOCK, "landlock", None, 0, 1)


def landlock(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restrict this process to reading (and executing) below ``readable`` and changing below ``writable``.

    From version 4 on it is without TCP, from version 6 on without signals to others. Paths that do not exist are
    skipped. `no_new_privileges` comes first.
    """
    version = landlock_version()
    handled = (1 << _RIGHTS_BY_VERSION[min(version, 5) - 1]) - 1
    attributes = struct.pack("=QQQ", handled, _TCP_RIGHTS, _SCOPES)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _system_call(_SYS_LANDLOCK, "landlock_create_ruleset", attributes, len(attributes), 0)
    try:
        for path in readable:
            _allow(ruleset, path, handled & _READ_RIGHTS)
        for path in writable:
            _allow(ruleset, path, handled & _NO_DEVICES)
        _system_call(_SYS_LANDLOCK + 2, "landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, descriptor)
        _system_call(_SYS_LANDLOCK + 1, "landlock_add_rule", ruleset, 1, rule, 0)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------- seccomp

_SCMP_ALLOW, _SCMP_ERRNO = 0x7FFF0000, 0x00050000
_SCMP_NE, _SCMP_MASKED_EQ = 1, 7
_AF_UNIX = 1
_FORBIDDEN = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp"),
    *("mount", "umount2", "pivot_root", "chroot", "setns", "unshare", "fsopen", "fsmount", "fsconfig", "fspick"),
    *("open_tree", "move_mount", "mount_setattr", "open_by_handle_at", "name_to_handle_at", "fanotify_init", "acct"),
    *("memfd_create", "memfd_secret", "shmget", "msgget", "semget", "mq_open"),  # memory that no limit counts
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "bpf", "perf_event_open", "userfaultfd"),
    *("keyctl", "add_key", "request_key", "personality", "syslog", "vhangup", "quotactl", "swapon", "swapoff"),
    *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot"),
    *("settimeofday", "clock_settime"),
)


class _Comparison(ctypes.Structure):
    _fields_ = (("argument", ctypes.c_uint), ("operator", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def filter_system_calls(*, unix_sockets: bool) -> None:
    """Refuse (EPERM) what a tool has no use for, and sockets of every kind; with ``unix_sockets`` those are left.

    Through libseccomp, where it is installed.
    """
    library = _libseccomp()
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_SCMP_ALLOW)))
    if not context:
        raise OSError(errno.ENOMEM, "seccomp_init failed")
    try:
        for name in _FORBIDDEN:
            _refuse(library, context, name, errno.EPERM)
        _refuse(library, context, "clone3", errno.ENOSYS)  # its flags cannot be seen; everyone falls back to clone
        _refuse(library, context, "clone", errno.EPERM, _Comparison(0, _SCMP_MASKED_EQ, _CLONE_NEWUSER, _CLONE_NEWUSER))
        limit = (_Comparison(0, _SCMP_NE, _AF_UNIX, 0),) if unix_sockets else ()
        _refuse(library, context, "socket", errno.EPERM, *limit)
        _checked(library.seccomp_load(context), "seccomp_load")
    finally:
        library.seccomp_release(context)


def load_seccomp() -> None:
    """Load the library now, so that a process with little memory finds it loaded."""
    _libseccomp()


def _libseccomp() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        raise OSError(errno.ENOSYS, "libseccomp is not installed") from None
    library.seccomp_init.restype = ctypes.c_void_p
    return library


def _refuse(library: ctypes.CDLL, context: ctypes.c_void_p, name: str, number: int, *when: _Comparison) -> None:
    call = library.seccomp_syscall_resolve_name(name.encode())
    if call == -1:  # unknown to this version
        return
    comparisons = (_Comparison * len(when))(*when)
    action = ctypes.c_uint32(_SCMP_ERRNO | number)
    _checked(library.seccomp_rule_add_array(context, action, call, len(when), comparisons), f"seccomp rule {name}")


def _checked(result: int, what: str) -> None:
    if result < 0:
        raise OSError(-result, f"{what}: {os.strerror(-result)}")
