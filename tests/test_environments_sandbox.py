"""The sandbox: what runs in it, what it says of what went wrong, and escapes that are tried and stopped.

The escapes (sandbox_escapes.py) are tried in two worlds: on this system as it is, and once more inside a sandbox, where
namespaces are forbidden and the user is nobody in particular, so that Landlock, seccomp and the keeper have to do.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from json import loads
from pathlib import Path

import pytest

import sandbox_escapes as escapes
from estr.environments import make_task
from estr.environments import sandbox as room
from estr.environments.arithmetic import calculate
from estr.environments.runner import run_step
from estr.environments.sandbox import Limits, Sandbox, sandbox_report
from estr.environments.sandbox_keeper import descendants
from estr.environments.sandbox_walls import Request
from estr.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
TESTS = str(Path(__file__).resolve().parent)
PATIENT = Limits(seconds=100, cpu_seconds=50)  # the machine may be busy


def answer(text):
    return f"got {text}"


def fail(text):
    raise KeyError(text)


def leave(text):
    sys.exit(3)


# ---------------------------------------------------------------------- what runs


def test_a_program_gets_its_input_and_its_files():
    code = "import sys; print(open('data.txt').read(), sys.stdin.read(), sys.argv[1:])"
    result = Sandbox(PATIENT).run([sys.executable, "-c", code, "a b"], "input ü", files={"data.txt": "data é"})
    assert (result.status, result.stdout, result.stderr, result.reason) == ("ok", "data é input ü ['a b']\n", "", "")
    assert 0 < result.seconds < PATIENT.seconds


def test_a_function_is_called_in_a_fresh_process():
    sandbox = Sandbox(PATIENT, readable=[TESTS])
    assert sandbox.run(answer, "it").stdout == "got it"
    assert sandbox.run("test_environments_sandbox:answer", "it").stdout == "got it"
    assert sandbox.run("estr.environments.arithmetic:calculate", "2+3*4").stdout == "14"
    assert sandbox.run(leave).reason == "it ended with exit status 3"
    failed = sandbox.run(fail, "key")
    assert failed.status == "error"
    assert failed.reason == "it ended with exit status 1 (KeyError: 'key')"
    assert "raise KeyError" in failed.stderr


def test_reasons_are_sentences_on_what_went_wrong():
    def reason(code):
        return Sandbox(PATIENT).python(code).reason

    assert reason("1 / 0") == "it ended with exit status 1 (ZeroDivisionError: division by zero)"
    assert reason("import os; os.abort()") == "it was ended by SIGABRT"
    assert reason("import sys; sys.exit(7)") == "it ended with exit status 7"
    absent = Sandbox(PATIENT).run(["no-such-program"])
    assert absent.status == "error"
    assert absent.reason == "the program 'no-such-program' cannot be started: No such file or directory"
    unreadable = Sandbox(PATIENT).run("no.such.module:name")
    assert unreadable.reason == "it ended with exit status 1 (ModuleNotFoundError: No module named 'no')"


def test_input_that_nobody_reads_holds_nothing_up():
    assert Sandbox(PATIENT).run(["/bin/sh", "-c", "echo done"], "x" * 5_000_000).stdout == "done\n"
    assert Sandbox(PATIENT).python("print(len(input()))", "x" * 5_000_000).stdout == "5000000\n"


def test_output_before_the_end_is_kept():
    result = Sandbox(Limits(seconds=100, cpu_seconds=1)).python("print('so far', flush=True)\nwhile True: pass")
    assert (result.status, result.stdout) == ("time", "so far\n")


def test_files_that_do_not_fit_are_said_so():
    small = Sandbox(Limits(disk_mb=1))
    assert small.run(["true"], files={"a": "x" * 2_000_000}).reason == "its files are larger than 1 MB"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b", "x" * 101, "naïve"])
def test_names_of_files_are_plain(name):
    with pytest.raises(UsageError, match="plain name"):
        Sandbox(PATIENT).run(["true"], files={name: ""})


@pytest.mark.parametrize(
    "program", ["", "module", "module:", ":name", "a b:c", "os:system;x", lambda text: text, [], ["a\0"]]
)
def test_what_is_no_program_is_refused(program):
    with pytest.raises(UsageError, match="a sandbox runs"):
        Sandbox(PATIENT).run(program)


@pytest.mark.parametrize(
    "limits", [{"seconds": 0}, {"memory_mb": -1}, {"processes": True}, {"cpu_seconds": 1.5}, {"seconds": float("nan")}]
)
def test_limits_are_positive_numbers(limits):
    with pytest.raises(ValueError, match=f"the limit {next(iter(limits))}"):
        Limits(**limits)


def test_required_limits_are_checked():
    walls = {wall.limit: wall for wall in sandbox_report()}
    for name, wall in walls.items():
        if wall.applied:
            Sandbox(require=[name])
        else:
            with pytest.raises(UsageError, match="cannot apply"):
                Sandbox(require=[name])
    with pytest.raises(UsageError, match="did you mean 'network'"):
        Sandbox(require=["netwrok"])


def test_what_is_missing_is_reported_with_its_reason():
    bare = room._walls(
        dict.fromkeys(("namespaces", "files", "proc", "uid", "landlock", "seccomp"), "forbidden here"), 0, True
    )
    missing = {wall.limit for wall in bare if not wall.applied}
    assert missing == {"processes", "writing outside", "reading outside", "network", "signals", "system calls"}
    assert all("forbidden here" in wall.how for wall in bare if not wall.applied)


def test_the_command_prints_every_limit():
    done = subprocess.run(
        [sys.executable, "-m", "estr.environments.sandbox"], capture_output=True, text=True, check=True
    )
    assert [line.split("  ")[0].strip() for line in done.stdout.splitlines()] == [
        wall.limit for wall in sandbox_report()
    ]


# ---------------------------------------------------------------------- escapes


@cache
def _here():
    """Findings on this system."""
    walls = {wall.limit: [wall.applied, wall.how] for wall in sandbox_report()}
    return {"walls": walls, "found": escapes.attempt_all()}


@cache
def _without_namespaces():
    """Findings inside a sandbox."""
    source = str(ROOT / "src")
    start = "runpy.run_path('sandbox_escapes.py', run_name='__main__')"
    code = f"import runpy, sys; sys.path[:0] = ['.', {source!r}]; {start}"
    wide = Limits(
        seconds=1000, cpu_seconds=100, memory_mb=2000, disk_mb=64, output_kb=4000, processes=100, open_files=128
    )
    files = {"sandbox_escapes.py": Path(escapes.__file__).read_text()}
    outcome = Sandbox(wide, readable=[source]).run([sys.executable, "-I", "-c", code], files=files)
    assert outcome.status == "ok", f"{outcome.reason}\n{outcome.stderr}"
    return loads(outcome.stdout)


@pytest.fixture(params=[_here, _without_namespaces], ids=["here", "without_namespaces"])
def world(request):
    found = request.param()

    def look(name, wall="time"):
        applied, how = found["walls"][wall]
        if not applied:
            pytest.skip(f"this system has no wall against it: {how}")
        if name not in found["found"]:
            pytest.skip("tried once is enough")
        return found["found"][name]

    return look


@pytest.mark.parametrize("name", [*escapes.PROGRAMS, *escapes.ENDLESS])
def test_no_program_outlives_its_run_or_changes_anything_outside(world, name):
    found = world(name)
    assert found["left"] == []
    assert found["directories"] == []
    assert found["escaped"] == []
    assert found["victim"]
    assert found["heard"] == 0
    assert found["status"] != "broken"


def test_a_fork_bomb_gets_as_many_processes_as_are_allowed(world):
    found = world("fork_bomb", "processes")
    assert 1 <= len(found["stdout"]) <= escapes.LIMITS.processes + 2
    assert 1 < int(world("thread_bomb", "processes")["stdout"]) <= escapes.LIMITS.processes + 2


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("allocation", "memory", "it ran out of its 256 MB of memory"),
        ("allocation_by_children", "memory", "its processes held more than 256 MB of memory together"),
        ("print", "output", "it wrote more than 64 KB to stdout"),
        ("print_errors", "output", "it wrote more than 64 KB to stderr"),
        ("loop", "time", "it used more than 1 s of processor time"),
        ("loop_ignoring_the_signal", "time", "it used more than 1 s of processor time"),
        ("sleep_without_output", "time", "it ran longer than 1 s"),
        ("ignoring_signals", "time", "it ran longer than 1 s"),
    ],
)
def test_limits_end_what_breaks_them(world, name, status, reason):
    found = world(name, "memory")
    assert (found["status"], found["reason"]) == (status, reason)
    assert len(found["stdout"]) <= 65536
    assert len(found["stderr"]) <= 65536


@pytest.mark.parametrize("name", ["recursion", "recursion_in_c"])
def test_deep_recursion_ends_the_program_alone(world, name):
    assert world(name)["status"] in ("error", "memory", "time")  # a slow machine spends its seconds first


@pytest.mark.parametrize(
    ("name", "wall"),
    [
        ("write_outside", "writing outside"),
        ("read_outside", "reading outside"),
        ("links", "reading outside"),
        ("network", "network"),
        ("signals", "signals"),
        ("privileges", "system calls"),
    ],
)
def test_nothing_outside_can_be_reached(world, name, wall):
    found = world(name, wall)
    assert (found["status"], found["stdout"]) == ("ok", "[]\n")


def test_secrets_of_the_environment_stay_outside(world):
    found = world("environment", "reading outside")
    assert found["status"] == "ok"
    assert escapes.SECRET not in found["stdout"]
    assert "'HOME'" in found["stdout"], "it printed nothing to look at"


def test_the_supervisor_inside_cannot_be_killed(world):
    found = world("kill_own_supervisor", "signals")
    assert (found["status"], found["stdout"]) == ("ok", "alive\n")


def test_a_daemon_does_not_hold_the_result_up(world):
    assert world("daemon")["status"] == "ok"


def test_a_program_may_delete_its_own_directory(world):
    assert world("delete_directory")["stdout"] == "done\n"


def test_bytes_that_are_no_text_are_replaced(world):
    assert world("binary")["stdout"] == bytes(range(256)).decode("utf-8", "replace")


@pytest.mark.parametrize("name", ["large_file", "many_files"])
def test_the_working_directory_has_a_size(world, name):
    found = world(name, "disk")
    assert found["status"] in ("disk", "error") or int(found["stdout"]) <= escapes.LIMITS.disk_mb << 20


def test_descriptors_of_the_sandbox_are_not_inherited(world):
    assert world("descriptors")["stdout"] == "[0, 1, 2]\n"
    assert int(world("open_files")["stdout"]) < escapes.LIMITS.open_files


@pytest.mark.parametrize(
    "expression",
    ["9^9^9^9", "9**9**9", "(10^49)^64", "2^64^64", "9^(9^(9^9))", "1/(10^64)^64", "9" * 200, "((9^64)^64)^64"],
)
def test_huge_powers_in_the_calculator_are_refused(expression):
    result = Sandbox(Limits(seconds=100, cpu_seconds=5, memory_mb=128)).run(
        "estr.environments.arithmetic:calculate", expression
    )
    assert result.status == "ok"
    assert result.stdout.startswith("error: ")
    assert calculate(expression) == result.stdout


# ---------------------------------------------------------------------- the helper


def test_the_helper_is_small_and_knows_no_secret(monkeypatch):
    import torch

    monkeypatch.setenv("ESTR_TEST_SECRET", escapes.SECRET)
    room._helper.close()
    assert torch.ones(1).sum() == 1
    assert Sandbox(PATIENT).run(["true"]).status == "ok"
    process = Path("/proc", str(room._helper._process.pid))
    if not process.exists():
        pytest.skip("no /proc to look into")
    assert "torch" not in (process / "maps").read_text()
    assert re.search(r"^Threads:\s+1$", (process / "status").read_text(), re.M)
    assert escapes.SECRET.encode() not in (process / "environ").read_bytes()


def test_a_helper_that_was_killed_is_replaced():
    assert Sandbox(PATIENT).run(["true"]).status == "ok"
    os.kill(room._helper._process.pid, signal.SIGKILL)
    assert Sandbox(PATIENT).run(["true"]).status in ("ok", "broken")  # it may have been asked before it was gone
    assert Sandbox(PATIENT).run(["true"]).status == "ok"


def test_many_runs_leave_nothing_behind():
    def state():
        helper = Path("/proc", str(room._helper._process.pid))
        return len(os.listdir("/proc/self/fd")), len(os.listdir(helper / "fd")), list(descendants(int(helper.name)))

    assert Sandbox(PATIENT).run(["true"]).status == "ok"
    if not os.path.isdir("/proc/self"):
        pytest.skip("no /proc to look into")
    _wait_until(lambda: not state()[2])  # the keeper answers, and ends a moment later
    before = state()
    for _ in range(20):
        Sandbox(PATIENT).run(["true"])
    _wait_until(lambda: state() == before)


def test_many_threads_may_ask_at_once():
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: Sandbox(PATIENT).run(["/bin/sh", "-c", f"sleep 0.05; echo {n}"]), range(16)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(16)]


def test_it_works_in_a_process_that_was_forked():
    code = """
    import os
    from estr.environments.sandbox import Sandbox
    assert Sandbox().run(["true"]).status == "ok"
    child = os.fork()
    if child == 0:
        os._exit(0 if Sandbox().run(["true"]).status == "ok" else 9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert Sandbox().run(["true"]).status == "ok"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=200)


TRAINER = """
import signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start what is in background without it
from estr.environments.sandbox import Limits, Sandbox
mark = sys.argv[1]
daemon = "import os, time\\nif os.fork() == 0:\\n os.setsid()\\n if os.fork() == 0: time.sleep(100)\\n"
code = daemon + "print('up', flush=True)\\ntime.sleep(100)"
run = lambda: Sandbox(Limits(seconds=90)).run([sys.executable, "-I", "main.py", mark], files={"main.py": code})
threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_everything_ends_with_the_process_that_asked(number):
    mark = f"estr-orphan-{os.getpid()}-{int(number)}"
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, mark], stderr=subprocess.DEVNULL)
    try:
        _wait_until(lambda: len(escapes.processes(mark)) >= 1 + 2 * 2)  # the trainer, and two with a daemon each
        helpers = list(descendants(trainer.pid))
        assert helpers
        trainer.send_signal(number)
        trainer.wait(100)
        _wait_until(lambda: not escapes.processes(mark) and not any(map(_alive, helpers)))
    finally:
        trainer.kill()
        trainer.wait()


def _wait_until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited 120 s"
        time.sleep(0.02)


def _alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_run_that_nobody_waits_for_is_stopped():
    mark = f"estr-abandoned-{os.getpid()}"
    request = Request([sys.executable, "-I", "-c", "import time; time.sleep(50)", mark], limits=Limits(seconds=40))
    assert room._helper.ask(asdict(request), patience=1.0) == b""
    _wait_until(lambda: not escapes.processes(mark))


# ---------------------------------------------------------------------- the page


def _blocks():
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "sandbox.md").read_text(), re.M | re.S)


def test_the_first_example_of_the_page_runs():
    done = subprocess.run([sys.executable, "-"], input=_blocks()[0], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "it used more than 1 s of processor time\n"), done.stderr


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(_blocks()[1])
    monkeypatch.syspath_prepend(tmp_path)
    yield make_task("program:ProgramTask", default_seed=3)
    sys.modules.pop("program", None)


def test_the_environment_of_the_page_runs_what_a_model_writes(program):
    for messages, _ in zip(program.demonstrations(0), range(2), strict=False):
        environment = program.environment()
        problem = program._problem(int(re.search(r"to (\d+)", messages[0]["content"])[1]))
        assert environment.reset(problem, 0) == messages[:1]
        reply = run_step(environment, messages[1]["content"], timeout=200.0)
        assert list(reply.messages) == messages[2:3]
        assert run_step(environment, messages[3]["content"]).done
        assert environment.reward() == 1.0


def test_the_environment_of_the_page_survives_what_a_model_writes(program):
    environment = program.environment()
    environment.reset(program.train_problem(0), 0)
    reply = run_step(environment, "<python>print('so far')\n1 / 0</python>", timeout=200.0)
    said = "so far\n\nerror: it ended with exit status 1 (ZeroDivisionError: division by zero)"
    assert reply.messages[0]["content"] == said
    assert run_step(environment, "nothing").done
    assert environment.reward() == 0.0
