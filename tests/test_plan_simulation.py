"""The simulated cluster: closed-form cases, bounds, conservation, repeatability, size."""

from __future__ import annotations

import math
import random
from collections.abc import Generator
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.errors import RunError
from estr.plan.cluster import Cluster, drawn_workload, simulate
from estr.plan.engine import Engine, Job
from estr.plan.outcome import Outcome
from estr.plan.sections import Distribution, PlanConfig
from estr.plan.sweep import sync_baseline
from estr.plan.workload import Profile


def fixed(value: float) -> Distribution:
    return Distribution(value=value)


def plan(**sections: dict[str, Any]) -> PlanConfig:
    """One engine with one slot, one trajectory a step of one turn of 10 tokens; nothing else costs time."""
    base: dict[str, dict[str, Any]] = {
        "cluster": {"engines": 1, "slots": 1, "parked": 0},
        "workload": {
            "prompts_per_step": 1,
            "group_size": 1,
            "prompt_tokens": {"value": 20},
            "turn_tokens": {"value": 10},
        },
        "engine": {"seconds_per_step": 0.1},
        "learner": {"seconds_per_token": 0.0},
        "schedule": {"mode": "sync"},
        "simulation": {"steps": 12},
    }
    names = base.keys() | sections.keys()
    return PlanConfig.model_validate({name: {**base.get(name, {}), **sections.get(name, {})} for name in names})


def test_one_engine_one_slot_sync_is_the_sum_of_its_parts() -> None:
    outcome = simulate(
        plan(
            engine={"seconds_per_step": 0.1, "seconds_per_row": 0.01, "seconds_per_prefill_token": 0.002},
            learner={"seconds_per_step": 0.5, "seconds_per_token": 0.01, "overhead_seconds": 0.3},
            weights={"publish_seconds": 0.2, "sync_seconds": 0.05},
        )
    )
    # The prompt is read, which samples the first of 10 tokens; nine decode steps sample the others.
    generating = 20 * 0.002 + 0.01 + 9 * (0.1 + 0.01)
    # The engine takes the new weights while the learner files the step.
    step = generating + 0.5 + 30 * 0.01 + 0.2 + 0.3
    assert outcome.seconds_per_step == pytest.approx(step)
    assert outcome.trained_tokens_per_second == pytest.approx(10 / step)
    assert outcome.engine_idle_fraction == pytest.approx(1 - generating / step)
    assert outcome.learner_idle_fraction == pytest.approx(generating / step)
    assert outcome.inter == {0: 1.0}
    assert outcome.intra == {0: 1.0}


def test_turns_are_read_on_from_the_cache_and_tools_are_waited_for() -> None:
    outcome = simulate(
        plan(
            workload={"turns": {"value": 3}, "reply_tokens": {"value": 5}},
            tools={"latency": "fixed", "latency_seconds": 0.7},
            engine={"seconds_per_step": 0.1, "seconds_per_prefill_token": 0.002},
        )
    )
    read = 20 + 2 * (5 + 1)  # a reply, and the last token of the turn before it
    assert outcome.seconds_per_step == pytest.approx(read * 0.002 + 3 * 9 * 0.1 + 2 * 0.7)


def test_rows_share_a_decode_step_up_to_the_slots() -> None:
    def seconds(slots: int) -> float:
        return simulate(plan(cluster={"slots": slots}, workload={"group_size": 8})).seconds_per_step

    assert seconds(8) == pytest.approx(9 * 0.1)
    assert seconds(4) == pytest.approx(2 * 9 * 0.1)
    assert seconds(1) == pytest.approx(8 * 9 * 0.1)


def test_siblings_read_their_prompt_once() -> None:
    outcome = simulate(
        plan(
            cluster={"slots": 8},
            workload={"group_size": 8},
            engine={"seconds_per_step": 0.1, "seconds_per_prefill_token": 0.01},
        )
    )
    assert outcome.seconds_per_step == pytest.approx(20 * 0.01 + 9 * 0.1)


def test_perfect_overlap_reaches_the_slower_of_engine_and_learner() -> None:
    """With staleness allowed and nothing random, a step takes as long as the slower side alone (here 0.9 s each)."""
    for learner, expected in ((0.5, 0.9), (0.9, 0.9), (2.0, 2.0)):
        outcome = simulate(plan(learner={"seconds_per_step": learner}, schedule={"mode": "async", "max_staleness": 3}))
        assert outcome.seconds_per_step == pytest.approx(expected)
        alone = simulate(plan(learner={"seconds_per_step": learner}))
        assert alone.seconds_per_step == pytest.approx(0.9 + learner)


def test_generation_of_one_trajectory_cannot_be_hurried() -> None:
    """No staleness, no overlap: async with max_staleness 0 is sync."""
    common: dict[str, Any] = {"learner": {"seconds_per_step": 0.4}}
    sync = simulate(plan(**common))
    strict = simulate(plan(**common, schedule={"mode": "async", "max_staleness": 0}))
    assert strict.seconds_per_step == pytest.approx(sync.seconds_per_step) == pytest.approx(1.3)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_slot_under_random_arrivals_is_the_queue_m_d_1(load: float) -> None:
    """Pollaczek and Khinchine: jobs that arrive at rate λ at one slot of service time s, ρ = λs, wait ρs / (2(1 − ρ))
    on average. An idle engine begins at once, so nothing is rounded to its steps."""
    environment, service, waits = simpy.Environment(), 9 * 0.1, list[float]()
    arrived: dict[int, float] = {}

    def ended(engine: Engine, job: Job) -> None:
        waits.append(environment.now - arrived[job.group] - service)
        engine.release(job)

    section = plan().cluster
    engine = Engine(environment, 0, section, plan().engine, 0.0, ended, lambda engine: None)
    engine.take(0)

    def arrivals() -> Generator[simpy.Event, None, None]:
        dice = random.Random(0)
        for number in range(20_000):
            yield environment.timeout(dice.expovariate(load / service))
            arrived[number] = environment.now
            engine.submit(Job(number, 0, 0, Profile(1, (10,), ()), ()))

    environment.process(arrivals())
    environment.run()
    assert len(waits) == 20_000
    assert min(waits) > -1e-6
    assert sum(waits) / len(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=0.08)
    assert engine.totals.busy == pytest.approx(20_000 * service)


def test_a_batch_on_one_slot_takes_the_sum_of_its_services() -> None:
    for k in (1, 3, 6):
        outcome = simulate(plan(workload={"prompts_per_step": k}))
        assert outcome.seconds_per_step == pytest.approx(k * 0.9)
        assert outcome.engine_idle_fraction == pytest.approx(0.0, abs=1e-9)


def test_an_engine_that_is_never_saturated_has_littles_number_of_rows() -> None:
    """L = λW: trained tokens per second times the seconds of a decode step are the mean rows of a decode step times
    the share of time in which the engine is busy."""
    outcome = simulate(
        plan(
            cluster={"slots": 64},
            workload={
                "prompts_per_step": 4,
                "group_size": 4,
                "turns": {"value": 2},
                "turn_tokens": {"kind": "lognormal", "median": 20, "p99": 90, "cap": 200},
            },
            tools={"latency": "lognormal"},
            schedule={"mode": "async", "max_staleness": 4},
            simulation={"steps": 200},
        )
    )
    rows = outcome.generated_tokens_per_second * 0.1
    assert rows == pytest.approx(outcome.active_rows * (1 - outcome.engine_idle_fraction), rel=0.02)


@st.composite
def plans(draw: st.DrawFn) -> PlanConfig:
    minibatches, epochs = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    spread = {"kind": "lognormal", "median": 8, "p99": 60, "cap": 100}
    return plan(
        cluster={
            "engines": draw(st.integers(1, 4)),
            "slots": draw(st.integers(1, 6)),
            "parked": draw(st.integers(-1, 4)),
            "failure_hours": draw(st.sampled_from([0.0, 0.003])),
            "restart_seconds": draw(st.sampled_from([0.0, 3.0])),
        },
        workload={
            "prompts_per_step": draw(st.integers(2, 4)),
            "group_size": draw(st.integers(1, 3)),
            "minibatches": minibatches,
            "epochs": epochs,
            "turns": {"kind": "lognormal", "median": 2, "p99": 5},
            "turn_tokens": spread,
        },
        tools={
            "latency": draw(st.sampled_from(["none", "fixed", "lognormal"])),
            "failure_rate": draw(st.sampled_from([0.0, 0.1])),
        },
        engine={
            "seconds_per_step": 0.05,
            "seconds_per_row": draw(st.sampled_from([0.0, 0.01])),
            "seconds_per_prefill_token": 0.001,
        },
        learner={
            "seconds_per_step": draw(st.sampled_from([0.0, 0.5])),
            "seconds_per_token": draw(st.sampled_from([0.0, 0.01])),
        },
        weights={
            "publish_seconds": draw(st.sampled_from([0.0, 0.1])),
            "sync_seconds": draw(st.sampled_from([0.0, 0.2])),
        },
        schedule={
            "mode": draw(st.sampled_from(["async", "sync"])),
            "max_staleness": minibatches * epochs - 1 + draw(st.integers(0, 4)),
        },
        simulation={"seed": draw(st.integers(0, 5)), "steps": 8},
    )


@settings(max_examples=60, deadline=None)
@given(plans())
def test_staleness_is_bounded_work_is_conserved_and_time_adds_up(given: PlanConfig) -> None:
    cluster = Cluster(given, drawn_workload(given))
    outcome = cluster.run()
    first_epoch = given.staleness_bound - given.workload.minibatches * (given.workload.epochs - 1)
    assert outcome.staleness_max <= given.staleness_bound
    assert outcome.staleness_max <= first_epoch, "later epochs are the staler ones"
    assert all(lag >= 0 for record in cluster.records for lag in [*record.intra, *record.inter])
    there = sum(len(group.finished) for group in cluster.schedule.outstanding)
    held = sum(len(engine.holding) for engine in cluster.engines)
    unfinished = outcome.trajectories["unfinished"]
    assert there + held <= unfinished, "and the others are with a tool while their engine is down"
    if not given.cluster.failure_hours:
        taken = len(cluster.records) % given.steps_per_batch  # a batch whose last minibatches were not recorded
        assert taken or there + held == unfinished
    assert 0 <= outcome.engine_idle_fraction <= 1
    assert 0 <= outcome.learner_idle_fraction <= 1
    assert math.isclose(sum(outcome.inter.values()), 1.0) or not outcome.inter
    trained = sum(record.action_tokens for record in cluster.records[::1]) / given.workload.epochs
    assert outcome.mode == "sync" or cluster.records[-1].generated >= trained - outcome.lost_tokens - 1e-6


@settings(max_examples=10, deadline=None)
@given(plans())
def test_the_same_seed_gives_the_same_numbers(given: PlanConfig) -> None:
    assert simulate(given) == simulate(given)


def test_another_seed_gives_other_numbers() -> None:
    varied = {"turn_tokens": {"kind": "lognormal", "median": 20, "p99": 90}}
    results = {simulate(plan(workload=varied, simulation={"seed": seed})).seconds_per_step for seed in range(3)}
    assert len(results) == 3


def test_engines_that_fail_cost_tokens_and_time_and_nothing_else() -> None:
    common: dict[str, Any] = {
        "cluster": {"engines": 3, "slots": 8},
        "workload": {"prompts_per_step": 4, "group_size": 4, "turns": {"value": 2}},
        "schedule": {"mode": "async", "max_staleness": 2},
        "simulation": {"steps": 60},
    }
    sound = simulate(plan(**common))
    common["cluster"] |= {"failure_hours": 0.005, "restart_seconds": 10.0}
    frail = simulate(plan(**common))
    assert frail.engine_failures > 0
    assert frail.lost_tokens > 0
    assert frail.trajectories["trained"] == sound.trajectories["trained"]
    assert frail.trained_tokens_per_second < sound.trained_tokens_per_second


def test_a_run_that_would_give_up_is_refused() -> None:
    with pytest.raises(RunError, match="groups in a row fail"):
        simulate(plan(tools={"failure_rate": 0.999}))


def test_the_synchronous_baseline_has_all_gpus_for_both() -> None:
    base = sync_baseline(plan(cluster={"engines": 6, "learner_ranks": 2}, schedule={"mode": "async"}))
    assert (base.cluster.engines, base.cluster.learner_ranks, base.gpus, base.staleness_bound) == (8, 8, 8, 0)


def test_four_thousand_engines() -> None:
    outcome: Outcome = simulate(
        plan(
            cluster={"engines": 4096, "slots": 4},
            workload={"prompts_per_step": 2048, "turn_tokens": {"kind": "lognormal", "median": 20, "p99": 90}},
            learner={"seconds_per_step": 1.0},
            weights={"sync_seconds": 0.1},
            schedule={"mode": "async", "max_staleness": 2},
            simulation={"steps": 3, "warm_steps": 2},
        )
    )
    assert outcome.trajectories["trained"] == 5 * 2048
    assert 0 < outcome.staleness_max <= 2
