"""Every method of every family inside the real loop: finite, reproducible, and not without effect.

Lockstep, inter = 4, intra = 2, int5 engine, two minibatches; six steps of builtin:micro, and under ``slow`` 20 steps on
the calculator with a model that was taught to use it. A method that gives the losses and gradients of plain grpo is
wired wrongly, unless ``INERT`` says why it must.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estr.advantages import advantages, reweightings
from estr.controllers import controllers, regularizers
from estr.engines.samplers import samplers
from estr.objectives import recipes
from estr.shaping import selections, shapings
from loop_helpers import metrics_without_clock, rollouts
from loop_methods import CALCULATOR, LOOP, Loop, configured, path_of, run

GRPO = ("objective.recipe=grpo",)
CORRECT = "correct_above=0.4"  # rewards of the echo task are spread over [0, 1)

RECIPES: dict[str, tuple[str, ...]] = {name: (f"objective.recipe={name}",) for name in recipes()}
RECIPES["pdm"] += ("rollout.topk_logprobs=8",)
RECIPES["score_centering"] += ("rollout.topk_logprobs=8",)
for recipe in RECIPES:  # bands made for small mismatches, which drop every sequence of an int5 engine
    if "_geo_rs" in recipe:
        RECIPES[recipe] += ("objective.rollout_rs_threshold=0.6_1.7",)
    if "_k3_rs" in recipe:
        RECIPES[recipe] += ("objective.rollout_rs_threshold=0.3",)
RECIPES["verl/decoupled_seq_is_rs"] += ("objective.rollout_rs_threshold=0.1_10.0",)
RECIPES["seq_mask_tis"] += ("objective.low=0.8", "objective.high=1.25")
RECIPES |= {"grpo + kl k1": (*GRPO, "objective.kl_coef=0.5", "objective.kl_estimator=k1")}
RECIPES |= {"grpo + kl k3": (*GRPO, "objective.kl_coef=0.5")}

ADVANTAGES = {name: (*GRPO, f"objective.advantage={name}") for name in advantages()}

REWEIGHTINGS = {name: (*GRPO, f"objective.reweighting={name}") for name in reweightings()}
REWEIGHTINGS["stare"] += ("objective.reweighting_options.target_entropy=99.0",)
REWEIGHTINGS["gtpo"] += (f"objective.reweighting_options.{CORRECT}",)

REGULARIZERS = {name: (*GRPO, f"objective.regularizer={name}") for name in regularizers()}
REGULARIZERS["aer"] += (f"objective.regularizer_options.{CORRECT}", "objective.regularizer_options.rho=1.0")

SHAPINGS = {name: (*GRPO, f"objective.shaping={name}") for name in shapings()}
SHAPINGS["overlong"] += (
    "objective.shaping_options.overlong.max_length=8",
    "objective.shaping_options.overlong.buffer=6",
)
SHAPINGS["err"] += (f"objective.shaping_options.err.{CORRECT}",)
SHAPINGS["err phase 2"] = (*SHAPINGS["err"], "objective.shaping_options.err.phase=2")

CONTROLLERS = {name: (*GRPO, f"learner.controllers={name}") for name in controllers()}
CONTROLLERS["rq"] += ("learner.controller_options.rq.min_history=1", "learner.controller_options.rq.quantile=0.1")
CONTROLLERS["gac"] += ("learner.controller_options.gac.low=0.0",)
CONTROLLERS["fixed_norm"] += ("learner.controller_options.fixed_norm.max_norm=0.5",)
CONTROLLERS["several"] = (*GRPO, "learner.controllers=['gac', 'fixed_norm', 'vcpo']")

SAMPLERS = {
    "temperature": (*GRPO, "rollout.temperature=0.7"),
    "top_p": (*GRPO, "rollout.top_p=0.7"),
    "top_k": (*GRPO, "rollout.top_k=20"),
    "min_p": (*GRPO, "rollout.min_p=0.3"),
    "cuts": (*GRPO, "rollout.sampler=cuts", "rollout.cuts_warm=1"),
    "mixed_cuts": (*GRPO, "rollout.sampler=mixed_cuts", "rollout.cuts_warm=1", "rollout.cuts_logprob=policy"),
}

SELECTIONS = {"aepo": (*GRPO, "objective.selection=aepo", "objective.selection_options.prompt_share=0.5")}

METHODS = {
    f"{family}: {name}": sets
    for family, table in {
        "recipe": RECIPES,
        "advantage": ADVANTAGES,
        "re-weighting": REWEIGHTINGS,
        "regularizer": REGULARIZERS,
        "shaping": SHAPINGS,
        "selection": SELECTIONS,
        "controller": CONTROLLERS,
        "sampler": SAMPLERS,
    }.items()
    for name, sets in table.items()
}

INERT = {
    "recipe: grpo": "it is what the others are compared with",
    "advantage: grpo": "it is what the others are compared with",
}


@cache
def path_of_grpo(base: tuple[str, ...]) -> np.ndarray:
    return path_of(Loop(configured(*GRPO, base=base)).go().metrics)


def differs_from_grpo(path: np.ndarray, base: tuple[str, ...]) -> bool:
    return not np.allclose(path, path_of_grpo(base), rtol=1e-6, atol=1e-9)


def test_the_table_is_complete() -> None:
    assert set(recipes()) <= set(RECIPES)
    for table, known in (
        (ADVANTAGES, advantages()),
        (REWEIGHTINGS, reweightings()),
        (REGULARIZERS, regularizers()),
        (SHAPINGS, shapings()),
        (CONTROLLERS, controllers()),
    ):
        assert set(known) <= set(table)
    assert set(samplers.table()) == {"standard", "cuts", "mixed_cuts"}
    assert set(selections()) == {"dapo", *SELECTIONS}


def test_dynamic_sampling_drops_what_the_same_loop_would_train() -> None:
    """Rewards of two values only, so that some groups have no spread."""
    sets = (*GRPO, "task.turns=1", "task.coarse=2")
    plain, chosen = (Loop(configured(*sets, f"objective.selection={rule}")).go() for rule in ("none", "dapo"))
    assert chosen.journal.dropped_groups
    assert plain.journal.dropped_groups == []
    assert min(line["grad/norm"] for line in chosen.metrics) > 0
    assert not np.array_equal(path_of(plain.metrics), path_of(chosen.metrics))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_in_the_loop_and_has_an_effect(name: str) -> None:
    """Two runs of the first batches agree to the last bit."""
    loop = Loop(configured(*METHODS[name])).go()
    for line in loop.metrics:
        assert all(math.isfinite(value) for value in line.values())
        assert line["grad/norm"] > 0
    assert not any(result.skipped for result in loop.results)
    assert [result.version for result in loop.results] == [1, 2, 3, 4, 5, 6]
    assert loop.metrics[-1]["staleness/inter_max"] >= 4
    assert np.array_equal(path_of(Loop(configured(*METHODS[name])).go(4).metrics), path_of(loop.metrics[:4]))
    assert differs_from_grpo(path_of(loop.metrics), LOOP) == (name not in INERT), INERT.get(name, "it changes nothing")


VISIBLE = {  # what makes a method act on a good model whose ratios are close to 1
    "recipe: estr": ("objective.tau=0.01",),
    "recipe: verl/bypass_ppo_clip": ("objective.dual_clip=1.02",),
    "recipe: verl/bypass_ppo_clip_geo_rs": ("objective.rollout_rs_threshold=0.97_1.03",),
    "recipe: verl/bypass_ppo_clip_k3_rs": ("objective.rollout_rs_threshold=0.0005",),
    "regularizer: aer": ("objective.regularizer_options.correct_above=0.9",),
    "shaping: overlong": ("objective.shaping_options.overlong.max_length=14",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_on_the_calculator(name: str) -> None:
    sets = (*METHODS[name], *VISIBLE.get(name, ()))
    loop = Loop(configured(*sets, base=CALCULATOR)).go()
    assert all(math.isfinite(value) for line in loop.metrics for value in line.values())
    assert [result.version for result in loop.results if not result.skipped][-1] == 20
    assert max(line["grad/norm"] for line in loop.metrics) > 0
    assert np.array_equal(path_of(Loop(configured(*sets, base=CALCULATOR)).go().metrics), path_of(loop.metrics))
    assert differs_from_grpo(path_of(loop.metrics), CALCULATOR) == (name not in INERT), INERT.get(name)


EVERYTHING: dict[str, Any] = {
    "task": {"name": "loop_tasks:Echo", "turns": 1, "coarse": 3},
    "schedule": {"mode": "lockstep", "inter": 2, "intra": 1},
    "objective": {
        "recipe": "ppo_ewma",
        "reweighting": "stare",
        "reweighting_options": {"adaptive": True, "target_entropy": 99.0},
        "regularizer": "aer",
        "regularizer_options": {"correct_above": 0.5, "tau": 1.01},
        "shaping": ["err"],
        "selection": "dapo",
        "kl_coef": 0.01,
    },
    "learner": {
        "minibatches": 2,
        "prompts_per_step": 2,
        "learning_rate": 0.01,
        "controllers": ["gac", "rq", "vcpo"],
        "controller_options": {"gac": {"low": 0.0}, "rq": {"min_history": 2, "quantile": 0.2}},
    },
}


def test_a_killed_run_with_every_family_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """All that the families remember is in the checkpoint: the averaged weights, STARE's gate and weights, AER's
    coefficient and first entropy, GAC's last gradient, RQ's norms."""
    whole = run(tmp_path / "whole", 8, **EVERYTHING)
    halves = run(tmp_path / "halves", 8, stop=5, **EVERYTHING)
    lines = metrics_without_clock(whole)
    assert lines == metrics_without_clock(halves)
    assert rollouts(whole) == rollouts(halves)
    for name in ("stare/weight_positive", "aer/alpha", "gac/cosine", "controller/threshold", "kl/reference"):
        assert len({line[name] for line in lines if name in line}) > 2, name
    assert len({line["learner/learning_rate"] for line in lines}) > 2
