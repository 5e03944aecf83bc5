"""Programs that try to get out of the sandbox or to hurt the machine, and what became of each.

`attempt_all` runs them and looks at what a successful one would have changed. The programs are bounded, so that a wall
that does not hold costs a few hundred megabytes or processes for seconds, and nothing more. As a script it prints the
findings as JSON: the tests run it inside a sandbox, where namespaces are forbidden, to see what walls are left then.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from estr.environments.sandbox import Limits, Sandbox, sandbox_report

SECRET = "correct-horse-battery-staple"
MARK = f"estr-escape-{os.getpid()}"
LIMITS = Limits(seconds=120, cpu_seconds=5, memory_mb=256, disk_mb=4, processes=8, open_files=32)
SHORT = Limits(seconds=1, cpu_seconds=5, memory_mb=256, processes=8)
BUSY = Limits(seconds=300, cpu_seconds=1, memory_mb=256)

# Each gets what it needs as its arguments: HOST_PID, VICTIM_PID, OUTSIDE (a directory anyone can write), PORT, SOCKET.
HEAD = "import os, sys, time, socket\nhost, victim, outside, port, path = sys.argv[1:6]\n"

PROGRAMS = {
    "fork_bomb": """
first = os.getpid()
for _ in range(7):  # 128 processes where nothing stops it
    try:
        os.fork()
    except OSError:
        pass
os.write(1, b"x")
time.sleep(1 if os.getpid() == first else 100)
""",
    "thread_bomb": """
import threading
started = 0
try:
    for _ in range(200):
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
        started += 1
except RuntimeError:
    pass
print(started)
""",
    "allocation": "bytearray(10 << 30)",
    "allocation_by_children": """
for _ in range(4):
    if os.fork() == 0:
        kept = b"x" * (100 << 20)
        time.sleep(100)
        os._exit(0)
time.sleep(100)
""",
    "print": "for _ in range(10_000): sys.stdout.write('x' * 1_000_000)",
    "print_errors": "for _ in range(10_000): sys.stderr.write('x' * 1_000_000)",
    "recursion": "sys.setrecursionlimit(1 << 30)\ndef down(): return down()\ndown()",
    "recursion_in_c": """
sys.setrecursionlimit(1 << 30)
class Deep:
    def __repr__(self): return repr([self])
repr(Deep())
""",
    "write_outside": """
done = []
for name in (outside, "/", "/usr", "/etc", "/var/tmp", "/root", "/home", "/proc/sys/kernel", sys.prefix):
    try:
        open(f"{name}/estr-escaped", "w").close()
        done.append(name)
    except OSError:
        pass
print(done)
""",
    "read_outside": """
found = []
for name in (f"{outside}/secret", f"{outside}/../secret", "/etc/passwd", "/etc/shadow", "/root/.bashrc"):
    try:
        found.append(open(name).read())
    except OSError:
        pass
print(found)
""",
    "environment": """
import glob
texts = [str(dict(os.environ))]
try:
    others = os.listdir("/proc")
except OSError:
    others = []
for process in {host, victim, str(os.getppid()), "1", *filter(str.isdigit, others)}:
    if process != str(os.getpid()):
        for name in ("environ", "maps", "mem"):
            try:
                texts.append(open(f"/proc/{process}/{name}", "rb").read(100000).decode("latin-1"))
            except OSError:
                pass
print(len(texts), texts[0], *texts[1:])
""",
    "links": """
done = []
def attempt(name, action):
    try:
        done.append((name, action()))
    except OSError:
        pass
os.symlink(f"{outside}/secret", "link")
os.symlink(outside, "directory")
attempt("read", lambda: open("link").read())
attempt("write", lambda: open("directory/estr-escaped", "w").close())
attempt("hard link", lambda: os.link(f"{outside}/secret", "hard"))
attempt("move", lambda: os.rename("main.py", "directory/estr-escaped"))
print(done)
""",
    "network": """
done = []
local = ("127.0.0.1", int(port))
kinds = [
    ("tcp", socket.AF_INET, socket.SOCK_STREAM, local),
    ("udp", socket.AF_INET, socket.SOCK_DGRAM, local),
    ("unix", socket.AF_UNIX, socket.SOCK_STREAM, path),
    ("abstract", socket.AF_UNIX, socket.SOCK_STREAM, "\\0" + path),
    ("vsock", 40, socket.SOCK_STREAM, None),
    ("packet", 17, socket.SOCK_RAW, None),
    ("netlink", 16, socket.SOCK_RAW, None),
]
for name, family, kind, address in kinds:
    try:
        with socket.socket(family, kind) as made:
            made.settimeout(0.5)
            if address is not None:
                made.connect(address)
                made.send(b"out")
        done.append(name)
    except OSError:
        pass
print(done)
""",
    "daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)  # holds standard output open as well
        os._exit(0)
    os._exit(0)
""",
    "signals": """
import signal
done = []
for process in {int(host), int(victim)}:
    for number in (0, signal.SIGTERM):
        try:
            os.kill(process, number)
            done.append((process, number))
        except OSError:
            pass
print(done)
""",
    "kill_own_supervisor": """
import signal
try:
    os.kill(os.getppid(), signal.SIGKILL)
except OSError:
    pass
time.sleep(0.2)
print("alive")
""",
    "delete_directory": """
import shutil
here = os.getcwd()
shutil.rmtree(here, ignore_errors=True)
try:
    os.rmdir(here)
except OSError:
    pass
print("done")
""",
    "binary": "sys.stdout.buffer.write(bytes(range(256)))",
    "large_file": "open('large', 'wb').write(bytes(100 << 20))",
    "many_files": """
written = 0
try:
    for index in range(100):
        with open(f"part-{index}", "wb") as file:
            written += file.write(bytes(1 << 20))
            file.flush()
        time.sleep(0.02)
except OSError:
    pass
print(written)
""",
    "open_files": """
held = []
try:
    while len(held) < 1000:
        held.append(open("main.py"))
except OSError:
    pass
print(len(held))
""",
    "descriptors": """
held = []
for number in range(256):
    try:
        os.fstat(number)
        held.append(number)
    except OSError:
        pass
print(held)
""",
    "privileges": """
import ctypes
libc = ctypes.CDLL(None)
done = []
calls = {
    "unshare": lambda: libc.unshare(0x10000000),
    "mount": lambda: libc.mount(b"x", b".", b"tmpfs", 0, None),
    "ptrace": lambda: libc.ptrace(16, int(victim), 0, 0),
    "memfd": lambda: libc.memfd_create(b"x", 0),
    "chroot": lambda: libc.chroot(b"/"),
    "setuid": lambda: libc.setuid(0),
}
for name, call in calls.items():
    if call() != -1:
        done.append(name)
print(done)
""",
}

ENDLESS = {
    "loop": (BUSY, "while True: pass"),
    "loop_ignoring_the_signal": (
        BUSY,
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    ),
    "sleep_without_output": (SHORT, "import os, time\nfor n in range(3): os.close(n)\ntime.sleep(30)"),
    "ignoring_signals": (
        SHORT,
        "import signal, time\nfor n in {*signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:\n"
        "    signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(30)",
    ),
}


def attempt_all(names: Sequence[str] = (*PROGRAMS, *ENDLESS)) -> dict[str, dict]:
    """Findings by program: the fields of its result, and what is different outside."""
    os.environ["ESTR_TEST_SECRET"] = SECRET
    with tempfile.TemporaryDirectory() as folder:
        outside = Path(folder, "outside")
        outside.mkdir()
        for place in (outside, Path(folder)):
            place.chmod(0o777)
            place.joinpath("secret").write_text(SECRET)
        with Listener(folder) as listener:
            victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            try:
                arguments = [str(os.getpid()), str(victim.pid), str(outside), str(listener.port), listener.path]
                return {name: _attempt(name, arguments, victim, listener) for name in names}
            finally:
                victim.kill()
                victim.wait()


def _attempt(name: str, arguments: list[str], victim: subprocess.Popen, listener: Listener) -> dict:
    limits, code = ENDLESS.get(name) or (LIMITS, HEAD + PROGRAMS[name])
    command = [sys.executable, "-I", "-S", "main.py", *arguments, f"{MARK}-{name}"]
    started = time.monotonic()
    result = Sandbox(limits).run(command, files={"main.py": code})
    return asdict(result) | {
        "waited": time.monotonic() - started,
        "escaped": sorted(path.name for path in Path(arguments[2]).rglob("estr-escaped")),
        "left": processes(f"{MARK}-{name}"),
        "victim": victim.poll() is None,
        "heard": listener.heard(),
        "directories": [entry for entry in os.listdir(tempfile.gettempdir()) if entry.startswith("estr-sandbox-")],
    }


class Listener:
    """What listens outside: TCP, UDP and Unix sockets (none where this process may have no sockets itself)."""

    def __init__(self, folder: str) -> None:
        self.path, self.port, self.sockets = f"{folder}/listener", 1, []

    def __enter__(self) -> Listener:
        try:
            tcp = socket.create_server(("127.0.0.1", 0))
            self.sockets.append(tcp)
            self.port = tcp.getsockname()[1]
            udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.sockets.append(udp)
            udp.bind(("127.0.0.1", self.port))
        except OSError:
            pass
        for address in (self.path, "\0" + self.path):
            made = socket.socket(socket.AF_UNIX)
            self.sockets.append(made)
            made.bind(address)
            made.listen()
        os.chmod(self.path, 0o777)
        for made in self.sockets:
            made.setblocking(False)
        return self

    def heard(self) -> int:
        count = 0
        for made in self.sockets:
            try:
                made.recvfrom(10) if made.type == socket.SOCK_DGRAM else made.accept()
                count += 1
            except BlockingIOError:
                pass
        return count

    def __exit__(self, *_: object) -> None:
        for made in self.sockets:
            made.close()


def processes(mark: str) -> list[int]:
    """Processes whose command line contains ``mark``."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in Path("/proc", process, "cmdline").read_bytes():
                found.append(int(process))
        except OSError:
            pass
    return found


if __name__ == "__main__":
    walls = {wall.limit: [wall.applied, wall.how] for wall in sandbox_report()}
    json.dump({"walls": walls, "found": attempt_all((*PROGRAMS, "sleep_without_output"))}, sys.stdout)
