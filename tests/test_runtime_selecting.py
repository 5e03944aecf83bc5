"""DAPO's dynamic sampling in the collector and in whole runs: what is dropped, replaced, bounded and written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from estr.errors import RunError
from estr.runtime.messages import Event, Finished, Job
from estr.storage.rollout_files import read_rollouts
from loop_helpers import metrics_without_clock, rollouts, small
from loop_methods import run
from test_runtime_collector import ASYNC, Bench, ScriptedPool, numbers, trajectory

DAPO = {"selection": "dapo"}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(script: Any, **changes: Mapping[str, Any]) -> Bench:
        made.append(
            Bench(tmp_path, small(objective=DAPO | changes.pop("objective", {}), **changes), ScriptedPool(script))
        )
        return made[-1]

    yield make
    for each in made:
        each.ledger.close()


def rewards(of: Callable[[Job], float]) -> Callable[[Job], list[Event]]:
    def script(job: Job) -> list[Event]:
        made = trajectory(job)
        made.reward = of(job)
        return [Finished(made)]

    return script


def flat_in(*groups: int) -> Callable[[Job], list[Event]]:
    """Rewards differ between siblings, except in these groups."""
    return rewards(lambda job: 1.0 if job.group in groups else float(job.sibling % 2))


@pytest.mark.parametrize("schedule", [{"mode": "lockstep"}, ASYNC], ids=["lockstep", "async"])
def test_a_group_without_spread_is_dropped_with_the_reason_and_replaced(
    bench: Callable[..., Bench], schedule: dict[str, Any]
) -> None:
    made = bench(flat_in(0, 2), schedule=schedule)
    assert sorted(numbers(made.collector.next_batch(0))) == [1, 3]
    assert made.journal.dropped_groups == 2
    assert [(one.trajectory.group, one.settlement.drop_reason) for one in made.journal._dropped] == [
        (group, "no reward spread") for group in (0, 0, 2, 2)
    ]
    assert {t.group for t in made.ledger.finished()} & {0, 2} == set()
    assert made.collector.selection.metrics() == {"selection/dropped_groups": 2.0}
    assert made.collector.selection.metrics() == {"selection/dropped_groups": 0.0}


def test_in_lockstep_the_replacement_takes_the_place(bench: Callable[..., Bench]) -> None:
    """Place 0 is trained by minibatch 0 and place 1 by minibatch 1, and with it the version that is aimed at."""
    made = bench(
        flat_in(0), schedule={"mode": "lockstep", "inter": 1}, learner={"prompts_per_step": 2, "minibatches": 2}
    )
    assert numbers(made.collector.next_batch(4)) == [2, 1]
    assert {job.group: job.window.target for job in made.pool.jobs} == {0: 4, 1: 5, 2: 4}


def test_without_the_rule_such_groups_train(bench: Callable[..., Bench]) -> None:
    made = bench(rewards(lambda job: 1.0), objective={"selection": "none"})
    assert numbers(made.collector.next_batch(0)) == [0, 1]
    assert made.collector.selection.metrics() == {}


def test_a_group_with_no_valid_reward_is_dropped_and_one_with_some_is_judged_by_them(
    bench: Callable[..., Bench],
) -> None:
    nan = float("nan")
    table = {0: (nan, nan, nan), 1: (nan, 1.0, 1.0), 2: (nan, 0.0, 1.0), 3: (0.0, 0.0, 1.0)}
    made = bench(rewards(lambda job: table[job.group][job.sibling]), rollout={"group_size": 3})
    assert numbers(made.collector.next_batch(0)) == [2, 3]


def test_the_number_of_dropped_groups_is_bounded(bench: Callable[..., Bench]) -> None:
    made = bench(rewards(lambda job: 0.0), objective={"selection_options": {"max_num_gen_batches": 3}})
    with pytest.raises(
        RunError, match=r"8 groups in whose rewards nothing differs .*max_num_gen_batches = 3\): the ta"
    ):
        made.collector.next_batch(0)
    assert len({job.group for job in made.pool.jobs}) <= 8


def test_the_bound_counts_from_one_batch_to_the_next(bench: Callable[..., Bench]) -> None:
    made = bench(flat_in(0, 3, 6), objective={"selection_options": {"max_num_gen_batches": 1}})
    assert [numbers(made.collector.next_batch(version)) for version in range(3)] == [[2, 1], [5, 4], [8, 7]]


CHANGES: dict[str, Any] = {
    "task": {"name": "loop_tasks:Echo", "turns": 1, "coarse": 2},
    "objective": DAPO | {"recipe": "grpo"},
    "schedule": {"mode": "lockstep", "inter": 2, "intra": 1},
}


def test_a_run_trains_only_groups_with_spread(tmp_path: Path) -> None:
    directory = run(tmp_path / "run", 6, **CHANGES)
    groups: dict[tuple[int, str], set[float]] = {}
    for row in read_rollouts(directory).to_pylist():
        groups.setdefault((row["group_id"], row["state"]), set()).add(row["reward"])
        assert row["drop_reason"] == (None if row["state"] == "trained" else "no reward spread")
    assert all(len(found) == (1 if state == "dropped" else 2) for (_, state), found in groups.items())
    dropped = [number for number, state in groups if state == "dropped"]
    assert 0 < len(dropped) == sum(line["selection/dropped_groups"] for line in metrics_without_clock(directory))
    assert all(line["grad/norm"] > 0 for line in metrics_without_clock(directory))


def test_a_killed_lockstep_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 6, **CHANGES)
    halves = run(tmp_path / "halves", 6, stop=3, **CHANGES)
    assert metrics_without_clock(whole) == metrics_without_clock(halves)
    assert rollouts(whole) == rollouts(halves)
