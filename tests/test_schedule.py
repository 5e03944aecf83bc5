"""The schedule on a logical clock: admission, overtaking, reservations, failures."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.schedule import Group, Schedule, ScheduleRules, Ticket, Waiting
from estr.trajectory import Trajectory


def rules(**changes: int) -> ScheduleRules:
    values = {"prompts_per_step": 2, "group_size": 2, "max_staleness": 2} | changes
    return ScheduleRules(**values)


def trajectory(ticket: Ticket) -> Trajectory:
    return Trajectory(ticket.group, ticket.sibling, ticket.attempt, "t", "p", seed=0, finish_reason="stop", reward=1.0)


def finish_group(schedule: Schedule, tickets: list[Ticket]) -> None:
    for ticket in tickets:
        assert schedule.finish(trajectory(ticket))


def test_admits_exactly_what_the_staleness_bound_allows() -> None:
    schedule = Schedule(rules(max_staleness=2))
    assert schedule.admissible(0) == 2 * 3
    for _ in range(6):
        schedule.admit(0)
    assert schedule.admissible(0) == 0


def test_fault_C10_max_staleness_zero_is_strictly_synchronous_and_progresses() -> None:
    schedule = Schedule(rules(max_staleness=0))
    for version in range(3):
        assert schedule.admissible(version) == 2
        tickets = [schedule.admit(version) for _ in range(2)]
        assert schedule.admissible(version) == 0
        for group in tickets:
            finish_group(schedule, group)
        batch = schedule.take(version)
        assert isinstance(batch, list)
        assert [group.admitted_version for group in batch] == [version, version]


def test_a_slow_group_is_overtaken_until_its_reserved_step() -> None:
    schedule = Schedule(rules(prompts_per_step=1, max_staleness=2))
    slow, *fast = (schedule.admit(0) for _ in range(3))
    for version, tickets in enumerate(fast):
        finish_group(schedule, tickets)
        batch = schedule.take(version)
        assert isinstance(batch, list)
        assert batch[0].number == tickets[0].group
    late = schedule.admit(2)
    finish_group(schedule, late)
    waiting = schedule.take(2)
    assert isinstance(waiting, Waiting)
    assert waiting.due == (slow[0].group,)
    assert str(slow[0].group) in str(waiting)
    finish_group(schedule, slow)
    batch = schedule.take(2)
    assert isinstance(batch, list)
    assert batch[0].number == slow[0].group


def test_two_slow_groups_are_not_both_left_to_one_step() -> None:
    """Both are due at version 2 where one batch has one place: the second overtaking must wait."""
    schedule = Schedule(rules(prompts_per_step=1, max_staleness=2))
    schedule.admit(0), schedule.admit(0)
    fast = schedule.admit(0)
    finish_group(schedule, fast)
    assert isinstance(schedule.take(0), list)
    newer = schedule.admit(1)
    finish_group(schedule, newer)
    assert isinstance(schedule.take(1), Waiting)


def test_fault_C1_staleness_bound_is_inclusive_at_consumption() -> None:
    schedule = Schedule(rules(prompts_per_step=1, max_staleness=2))
    tickets = schedule.admit(3)
    finish_group(schedule, tickets)
    assert schedule.outstanding[0].deadline == 5
    assert isinstance(schedule.take(5), list)


def test_minibatches_and_epochs_shorten_the_lag() -> None:
    assert rules(max_staleness=5, steps_per_batch=4).lag == 2
    with pytest.raises(ValueError, match="at least that"):
        rules(max_staleness=2, steps_per_batch=4)


def test_failed_sibling_is_retried_a_bounded_number_of_times_then_its_group_is_dropped() -> None:
    schedule = Schedule(rules(attempts=3))
    ticket = schedule.admit(0)[1]
    assert schedule.fail(ticket.group, 1) == Ticket(ticket.group, 1, 1)
    assert schedule.fail(ticket.group, 1) == Ticket(ticket.group, 1, 2)
    dropped = schedule.fail(ticket.group, 1)
    assert isinstance(dropped, Group)
    assert schedule.fail(ticket.group, 1) is None
    assert not schedule.finish(trajectory(ticket))


def test_fault_E1_capacity_is_refilled_when_a_group_fails() -> None:
    schedule = Schedule(rules(prompts_per_step=1, max_staleness=0, attempts=1))
    ticket = schedule.admit(0)[0]
    assert schedule.admissible(0) == 0
    assert isinstance(schedule.fail(ticket.group, 0), Group)
    assert schedule.admissible(0) == 1


def test_many_failures_in_a_row_are_hopeless_and_a_success_resets_them() -> None:
    schedule = Schedule(rules(attempts=1, max_failed_groups=2, max_staleness=9))
    schedule.fail(schedule.admit(0)[0].group, 0)
    assert not schedule.hopeless
    finish_group(schedule, schedule.admit(0))
    schedule.fail(schedule.admit(0)[0].group, 0)
    assert not schedule.hopeless
    schedule.fail(schedule.admit(0)[0].group, 0)
    assert schedule.hopeless


def test_no_more_groups_are_admitted_than_the_run_will_train() -> None:
    schedule = Schedule(rules(max_staleness=4), total_groups=3)
    assert schedule.admissible(0) == 3


def test_a_trajectory_that_comes_twice_is_refused() -> None:
    schedule = Schedule(rules())
    ticket = schedule.admit(0)[0]
    assert schedule.finish(trajectory(ticket))
    assert not schedule.finish(trajectory(ticket))


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.integers(1, 4),
    steps=st.integers(1, 3),
    slack=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
def test_the_bound_holds_and_the_learner_never_starves(prompts: int, steps: int, slack: int, seed: int) -> None:
    """Groups finish in any order, some fail for good: every taken group keeps the bound, and there is always either a
    batch to take or unfinished work to wait for."""
    schedule = Schedule(rules(prompts_per_step=prompts, steps_per_batch=steps, max_staleness=steps - 1 + slack))
    order = random.Random(seed)
    running: list[Ticket] = []
    version, trained = 0, set()
    for _ in range(400):
        while schedule.admissible(version):
            running += schedule.admit(version)
        batch = schedule.take(version)
        if isinstance(batch, list):
            for group in batch:
                assert group.number not in trained
                trained.add(group.number)
                assert version + steps - 1 - group.admitted_version <= schedule.rules.max_staleness
            version += steps
            continue
        assert running, "the learner waits and nothing runs"
        ticket = running.pop(order.randrange(len(running)))
        if order.random() < 0.1:
            outcome = schedule.fail(ticket.group, ticket.sibling)
            if isinstance(outcome, Ticket):
                running.append(outcome)
            else:
                running = [other for other in running if other.group != ticket.group]
        else:
            schedule.finish(trajectory(ticket))
    assert version > 0
