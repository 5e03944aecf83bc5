"""Collector, schedule, journal, ledger and rollouts under random events on a logical clock, with a scripted engine.

Engines start, finish, fail and die; the learner trains, skips steps and publishes; the process is killed between two
events and resumed from one of its checkpoints. Whatever the order: every trajectory is trained exactly once in the
surviving history of the weights or dropped with a reason, groups are whole, and the staleness bound holds.
"""

import collections
import dataclasses
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from estr.learner.rollouts import minibatch_plan
from estr.runtime.accounting import Accounting
from estr.runtime.collector import Collector
from estr.runtime.journal import RunJournal
from estr.runtime.messages import Failed, Finished, KeptTurn, Progress
from estr.runtime.setup import _minibatches
from estr.schedule import Schedule, ScheduleRules
from estr.storage.ledger import Ledger
from estr.storage.rollout_files import RolloutWriter, read_rollouts
from estr.storage.rollouts import Settlement
from estr.trajectory import Segment, Trajectory, derive_seed
from loop_helpers import small
from loop_tasks import Echo

NAN = np.float32("nan")


class WouldWaitError(Exception):
    """The learner has nothing to train yet."""


class Sink:
    def write(self, *_):
        pass


@dataclasses.dataclass
class Running:
    job: object
    first: int | None = None  # version of the first token, once it was sampled


class LogicalPool:
    """Jobs in the order they came; the machine decides what becomes of them."""

    def __init__(self):
        self.running: dict[str, Running] = {}
        self.queue = []

    def submit(self, jobs):
        for job in jobs:
            assert job.key not in self.running, f"{job.key} was submitted twice"
            first = None if job.kept is None else int(job.kept.progress.trajectory.action_versions[0])
            self.running[job.key] = Running(job, first)

    def events(self, timeout):
        if timeout and not self.queue:
            raise WouldWaitError
        events, self.queue = self.queue, []
        return events

    def cancel_group(self, group):
        self.running = {key: one for key, one in self.running.items() if one.job.group != group}

    def publish(self, *_): ...

    def close(self): ...


def finished(job, first, last):
    row = Segment(
        np.array([3, 4, 5], np.int32),
        np.array([False, True, True]),
        np.array([NAN, -0.5, -0.5], np.float32),
        np.array([NAN, 1.0, 1.0], np.float32),
        np.array([-1, first, last], np.int32),
    )
    seed = derive_seed(job.run_seed, job.group, job.sibling, job.attempt)
    about = (job.group, job.sibling, job.attempt, job.problem.task_id, job.problem.prompt, seed)
    return Trajectory(*about, [row], reward=0.5, finish_reason="stop", group_key=job.problem.task_id)


def kept_turn(one, version):
    return KeptTurn.of(Progress(finished(one.job, one.first, version), [], 1, "stop", None))


def about(event):
    if isinstance(event, KeptTurn):
        return event.ticket
    return event.job if isinstance(event, Failed) else event.trajectory


class ResumeMachine(RuleBasedStateMachine):
    """``weights`` is step → ids trained in it, of the surviving history; ``checkpoints`` is step → what one holds."""

    @initialize(
        mode=st.sampled_from(["async", "async", "sync"]),
        prompts=st.integers(1, 2),
        size=st.integers(1, 3),
        minibatches=st.integers(1, 2),
        slack=st.integers(0, 3),
    )
    def start(self, mode, prompts, size, minibatches, slack):
        minibatches = min(minibatches, prompts)
        self.config = small(
            schedule={"mode": mode, "max_staleness": minibatches - 1 + slack, "attempts": 2, "max_failed_groups": 1000},
            learner={"prompts_per_step": prompts, "minibatches": minibatches},
            rollout={"group_size": size},
        )
        self.rules = ScheduleRules(
            prompts_per_step=prompts,
            group_size=size,
            steps_per_batch=minibatches,
            max_staleness=minibatches - 1 + (slack if mode == "async" else 0),
            attempts=2,
            max_failed_groups=1000,
        )
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        (self.directory / "rollouts").mkdir()
        self.weights, self.step, self.version = {}, 0, 0
        self.checkpoints = {0: (0, 0, None)}
        self.begin()
        self.collector.fill(0)

    def begin(self):
        self.ledger = Ledger(self.directory / "ledger.sqlite")
        self.rollouts = RolloutWriter(self.directory / "rollouts")
        self.journal = RunJournal(self.config, self.ledger, self.rollouts, self.step)
        self.schedule, self.pool = Schedule(self.rules), LogicalPool()
        self.collector = Collector(
            self.config,
            self.schedule,
            self.pool,
            Echo(),
            self.journal,
            Accounting(Sink(), 1),
            notice=lambda _: None,
            minibatch_of=_minibatches(self.config).__getitem__,
        )

    # ------------------------------------------------------------------ the engines

    def jobs(self, started=None):
        chosen = (one for one in self.pool.running.values() if started is None or (one.first is not None) == started)
        return sorted((one.job.key for one in chosen), key=lambda key: [int(part) for part in key.split("/")])

    @precondition(lambda self: self.jobs(started=False))
    @rule(data=st.data())
    def first_token(self, data):
        self.pool.running[data.draw(st.sampled_from(self.jobs(started=False)))].first = self.version

    @precondition(lambda self: self.jobs(started=True))
    @rule(data=st.data(), twice=st.booleans())
    def finish(self, data, twice):
        one = self.pool.running.pop(data.draw(st.sampled_from(self.jobs(started=True))))
        self.pool.queue += [Finished(finished(one.job, one.first, self.version))] * (1 + twice)

    @precondition(lambda self: self.jobs(started=True))
    @rule(data=st.data())
    def end_a_turn(self, data):
        one = self.pool.running[data.draw(st.sampled_from(self.jobs(started=True)))]
        self.pool.queue.append(kept_turn(one, self.version))

    @precondition(lambda self: self.jobs())
    @rule(data=st.data(), final=st.booleans())
    def fail(self, data, final):
        one = self.pool.running.pop(data.draw(st.sampled_from(self.jobs())))
        self.pool.queue.append(Failed(one.job, "the tool broke", final))

    @rule(seed=st.integers(0, 2**16), steps=st.integers(1, 5))
    def go_on(self, seed, steps):
        """Some optimizer steps with everything in a random order."""
        draw, target = random.Random(seed), self.step + steps
        for _ in range(400):
            self.train(draw.random() < 0.1)
            if self.step >= target or not self.pool.running:
                return
            one = self.pool.running[draw.choice(self.jobs())]
            if one.first is None:
                one.first = self.version
            elif draw.random() < 0.2:
                self.pool.queue.append(kept_turn(one, self.version))
            elif draw.random() < 0.03:
                self.pool.queue.append(Failed(self.pool.running.pop(one.job.key).job, "the tool broke"))
            else:
                self.pool.running.pop(one.job.key)
                self.pool.queue.append(Finished(finished(one.job, one.first, self.version)))

    @rule()
    def an_engine_dies(self):
        for one in self.pool.running.values():
            one.first = None if one.job.kept is None else int(one.job.kept.progress.trajectory.action_versions[0])

    # ------------------------------------------------------------------ the learner

    @rule()
    def absorb(self):
        self.collector.absorb_waiting()

    @rule(skipped=st.sampled_from([False, False, False, True]))
    def train(self, skipped):
        try:
            groups = self.collector.next_batch(self.version)
        except WouldWaitError:
            return
        for part in minibatch_plan(len(groups), self.rules.steps_per_batch, 1, 0):
            self.optimizer_step([t for place in part for t in groups[place].trajectories], skipped)

    def optimizer_step(self, batch, skipped):
        for one in batch:
            assert self.version - int(one.action_versions[0]) <= self.rules.max_staleness
        target, self.step = self.version, self.step + 1
        if skipped:
            settlement = Settlement("dropped", drop_reason="the step was skipped")
        else:
            self.version += 1
            self.weights[self.step] = [one.trajectory_id for one in batch]
            settlement = Settlement("trained", trained_step=self.step, target_version=target)
        self.journal.trained([(one, settlement) for one in batch], self.step)
        self.journal.store_rows()

    @rule(keep=st.integers(1, 3))
    def checkpoint(self, keep):
        self.checkpoints[self.step] = (self.version, self.schedule.next_group, self.journal.position())
        self.checkpoints = dict(sorted(self.checkpoints.items())[-keep:])
        self.journal.commit(self.step, prune_through=min(self.checkpoints))

    @rule(data=st.data(), again=st.booleans())
    def kill_and_resume(self, data, again):
        self.step = data.draw(st.sampled_from(sorted(self.checkpoints)))
        self.version, next_group, position = self.checkpoints[self.step]
        self.checkpoints = {step: held for step, held in self.checkpoints.items() if step <= self.step}
        self.weights = {step: names for step, names in self.weights.items() if step <= self.step}
        for _ in range(1 + again):
            self.ledger.close()
            self.begin()
            self.rollouts.withdraw_after(self.step)
            self.schedule.next_group = max(self.ledger.next_group, next_group)
            backlog = self.journal.rewind(self.step, position, redo_from=None)
            self.collector.take_up(backlog, self.version)

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def the_weights_saw_whole_groups_once(self):
        names = [name for trained in self.weights.values() for name in trained]
        sizes = collections.Counter(name[:8] for name in names)
        assert len(names) == len(set(names)) == self.ledger.counts()["trained"]
        assert set(sizes.values()) <= {self.rules.group_size}

    @invariant()
    def nothing_is_lost(self):
        """Whatever was issued and is not settled is in the schedule, or waits to be issued again."""
        live = {name for name, state, _, _ in self.ledger.history() if state in ("issued", "finished")}
        scheduled = {group.number for group in self.schedule.outstanding}
        waiting = {number for number, _ in self.collector._backlog}
        assert {int(name[:8]) for name in live} == scheduled | waiting
        for group in self.schedule.outstanding:
            missing = set(range(group.size)) - set(group.finished)
            running = {one.job.sibling for one in self.pool.running.values() if one.job.group == group.number}
            queued = {one.sibling for one in map(about, self.pool.queue) if one.group == group.number}
            assert (set() if group.held else missing) <= running | queued

    def teardown(self):
        try:
            self.drain()
        finally:
            self.ledger.close()
            shutil.rmtree(self.directory)

    def drain(self):
        """From any state the run goes on to train, and what is stored is what the ledger says."""
        for _ in range(4):
            before = self.step
            for _ in range(1000):
                for one in list(self.pool.running.values()):
                    first = self.version if one.first is None else one.first
                    self.pool.queue.append(Finished(finished(one.job, first, self.version)))
                self.pool.running.clear()
                self.train(False)
                if self.step > before:
                    break
            assert self.step > before, "the learner waits and nothing can come"
        self.journal.unfinished(self.schedule.outstanding, self.step)
        rows = {row["trajectory_id"]: row for row in read_rollouts(self.directory).to_pylist()}
        for name, state, step, reason in self.ledger.history():
            if state == "trained":
                assert (rows[name]["state"], rows[name]["trained_step"]) == ("trained", step)
            elif state == "dropped":
                assert (rows[name]["state"], rows[name]["drop_reason"]) == ("dropped", reason)


def run(examples, steps):
    phases = (Phase.reuse, Phase.generate)  # shrinking such long histories takes longer than it helps
    chosen = settings(max_examples=examples, stateful_step_count=steps, deadline=None, phases=phases)
    run_state_machine_as_test(ResumeMachine, settings=chosen)


def test_fault_E3_random_events_keep_every_promise():
    run(15, 40)


@pytest.mark.slow
def test_fault_E3_ten_thousand_random_events_keep_every_promise():
    run(125, 80)
