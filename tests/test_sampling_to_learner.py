"""From the sampler through episodes to the learner and to disk: log μ, log π and the support fit each other."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from estr.config import Config, RolloutConfig
from estr.learner import Learner, pack, score
from estr.learner.scoring import values
from estr.models.builtin import new_model
from estr.models.forward import prepare_model
from estr.models.load import merged_state
from estr.models.tokenizer import builtin_tokenizer
from estr.runtime.builders import build_rollout_worker, build_task
from estr.runtime.messages import Finished, Job
from estr.storage.rollout_files import RolloutWriter, read_rollouts
from estr.storage.rollouts import SCHEMA, Settlement, rows_from
from estr.storage.spool import decode_trajectory, encode_trajectory
from estr.trajectory import Segment, Support, Trajectory
from learner_helpers import VOCABULARY, random_groups, tiny_model
from learner_helpers import settings as learner_settings


@pytest.fixture(scope="module")
def policy() -> tuple[Any, Any]:
    """builtin:micro with logits spread far enough that truncation leaves out most of the vocabulary."""
    tokenizer = builtin_tokenizer()
    model = new_model("builtin:micro", tokenizer)
    with torch.no_grad():
        model.get_decoder().norm.weight *= 12
    prepare_model(model)
    return model, tokenizer


def config(**rollout: Any) -> Config:
    defaults = {"group_size": 4, "max_new_tokens": 12, "max_turns": 3, "slots": 6, "parked": 6}
    return Config(task={"name": "calculator"}, rollout=defaults | rollout)


def rollout(policy: tuple[Any, Any], config: Config, groups: int = 2) -> list[Trajectory]:
    """Trajectories of the real worker, sampled by the model's own weights."""
    model, tokenizer = policy
    task = build_task(config)
    worker = build_rollout_worker(config, task, new_model("builtin:micro", tokenizer), tokenizer, wait_for_tools=False)
    worker.engine.set_weights(0, merged_state(model), own=True)
    for group in range(groups):
        for sibling in range(config.rollout.group_size):
            explore = config.rollout.explores(sibling)
            worker.submit(Job(group, sibling, 0, task.train_problem(group), run_seed=0, explore=explore))
    results = worker.run_all()
    assert all(isinstance(result, Finished) for result in results)
    return sorted((r.trajectory for r in results if isinstance(r, Finished)), key=lambda t: (t.group, t.sibling))


def segments(trajectories: list[Trajectory]) -> list[Segment]:
    return [segment for trajectory in trajectories for segment in trajectory.segments]


def actions(rows: list[Segment], name: str) -> np.ndarray:
    return np.concatenate([getattr(row, name)[row.action] for row in rows])


def scored(model: Any, rows: list[Segment], temperature: float, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    pairs = score(model, rows, temperature, **options)
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])


SAMPLING = [
    {"top_p": 0.7},
    {"top_k": 5},
    {"min_p": 0.1},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_fault_A3_ratios_are_one_at_equal_weights(policy: tuple[Any, Any], sampling: dict[str, float]) -> None:
    """On every action token log μ = log π and H equal to 1e-4; without the support both would be off."""
    rows = segments(rollout(policy, config(**sampling)))
    temperature = sampling.get("temperature", 1.0)
    log_mu, entropy = actions(rows, "logprob"), actions(rows, "entropy")
    assert len(log_mu) > 40
    assert all(row.support is not None for row in rows)
    logprob, learner_entropy = scored(policy[0], rows, temperature)
    np.testing.assert_allclose(logprob, log_mu, atol=1e-4)
    np.testing.assert_allclose(learner_entropy, entropy, atol=1e-4)
    whole = [dataclasses.replace(row, support=None) for row in rows]
    other, other_entropy = scored(policy[0], whole, temperature)
    assert (log_mu - other).max() > 0.1
    assert (log_mu - other).min() > -1e-4, "leaving tokens out can only make the sampled one likelier"
    assert (other_entropy - entropy).max() > 0.1


def test_the_split_into_micro_batches_keeps_supports_with_their_tokens(policy: tuple[Any, Any]) -> None:
    rows = segments(rollout(policy, config(top_p=0.7, sampler="standard")))
    rows = [dataclasses.replace(row, support=None) if i % 3 == 0 else row for i, row in enumerate(rows)]
    together, apart = (scored(policy[0], rows, 1.0, tokens_per_microbatch=size) for size in (10**6, 1))
    for a, b in zip(together, apart, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_cuts_as_proposal_is_corrected_within_its_support(policy: tuple[Any, Any]) -> None:
    """μ is uniform on S and the learner normalizes over S: E = π_S |S|, whose mean under μ is 1."""
    rows = segments(rollout(policy, config(sampler="cuts", cuts_delta=0.01, cuts_warm=2)))
    seen = set()
    for row, (logprob, _) in zip(rows, score(policy[0], rows), strict=True):
        whole = score(policy[0], [dataclasses.replace(row, support=None)])[0][0]
        assert row.support is not None
        for a in range(row.action_count):
            size = len(row.support[a])
            seen.add(size)
            log_mu, entropy = row.logprob[row.action][a], row.entropy[row.action][a]
            if size == 0:
                assert log_mu == pytest.approx(float(logprob[a]), abs=1e-4)
                continue
            assert log_mu == pytest.approx(-math.log(size), abs=1e-5)
            assert entropy == pytest.approx(math.log(size), abs=1e-5)
            tokens = row.tokens.copy()
            at = np.flatnonzero(row.action)[a]
            mass = 0.0
            for token in row.support[a]:
                tokens[at] = token
                changed = dataclasses.replace(row, tokens=tokens.copy())
                mass += math.exp(float(score(policy[0], [changed])[0][0][a]))
            assert mass == pytest.approx(1.0, abs=1e-4), "π_S sums to 1, so the mean of E under μ is 1"
            assert logprob[a] >= whole[a] - 1e-5
    assert {0, 1} < seen


def test_cuts_as_policy_has_ratio_one_at_equal_weights(policy: tuple[Any, Any]) -> None:
    changes = {"sampler": "cuts", "cuts_delta": 0.01, "cuts_warm": 2, "temperature": 0.9, "cuts_logprob": "policy"}
    rows = segments(rollout(policy, config(**changes)))
    assert all(row.support is None for row in rows)
    logprob, entropy = scored(policy[0], rows, 0.9)
    np.testing.assert_allclose(logprob, actions(rows, "logprob"), atol=1e-4)
    np.testing.assert_allclose(entropy, actions(rows, "entropy"), atol=1e-4)
    proposal = segments(rollout(policy, config(**changes | {"cuts_logprob": "proposal"})))
    assert [row.tokens.tolist() for row in rows] == [row.tokens.tolist() for row in proposal]


@pytest.mark.parametrize(("size", "cut"), [(4, [2, 3]), (5, [3, 4]), (2, [1])])
def test_mixed_cuts_explores_in_the_second_half_of_a_group(policy: tuple[Any, Any], size: int, cut: list[int]) -> None:
    mixed = config(group_size=size, sampler="mixed_cuts", cuts_warm=0)
    plain = rollout(policy, config(group_size=size), groups=1)
    for trajectory, usual in zip(rollout(policy, mixed, groups=1), plain, strict=True):
        supports = [row.support for row in trajectory.segments]
        assert all((s is not None) == (trajectory.sibling in cut) for s in supports)
        rows = rows_from(trajectory, Settlement("finished"), mixed.rollout)
        assert {row["sampler"] for row in rows} == {"cuts" if trajectory.sibling in cut else "standard"}
        if trajectory.sibling not in cut:
            assert trajectory.segments[0].tokens.tolist() == usual.segments[0].tokens.tolist()


def test_an_evaluation_truncates_but_does_not_explore(policy: tuple[Any, Any]) -> None:
    model, tokenizer = policy
    task = build_task(config())
    for changes, expected in (({"sampler": "cuts", "topk_logprobs": 4}, 0), ({"top_k": 1}, 1)):
        worker = build_rollout_worker(config(**changes), task, model, tokenizer, temperature=1.0, wait_for_tools=False)
        worker.engine.set_weights(0, merged_state(model), own=True)
        worker.submit(Job(0, 0, 0, task.train_problem(0), run_seed=0))
        (result,) = worker.run_all()
        assert isinstance(result, Finished)
        row = result.trajectory.segments[0]
        assert row.topk_ids is None
        assert (row.support is not None) == bool(expected)


def test_likely_tokens_have_the_learners_log_probabilities(policy: tuple[Any, Any]) -> None:
    rows = segments(rollout(policy, config(top_p=0.7, topk_logprobs=6, temperature=0.9)))
    (microbatch,) = pack([[row] for row in rows], 10**6)
    found = values(policy[0], microbatch, 0.9, topk=True).other_logprob
    assert microbatch.topk_logprob is not None
    assert found is not None
    inside = microbatch.topk_logprob.isfinite()
    assert torch.equal(inside, found.isfinite()), "beyond the support there is no probability on either side"
    assert 0 < int((~inside).sum()) < inside.numel()
    assert float((found.detach() - microbatch.topk_logprob)[inside].abs().max()) < 1e-4
    assert values(policy[0], microbatch, 0.9).other_logprob is None


# ---------------------------------------------------------------------- training


def record(model: Any, groups: list[list[Trajectory]], support: bool = True, topk: int = 6) -> None:
    """Give made-up trajectories what an engine with noisy weights would have recorded."""
    rng = np.random.default_rng(3)
    for row in (row for group in groups for member in group for row in member.segments):
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        with torch.no_grad():
            noisy = model(tokens[None]).logits[0].float()
            noisy += torch.from_numpy(rng.normal(0, 0.3, noisy.shape)).float()
        at = np.flatnonzero(row.action)
        chosen = noisy[at - 1]
        parts = [np.union1d(rng.choice(VOCABULARY, 9), row.tokens[i]).astype(np.int32) for i in at]
        if support:
            row.support = Support.of(parts)
            mask = torch.ones_like(chosen, dtype=torch.bool)
            for i, part in enumerate(parts):
                mask[i, part] = False
            chosen = chosen.masked_fill(mask, -torch.inf)
        log_mu = chosen.log_softmax(-1)
        row.logprob[row.action] = log_mu.gather(1, tokens[at, None])[:, 0].numpy()
        row.entropy[row.action] = torch.special.entr(log_mu.exp()).sum(-1).numpy()
        best = log_mu.topk(topk)
        row.topk_ids, row.topk_logprob = best.indices.int().numpy(), best.values.numpy()


def gradient_of(
    recipe: str, support: bool = True, tokens: int = 4096
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The change of the weights in one plain step on recorded trajectories, and the step's metrics."""
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = random_groups()
    record(model, groups, support)
    learner = Learner(
        model,
        learner_settings(
            objective={"recipe": recipe}, rollout={"topk_logprobs": 6}, learner={"tokens_per_microbatch": tokens}
        ),
    )
    (result,) = learner.train(groups)
    assert not result.skipped
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}, result.metrics


@pytest.mark.parametrize("recipe", ["estr", "pdm", "score_centering"])
def test_recipes_train_on_supports_and_likely_tokens(recipe: str) -> None:
    """Finite, the same however the step is split, and different from what the whole vocabulary would give."""
    whole, metrics = gradient_of(recipe)
    split, _ = gradient_of(recipe, tokens=20)
    without, _ = gradient_of(recipe, support=False)
    assert metrics["tokens/invalid"] == 0
    assert all(delta.isfinite().all() for delta in whole.values())
    largest = max(float(delta.abs().max()) for delta in whole.values())
    assert largest > 0
    assert max(float((whole[name] - split[name]).abs().max()) for name in whole) < 1e-2 * largest
    assert max(float((whole[name] - without[name]).abs().max()) for name in whole) > 1e-2 * largest


def test_score_centering_differs_from_the_policy_gradient() -> None:
    centered, _ = gradient_of("score_centering")
    plain, _ = gradient_of("grpo")
    assert max(float((centered[name] - plain[name]).abs().max()) for name in plain) > 1e-3


def test_a_recipe_without_its_likely_tokens_is_refused() -> None:
    from estr.errors import UsageError

    with pytest.raises(UsageError, match="needs behavior_topk_logprob"):
        Learner(tiny_model(), learner_settings(objective={"recipe": "pdm"}))


# ---------------------------------------------------------------------- storage


def recorded_segment(support: bool = True, topk: bool = True) -> Segment:
    """Four tokens, actions at 1 and 3; the first of them was drawn from the whole vocabulary."""
    action = np.array([False, True, False, True])
    column = np.where(action, np.float32(-0.5), np.float32("nan"))
    return Segment(
        tokens=np.arange(4, dtype=np.int32),
        action=action,
        logprob=column,
        entropy=-column,
        version=np.where(action, 2, -1).astype(np.int32),
        support=Support.of([np.zeros(0, np.int32), np.array([3, 7, 9], np.int32)]) if support else None,
        topk_ids=np.array([[1, 5], [3, 7]], np.int32) if topk else None,
        topk_logprob=np.array([[-0.5, -1.0], [-0.25, -np.inf]], np.float32) if topk else None,
    )


def stored_trajectory(*rows: Segment) -> Trajectory:
    return Trajectory(1, 0, 0, "t", "p", 7, segments=list(rows), reward=1.0, finish_reason="stop", group_key="k")


def test_supports_and_likely_tokens_are_stored_with_their_tokens(tmp_path: Any) -> None:
    trajectory = stored_trajectory(recorded_segment(), recorded_segment(False, False))
    with RolloutWriter(tmp_path) as writer:
        writer.write(1, rows_from(trajectory, Settlement("trained", trained_step=1), RolloutConfig(min_p=0.5)))
    table = read_rollouts(tmp_path)
    types = {name: str(SCHEMA.field(name).type) for name in ("support", "topk_ids", "topk_logprob")}
    assert types["support"] == types["topk_ids"] == "list<item: list<item: int32>>"
    assert types["topk_logprob"] == "list<item: list<item: float>>"
    first, second = table.to_pylist()
    assert first["support"] == [None, None, None, [3, 7, 9]]
    assert first["topk_ids"] == [None, [1, 5], None, [3, 7]]
    assert first["topk_logprob"] == [None, [-0.5, -1.0], None, [-0.25, -math.inf]]
    assert (first["min_p"], first["sampler"]) == (0.5, "standard")
    assert second["support"] is second["topk_ids"] is second["topk_logprob"] is None


@pytest.mark.parametrize("kinds", [[(True, True)], [(True, False), (False, True), (False, False)], [(False, False)]])
def test_the_spool_keeps_supports_and_likely_tokens(kinds: list[tuple[bool, bool]]) -> None:
    trajectory = stored_trajectory(*(recorded_segment(*kind) for kind in kinds))
    payload = encode_trajectory(trajectory)
    for before, after in zip(trajectory.segments, decode_trajectory(payload).segments, strict=True):
        for field in dataclasses.fields(Segment):
            a, b = getattr(before, field.name), getattr(after, field.name)
            if isinstance(a, Support):
                assert (a.ids.tolist(), a.offsets.tolist()) == (b.ids.tolist(), b.offsets.tolist())
            elif a is None:
                assert b is None
            else:
                np.testing.assert_array_equal(a, b)
                assert a.dtype == b.dtype


def test_damaged_payloads_with_optional_columns_are_recognized() -> None:
    import zlib

    content = zlib.decompress(encode_trajectory(stored_trajectory(recorded_segment())))
    for broken in (
        content[:-4],
        content.replace(b'"support_ids": [3]', b'"support_ids": [2]'),
        content.replace(b'"support_ids": [3]', b'"support_ids": [-3]'),
        content.replace(b'"topk_ids": [2, 2]', b'"topk_ids": [4, 1]'),
    ):
        assert broken != content
        with pytest.raises(ValueError):
            decode_trajectory(zlib.compress(broken))


def test_supports_join_row_after_row() -> None:
    one = Support.of([np.array([1, 2], np.int32), np.zeros(0, np.int32)])
    joined = Support.join([one, None, one], [2, 3, 2])
    assert joined is not None
    assert [joined[i].tolist() for i in range(len(joined))] == [[1, 2], [], [], [], [], [1, 2], []]
    assert Support.join([None, None], [2, 3]) is None
    with pytest.raises(ValueError, match="offsets must rise"):
        Support(np.zeros(3, np.int32), np.array([0, 2], np.int64))
    with pytest.raises(ValueError, match="2 entries, one per action token"):
        dataclasses.replace(recorded_segment(), support=Support.of([np.zeros(0, np.int32)]))
    with pytest.raises(ValueError, match="if and only if"):
        dataclasses.replace(recorded_segment(), topk_logprob=None)
