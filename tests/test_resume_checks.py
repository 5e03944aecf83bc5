"""What a resume refuses, what it may be told to accept, and what is written down about how a run ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from estr.config.load import dump_config
from estr.environments.base import Problem
from estr.errors import RunError, UsageError
from estr.runtime.fingerprint import FREE, check_fits, fingerprint, package_changes
from estr.runtime.interrupts import Interrupts
from estr.runtime.run import Run
from estr.runtime.setup import prepared
from estr.storage.checkpoints import latest_checkpoint
from estr.storage.rollout_files import read_rollouts, retain_rollouts, rollout_files
from estr.storage.run_directory import RunDirectory
from estr.storage.run_record import RunRecord
from forking import forked_engines
from loop_helpers import Watcher, estr, small, stored, train, write_config
from loop_tasks import Echo
from torture.proof import Proof

HALF: dict[str, Any] = {"run": {"steps": 2, "checkpoint_every": 2}}


def trained(tmp_path: Path, capsys: pytest.CaptureFixture[str], **changes: dict[str, Any]) -> None:
    outcome = estr(capsys, "train", write_config(tmp_path / "run.toml", **changes), "--output", tmp_path / "run")
    assert outcome.status == 0, outcome.err


@pytest.fixture
def half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """A run of two steps that may go on to four; its configuration is changed and it is resumed."""
    trained(tmp_path, capsys, **HALF)
    run = tmp_path / "run"

    def resume(*arguments: str, **changes: dict[str, Any]) -> Any:
        config = RunDirectory.open(run).config()
        for section, values in {"run": {"steps": 4}, **changes}.items():
            for key, value in values.items():
                setattr(getattr(config, section), key, value)
        (run / "config.toml").write_text(dump_config(config))
        return estr(capsys, "resume", run, *arguments)

    return resume


def test_more_steps_need_no_permission(half: Any, tmp_path: Path) -> None:
    assert half(runtime={"learner_threads": 0}).status == 0
    assert len({row.trained_step for row in stored(tmp_path / "run")}) == 4


def test_a_changed_configuration_is_refused_and_named_or_accepted(half: Any, tmp_path: Path) -> None:
    refused = half(learner={"learning_rate": 0.5}, rollout={"temperature": 0.7})
    assert refused.status == 2
    assert "learner.learning_rate is 0.5, it was 0.01" in refused.complaint
    assert "rollout.temperature is 0.7, it was 1.0" in refused.complaint
    assert f"estr resume {tmp_path / 'run'} --accept-changes" in refused.complaint
    assert len(stored(tmp_path / "run")) == 8, "nothing was touched"
    assert half("--accept-changes").status == 0
    assert RunRecord(RunDirectory(tmp_path / "run")).fingerprint["configuration"]["learner.learning_rate"] == 0.5


def test_a_changed_model_is_refused(half: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from estr.runtime import setup

    real = setup.resolve_model

    def other(*arguments: Any, **named: Any) -> Path:
        found, copy = real(*arguments, **named), tmp_path / "model"
        copy.mkdir(exist_ok=True)
        for file in found.iterdir():
            (copy / file.name).write_bytes(file.read_bytes() + (b" " if file.name == "config.json" else b""))
        return copy

    monkeypatch.setattr(setup, "resolve_model", other)
    refused = half()
    assert refused.status == 2
    assert "the model's config.json has changed" in refused.complaint


class Changing(Echo):
    """A task whose data may be changed behind its back."""

    def __init__(self, *, path: str = "", word: str = "Say") -> None:
        super().__init__()
        self.word = word

    def train_problem(self, index: int) -> Problem:
        return Problem(f"changing-{index}", f"{self.word} {index}", index)


def test_task_model_and_configuration_are_compared(tmp_path: Path) -> None:
    data, model = tmp_path / "data.jsonl", tmp_path / "model"
    model.mkdir()
    data.write_text("{}\n")
    (model / "config.json").write_text("{}")
    config = small(task={"path": str(data)})
    before = fingerprint(config, Changing(), model)
    assert json.loads(json.dumps(before)) == before
    check_fits(fingerprint(config, Changing(), model), before, tmp_path)

    data.write_text("{ }\n")
    (model / "model.safetensors").write_bytes(b"x")
    config.learner.beta2, config.run.steps = 0.9, 99
    with pytest.raises(UsageError) as refused:
        check_fits(fingerprint(config, Changing(word="Tell"), model), before, tmp_path)
    assert str(refused.value).startswith(
        f"{tmp_path} no longer fits what it was started with: learner.beta2 is 0.9, it was 0.95; "
        f"the task's file {data} has changed; the task's sequence of problems has changed; "
        "the model's model.safetensors is new."
    )
    assert package_changes(before, before) == []
    (change,) = package_changes(before, {**before, "packages": {"torch": "1.0", "gone": "2"}})
    assert change.endswith("(was 1.0)")


def test_large_model_files_are_compared_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("estr.runtime.fingerprint._WHOLE", 8)
    file, seen = tmp_path / "model.safetensors", set()
    for content in (b"0123456789", b"x123456789", b"012345678x", b"0123456789x"):
        file.write_bytes(content)
        seen.add(fingerprint(small(), Echo(), tmp_path)["model"]["model.safetensors"])
    assert len(seen) == 4


def test_every_free_key_exists() -> None:
    keys = {f"{section}.{key}" for section, values in small().model_dump().items() for key in values}
    assert set(FREE) <= keys


def test_how_a_run_ended_is_written_down(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", small())
    assert (RunRecord(run).state, RunRecord(run).ending, RunRecord(run).fingerprint) == ("running", "", None)
    RunRecord(run).begin({"task": {"a": "b"}})
    RunRecord(run).end("failed", "the disk \ud800 was full")
    assert RunRecord(run).state == "running", "its lock is held"
    run.close()
    record = RunRecord(run)
    assert (record.state, record.ending, record.reason) == ("failed", "failed", "the disk ? was full")
    assert record.fingerprint == {"task": {"a": "b"}}
    record.begin({"task": {}})
    assert (RunRecord(run).state, RunRecord(run).ending, RunRecord(run).reason) == ("killed", "", "")


@pytest.mark.parametrize("text", ["{", "[]", '{"fingerprint": 3}', '{"fingerprint": {"task": 1}}'])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    run = RunDirectory.create(tmp_path / "run", small())
    (run.path / "run.json").write_text(text)
    with pytest.raises(RunError, match=r"run.json is damaged; remove it"):
        RunRecord(run)


def test_a_run_killed_between_its_last_checkpoint_and_its_end_is_ended_by_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, capsys, **HALF)
    run, record = tmp_path / "run", RunRecord(RunDirectory(tmp_path / "run"))
    assert estr(capsys, "resume", run).out == f"{run} is finished: 2 of 2 steps are done\n"
    record.begin(record.fingerprint or {})
    (run / "report.html").unlink()
    outcome = estr(capsys, "resume", run)
    assert outcome.status == 0, outcome.err
    assert "steps 2" in outcome.out
    assert (run / "report.html").exists()
    assert RunRecord(RunDirectory(run)).state == "finished"
    assert len(stored(run)) == 8


def test_old_rollouts_go_and_a_resume_does_not_miss_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"run": {"steps": 6, "checkpoint_every": 2, "keep_checkpoints": 2, "keep_rollouts": 1}}
    trained(tmp_path, capsys, **settings)
    run = tmp_path / "run"
    assert {row.trained_step for row in stored(run)} == {6}
    checkpoint = run / "checkpoints/step-000006/trainer.json"
    checkpoint.write_text(checkpoint.read_text().replace("6", "7", 1))
    resumed = estr(capsys, "resume", run)
    assert resumed.status == 0
    assert "is torn" in resumed.err
    assert {row.trained_step for row in stored(run)} == {6}


def test_only_steps_before_the_oldest_wanted_are_removed(tmp_path: Path) -> None:
    for name in ("step-000001", "step-000002.1", "step-000003", "step-000003-finished", "other"):
        (tmp_path / f"{name}.parquet").write_bytes(b"")
    assert retain_rollouts(tmp_path, 3) == 2
    assert {path.stem for path in rollout_files(tmp_path)} == {"step-000003", "step-000003-finished", "other"}
    with pytest.raises(UsageError):
        read_rollouts(tmp_path)


# ---------------------------------------------------------------------- estr runs


def test_runs_are_listed_with_state_step_reward_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "runs"
    (root / "group").mkdir(parents=True)
    config = write_config(tmp_path / "run.toml", run={"steps": 2, "eval_every": 2, "eval_prompts": 2})
    assert estr(capsys, "train", config, "--output", root / "group" / "b").status == 0
    RunDirectory.create(root / "a", small()).close()
    damaged = RunDirectory.create(root / "c", small())
    (damaged.path / "config.toml").write_text("[run]\nstep = 3\n")
    with RunDirectory.create(root / "d", small()):
        listed = {line["run"]: line for line in json.loads(estr(capsys, "runs", root, "--json").out)}
        shown = estr(capsys, "runs", root).out
    assert {name: (line["state"], line["step"], line["steps"]) for name, line in listed.items()} == {
        "a": ("killed", 0, 6),
        "c": ("damaged", 0, None),
        "d": ("running", 0, 6),
        "group/b": ("finished", 2, 2),
    }
    assert 0 <= listed["group/b"]["reward"] < 1
    assert listed["group/b"]["held_out"] == listed["group/b"]["best"]
    size = sum(path.lstat().st_size for path in (root / "group" / "b").rglob("*"))
    assert listed["group/b"]["size"] == size
    assert "group/b finished" in " ".join(shown.split())
    assert "did you mean 'steps'?" in shown
    assert [line["run"] for line in json.loads(estr(capsys, "runs", root / "a", "--json").out)] == ["a"]


def test_where_there_are_no_runs_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no run directories" in estr(capsys, "runs", tmp_path).complaint
    assert "does not exist" in estr(capsys, "runs", tmp_path / "nowhere").complaint
    assert estr(capsys, "runs", tmp_path, "--json").out == "[]\n"


def test_a_look_at_a_run_never_keeps_a_process_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`estr runs` holds the lock for a moment; whoever wants it then waits that moment."""
    import fcntl
    import os
    import threading

    RunDirectory.create(tmp_path / "run", small()).close()
    looking = os.open(tmp_path / "run" / ".lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.1, os.close, (looking,)).start()
    RunDirectory.open(tmp_path / "run", lock=True).close()


def test_a_second_process_on_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory.create(tmp_path / "run", small()):
        outcome = estr(capsys, "resume", tmp_path / "run")
    assert outcome.status == 2
    assert outcome.complaint.startswith(f"{tmp_path / 'run'} is in use by process ")


ASYNC: dict[str, Any] = {
    "run": {"steps": 6, "checkpoint_every": 2},
    "schedule": {"mode": "async", "max_staleness": 2},
    "runtime": {"engines": 1},
}


def killed_after_step_3(path: Path) -> None:
    """An asynchronous run with a checkpoint of step 2 and groups in flight."""

    def die(step: int) -> None:
        if step == 3:
            raise RuntimeError("killed")

    with forked_engines(), pytest.raises(RuntimeError, match="killed"):
        train(small(**ASYNC), path, Watcher(on_step=die))


def test_changes_that_are_refused_in_the_end_are_not_what_the_run_was_started_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_after_step_3(tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    before = config.read_text()
    config.write_text(before.replace("group_size = 2", "group_size = 4"))
    with forked_engines():
        refused = estr(capsys, "resume", tmp_path / "run", "--accept-changes")
        assert refused.status == 1
        assert "were the task or rollout.group_size changed?" in refused.complaint
        config.write_text(before)
        assert estr(capsys, "resume", tmp_path / "run").status == 0
    Proof(tmp_path / "run").check()


def test_a_resume_gives_no_number_a_second_time(tmp_path: Path) -> None:
    """Groups that were issued after the last checkpoint keep their numbers, and new ones come after them."""
    killed_after_step_3(tmp_path / "run")
    with (
        forked_engines(),
        RunDirectory.open(tmp_path / "run", lock=True) as directory,
        Interrupts() as interrupts,
    ):
        checkpoint = latest_checkpoint(directory).checkpoint
        assert checkpoint is not None
        with prepared(directory.config(), directory, Watcher(), interrupts, checkpoint) as parts:
            issued = max(int(name[:8]) for name, *_ in parts.journal._ledger.history()) + 1
            assert parts.schedule.next_group == issued > parts.position.next_group
            Run(parts, interrupts).go()
        RunRecord(directory).end("finished")
    Proof(tmp_path / "run").check()
