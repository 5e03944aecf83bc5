"""A learner of several ranks does what one does: gradients for any split, statistics, optimizer, state, empty ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from estr.learner import Learner
from estr.learner.minibatch import Minibatch
from estr.learner.packing import pack
from estr.learner.rollouts import Rollouts
from estr.learner.sharding import part_of
from estr.models.load import apply_lora, load_model, save_model
from estr.models.tokenizer import builtin_tokenizer
from estr.objectives import objective
from estr.runtime.ranks import rank_processes
from learner_helpers import assert_same_gradients, near_policy, random_groups, settings, tiny_model

TOKENIZER = builtin_tokenizer()
SPLITS = {
    "by length": None,
    "all on rank 0": lambda place, ranks: 0,
    "all on the last rank": lambda place, ranks: ranks - 1,
    "in turns": lambda place, ranks: place % ranks,
    "one against the rest": lambda place, ranks: int(place == 0),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose weights are large enough to matter: heads of 4, so that three ranks leave a shard empty."""
    path = tmp_path_factory.mktemp("models")
    for tied in (True, False):
        save_model(tiny_model(tied=tied, vocabulary=len(TOKENIZER), head=4), TOKENIZER, path / f"tied-{tied}")
    save_model(tiny_model(seed=1, vocabulary=len(TOKENIZER), head=4), TOKENIZER, path / "reference")
    return path


def model_of(path: Path, config: Any) -> Any:
    model = load_model(path, "float32").model
    return apply_lora(model, config.model.lora_rank, 16.0) if config.model.lora_rank else model


@contextmanager
def learner_of(path: Path, ranks: int, reference: Path | None = None, **sections: Any) -> Iterator[Learner]:
    """A learner of several ranks, or of one."""
    learner = {"tokens_per_microbatch": 60, **sections.pop("learner", {}), "ranks": ranks}
    config = settings(learner=learner, **sections)
    frozen = None if reference is None else load_model(reference, "float32").model
    if ranks == 1:
        yield Learner(model_of(path, config), config, reference=frozen)
        return
    with rank_processes(config, path, reference, threads=1) as others:
        yield Learner(model_of(path, config), config, reference=frozen, others=others)


def gradient(learner: Learner, groups: Any, split: Any = None) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradient of one step (which AdamW with beta1 = 0 keeps as its first moment) and its metrics."""
    rollouts = Rollouts.of(groups, learner.config.learner)
    rollouts.advantage = torch.linspace(-1.0, 2.0, len(rollouts.trajectories)) + 0.1
    minibatch = Minibatch.of(rollouts, list(range(len(groups))), 60, learner.device, ranks=learner.ranks.count)
    if split is not None:
        minibatch.microbatches = [
            dataclasses.replace(microbatch, rank=split(place, learner.ranks.count))
            for place, microbatch in enumerate(minibatch.microbatches)
        ]
    seen = learner._gradient(minibatch, 0, fresh=True, seed=0)
    learner.optimizer.step(0.0)
    moments = learner.state_tensors().items()
    start = "optimizer/exp_avg."
    return {name.removeprefix(start): t.clone() for name, t in moments if name.startswith(start)}, seen.metrics


@pytest.mark.parametrize(("tied", "ranks"), [(True, 2), (False, 3)])
def test_any_number_of_ranks_and_any_split_give_the_gradient_of_one(directory: Path, tied: bool, ranks: int) -> None:
    path, groups = directory / f"tied-{tied}", random_groups(seed=3)
    near_policy(load_model(path, "float32").model.eval(), groups)
    sections = {"objective": {"recipe": "estr", "tau": 0.5, "denominator": "kept"}, "learner": {"beta1": 0.0}}
    few = [groups[0][:1]]
    with learner_of(path, 1, **sections) as alone:
        expected, metrics = gradient(alone, groups)
        expected_few, _ = gradient(alone, few)
    with learner_of(path, ranks, **sections) as learner:
        for name, split in SPLITS.items():
            got, seen = gradient(learner, groups, split)
            assert_same_gradients(got, expected)
            assert seen == pytest.approx(metrics, rel=1e-4, abs=1e-6), name
        single, _ = gradient(learner, few)  # fewer trajectories than ranks
    assert_same_gradients(single, expected_few)


CASES: dict[str, dict[str, Any]] = {
    "m2po, minibatches, gac and rq": {
        "objective": {"recipe": "m2po", "budget": 0.01},
        "learner": {"minibatches": 2, "epochs": 2, "controllers": ["gac", "rq", "vcpo"]}
        | {"controller_options": {"gac": {"low": 0.0}, "rq": {"min_history": 1}}, "max_grad_norm": 0.5},
    },
    "clip_cov and aer": {
        "objective": {"recipe": "clip_cov", "ratio": 0.2, "low": 0.0, "regularizer": "aer"}
        | {"regularizer_options": {"initial_alpha": 0.1, "rho": 1.0}},
        "learner": {"minibatches": 2},
        "rollout": {"temperature": 0.8},
    },
    "ppo_ewma and a reference model": {
        "objective": {"recipe": "ppo_ewma", "beta": 0.9, "kl_coef": 0.2, "kl_estimator": "k1"},
        "learner": {"minibatches": 2},
    },
    "adapters and their base as reference, papo, opob": {
        "objective": {"recipe": "vespo", "kl_coef": 0.2, "advantage": "opob", "reweighting": "papo"}
        | {"reweighting_options": {"reference": "initial", "tau": 2.0}},
        "model": {"lora_rank": 2, "gradient_checkpointing": True},
        "learner": {"learning_rate": 0.05},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_does_and_their_state_fits_one(directory: Path, name: str) -> None:
    """Steps of two ranks against those of one; then one goes on with the state of two, and two with that of one."""
    case, path = CASES[name], directory / "tied-True"
    if "adapters" in name:
        pytest.importorskip("peft")
    reference = directory / "reference" if "a reference" in name else None
    first, second = random_groups(4, seed=5), random_groups(4, seed=6)
    for groups in (first, second):
        near_policy(load_model(path, "float32").model.eval(), groups, temperature=0.8)
    with learner_of(path, 1, reference, **case) as alone, learner_of(path, 2, reference, **case) as learner:
        assert_same_steps(list(learner.train(first)), list(alone.train(first)))
        assert_same_state(learner, alone)
        kept = (
            learner.state(),
            {**learner.state_tensors(), **{f"adapter/{n}": t for n, t in learner.trainable().items()}},
        )
        assert_same_steps(list(learner.train(second)), list(alone.train(second)))
        assert_same_state(learner, alone)
        learner.load_state(*kept)
        assert same_tensors(
            learner.trainable(), {n.removeprefix("adapter/"): t for n, t in kept[1].items()}, exact=True
        )
        again = learner.state_tensors()
        assert again.keys() <= kept[1].keys()
        assert same_tensors(again, kept[1], exact=True)
        weights = {n: t.clone() for n, t in learner.trainable().items()}
        repeated = list(learner.train(second))
        with torch.no_grad():
            for parameter, value in weights.items():
                alone.optimizer.parameters[parameter].copy_(value)
        alone.load_state(*kept)
        assert_same_steps(repeated, list(alone.train(second)))
        assert np.allclose(learner.canary([3, 1, 4, 1, 5]), alone.canary([3, 1, 4, 1, 5]), atol=1e-4)


def assert_same_steps(got: list[Any], expected: list[Any]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.metrics == pytest.approx(other.metrics, rel=2e-3, abs=1e-5)
        assert (one.version, one.skipped, one.action_tokens) == (other.version, other.skipped, other.action_tokens)
        for a, b in zip(one.trajectories, other.trajectories, strict=True):
            assert a.trajectory is b.trajectory
            assert a.advantage == pytest.approx(b.advantage, rel=1e-3, abs=1e-5)
            for column in ("learner_logprob", "learner_entropy", "proximal_logprob", "token_advantage"):
                assert_same_columns(getattr(a, column), getattr(b, column))


def assert_same_columns(got: Any, expected: Any) -> None:
    assert (got is None) == (expected is None)
    for a, b in zip(got or [], expected or [], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def assert_same_state(learner: Learner, alone: Learner) -> None:
    assert same_tensors(learner.weights(), alone.weights())
    assert learner.state_tensors().keys() == alone.state_tensors().keys()
    assert same_tensors(learner.state_tensors(), alone.state_tensors())
    assert same_tensors(learner.trainable(), alone.trainable())


def same_tensors(got: Any, expected: Any, exact: bool = False) -> bool:
    if exact:
        return all(torch.equal(tensor, expected[name]) for name, tensor in got.items())
    assert got.keys() == expected.keys()
    return all(torch.allclose(tensor, expected[name], rtol=1e-3, atol=2e-4) for name, tensor in got.items())


def test_units_are_shared_out_by_length_and_every_one_once() -> None:
    units = [member.segments for group in random_groups(5) for member in group]
    for share in (False, True):
        packed = pack(units, 40, share=share, ranks=3)
        assert sorted(unit for m in packed for unit in m.units) == list(range(len(units)))
        read = [sum(int(m.cu_seqlens[-1]) for m in packed if m.rank == rank) for rank in range(3)]
        assert max(read) - min(read) <= 2 * max(sum(len(row.tokens) for row in unit) for unit in units)
        assert len({m.rank for m in pack(units[:2], 40, share=share, ranks=3)}) == 2


def test_slices_are_those_of_torch_chunk() -> None:
    for size in (1, 4, 7, 9):
        tensor = torch.arange(size)
        chunks = list(tensor.chunk(3))
        for rank in range(3):
            expected = chunks[rank] if rank < len(chunks) else tensor[:0]
            assert torch.equal(part_of(tensor, rank, 3), expected)


def test_a_draw_among_all_tokens_is_the_same_when_micro_batches_are_worked_on_apart() -> None:
    """Twin trajectories tie: each process must know what was taken before."""
    from estr import TokenBatch

    generator = torch.Generator().manual_seed(1)
    logprob = -torch.rand(12, generator=generator, dtype=torch.float64)
    advantage = torch.randn(12, generator=generator, dtype=torch.float64)

    def batch() -> TokenBatch:
        return TokenBatch(
            logprob=logprob, behavior_logprob=logprob - 0.1, advantage=advantage, sequence=torch.arange(12) // 4
        )

    recipe, batches = objective("clip_cov", ratio=0.2, low=-9.0, high=9.0), [batch(), batch(), batch()]
    shared = recipe.statistics(batches)
    expected = [recipe(b, 36, 9, shared, torch.Generator().manual_seed(7)).keep for b in batches]
    apart = recipe.statistics_apart(batches, torch.Generator().manual_seed(7))
    order = [2, 0, 1]
    got = {i: recipe(batches[i], 36, 9, apart[i], torch.Generator()).keep for i in order}
    assert all(torch.equal(got[i], expected[i]) for i in order)
    assert int((~torch.cat(expected)).sum()) == 7
