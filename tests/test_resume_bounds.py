"""What a resume must not break: staleness bounds, whole groups, retries that are issued if and only if recorded."""

import pytest

from estr.errors import RunError
from estr.runtime.accounting import Accounting
from estr.runtime.collector import Collector
from estr.runtime.journal import RunJournal
from estr.runtime.messages import Failed, Finished
from estr.schedule import Schedule, ScheduleRules, Ticket
from estr.storage.ledger import Ledger
from estr.storage.rollout_files import RolloutWriter, read_rollouts
from estr.storage.rollouts import Settlement
from estr.trajectory import Trajectory
from loop_helpers import small
from loop_tasks import Echo
from test_resume_machine import LogicalPool, Sink, finished


def schedule(**changes):
    return Schedule(ScheduleRules(**{"prompts_per_step": 1, "group_size": 2, "max_staleness": 2} | changes))


def done(group, sibling):
    return Trajectory(group, sibling, 0, "t", "p", seed=0, finish_reason="stop", reward=1.0)


def test_a_group_that_goes_on_at_an_older_version_is_due_earlier():
    """Killed at version 13, resumed at 10: the missing sibling starts at 10 and must be trained by 12, not by 15."""
    taken_up = schedule()
    taken_up.take_up(7, 13, {}, [done(7, 0)])
    assert taken_up.admissible(10) == 0
    assert taken_up.release(10) == [[Ticket(7, 1, 0)]]
    assert taken_up.outstanding[0].deadline == 12
    assert taken_up.release(10) == []


def test_what_the_reservations_do_not_allow_yet_is_held():
    """Three complete groups fill the batches that start at 10, 11 and 12; the fourth may not be due with them."""
    taken_up = schedule()
    for number, first in ((4, 10), (5, 10), (6, 10), (7, 13)):
        taken_up.take_up(number, first, {}, [done(number, sibling) for sibling in range(1 if number == 7 else 2)])
    assert taken_up.release(10) == []
    assert taken_up.admissible(10) == 0
    assert [group.number for group in taken_up.take(10)] == [4]
    assert taken_up.release(11) == [[Ticket(7, 1, 0)]]
    assert taken_up.outstanding[-1].deadline == 13


def test_a_complete_group_keeps_its_deadline():
    taken_up = schedule()
    taken_up.take_up(3, 9, {}, [done(3, 0), done(3, 1)])
    assert taken_up.release(10) == []
    assert taken_up.outstanding[0].deadline == 11
    assert taken_up.admissible(10) == 2


class Bench:
    def __init__(self, tmp_path):
        config = small(schedule={"mode": "async", "max_staleness": 1, "attempts": 2})
        rules = ScheduleRules(prompts_per_step=2, group_size=2, max_staleness=1, attempts=2)
        self.pool, self.ledger = LogicalPool(), Ledger(tmp_path / "ledger.sqlite")
        self.journal = RunJournal(config, self.ledger, RolloutWriter(tmp_path))
        accounting = Accounting(Sink(), 1)
        self.collector = Collector(
            config,
            Schedule(rules),
            self.pool,
            Echo(),
            self.journal,
            accounting,
            notice=lambda _: None,
            minibatch_of=lambda place: 0,
        )
        self.collector.fill(0)

    def fail(self, key):
        self.pool.queue.append(Failed(self.pool.running.pop(key).job, "the tool broke"))
        self.collector.absorb_waiting()


@pytest.mark.parametrize("method", ["issued", "failed"])
def test_a_failed_attempt_and_the_next_one_are_one_transaction(tmp_path, monkeypatch, method):
    """Killed between the two, a resume would find a sibling that neither runs nor may be issued."""
    bench = Bench(tmp_path)
    real = getattr(bench.journal, method)

    def then_killed(*arguments):
        real(*arguments)
        raise RunError("killed")

    monkeypatch.setattr(bench.journal, method, then_killed)
    with pytest.raises(RunError, match="killed"):
        bench.fail("0/0/0")
    states = {name: state for name, state, _, _ in bench.ledger.history()}
    assert states["00000000-000"] == "issued"
    assert "00000000-000.1" not in states


def test_a_last_attempt_and_the_end_of_its_group_are_one_transaction(tmp_path, monkeypatch):
    bench = Bench(tmp_path)
    bench.fail("0/0/0")

    def killed(*_):
        raise RunError("killed")

    monkeypatch.setattr(bench.journal, "dropped", killed)
    with pytest.raises(RunError, match="killed"):
        bench.fail("0/0/1")
    states = {name: state for name, state, _, _ in bench.ledger.history() if name.startswith("00000000")}
    assert states == {"00000000-000": "dropped", "00000000-000.1": "issued", "00000000-001": "issued"}


def test_drops_at_the_end_of_a_run_are_withdrawn_by_a_resume_that_goes_further(tmp_path):
    """They are recorded for the step after the last one; a row under the last one would be written twice."""
    bench = Bench(tmp_path)
    batch = [finished(bench.pool.running[key].job, 0, 0) for key in ("1/0/0", "1/1/0")]
    for one in batch:
        bench.journal.finished([Finished(one)])
    bench.journal.trained([(one, Settlement("trained", trained_step=1, target_version=0)) for one in batch], 1)
    bench.journal.store_rows()
    bench.fail("0/0/0")
    bench.journal.unfinished([], 1)
    position = bench.journal.position()
    rollouts = RolloutWriter(tmp_path)
    assert len(read_rollouts(tmp_path)) == 3
    rollouts.withdraw_after(1)
    again = RunJournal(small(), bench.ledger, rollouts, 1)
    again.rewind(1, position, redo_from=None)
    again.unfinished([], 1)
    rows = {row["trajectory_id"]: row["drop_reason"] for row in read_rollouts(tmp_path).to_pylist()}
    assert rows == {"00000001-000": None, "00000001-001": None, "00000000-000": "the tool broke"}
