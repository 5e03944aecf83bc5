"""The run directory: appears complete, belongs to one process, says what is wrong."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from estr.config import Config
from estr.config.load import load_config
from estr.errors import RunError, UsageError
from estr.storage import files
from estr.storage.run_directory import RunDirectory


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_create_appears_complete_and_locked(tmp_path):
    with RunDirectory.create(tmp_path / "a" / "run", Config()) as run:
        assert run.locked
        assert run.config() == load_config(None).config
        assert all(part.is_dir() for part in (run.rollouts, run.spool, run.checkpoints))
        assert sorted(entry.name for entry in (tmp_path / "a").iterdir()) == ["run"]
    assert not run.locked


@pytest.mark.parametrize("what", ["directory", "file", "dangling link"])
def test_create_refuses_what_exists(tmp_path, what):
    path = tmp_path / "run"
    {"directory": path.mkdir, "file": path.touch, "dangling link": lambda: path.symlink_to("nowhere")}[what]()
    with pytest.raises(UsageError, match="exists already"):
        RunDirectory.create(path, Config())


def test_open_says_what_is_wrong(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        RunDirectory.open(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        RunDirectory.open(tmp_path / "file")
    with pytest.raises(UsageError, match=r"no config\.toml"):
        RunDirectory.open(tmp_path)


def test_second_process_is_refused_and_reading_is_not(tmp_path):
    code = """
        import sys
        from estr.errors import UsageError
        from estr.storage.run_directory import RunDirectory
        RunDirectory.open(sys.argv[1])
        try:
            RunDirectory.open(sys.argv[1], lock=True)
        except UsageError as error:
            print(error)
    """
    with RunDirectory.create(tmp_path / "run", Config()) as run:
        refused = run_python(code, str(run.path))
        assert f"in use by process {os.getpid()}" in refused.stdout, refused.stderr
    assert run_python(code, str(run.path)).stdout == ""


def test_a_lock_file_that_is_removed_lets_nobody_in(tmp_path):
    with RunDirectory.create(tmp_path / "run", Config()) as run:
        run.lock_path.unlink()
        assert RunDirectory.open(run.path).in_use
        with pytest.raises(UsageError, match="is in use by another process"):
            RunDirectory.open(run.path, lock=True)
    RunDirectory.open(run.path, lock=True).close()


def test_a_killed_process_keeps_no_lock(tmp_path):
    RunDirectory.create(tmp_path / "run", Config()).close()
    code = """
        import sys, time
        from estr.storage.run_directory import RunDirectory
        run = RunDirectory.open(sys.argv[1], lock=True)
        print("locked", flush=True)
        time.sleep(60)
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(UsageError, match=f"process {holder.pid}"):
        RunDirectory.open(tmp_path / "run", lock=True)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    RunDirectory.open(tmp_path / "run", lock=True).close()


def test_children_do_not_keep_the_lock(tmp_path):
    run = RunDirectory.create(tmp_path / "run", Config())
    executed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    forked.start()
    try:
        time.sleep(0.2)
        run.close()
        RunDirectory.open(run.path, lock=True).close()
    finally:
        forked.kill()
        executed.communicate(b"\n")
        forked.join()


def test_forked_child_does_not_release_the_lock_of_its_parent(tmp_path):
    with RunDirectory.create(tmp_path / "run", Config()) as run:
        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join()
        with pytest.raises(UsageError, match="in use"):
            RunDirectory.open(run.path, lock=True)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_failed_create_leaves_nothing(tmp_path, monkeypatch, code, call):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.os, call, fail)
    with pytest.raises(RunError, match="cannot create the run directory"):
        RunDirectory.create(tmp_path / "run", Config())
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    RunDirectory.create(tmp_path / "run", Config()).close()


def test_kill_before_the_rename_leaves_no_run(tmp_path):
    code = """
        import os, sys
        from estr.config import Config
        from estr.storage.run_directory import RunDirectory
        os.rename = lambda source, target: os._exit(9) if str(target).endswith("/run") else os.replace(source, target)
        RunDirectory.create(sys.argv[1], Config())
    """
    assert run_python(code, str(tmp_path / "run")).returncode == 9
    assert not (tmp_path / "run").exists()
    (leftover,) = tmp_path.iterdir()
    os.utime(leftover, (0, 0))
    RunDirectory.create(tmp_path / "run", Config()).close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_write_atomic_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    target = tmp_path / "file"
    files.write_atomic(target, b"old")
    real = os.write

    def short_then_full(descriptor, data):
        if len(data) < 4:
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, data[:1])

    monkeypatch.setattr(files.os, "write", short_then_full)
    with pytest.raises(OSError, match="full"):
        files.write_atomic(target, b"newer")
    assert target.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_short_writes_are_completed(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(files.os, "write", lambda descriptor, data: real(descriptor, data[:2]))
    files.write_atomic(tmp_path / "file", b"whole content")
    assert (tmp_path / "file").read_bytes() == b"whole content"
