"""The averaged weights of PPO-EWMA: the sheet's numbers, what is scored with them, and their place in a checkpoint."""

import contextlib
import copy

import numpy as np
import pytest
import torch

from estr.errors import RunError
from estr.learner import Learner
from estr.learner.average import AveragedWeights
from learner_helpers import near_policy, plain_values, random_groups, settings, tiny_model

CONFIG = {"objective": {"recipe": "ppo_ewma", "beta": 0.9}, "learner": {"minibatches": 2, "learning_rate": 0.05}}


def test_the_debiased_average_of_the_sheet() -> None:
    """beta .9, start 2, then 4, 4: tot 1.9 and value 3.052632, tot 2.71 and value 3.402214."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    average = AveragedWeights(model, 0.9)
    for total, value in ((1.9, 3.052632), (2.71, 3.402214)):
        torch.nn.init.constant_(model.weight, 4.0)
        average.update()
        assert average.total == pytest.approx(total)
        assert float(average.state_tensors()["weight"]) == pytest.approx(value, abs=1e-6)


def test_inside_the_context_the_model_has_the_average_and_outside_its_own_weights() -> None:
    model = torch.nn.Linear(2, 2)
    own = model.weight.detach().clone()
    average = AveragedWeights(model, 0.5)
    with torch.no_grad():
        model.weight += 1.0
    average.update()
    storage = model.weight.data_ptr()
    with contextlib.suppress(ZeroDivisionError), average.weights():
        assert torch.allclose(model.weight, own + 1 / 1.5)
        raise ZeroDivisionError
    assert torch.equal(model.weight, own + 1.0)
    assert model.weight.data_ptr() == storage


def test_the_proximal_policy_is_the_average_before_each_step() -> None:
    model = tiny_model()
    groups = random_groups(4, 3)
    near_policy(model, groups)
    learner = Learner(model, settings(**CONFIG))
    shadow, total = copy.deepcopy(model), 1.0
    for result in learner.train(groups):
        for record in result.trajectories:
            for row, column in zip(record.trajectory.segments, record.proximal_logprob, strict=True):
                assert np.allclose(column[row.action], plain_values(shadow, row)[0].detach(), atol=2e-5)
        new = 0.9 * total + 1
        with torch.no_grad():
            for kept, now in zip(shadow.parameters(), model.parameters(), strict=True):
                kept.mul_(0.9 * total / new).add_(now / new)
        total = new
    last = result.trajectories[0]
    row = last.trajectory.segments[0]
    assert not np.allclose(last.learner_logprob[0][row.action], last.proximal_logprob[0][row.action], atol=1e-3)


def test_a_skipped_step_is_not_averaged() -> None:
    model = tiny_model()
    groups = random_groups(2, 2)
    near_policy(model, groups)
    config = settings(objective={"recipe": "ppo_ewma"}, learner={"truncated": "mask"})
    for trajectory in (member for group in groups for member in group):
        trajectory.finish_reason = "length"
    learner = Learner(model, config)
    (result,) = learner.train(groups)
    assert result.skipped
    assert learner.state()["average"] == {"total": 1.0}


def test_a_resumed_run_goes_on_with_its_average() -> None:
    model = tiny_model()
    batches = [random_groups(4, 3, seed) for seed in (0, 1)]
    for batch in batches:
        near_policy(model, batch)
    learner = Learner(model, settings(**CONFIG))
    list(learner.train(batches[0]))
    state, tensors = learner.state(), {name: t.clone() for name, t in learner.state_tensors().items()}
    resumed = Learner(copy.deepcopy(model), settings(**CONFIG))
    resumed.load_state(state, tensors)
    a, b = list(learner.train(batches[1])), list(resumed.train(batches[1]))
    assert [r.metrics for r in a] == [r.metrics for r in b]
    assert all(torch.equal(x, resumed.state_tensors()[name]) for name, x in learner.state_tensors().items())
    del tensors["average/model.norm.weight"]
    with pytest.raises(RunError, match="another model"):
        Learner(tiny_model(), settings(**CONFIG)).load_state(state, tensors)
