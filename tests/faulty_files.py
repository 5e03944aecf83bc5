"""Runs storage, or a whole run, with one file call failing, again and again; started by test_faulty_files.py.

    LD_PRELOAD=faultio.so python faulty_files.py storage|run COUNT SEED DIRECTORY

Every experiment is a forked process. Prints one JSON object: how many calls there are to fail, and for each experiment
which failed and what came of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = {
    "one call fails (ENOSPC)": (errno.ENOSPC, 1),
    "one call fails (EIO)": (errno.EIO, 1),
    "the disk stays full": (errno.ENOSPC, 2),
    "a short write, then one fails": (errno.ENOSPC, 3),
    "one fsync fails": (errno.EIO, 4),
}


def arm(directory: Path, call: int, error: int, kind: int) -> None:
    library = ctypes.CDLL(None)
    library.faultio_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    library.faultio_arm(os.fsencode(directory), call, error, kind)


def counted() -> int:
    library = ctypes.CDLL(None)
    library.faultio_count.restype = ctypes.c_long
    return int(library.faultio_count())


def in_child(action: Callable[[], Any]) -> Any:
    """What ``action`` returned, or the error it ended with as a sentence."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        from estr.errors import EstrError

        try:
            answer = {"value": action()}
        except EstrError as error:
            answer = {"refused": str(error)}
        except BaseException as error:
            answer = {"crashed": f"{type(error).__name__}: {error}"}
        with os.fdopen(writing, "w") as file:
            json.dump(answer, file)
            file.flush()
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else {"crashed": "it died"}


# ---------------------------------------------------------------------- what is run


def scripted_storage(path: Path) -> int:
    from test_storage_resume import ScriptedRun

    ScriptedRun(path).finish()
    return counted()


def check_storage(path: Path) -> None:
    from test_storage_resume import ScriptedRun, check_complete

    ScriptedRun(path).finish()
    check_complete(path)


def whole_run(path: Path) -> int:
    """The command line; its exit status 1 with one sentence counts as refused."""
    from estr.cli.main import main
    from estr.errors import RunError
    from estr.runtime import builders, setup
    from torture import parts

    builders.LocalEngine, setup.Learner = parts.PretendedEngine, parts.PretendedLearner  # type: ignore[misc]
    config = path.with_suffix(".toml")
    arguments = ["resume", str(path)] if path.exists() else ["train", str(config), "--output", str(path)]
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        status = main(arguments)
    if status == 1 and "better sentence" not in err.getvalue() and "Traceback" not in err.getvalue():
        raise RunError(err.getvalue().splitlines()[-1])
    if status:
        raise AssertionError(f"exit status {status}: {err.getvalue()}")
    return counted()


def check_run(path: Path) -> None:
    from torture.proof import Proof

    whole_run(path)
    Proof(path).check(counts=True)


# ---------------------------------------------------------------------- experiments


def experiment(
    scenario: str, directory: Path, number: int, call: int, kind: str, run: Callable[[Path], int], check: Any
) -> dict[str, Any]:
    path = directory / f"{scenario}-{number}"
    prepare(scenario, path)

    def faulty() -> int:
        arm(path.parent / path.name, call, *KINDS[kind])
        return run(path)

    first = in_child(faulty)
    second = in_child(lambda: check(path))
    bad = [answer for answer in (first, second) if "crashed" in answer] + ([second] if "refused" in second else [])
    if not bad:
        shutil.rmtree(path, ignore_errors=True)
    return {"call": call, "kind": kind, "outcome": first, "bad": bad}


def prepare(scenario: str, path: Path) -> None:
    if scenario == "run":
        from estr.config.load import dump_config
        from torture.harness import configuration

        path.with_suffix(".toml").write_text(dump_config(configuration("lockstep")))


def main() -> None:
    scenario, count, seed, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    import torch

    import test_storage_resume  # noqa: F401  (imported once, before the forks)
    import torture.harness  # noqa: F401

    torch.set_num_threads(1)
    run, check = (scripted_storage, check_storage) if scenario == "storage" else (whole_run, check_run)
    draw = random.Random(seed)

    def undisturbed(kind: int) -> int:
        path = directory / f"{scenario}-undisturbed-{kind}"
        prepare(scenario, path)
        answer = in_child(lambda: [arm(path, 0, 0, kind), run(path)][1])
        return int(answer["value"])

    calls, syncs = undisturbed(1), undisturbed(4)
    most = {kind: syncs if how == 4 else calls for kind, (_, how) in KINDS.items()}
    every = [(call, kind) for kind in KINDS for call in range(1, most[kind] + 1)]
    chosen = every if count == 0 else draw.sample(every, min(count, len(every)))
    results = [
        experiment(scenario, directory, number, call, kind, run, check) for number, (call, kind) in enumerate(chosen)
    ]
    print(json.dumps({"calls": calls, "syncs": syncs, "results": results}))


if __name__ == "__main__":
    main()
