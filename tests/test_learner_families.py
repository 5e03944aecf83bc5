"""What the learner gives the families: thinking tokens, the model's vocabulary, importance weights, the reference."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from estr.controllers import controller
from estr.errors import RunError
from estr.learner import Extensions, Learner
from estr.learner.learner import needs_reference
from estr.learner.minibatch import Task
from estr.learner.rollouts import Rollouts
from estr.shaping import shaping
from learner_helpers import (
    VOCABULARY,
    near_policy,
    plain_values,
    random_groups,
    segment,
    settings,
    tiny_model,
    trajectory,
)

END = 40


def relief(rollouts: Rollouts, think_end: int | None) -> list[float]:
    rule = shaping("err", eps=0.0, lam=1.0, reward_max=100.0)
    rollouts.shape_rewards(rule, think_end)
    return (rollouts.reward - 1).tolist()


def thinkers() -> Rollouts:
    """Entropy drops by 1 at every action token; the second thinks for three tokens, over two rows."""
    plain = segment([1, 2, 3, 4, 5], [0, 1, 1, 1, 1], entropy=[4.0, 3.0, 2.0, 1.0])
    first = segment([1, 2, 3, 9], [0, 1, 1, 0], entropy=[9.0, 8.0])
    second = segment([1, 4, END, 5, 6], [0, 1, 1, 1, 1], entropy=[7.0, 6.0, 5.0, 4.0])
    group = [trajectory(plain), trajectory(first, second, sibling=1)]
    return Rollouts.of([group], settings().learner)


def test_thinking_ends_before_the_first_end_token_that_was_sampled() -> None:
    got = relief(thinkers(), END)
    assert got == pytest.approx([3 / math.log(5), 2 / math.log(4)])


def test_without_such_a_token_everything_is_thinking() -> None:
    assert relief(thinkers(), None) == pytest.approx([3 / math.log(5), 5 / math.log(7)])
    assert relief(thinkers(), 39) == pytest.approx([3 / math.log(5), 5 / math.log(7)])


def test_an_end_token_in_the_prompt_or_a_tools_answer_does_not_count() -> None:
    row = segment([END, 2, END, 3, 4], [0, 1, 0, 1, 1], entropy=[3.0, 2.0, 1.0])
    assert relief(Rollouts.of([[trajectory(row)]], settings().learner), END) == pytest.approx([2 / math.log(4)])


def test_a_recipe_that_asks_for_the_vocabulary_gets_the_models() -> None:
    assert Learner(tiny_model(), settings(objective={"recipe": "espo"})).objective.hyperparameters["vocabulary"] == (
        VOCABULARY
    )
    given = settings(objective={"recipe": "espo", "vocabulary": 1000})
    assert Learner(tiny_model(), given).objective.hyperparameters["vocabulary"] == 1000


@pytest.mark.parametrize("recipe", ["tis_sequence", "grpo"])
def test_vcpo_weighs_by_q_where_there_is_one(recipe: str) -> None:
    """Second minibatch: with q known the weights are those of the batch's start, else those of the weights of now."""
    model = tiny_model()
    groups = random_groups(4, 3)
    near_policy(model, groups, noise=0.3)
    start = copy.deepcopy(model)
    config = settings(objective={"recipe": recipe}, learner={"minibatches": 2, "learning_rate": 0.02})
    learner = Learner(model, config, extensions=Extensions(controllers=[controller("vcpo", scaling="linear")]))
    steps = learner.train(groups)
    next(steps)
    now = copy.deepcopy(model)
    second = next(steps)
    policy = start if recipe == "tis_sequence" else now
    log_weight = [
        sum(
            float((plain_values(policy, row)[0].detach().numpy() - row.logprob[row.action]).sum(dtype=np.float64))
            for row in record.trajectory.segments
        )
        for record in second.trajectories
    ]
    weight = np.exp(log_weight)
    share = weight.sum() ** 2 / (weight**2).sum() / len(weight)
    assert second.metrics["learner/learning_rate"] == pytest.approx(0.02 * share, rel=1e-3)


def test_steps_that_a_controller_holds_back_are_no_divergence() -> None:
    model = tiny_model()
    groups = random_groups(1, 3)
    near_policy(model, groups)
    extensions = Extensions(controllers=[controller("gac", high=0.2, above="skip")])
    learner = Learner(model, settings(learner={"max_skipped_steps": 2, "learning_rate": 1e-6}), extensions=extensions)
    results = [next(learner.train(groups)) for _ in range(5)]
    assert [r.skipped for r in results] == [False, True, True, True, True]
    assert all(r.divergence is None for r in results)
    assert (learner.skipped, learner.skipped_in_row) == (4, 0)


@pytest.mark.parametrize(
    ("objective", "wanted"),
    [({"recipe": "dar"}, True), ({"recipe": "grpo", "kl_coef": 0.1}, True), ({"recipe": "grpo"}, False)],
)
def test_who_needs_the_starting_weights(objective: dict, wanted: bool) -> None:
    config = settings(objective=objective)
    assert needs_reference(config) == wanted
    model = tiny_model()
    groups = random_groups(2, 3)
    near_policy(model, groups)
    learner = Learner(model, config, reference=tiny_model(seed=1) if wanted else None)
    (result,) = learner.train(groups)
    assert math.isfinite(result.metrics["loss"])
    resumed = Learner(copy.deepcopy(model), config)
    if wanted:
        with pytest.raises(RunError, match="the recipe needs the weights the run started from"):
            resumed.load_state(learner.state(), learner.state_tensors())


def test_what_an_estimator_refuses_is_a_sentence() -> None:
    groups = [[trajectory(segment([1, 2], [0, 1]), sibling=i, reward=r) for i, r in enumerate((-1.0, 1.0))]]
    learner = Learner(tiny_model(), settings(objective={"advantage": "maxrl"}))
    with pytest.raises(RunError, match=r"objective.advantage: maxrl needs rewards of at least 0"):
        next(learner.train(groups))


@pytest.mark.parametrize("budget", [4096, 10])
def test_what_a_recipe_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    model = tiny_model()
    groups = random_groups(1, 2)
    near_policy(model, groups, noise=2.0)
    objective = {"recipe": "estr", "tau": 0.5, "undecided": "error", "denominator": "kept"}
    learner = Learner(model, settings(objective=objective, learner={"tokens_per_microbatch": budget}))
    original = Task.token_batch

    def with_interval(self, *args, **kwargs):
        batch = original(self, *args, **kwargs)
        batch.behavior_entropy_upper = torch.full_like(batch.behavior_entropy, 50.0)
        return batch

    monkeypatch.setattr(Task, "token_batch", with_interval)
    with pytest.raises(RunError, match=r"objective.recipe estr: \d+ tokens are undecided"):
        next(learner.train(groups))
