"""The learner over whole rollout batches: frozen q, versions, skipped steps, results, state, reference, adapters."""

import copy
import math
import re

import numpy as np
import pytest
import torch

from estr.controllers import controller
from estr.errors import RunError, UsageError
from estr.learner import Extensions, Learner, learning_rate
from estr.learner.rollouts import minibatch_plan
from estr.shaping import shaping
from learner_helpers import (
    near_policy,
    plain_values,
    random_groups,
    segment,
    settings,
    tiny_model,
    trajectory,
)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def batch(model, seed: int = 0, groups: int = 4, noise: float = 0.1, version: int = 0):
    result = random_groups(groups, 3, seed, version)
    near_policy(model, result, noise)
    return result


def test_q_is_frozen_over_minibatches_and_epochs() -> None:
    model = tiny_model()
    groups = batch(model)
    start = copy.deepcopy(model)
    config = settings(objective={"recipe": "icepop"}, learner={"minibatches": 2, "epochs": 2})
    learner = Learner(model, config)
    results = list(learner.train(groups))
    assert [r.version for r in results] == [1, 2, 3, 4]
    seen: dict[str, int] = {}
    for result in results:
        for record in result.trajectories:
            seen[record.trajectory.trajectory_id] = seen.get(record.trajectory.trajectory_id, 0) + 1
            for row, column in zip(record.trajectory.segments, record.proximal_logprob, strict=True):
                assert np.allclose(column[row.action], plain_values(start, row)[0].detach(), atol=2e-5)
                assert np.isnan(column[~row.action]).all()
    assert set(seen.values()) == {2}
    assert len(seen) == 12
    last = results[-1].trajectories[0]
    row = last.trajectory.segments[0]
    assert not np.allclose(last.learner_logprob[0][row.action], last.proximal_logprob[0][row.action], atol=1e-3)


def test_the_first_step_scores_q_only_for_the_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """One minibatch and one epoch: q is π itself and costs no forward pass of its own."""
    model = tiny_model()
    groups = batch(model)
    calls = []
    decoder = model.get_decoder()
    decoder.register_forward_hook(lambda *_: calls.append(1))
    learner = Learner(model, settings(objective={"recipe": "icepop"}))
    calls.clear()
    (result,) = learner.train(groups)
    assert len(calls) == 1
    record = result.trajectories[0]
    assert np.array_equal(record.proximal_logprob[0], record.learner_logprob[0], equal_nan=True)


def test_a_recipe_on_the_direct_edge_has_no_q() -> None:
    model = tiny_model()
    (result,) = Learner(model, settings(objective={"recipe": "estr"})).train(batch(model))
    assert all(record.proximal_logprob is None for record in result.trajectories)


def test_results_hold_what_the_learner_saw() -> None:
    model = tiny_model()
    groups = batch(model)
    before = copy.deepcopy(model)
    (result,) = Learner(model, settings()).train(groups)
    assert [r.trajectory for r in result.trajectories] == [t for group in groups for t in group]
    for record in result.trajectories:
        for row, logprob, entropy in zip(
            record.trajectory.segments, record.learner_logprob, record.learner_entropy, strict=True
        ):
            expected = plain_values(before, row)
            assert np.allclose(logprob[row.action], expected[0].detach(), atol=2e-5)
            assert np.allclose(entropy[row.action], expected[1].detach(), atol=2e-5)
            assert np.isnan(logprob[~row.action]).all()
    rewards = np.array([t.reward for t in groups[0]])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert [r.advantage for r in result.trajectories[:3]] == pytest.approx(expected.tolist(), rel=1e-5)
    assert (result.version_before, result.version, result.target_version, result.skipped) == (0, 1, 0, False)


def test_metrics_have_the_keys_of_the_contract() -> None:
    model = tiny_model()
    groups = batch(model)
    (result,) = Learner(model, settings()).train(groups)
    expected = {
        "loss",
        "reward/mean",
        "policy/entropy",
        "mismatch/kl",
        "mismatch/ratio_deviation",
        "mismatch/delta_abs",
        "gate/masked_fraction",
        "gate/undecided_fraction",
        "clip/fraction",
        "tokens/action",
        "tokens/invalid",
        "staleness/inter_mean",
        "staleness/inter_max",
        "staleness/intra_mean",
        "staleness/intra_max",
        "grad/norm",
        "learner/learning_rate",
    }
    assert expected <= result.metrics.keys()
    assert all(math.isfinite(v) for v in result.metrics.values())
    assert result.metrics["reward/mean"] == pytest.approx(np.mean([t.reward for g in groups for t in g]))
    assert result.metrics["tokens/action"] == sum(t.action_count for g in groups for t in g)


def test_fault_A11_the_logged_entropy_is_that_of_action_tokens() -> None:
    model = tiny_model()
    row = segment([3, 9, 4, 7, 5, 6], [0, 0, 0, 1, 1, 1])
    _, entropy = plain_values(model, row)
    everywhere = plain_values(model, segment([3, 9, 4, 7, 5, 6], [0, 1, 1, 1, 1, 1]))[1]
    (result,) = Learner(model, settings()).train([[trajectory(row)]])
    assert result.metrics["policy/entropy"] == pytest.approx(float(entropy.detach().mean()), abs=1e-5)
    assert result.metrics["policy/entropy"] != pytest.approx(float(everywhere.detach().mean()), abs=1e-3)


def test_staleness_counts_optimizer_steps() -> None:
    model = tiny_model()
    fresh = trajectory(segment([1, 2, 3, 4], [0, 1, 1, 1], version=[3, 4, 5]))
    stale = trajectory(segment([1, 2, 3], [0, 1, 1], version=2), segment([1, 2], [0, 1], version=3), sibling=1)
    learner = Learner(model, settings())
    learner.version = 5
    (result,) = learner.train([[fresh, stale]])
    assert result.target_version == 5
    got = {k.removeprefix("staleness/"): v for k, v in result.metrics.items() if k.startswith("staleness/")}
    assert got == {"inter_mean": 1.0, "inter_max": 2.0, "intra_mean": 1.5, "intra_max": 2.0}


def test_fault_C7_every_minibatch_is_a_version() -> None:
    model = tiny_model()
    results = list(Learner(model, settings(learner={"minibatches": 4})).train(batch(model)))
    assert [r.target_version for r in results] == [0, 1, 2, 3]
    assert [r.metrics["staleness/inter_max"] for r in results] == [0, 1, 2, 3]


def test_a_learning_rate_of_zero_changes_no_bit() -> None:
    model = tiny_model()
    groups = batch(model, noise=0.0)
    before = weights(model)
    config = settings(learner={"learning_rate": 0.0, "weight_decay": 0.1, "minibatches": 4})
    results = list(Learner(model, config).train(groups))
    assert results[-1].version == 4
    assert same(before, weights(model))
    assert all(r.metrics["mismatch/delta_abs"] < 1e-5 for r in results)


def test_one_step_is_adamw_on_the_clipped_gradient() -> None:
    model = tiny_model()
    groups = batch(model)
    plain = copy.deepcopy(model)
    config = settings(learner={"max_grad_norm": 0.01, "weight_decay": 0.5})
    gradient: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: gradient.__setitem__(name, p.grad.clone()))
    (result,) = Learner(model, config).train(groups)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))
    assert result.metrics["grad/norm"] == pytest.approx(norm, rel=1e-4)
    assert norm > 0.01
    for name, p in plain.named_parameters():
        g = gradient[name] * 0.01 / norm
        decayed = p.detach() * (1 - 1e-2 * 0.5 * (p.ndim >= 2))
        expected = decayed - 1e-2 * g / (g.abs() + 1e-8)
        assert torch.allclose(dict(model.named_parameters())[name], expected, atol=1e-5), name


def poison(model, value: float):
    """Make one gradient not finite from now on; call the result to stop."""
    parameter = next(iter(model.parameters()))
    return parameter.register_hook(lambda grad: torch.full_like(grad, value)).remove


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(value: float) -> None:
    model = tiny_model()
    learner = Learner(model, settings(learner={"minibatches": 2, "max_skipped_steps": 3}))
    groups = batch(model)
    list(learner.train(groups))
    before, tensors = weights(model), {k: v.clone() for k, v in learner.state_tensors().items()}
    heal = poison(model, value)
    results = list(learner.train(groups))
    assert [(r.version_before, r.version, r.skipped) for r in results] == [(2, 2, True)] * 2
    assert "gradient norm" in results[0].reason
    assert same(before, weights(model))
    assert all(torch.equal(tensors[k], v) for k, v in learner.state_tensors().items())
    assert all(math.isfinite(v) for v in results[0].metrics.values())
    assert learner.state()["skipped"] == 2
    heal()
    (good, _) = learner.train(groups)
    assert good.version == 3
    assert learner.state()["skipped_in_row"] == 0


def test_several_skipped_steps_in_a_row_come_with_a_diagnosis() -> None:
    model = tiny_model()
    learner = Learner(model, settings(learner={"max_skipped_steps": 2}))
    groups = batch(model)
    poison(model, math.nan)
    (first,) = learner.train(groups)
    assert first.divergence is None
    (second,) = learner.train(groups)
    assert second.skipped
    assert re.match(r"2 optimizer steps in a row were skipped at version 0.*gradient norm is nan", second.divergence)


def test_fault_A5_invalid_tokens_are_dropped_and_counted() -> None:
    model = tiny_model()
    groups = batch(model)
    row = groups[0][0].segments[0]
    row.logprob[np.flatnonzero(row.action)[0]] = np.nan
    (result,) = Learner(model, settings()).train(groups)
    assert not result.skipped
    assert result.metrics["tokens/invalid"] == 1


def test_masked_trajectories_are_kept_out_and_all_masked_is_a_skipped_step() -> None:
    model = tiny_model()
    groups = batch(model)
    groups[0][0].finish_reason = "length"
    config = settings(learner={"truncated": "mask", "minibatches": 4})
    learner = Learner(model, config)
    first = next(learner.train(groups))
    assert first.trajectories[0].learner_logprob is None
    assert first.trajectories[1].learner_logprob is not None
    assert first.metrics["tokens/truncated"] == groups[0][0].action_count
    assert first.action_tokens == sum(t.action_count for t in groups[0][1:])
    for member in (m for group in groups for m in group):
        member.finish_reason = "turns"
    before = weights(model)
    step = next(learner.train(groups))
    assert step.skipped
    assert "takes part" in step.reason
    assert same(before, weights(model))


def test_a_reward_that_is_nan_trains_nothing_and_is_counted() -> None:
    model = tiny_model()
    groups = batch(model)
    groups[0][0].reward = math.nan
    (result,) = Learner(model, settings()).train(groups)
    assert result.trajectories[0].advantage == 0.0
    assert result.metrics["reward/invalid"] == 1
    assert not result.skipped


def test_two_runs_are_equal_bit_for_bit() -> None:
    outcomes = []
    for _ in range(2):
        model = tiny_model()
        learner = Learner(model, settings(learner={"minibatches": 2, "epochs": 2, "tokens_per_microbatch": 40}))
        metrics = [r.metrics for r in learner.train(batch(model))]
        outcomes.append((metrics, weights(model)))
    assert outcomes[0][0] == outcomes[1][0]
    assert same(outcomes[0][1], outcomes[1][1])


def test_a_learner_goes_on_from_its_state_bit_for_bit() -> None:
    config = settings(learner={"minibatches": 2, "schedule": "cosine", "warmup_steps": 3}, run={"steps": 8})

    def extensions() -> Extensions:
        return Extensions(controllers=[controller("gac", low=0.0), controller("rq", min_history=1)])

    model = tiny_model()
    first, second = batch(model, seed=1), batch(model, seed=2)
    learner = Learner(model, config, extensions=extensions())
    list(learner.train(first))
    state = learner.state()
    tensors = {name: t.clone() for name, t in learner.state_tensors().items()}
    resumed = Learner(copy.deepcopy(model), config, extensions=extensions())
    resumed.load_state(state, tensors)
    assert resumed.version == 2
    a, b = list(learner.train(second)), list(resumed.train(second))
    assert [r.metrics for r in a] == [r.metrics for r in b]
    assert same(weights(learner.model), weights(resumed.model))


def test_optimizer_state_of_another_model_is_refused() -> None:
    learner = Learner(tiny_model(), settings())
    list(learner.train(batch(learner.model)))
    state, tensors = learner.state(), learner.state_tensors()
    with pytest.raises(RunError, match="does not train"):
        Learner(tiny_model(tied=False), settings()).load_state(state, {"optimizer/step.other": torch.ones(())})
    tensors["optimizer/exp_avg.model.norm.weight"] = torch.zeros(3)
    with pytest.raises(RunError, match=r"should have shape \[16\], got \[3\]"):
        Learner(tiny_model(), settings()).load_state(state, tensors)


def test_the_reference_is_the_starting_weights() -> None:
    model = tiny_model()
    start = copy.deepcopy(model)
    groups = batch(model)
    learner = Learner(model, settings(objective={"kl_coef": 0.1}))
    first = next(learner.train(groups))
    second = next(learner.train(groups))
    assert first.metrics["kl/reference"] == pytest.approx(0.0, abs=1e-6)
    rows = [row for g in groups for t in g for row in t.segments]
    now = second.trajectories
    pi = np.concatenate(
        [c[r.action] for t in now for r, c in zip(t.trajectory.segments, t.learner_logprob, strict=True)]
    )
    ref = np.concatenate([plain_values(start, row)[0].detach().numpy() for row in rows])
    assert second.metrics["kl/reference"] == pytest.approx(float((np.exp(ref - pi) - 1 - (ref - pi)).mean()), rel=1e-3)
    assert second.metrics["kl/reference"] > 1e-4


def test_a_resumed_learner_wants_the_starting_weights_as_reference() -> None:
    config = settings(objective={"kl_coef": 0.1})
    model = tiny_model()
    learner = Learner(model, config)
    list(learner.train(batch(model)))
    with pytest.raises(RunError, match="reference"):
        Learner(copy.deepcopy(model), config).load_state(learner.state(), learner.state_tensors())
    resumed = Learner(copy.deepcopy(model), config, reference=tiny_model())
    resumed.load_state(learner.state(), learner.state_tensors())
    assert resumed.version == 1


def test_frozen_parameters_are_left_alone() -> None:
    model = tiny_model()
    model.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(True)
    before = weights(model)
    learner = Learner(model, settings())
    (result,) = learner.train(batch(model))
    moved = {name for name, w in weights(model).items() if not torch.equal(w, before[name])}
    assert moved == {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert {name.split(".", 1)[1] for name in learner.state_tensors() if "exp_avg." in name} == moved
    assert result.version == 1


def test_adapters_train_and_the_reference_is_the_model_without_them() -> None:
    peft = pytest.importorskip("peft", reason="adapters need estr[peft]")
    base = tiny_model()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    groups = batch(base)
    learner = Learner(model, settings(objective={"kl_coef": 0.1}, learner={"learning_rate": 0.1}))
    first, second = next(learner.train(groups)), next(learner.train(groups))
    assert first.metrics["kl/reference"] == pytest.approx(0.0, abs=1e-6)
    assert second.metrics["kl/reference"] > 1e-5
    assert all("lora" in name for name in learner.optimizer.parameters)


def test_canary_is_the_models_own_logprob_at_the_rollout_temperature() -> None:
    model = tiny_model()
    learner = Learner(model, settings(rollout={"temperature": 0.7}))
    tokens = [3, 1, 4, 1, 5, 9]
    got = learner.canary(tokens)
    log_p = (model(torch.tensor([tokens])).logits[0, :-1] / 0.7).log_softmax(-1)
    assert np.allclose(got, log_p.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].detach(), atol=1e-5)
    list(learner.train(batch(model)))
    assert not np.allclose(got, learner.canary(tokens), atol=1e-3)


def test_gradient_checkpointing_and_bfloat16_run() -> None:
    model = tiny_model()
    config = settings(model={"gradient_checkpointing": True}, learner={"dtype": "bfloat16"})
    (result,) = Learner(model, config).train(batch(model))
    assert result.version == 1


def test_the_optimal_baseline_gets_its_score_norms() -> None:
    model = tiny_model()
    groups = batch(model)
    (result,) = Learner(model, settings(objective={"advantage": "opob"})).train(groups)
    advantages = np.array([r.advantage for r in result.trajectories[:3]])
    rewards = np.array([t.reward for t in groups[0]])
    scaled = (rewards - advantages * rewards.std()).round(4)
    assert len(set(scaled.tolist())) == 1
    assert scaled[0] != pytest.approx(rewards.mean(), abs=1e-3)


def test_the_effective_sample_size_scales_the_learning_rate() -> None:
    model = tiny_model()
    groups = batch(model, noise=0.5)
    ratio = []
    for member in (m for group in groups for m in group):
        delta = [plain_values(model, r)[0].detach().numpy() - r.logprob[r.action] for r in member.segments]
        ratio.append(np.exp(np.concatenate(delta).sum(dtype=np.float64)))
    ess = np.sum(ratio) ** 2 / np.sum(np.square(ratio)) / len(ratio)
    extensions = Extensions(controllers=[controller("vcpo")])
    config = settings(learner={"tokens_per_microbatch": 40})
    (result,) = Learner(model, config, extensions=extensions).train(groups)
    assert result.metrics["learner/learning_rate"] == pytest.approx(1e-2 * ess**0.5, rel=1e-3)


def test_a_controller_can_ask_for_no_step() -> None:
    model = tiny_model()
    groups = batch(model)
    extensions = Extensions(controllers=[controller("gac", high=0.2, above="skip")])
    learner = Learner(model, settings(learner={"learning_rate": 1e-6}), extensions=extensions)
    results = [next(learner.train(groups)) for _ in range(2)]
    assert [r.version for r in results] == [1, 1]
    assert "GradientAlignment" in results[1].reason


def test_shaping_changes_advantages_and_not_the_reported_reward() -> None:
    model = tiny_model()
    groups = [[trajectory(segment([1, *[2] * n], [0] + [1] * n), sibling=n, reward=1.0) for n in (2, 8)]]
    near_policy(model, groups)
    extensions = Extensions(shapings=[shaping("overlong", max_length=10, buffer=4)])
    (result,) = Learner(model, settings(), extensions=extensions).train(groups)
    assert [r.advantage for r in result.trajectories] == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-4)
    assert result.metrics["reward/mean"] == 1.0


def test_an_unknown_recipe_or_a_field_nobody_records_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="did you mean 'estr'"):
        Learner(tiny_model(), settings(objective={"recipe": "est"}))
    with pytest.raises(UsageError, match="behavior_topk_logprob, topk_logprob, which rollouts do not record"):
        Learner(tiny_model(), settings(objective={"recipe": "pdm"}))
    with pytest.raises(ValueError, match="at least one trajectory"):
        next(Learner(tiny_model(), settings()).train([]))


def test_minibatches_keep_groups_whole_and_epochs_differ() -> None:
    plan = minibatch_plan(7, 3, 3, seed=5)
    assert plan[:3] == [[0, 1, 2], [3, 4], [5, 6]]
    for epoch in range(3):
        assert sorted(g for part in plan[3 * epoch : 3 * epoch + 3] for g in part) == list(range(7))
    assert plan[3:6] != plan[:3]
    assert plan[3:6] != plan[6:]
    assert plan == minibatch_plan(7, 3, 3, seed=5)
    assert plan != minibatch_plan(7, 3, 3, seed=6)
    assert minibatch_plan(2, 5, 1, seed=0) == [[0], [1]]


def test_learning_rate_schedules() -> None:
    def rates(total: int, *steps: int, **options) -> list[float]:
        config = settings(learner={"learning_rate": 1.0, **options}).learner
        return [round(learning_rate(step, total, config), 6) for step in steps]

    assert rates(10, 0, 5, 99) == [1.0, 1.0, 1.0]
    assert rates(10, 0, 1, 3, 4, 5, warmup_steps=4) == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert rates(10, 2, 6, 10, 50, schedule="linear", warmup_steps=2) == [1.0, 0.5, 0.0, 0.0]
    assert rates(8, 0, 4, 8, schedule="cosine", min_learning_rate_ratio=0.2) == [1.0, 0.6, 0.2]
    assert rates(0, 0, schedule="cosine") == [1.0]
