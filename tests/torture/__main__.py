"""See the package's head."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from torture.harness import Torturer
from torture.proof import Proof


def torture(torturer: Torturer, kills: int, most: int = 6) -> None:
    """Deal at least ``kills`` blows over whole runs, proving each at its end; lockstep runs are also compared with one
    that was never killed."""
    modes = ("async", "sync") if torturer.helper else ("async", "sync", "async", "lockstep")
    if "lockstep" in modes:
        reference = Proof(torturer.reference("lockstep"))
        reference.check(counts=torturer.pretended)
    while torturer.tally.total < kills:
        mode = modes[sum(torturer.tally.runs.values()) % len(modes)]
        path = torturer.run(mode, most)
        proof = Proof(path)
        proof.check(counts=torturer.pretended)
        assert proof.run.report_path.exists(), f"{path} has no report"
        log = path.with_suffix(".log")
        assert "the report could not be written" not in log.read_text(), f"a report could not be written, see {log}"
        torturer.tally.facts += proof.facts
        if mode == "lockstep":
            assert proof.weights() == reference.weights(), f"{path}: the final weights differ"
            assert proof.timeless() == reference.timeless(), f"{path}: metrics or rollouts differ"
        shutil.rmtree(path)


def report(title: str, torturer: Torturer, seconds: float) -> None:
    tally = torturer.tally
    runs = ", ".join(f"{count} {mode}" for mode, count in sorted(tally.runs.items()))
    print(f"{title}: {tally.total} kills in {tally.lives} process lives, finished runs: {runs}")
    for phase, count in sorted(tally.kills.items()):
        print(f"  {count:4d}  {phase}")
    print(f"  trajectories: {dict(sorted(tally.facts.items()))}; {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="torture", description="Kill runs at every point of their life.")
    parser.add_argument("--kills", type=int, default=200, help="with pretended engines and learner")
    parser.add_argument("--real", type=int, default=30, help="with the real ones")
    parser.add_argument("--family", type=int, default=10, help="with the helper that engines are forked from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="leave the directory with the logs")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="estr-torture-"))
    os.environ.setdefault("ESTR_CACHE", str(directory / "models"))
    print(f"seed {arguments.seed}, in {directory}", flush=True)
    for title, kills, how in (
        ("pretended model", arguments.kills, {"pretended": True}),
        ("real model", arguments.real, {"pretended": False}),
        ("family of processes", arguments.family, {"pretended": False, "helper": True}),
    ):
        if kills:
            started, place = time.monotonic(), directory / title.partition(" ")[0]
            place.mkdir()
            torturer = Torturer(place, arguments.seed, **how)
            try:
                torture(torturer, kills)
            finally:
                report(title, torturer, time.monotonic() - started)
    print(
        "every issued trajectory was trained exactly once or dropped with a reason; no group was trained short; no "
        "trajectory was trained late; lockstep runs ended with the same bits as the one that was never killed"
    )
    if not arguments.keep:
        shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(main())
