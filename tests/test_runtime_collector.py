"""The collector on a scripted pool, with the real schedule and the real ledger."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estr.config import Config
from estr.environments.base import Problem
from estr.errors import RunError
from estr.runtime.accounting import Accounting
from estr.runtime.collector import Collector
from estr.runtime.journal import RunJournal
from estr.runtime.messages import Activity, Died, Event, Failed, Finished, Job, KeptTurn, Progress, Ready, Synced
from estr.runtime.setup import _minibatches
from estr.schedule import Group, Schedule, ScheduleRules
from estr.storage.ledger import Ledger
from estr.storage.rollout_files import RolloutWriter, read_rollouts
from estr.storage.rollouts import Settlement
from estr.trajectory import Segment, Trajectory, derive_seed
from loop_helpers import small
from loop_tasks import Echo, Faulty


def trajectory(job: Job) -> Trajectory:
    """What an engine makes of a job: one prompt token and one action."""
    nan = np.float32("nan")
    segment = Segment(
        np.array([5, 6], np.int32),
        np.array([False, True]),
        np.array([nan, -0.5], np.float32),
        np.array([nan, 1.0], np.float32),
        np.array([-1, job.min_version], np.int32),
    )
    seed = derive_seed(job.run_seed, job.group, job.sibling, job.attempt)
    identity = (job.group, job.sibling, job.attempt, job.problem.task_id, job.problem.prompt, seed)
    return Trajectory(*identity, segments=[segment], reward=1.0, finish_reason="stop", group_key=job.problem.task_id)


class ScriptedPool:
    """``script`` turns each job into the events it causes; ``later`` comes with the next poll, ``always`` with each."""

    def __init__(self, script: Callable[[Job], Sequence[Event]]) -> None:
        self.script = script
        self.jobs: list[Job] = []
        self.waiting: list[Job] = []
        self.later: list[Event] = []
        self.always: list[Event] = []
        self.cancelled: list[int] = []

    def submit(self, jobs: Sequence[Job]) -> None:
        self.jobs += jobs
        self.waiting += jobs

    def events(self, timeout: float) -> list[Event]:
        jobs, self.waiting = self.waiting, []
        events, self.later = self.later, []
        return [*events, *self.always, *(event for job in jobs for event in self.script(job))]

    def cancel_group(self, group: int) -> None:
        self.cancelled.append(group)
        self.waiting = [job for job in self.waiting if job.group != group]

    def publish(self, version: int, tensors: Mapping[str, Any], canary: Any) -> None: ...

    def close(self) -> None: ...


def works(job: Job) -> list[Event]:
    return [Finished(trajectory(job))]


def broken_in(*groups: int, times: int = 1000, final: bool = False) -> Callable[[Job], list[Event]]:
    """The first sibling of these groups fails its first ``times`` attempts."""

    def script(job: Job) -> list[Event]:
        if job.group in groups and job.sibling == 0 and job.attempt < times:
            return [Failed(job, f"problem {job.problem.task_id}: the tool broke", final)]
        return works(job)

    return script


class Bench:
    """A collector with everything around it."""

    def __init__(self, tmp_path: Path, config: Config, pool: ScriptedPool, task: Any = None, check: Any = None) -> None:
        self.pool, self.notices = pool, []
        steps = config.learner.minibatches * config.learner.epochs
        lag = config.schedule.max_staleness if config.schedule.mode == "async" else steps - 1
        rules = ScheduleRules(
            prompts_per_step=config.learner.prompts_per_step,
            group_size=config.rollout.group_size,
            steps_per_batch=steps,
            max_staleness=lag,
            attempts=config.schedule.attempts,
            max_failed_groups=config.schedule.max_failed_groups,
        )
        self.schedule = Schedule(rules)
        self.ledger = Ledger(tmp_path / "ledger.sqlite")
        self.journal = RunJournal(config, self.ledger, RolloutWriter(tmp_path))
        timeline: Any = type("Sink", (), {"write": lambda *_: None})()
        self.collector = Collector(
            config,
            self.schedule,
            pool,
            task or Echo(),
            self.journal,
            Accounting(timeline, 1),
            notice=self.notices.append,
            minibatch_of=_minibatches(config).__getitem__,
            check=check or (lambda: None),
        )


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(script: Any = works, *, task: Any = None, check: Any = None, **changes: Mapping[str, Any]) -> Bench:
        made.append(Bench(tmp_path, small(**changes), ScriptedPool(script), task, check))
        return made[-1]

    yield make
    for each in made:
        each.ledger.close()


def numbers(groups: Sequence[Group]) -> list[int]:
    return [group.number for group in groups]


ASYNC = {"mode": "async", "max_staleness": 2}


def test_the_pool_is_supplied_up_to_the_bound_and_groups_come_whole(bench: Callable[..., Bench]) -> None:
    made = bench(schedule=ASYNC)
    assert numbers(made.collector.next_batch(0)) == [0, 1]
    assert [(job.group, job.sibling) for job in made.pool.jobs] == [(g, s) for g in range(6) for s in range(2)]
    assert {job.min_version for job in made.pool.jobs} == {0}
    batch = made.collector.next_batch(1)
    assert numbers(batch) == [2, 3]
    assert all([t.sibling for t in group.trajectories] == [0, 1] for group in batch)
    assert [job.group for job in made.pool.jobs[12:]] == [6, 6, 7, 7]
    assert {job.min_version for job in made.pool.jobs[12:]} == {1}


def test_fault_C2_jobs_wait_for_the_version_they_were_admitted_at(bench: Callable[..., Bench]) -> None:
    made = bench(schedule={"mode": "sync"})
    for version in range(3):
        made.collector.next_batch(version)
        assert {job.min_version for job in made.pool.jobs[4 * version :]} == {version}


def test_fault_C10_with_no_staleness_allowed_the_loop_still_progresses(bench: Callable[..., Bench]) -> None:
    made = bench(schedule={"mode": "async", "max_staleness": 0})
    for version in range(3):
        assert numbers(made.collector.next_batch(version)) == [2 * version, 2 * version + 1]
        assert {job.min_version for job in made.pool.jobs[4 * version :]} == {version}
    assert len(made.pool.jobs) == 12, "strictly synchronous: nothing is issued ahead"


def turn(job: Job, number: int) -> KeptTurn:
    begun = trajectory(job)
    begun.turns = number
    return KeptTurn.of(Progress(begun, [], 1, "stop", {}))


def test_of_turns_that_come_together_the_newest_of_each_trajectory_in_flight_is_kept(
    bench: Callable[..., Bench],
) -> None:
    made = bench(lambda job: [], schedule=ASYNC)
    made.collector.fill(0)
    done, going = made.pool.jobs[:2]
    made.pool.later = [turn(done, 1), turn(going, 1), turn(done, 2), Finished(trajectory(done)), turn(going, 2)]
    made.collector.absorb_waiting()
    assert [(kept.sibling, kept.turns) for kept, _ in made.ledger.turns()] == [(going.sibling, 2)]
    assert made.ledger.counts()["finished"] == 1


def test_what_a_step_trained_is_durable_together_with_what_came_meanwhile_and_undone_with_it(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    made = bench(lambda job: [], schedule=ASYNC)
    made.collector.fill(0)
    size = made.collector._config.rollout.group_size
    first, last = made.pool.jobs[:size], made.pool.jobs[size]
    made.pool.later = [Finished(trajectory(job)) for job in first]
    made.collector.absorb_waiting()
    settled = [(trajectory(job), Settlement("trained", trained_step=1, target_version=0)) for job in first]

    def broken() -> None:
        made.journal.trained(settled, 1)
        raise RunError("the disk is full")

    made.pool.later = [Finished(trajectory(last))]
    with pytest.raises(RunError, match="full"):
        made.collector.turn_over(broken, None)
    assert made.ledger.counts()["trained"] == 0
    made.journal._settled.clear()
    made.pool.later = [Finished(trajectory(last))]
    made.collector.turn_over(lambda: made.journal.trained(settled, 1), None)
    assert made.ledger.counts() | {"issued": 0} == {"issued": 0, "finished": 1, "trained": size, "dropped": 0}
    assert not list(tmp_path.glob("*.parquet"))
    made.journal.store_rows()
    assert len(read_rollouts(tmp_path)) == size


def test_groups_issued_when_a_step_ends_are_durable_before_an_engine_has_them(bench: Callable[..., Bench]) -> None:
    made = bench(lambda job: [], schedule=ASYNC)
    submit, seen = made.pool.submit, []

    def noted(jobs: Sequence[Job]) -> None:
        with contextlib.closing(sqlite3.connect(made.ledger.path)) as another:
            (issued,) = another.execute("SELECT COUNT(*) FROM trajectories").fetchone()
        seen.append((len(jobs), issued))
        submit(jobs)

    made.pool.submit = noted  # type: ignore[method-assign]
    made.collector.turn_over(lambda: None, None)
    assert seen == []
    made.collector.turn_over(lambda: None, 0)
    assert [jobs for jobs, _ in seen] == [issued for _, issued in seen] == [len(made.pool.jobs)]


class Refusing(Echo):
    """Has problems for the first groups only."""

    def train_problem(self, index: int) -> Problem:
        if index >= 2:
            raise ValueError("no more problems")
        return super().train_problem(index)


def test_a_step_is_filed_also_where_nothing_more_can_be_issued(bench: Callable[..., Bench]) -> None:
    made = bench(schedule={"mode": "sync"}, task=Refusing())
    batch = made.collector.next_batch(0)
    trained = [one for group in batch for one in group.trajectories]
    settlement = Settlement("trained", trained_step=1, target_version=0)
    made.collector.turn_over(lambda: made.journal.trained([(one, settlement) for one in trained], 1), 1)
    assert made.ledger.counts() == {"issued": 0, "finished": 0, "trained": len(trained), "dropped": 0}
    for _ in range(2):
        with pytest.raises(RunError, match="no more problems"):
            made.collector.next_batch(1)


def test_rows_that_could_not_be_stored_are_asked_for_again_by_a_checkpoint(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(schedule={"mode": "sync"})
    batch = made.collector.next_batch(0)
    settlement = Settlement("trained", trained_step=1, target_version=0)
    made.journal.trained([(one, settlement) for group in batch for one in group.trajectories], 1)

    def full(*_: object) -> None:
        raise RunError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(made.journal._rollouts, "write_settled", full)
        with pytest.raises(RunError, match="full"):
            made.journal.store_rows()
    made.journal.position()
    assert len(read_rollouts(made.journal._rollouts.directory)) == sum(len(group.trajectories) for group in batch)


class OneByOne(ScriptedPool):
    """One event a poll."""

    def events(self, timeout: float) -> list[Event]:
        self.later = [*self.later, *(event for job in self.waiting for event in self.script(job))]
        self.waiting, events, self.later = [], self.later[:1], self.later[1:]
        return events


def test_results_that_cannot_complete_a_batch_are_made_durable_together(
    bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(schedule={"mode": "sync"}, learner={"prompts_per_step": 4})
    made.pool.__class__ = OneByOne
    statements: list[str] = []
    made.ledger._connection.set_trace_callback(statements.append)
    batch = made.collector.next_batch(0)
    made.ledger._connection.set_trace_callback(None)
    results = sum(len(group.trajectories) for group in batch)
    assert results == made.ledger.counts()["finished"] == 8
    assert statements.count("COMMIT") < 1 + results, "one for what is issued, and fewer than one a result"


def test_a_failed_sibling_is_issued_again_under_a_new_seed(bench: Callable[..., Bench]) -> None:
    made = bench(broken_in(1, times=2), schedule={"attempts": 3})
    batch = made.collector.next_batch(0)
    assert numbers(batch) == [0, 1]
    tried = [job.attempt for job in made.pool.jobs if (job.group, job.sibling) == (1, 0)]
    assert tried == [0, 1, 2]
    assert batch[1].trajectories[0].attempt == 2
    seeds = {trajectory(job).seed for job in made.pool.jobs if (job.group, job.sibling) == (1, 0)}
    assert len(seeds) == 3
    assert not made.notices
    assert made.ledger.counts() == {"issued": 0, "finished": 4, "trained": 0, "dropped": 2}


def test_fault_E1_a_group_that_fails_for_good_is_replaced(bench: Callable[..., Bench]) -> None:
    made = bench(broken_in(0), schedule={"attempts": 2})
    assert numbers(made.collector.next_batch(0)) == [2, 1], "the replacement takes the place that became free"
    assert made.pool.cancelled == [0]
    assert made.notices == ["group 0 was dropped: problem echo-0: the tool broke"]
    assert made.journal.dropped_groups == 1
    states = {name: (state, reason) for name, state, _, reason in made.ledger.history()}
    assert states["00000000-000"] == ("dropped", "problem echo-0: the tool broke")
    assert states["00000000-001"] == ("dropped", "a sibling failed: problem echo-0: the tool broke")
    assert states["00000002-000"] == ("finished", None)


def test_a_failure_that_trying_again_cannot_mend_is_not_tried_again(bench: Callable[..., Bench]) -> None:
    made = bench(broken_in(0, final=True), schedule={"attempts": 5})
    made.collector.next_batch(0)
    assert [job.attempt for job in made.pool.jobs if job.group == 0] == [0, 0]


def test_many_failures_in_a_row_end_the_run_with_the_last_reason(bench: Callable[..., Bench]) -> None:
    made = bench(broken_in(*range(100)), schedule={"attempts": 2, "max_failed_groups": 3})
    with pytest.raises(RunError, match=r"^3 groups in a row failed; the last one: problem echo-\d: the tool broke$"):
        made.collector.next_batch(0)


def test_successes_between_failures_keep_the_run_going(bench: Callable[..., Bench]) -> None:
    made = bench(broken_in(*range(0, 60, 2)), schedule={"attempts": 1, "max_failed_groups": 3})
    for version in range(8):
        assert all(number % 2 for number in numbers(made.collector.next_batch(version)))


def test_fault_E1_a_wait_has_a_limit_and_names_what_it_waits_for(bench: Callable[..., Bench]) -> None:
    def one_missing(job: Job) -> list[Event]:
        return [] if (job.group, job.sibling) == (1, 1) else works(job)

    made = bench(one_missing, schedule={"mode": "sync", "wait_timeout": 0.05})
    with pytest.raises(RunError, match=r"nothing happened for .* \(schedule.wait_timeout\).*waited for group 1 "):
        made.collector.next_batch(0)


def test_an_engine_that_only_reports_that_it_lives_is_no_progress(bench: Callable[..., Bench]) -> None:
    made = bench(lambda job: [], schedule={"wait_timeout": 0.05})
    made.pool.always = [Activity([], 0)]
    with pytest.raises(RunError, match="nothing happened"):
        made.collector.next_batch(0)


def test_an_interrupt_ends_the_wait(bench: Callable[..., Bench]) -> None:
    asked = iter([False, False, True])

    def check() -> None:
        if next(asked):
            raise RunError("asked to stop")

    made = bench(lambda job: [], check=check)
    with pytest.raises(RunError, match="asked to stop"):
        made.collector.next_batch(0)


@pytest.mark.parametrize("error", [2e-3, math.nan, math.inf])
def test_fault_D2_an_engine_with_a_wrong_canary_is_refused(bench: Callable[..., Bench], error: float) -> None:
    made = bench()
    made.pool.later = [Synced(7, error)]
    with pytest.raises(RunError, match="wrong weights after taking version 7"):
        made.collector.next_batch(0)


def test_a_canary_is_logged_and_not_judged_where_precisions_differ(bench: Callable[..., Bench]) -> None:
    made = bench(rollout={"dtype": "int8"})
    made.pool.later = [Synced(0, 0.2)]
    made.collector.next_batch(0)
    assert made.collector.canary_error == 0.2


def test_what_nobody_expects_is_ignored(bench: Callable[..., Bench]) -> None:
    """Twice the same trajectory, one of a dropped group, one of a group that was taken, failures of both."""

    def twice(job: Job) -> list[Event]:
        return broken_in(0, times=1)(job) if job.sibling == 0 else works(job) * 2

    made = bench(twice, schedule={"attempts": 1})
    first = made.collector.next_batch(0)
    assert numbers(first) == [2, 1]
    stale = [job for job in made.pool.jobs if job.group in (0, 1)]
    made.pool.later = [event for job in stale for event in (Finished(trajectory(job)), Failed(job, "late"))]
    assert numbers(made.collector.next_batch(1)) == [3, 4]
    assert made.journal.dropped_groups == 1
    assert len({(t.group, t.sibling) for group in first for t in group.trajectories}) == 4


def test_a_replaced_engine_is_told_and_the_wait_goes_on(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.pool.later = [Died("engine-0 ended without a word"), Ready()]
    made.collector.next_batch(0)
    assert made.notices == ["an engine process was replaced and its work issued again: engine-0 ended without a word"]


def test_a_task_that_raises_ends_the_run_in_one_sentence(bench: Callable[..., Bench]) -> None:
    made = bench(task=Faulty(how="problem", every=3, only=1))
    with pytest.raises(RunError, match=r"^the task raised LookupError for problem 1: the shelf is empty$"):
        made.collector.next_batch(0)


LOCKSTEP = {"mode": "lockstep", "inter": 8, "intra": 3, "intra_every": 2}


def test_fault_C7_each_minibatch_of_a_lockstep_batch_has_its_own_target(bench: Callable[..., Bench]) -> None:
    """Four groups in four minibatches: the last one is trained three versions later, and sampled for that."""
    made = bench(schedule=LOCKSTEP, learner={"prompts_per_step": 4, "minibatches": 4})
    assert numbers(made.collector.next_batch(20)) == [0, 1, 2, 3]
    windows = {job.group: job.window for job in made.pool.jobs}
    assert [windows[g].target for g in range(4)] == [20, 21, 22, 23]
    assert [windows[3](i) for i in range(8)] == [23 - 8 - max(0, 3 - i // 2) for i in range(8)]
    assert numbers(made.collector.next_batch(24)) == [4, 5, 6, 7]
    assert [job.window.target for job in made.pool.jobs[8:]] == [24, 24, 25, 25, 26, 26, 27, 27]


def test_fault_C7_a_replacement_is_sampled_for_the_minibatch_it_is_trained_in(bench: Callable[..., Bench]) -> None:
    made = bench(
        broken_in(1, 4), schedule=LOCKSTEP | {"attempts": 1}, learner={"prompts_per_step": 4, "minibatches": 4}
    )
    batch = made.collector.next_batch(20)
    assert numbers(batch) == [0, 5, 2, 3], "group 1, then its replacement 4, are replaced in their place"
    windows = {job.group: job.window.target for job in made.pool.jobs}
    assert [windows[number] for number in numbers(batch)] == [20, 21, 22, 23]
    assert numbers(made.collector.next_batch(24)) == [6, 7, 8, 9]


def test_fault_E3_a_resumed_run_issues_only_what_had_not_finished(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """Group 0 had one of two, group 1 had failed once, 2 and 3 had nothing: numbers, attempts, deadlines go on."""

    def killed_early(job: Job) -> list[Event]:
        if (job.group, job.sibling) == (0, 0):
            return works(job)
        return broken_in(1, times=1)(job) if job.attempt == 0 and job.group == 1 and job.sibling == 0 else []

    before = bench(killed_early, schedule=ASYNC | {"max_staleness": 1, "wait_timeout": 0.05})
    with pytest.raises(RunError, match="nothing happened"):
        before.collector.next_batch(0)
    before.ledger.close()

    after = bench(schedule=ASYNC | {"max_staleness": 1})
    after.schedule.next_group = after.ledger.next_group
    after.collector.take_up(after.journal.rewind(0, None, redo_from=None), 0)
    assert [(job.group, job.sibling, job.attempt) for job in after.pool.jobs] == [(0, 1, 0)]
    assert numbers(after.collector.next_batch(0)) == [0, 1]
    issued = [(job.group, job.sibling, job.attempt) for job in after.pool.jobs]
    assert issued == [(0, 1, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0), (2, 1, 0), (3, 0, 0), (3, 1, 0)]
    assert numbers(after.collector.next_batch(1)) == [2, 3]
    assert [job.group for job in after.pool.jobs[7:]] == [4, 4, 5, 5]
