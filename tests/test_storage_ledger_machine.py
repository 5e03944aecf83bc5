"""Random events against a model of the ledger: no trajectory lost, none trained twice, no group trained short."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from estr.storage.ledger import Ledger
from estr.trajectory import Segment, Trajectory

SIZE = 2


def made(group, sibling, attempt):
    ones = np.full(2, group, np.float32)
    segment = Segment(np.array([sibling, attempt], np.int32), np.ones(2, np.bool_), ones, ones, np.zeros(2, np.int32))
    return Trajectory(group, sibling, attempt, "t", "p", 1000 * group + 10 * sibling + attempt, [segment])


class LedgerMachine(RuleBasedStateMachine):
    """``live`` is (group, sibling) → [attempt, state, step]; ``dropped`` holds ids; ``weights`` is step → ids that were
    trained in the surviving history of the weights."""

    @initialize()
    def start(self):
        self.directory = Path(tempfile.mkdtemp())
        self.ledger = Ledger(self.directory / "ledger.sqlite")
        self.live, self.dropped, self.weights, self.checkpoints, self.step = {}, set(), {}, [0], 0

    def teardown(self):
        self.ledger.close()
        shutil.rmtree(self.directory)

    def name(self, key):
        return made(*key, self.live[key][0]).trajectory_id

    def keys(self, *states):
        return sorted(key for key, (_, state, _) in self.live.items() if state in states)

    def issue(self, group, sibling, attempt):
        self.ledger.issue(group, sibling, attempt, seed=made(group, sibling, attempt).seed, group_size=SIZE)
        self.live[group, sibling] = [attempt, "issued", None]

    @rule()
    def admit(self):
        group = self.ledger.next_group
        with self.ledger.batch():
            for sibling in range(SIZE):
                self.issue(group, sibling, 0)

    @precondition(lambda self: self.keys("issued"))
    @rule(data=st.data())
    def finish(self, data):
        key = data.draw(st.sampled_from(self.keys("issued")))
        self.ledger.finish(made(*key, self.live[key][0]))
        self.live[key][1] = "finished"

    @precondition(lambda self: self.keys("issued"))
    @rule(data=st.data())
    def fail_and_retry(self, data):
        key = data.draw(st.sampled_from(self.keys("issued")))
        name, attempt = self.name(key), self.live[key][0]
        with self.ledger.batch():
            self.ledger.drop(name, "failed", self.step + 1)
            self.issue(*key, attempt + 1)
        self.dropped.add(name)

    @precondition(lambda self: self.keys("issued", "finished"))
    @rule(data=st.data())
    def fail_for_good(self, data):
        group, _ = data.draw(st.sampled_from(self.keys("issued", "finished")))
        for one in self.ledger.drop_group(group, "failed", self.step + 1):
            self.dropped.add(one.trajectory_id)
            del self.live[group, one.sibling]

    def whole_groups(self):
        finished = self.keys("finished")
        return [group for group, sibling in finished if sibling == 0 and (group, 1) in finished]

    @precondition(lambda self: self.whole_groups())
    @rule(data=st.data())
    def train(self, data):
        groups = data.draw(st.lists(st.sampled_from(self.whole_groups()), unique=True, min_size=1))
        self.step += 1
        names = [self.name((group, sibling)) for group in groups for sibling in range(SIZE)]
        self.ledger.settle(names, self.step)
        self.weights[self.step] = names
        for group in groups:
            for sibling in range(SIZE):
                self.live[group, sibling][1:] = ["trained", self.step]

    @rule(keep=st.integers(1, 3))
    def checkpoint(self, keep):
        self.checkpoints = sorted({*self.checkpoints, self.step})[-keep:]
        self.ledger.commit(self.step, prune_through=self.checkpoints[0])

    @rule(data=st.data(), hard=st.booleans())
    def kill_and_resume(self, data, hard):
        if not hard:
            self.ledger.close()  # else the old connection stays, as a killed process leaves the files
        self.ledger = Ledger(self.ledger.path)
        step = data.draw(st.sampled_from(self.checkpoints))
        rewind = self.ledger.rewind_to(step)
        undone = {name for later, names in self.weights.items() if later > step for name in names}
        self.weights = {number: names for number, names in self.weights.items() if number <= step}
        self.checkpoints = [kept for kept in self.checkpoints if kept <= step]
        self.step = step
        for entry in self.live.values():
            if entry[1] == "trained" and entry[2] > step:
                entry[1:] = ["finished", None]
        assert set(rewind.finished_again) == undone
        assert [(one.group, one.sibling) for one in rewind.in_flight] == self.keys("issued")
        for one in rewind.in_flight:
            assert one.seed == made(one.group, one.sibling, one.attempt).seed
            self.issue(one.group, one.sibling, one.attempt)

    @invariant()
    def the_ledger_is_as_the_model_says(self):
        expected = {self.name(key): (state, step) for key, (_, state, step) in self.live.items()}
        history = self.ledger.history()
        assert {name: (state, step) for name, state, step, _ in history if state != "dropped"} == expected
        assert {name for name, state, _, _ in history if state == "dropped"} == self.dropped

    @invariant()
    def what_finished_is_there_to_be_trained(self):
        found = [(one.group, one.sibling) for one in self.ledger.finished()]
        assert found == self.keys("finished")
        for one in self.ledger.finished():
            assert one.segments[0].tokens.tolist() == [one.sibling, one.attempt]

    @invariant()
    def the_weights_saw_each_trajectory_once_and_groups_whole(self):
        names = [name for names in self.weights.values() for name in names]
        assert len(names) == len(set(names)) == self.ledger.counts()["trained"]
        assert len(names) == SIZE * len({name[:8] for name in names})


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
