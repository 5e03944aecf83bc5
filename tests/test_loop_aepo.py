"""AEPO in the loop: second rollouts at a temperature of their own, what is chosen of them, what becomes of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from estr.engines.samplers import Standard, draw
from estr.learner import Extensions, Learner
from estr.learner.replacing import NOT_CHOSEN, REPLACED, put_in_place
from estr.learner.rollouts import Rollouts
from estr.schedule import Schedule, ScheduleRules
from estr.shaping import selection
from estr.storage.rollout_files import read_rollouts
from learner_helpers import near_policy, random_groups, settings, tiny_model
from loop_helpers import metrics_without_clock, rollouts
from loop_methods import Loop, configured, path_of, run

AEPO = ("objective.recipe=grpo", "objective.selection=aepo", "objective.selection_options.prompt_share=0.5")


def test_a_row_with_heat_is_drawn_at_its_temperature_and_recorded_at_the_samplers() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0]]).repeat(3, 1)
    uniform = torch.tensor([0.85, 0.85, 0.85], dtype=torch.float64)
    plain = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool)
    got = draw(Standard(1.0), logits, *plain, uniform, heat=torch.tensor([0.0, 3.0, 0.2]))
    p = logits[0].softmax(-1)
    cumulative = [(logits[0] / t).softmax(-1).cumsum(-1) for t in (1.0, 3.0, 0.2)]
    assert got.token.tolist() == [int((c < 0.85).sum()) for c in cumulative] == [1, 2, 0]
    assert got.logprob.tolist() == pytest.approx(p.log()[got.token].tolist())
    assert got.entropy.tolist() == pytest.approx([float(-(p * p.log()).sum())] * 3)


def test_so_many_of_every_batch_have_twice_as_many_trajectories() -> None:
    schedule = Schedule(ScheduleRules(prompts_per_step=4, group_size=3, doubled=1))
    tickets = [schedule.admit(0) for _ in range(4)]
    assert [[t.sibling for t in group] for group in tickets] == [list(range(6)), [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert [group.size for group in schedule.outstanding] == [6, 3, 3, 3]


def with_advantages(values: list[float], siblings: int, first: int = 0, finish: str = "stop") -> Rollouts:
    groups = random_groups(len(values) // siblings, siblings, seed=first)
    for member in (m for group in groups for m in group):
        member.sibling += first
        member.finish_reason = finish
    result = Rollouts.of(groups, settings(learner={"truncated": "mask"}).learner)
    result.advantage = torch.tensor(values)
    return result


@pytest.mark.parametrize(("entropy", "chosen"), [(0.3, [0, 3]), (0.6, [0])])
def test_the_vector_of_the_sheet(entropy: float, chosen: list[int]) -> None:
    """H = .3, target .5: kept {0, 3} and n_s = 2; H = .6: n_s = 1."""
    rule = selection("aepo")
    rule.observe(entropy)
    batch = with_advantages([0.1, 0.2, 0.3, 0.4, 0.5], 5)
    second = with_advantages([1.2, -0.4, 0.03, 0.9, 0.0], 5, first=5)
    before = list(batch.trajectories)
    dropped = put_in_place(batch, second, rule)
    n = len(chosen)
    assert [t.sibling for t in batch.trajectories] == [5 + j for j in chosen] + [t.sibling for t in before[n:]]
    assert batch.advantage.tolist() == pytest.approx([1.0] * n + [0.1, 0.2, 0.3, 0.4, 0.5][n:])
    assert batch.lengths == [t.action_count for t in batch.trajectories]
    assert [(t.sibling, reason) for t, reason in dropped] == [(i, REPLACED) for i in range(n)] + [
        (5 + j, NOT_CHOSEN) for j in range(5) if j not in chosen
    ]


def test_what_takes_no_part_in_the_loss_is_never_chosen() -> None:
    batch, second = with_advantages([0.0] * 2, 2), with_advantages([2.0, 3.0], 2, first=2, finish="length")
    assert [reason for _, reason in put_in_place(batch, second, selection("aepo"))] == [NOT_CHOSEN] * 2


def test_the_batch_keeps_its_size_and_advantages_are_apart() -> None:
    model = tiny_model()
    groups = random_groups(4, 6)
    near_policy(model, groups)
    rule = selection("aepo", target_entropy=99.0)
    learner = Learner(
        model, settings(rollout={"group_size": 3}, learner={"minibatches": 2}), extensions=Extensions(replacing=rule)
    )
    first, second = learner.train(groups)
    assert (second.dropped, len(first.trajectories), len(second.trajectories)) == ([], 6, 6)
    trained = {r.trajectory.trajectory_id for r in (*first.trajectories, *second.trajectories)}
    assert trained.isdisjoint(t.trajectory_id for t, _ in first.dropped)
    assert len(trained) + len(first.dropped) == 24
    chosen = [r for r in first.trajectories if r.trajectory.sibling >= 3]
    assert 0 < len(chosen) == sum(reason == REPLACED for _, reason in first.dropped)
    assert all(r.advantage == 1.0 for r in chosen)
    own = {t.sibling: t.reward for t in groups[3] if t.sibling < 3}
    mean = np.mean(list(own.values()))
    for record in second.trajectories:
        if record.trajectory.group == 3:
            assert np.sign(record.advantage) == np.sign(own[record.trajectory.sibling] - mean)


def test_second_rollouts_are_hotter_while_entropy_is_low_and_colder_while_it_is_high() -> None:
    """The policy of a random model has nearly the highest entropy there is, so only the first batch is hotter."""
    loop = Loop(configured(*AEPO, "objective.selection_options.target_entropy=1.0")).go()
    assert [line["aepo/temperature"] for line in loop.metrics] == [0.8] * 6
    hot = Loop(configured(*AEPO, "objective.selection_options.target_entropy=99.0")).go()
    assert [line["aepo/temperature"] for line in hot.metrics] == [1.2] * 6
    assert not np.array_equal(path_of(loop.metrics), path_of(hot.metrics))


def tokens_of(loop: Loop, batch: int, second: bool) -> list[list[int]]:
    size = loop.config.rollout.group_size
    trajectories = [t for result in loop.results[2 * batch : 2 * batch + 2] for t in seen(result)]
    return sorted(t.segments[0].tokens.tolist() for t in trajectories if (t.sibling >= size) == second)


def seen(result: Any) -> list[Any]:
    return [record.trajectory for record in result.trajectories] + [t for t, _ in result.dropped]


def test_only_second_rollouts_have_another_temperature() -> None:
    """The first batch is "hot", here 1 or nearly greedy: first rollouts are the same and second ones are not."""
    option = "objective.selection_options.temperature_high"
    loops = [Loop(configured(*AEPO, f"{option}={value}")).go(2) for value in (1.0, 0.05)]
    assert tokens_of(loops[0], 0, second=False) == tokens_of(loops[1], 0, second=False)
    assert tokens_of(loops[0], 0, second=True) != tokens_of(loops[1], 0, second=True)


CHANGES: dict[str, Any] = {
    "objective": {
        "recipe": "grpo",
        "selection": "aepo",
        "selection_options": {"prompt_share": 0.5, "target_entropy": 6.0},
    },
    "schedule": {"mode": "lockstep", "inter": 2, "intra": 1},
    "learner": {"prompts_per_step": 2, "minibatches": 2, "learning_rate": 0.05},
}


def test_a_killed_run_ends_as_one_that_was_not_and_every_trajectory_is_settled_once(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 6, **CHANGES)
    assert metrics_without_clock(whole) == metrics_without_clock(run(tmp_path / "halves", 6, stop=3, **CHANGES))
    assert rollouts(whole) == rollouts(tmp_path / "halves")
    rows = [row for row in read_rollouts(whole).to_pylist() if not row["segment"]]
    assert len({row["trajectory_id"] for row in rows}) == len(rows) == 3 * (4 + 2)
    assert {row["drop_reason"] for row in rows} == {None, REPLACED, NOT_CHOSEN}
    assert sum(row["state"] == "trained" for row in rows) == 12
    assert {row["sampler"] for row in rows if row["sibling"] >= 2} == {"tempered"}
    assert {row["advantage"] for row in rows if row["state"] == "trained" and row["sibling"] >= 2} == {1.0}


def test_a_run_that_ends_inside_a_batch_settles_the_rest_once(tmp_path: Path) -> None:
    rows = [r for r in read_rollouts(run(tmp_path / "run", 3, **CHANGES)).to_pylist() if not r["segment"]]
    assert len({row["trajectory_id"] for row in rows}) == len(rows) == 12
    assert {row["state"] for row in rows} == {"trained", "dropped", "finished"}
