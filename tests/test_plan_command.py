"""Plans from TOML and from runs, sweeps, and what `estr plan` prints and writes."""

from __future__ import annotations

import builtins
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estr.cli.main import main
from estr.config import Config
from estr.errors import MissingExtraError, UsageError
from estr.plan.calibrate import calibrate, non_negative_least_squares, profile_of
from estr.plan.cluster import simulate
from estr.plan.load import change_plan, load_plan
from estr.plan.sections import PlanConfig
from estr.plan.sweep import cut_slice, recommend, run_sweep, variants
from estr.plan.workload import Profile, ToolWaits, tool_latency
from estr.storage.metrics import MetricsWriter, TimelineWriter
from estr.storage.rollout_files import RolloutWriter
from estr.storage.rollouts import Settlement, rows_from
from estr.storage.run_directory import RunDirectory
from estr.trajectory import Segment, Trajectory
from loop_helpers import estr, small

PLANS = Path(__file__).resolve().parent.parent / "examples" / "plans"
SMALL = """
[cluster]
engines = 2
learner_ranks = 1
slots = 4
[workload]
prompts_per_step = 4
group_size = 2
turn_tokens = { kind = "lognormal", median = 20, p99 = 60, cap = 64 }
[tools]
latency = "fixed"
latency_seconds = 0.1
[engine]
seconds_per_step = 0.01
[learner]
seconds_per_token = 1e-4
[simulation]
steps = 6
[sweep]
engines = [1, 2, 4]
max_staleness = [0, 2]
"""


@pytest.fixture
def small_plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(SMALL)
    return path


# ---------------------------------------------------------------------- TOML


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_are_plans(path: Path) -> None:
    assert load_plan(path).gpus >= 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[clustr]\n", r"plan.toml, line 1: there is no section 'clustr'; did you mean 'cluster'\?"),
        (
            "[cluster]\n\nengine = 1\n",
            r"plan.toml, line 3: cluster.engine is not a known key; did you mean 'engines'\?",
        ),
        (
            "[cluster]\nengines = 0\n",
            r"plan.toml, line 2: cluster.engines is not valid: .*greater than or equal to 1, got 0",
        ),
        ("cluster = 3\n", r"plan.toml, line 1: cluster must be a section"),
        (
            "[workload]\nturns = { vaule = 3 }\n",
            r"line 2: workload.turns.vaule is not a known key; did you mean 'value'",
        ),
        (
            "[workload]\nminibatches = 4\n[schedule]\nmax_staleness = 2\n",
            r"line 4: schedule.max_staleness = 2 cannot hold",
        ),
        ("[tools]\nlatency_median = 3.0\n", r"line 2: tools.latency_median must be at most"),
        ("[sweep]\ngpus = [1]\n", r"line 2: sweep.gpus must hold numbers of at least 2"),
    ],
)
def test_what_is_wrong_in_a_plan_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        load_plan(path)
    assert re.search(words, str(error.value)), error.value


def test_set_changes_a_plan_and_refuses_unknown_keys() -> None:
    changed = change_plan(PlanConfig(), ["cluster.slots=8", "workload.turns.value=3"])
    assert (changed.cluster.slots, changed.workload.turns.value) == (8, 3)
    with pytest.raises(UsageError, match=r"--set cluster\.slot is not a known key"):
        change_plan(PlanConfig(), ["cluster.slot=8"])


def test_tools_wait_as_a_tasks_do() -> None:
    tools = change_plan(PlanConfig(), ["tools.latency=lognormal"]).tools
    waits = np.array([ToolWaits(0, tool_latency(tools))(group, 0, 0, 1)[0] for group in range(4000)])
    assert np.median(waits) == pytest.approx(0.2, rel=0.1)
    assert np.quantile(waits, 0.99) == pytest.approx(2.0, rel=0.3)
    assert waits.max() <= 5.0


# ---------------------------------------------------------------------- sweeps


def test_the_recommended_bound_is_the_smallest_that_is_nearly_best(small_plan: Path) -> None:
    sweep = run_sweep(load_plan(small_plan))
    best = recommend(sweep.points, worth=0.03)
    top = max(point.tokens_per_gpu_second for point in sweep.points)
    assert best.tokens_per_gpu_second >= 0.97 * top
    smaller = [point for point in sweep.points if point.max_staleness < best.max_staleness]
    assert all(point.tokens_per_gpu_second < 0.97 * top for point in smaller)
    assert recommend(sweep.points, worth=0.99).max_staleness == 0


def test_a_sweep_over_gpus_uses_them_all() -> None:
    plan = change_plan(PlanConfig(), ["sweep.gpus=[8, 32]", "sweep.max_staleness=[2]", "cluster.gpus_per_engine=2"])
    found = variants(plan)
    assert {variant.gpus for variant in found} == {8, 32}
    assert len({(variant.cluster.engines, variant.cluster.learner_ranks) for variant in found}) == len(found) > 4


def test_a_slice_stands_for_the_whole() -> None:
    plan = change_plan(
        PlanConfig(),
        [
            "cluster.engines=48",
            "cluster.learner_ranks=16",
            "cluster.slots=8",
            "workload.prompts_per_step=96",
            "workload.turn_tokens.kind=lognormal",
            "workload.turn_tokens.median=40",
            "workload.turn_tokens.p99=160",
            "tools.latency=lognormal",
            "learner.seconds_per_token=0.001",
            "simulation.most_engines=12",
            "simulation.steps=12",
        ],
    )
    part, times = cut_slice(plan)
    assert (part.cluster.engines, part.workload.prompts_per_step, times) == (12, 24, 4.0)
    whole, sliced = simulate(plan), simulate(part)
    assert sliced.trained_tokens_per_second * times == pytest.approx(whole.trained_tokens_per_second, rel=0.08)
    assert sliced.inter_mean == pytest.approx(whole.inter_mean, abs=0.3)


# ---------------------------------------------------------------------- calibration


def test_lengths_come_from_the_action_mask() -> None:
    mask = np.array([0, 0, 0, 1, 1, 0, 0, 1, 0], bool)
    assert profile_of([mask]) == Profile(3, (2, 1), (2,))
    assert profile_of([mask, np.array([0, 1, 1, 1], bool)]) == Profile(3, (2, 1, 3), (2, 1))
    assert profile_of([np.zeros(3, bool)]) is None


def test_least_squares_find_costs_and_never_go_below_zero() -> None:
    generator = np.random.default_rng(0)
    work = generator.integers(1, 50, (200, 3)).astype(float)
    costs = np.array([0.02, 0.001, 0.0003])
    assert non_negative_least_squares(work, work @ costs) == pytest.approx(costs)
    seconds = work @ np.array([0.02, 0.001, 0.0]) + generator.normal(0, 0.05, 200)
    found = np.array(non_negative_least_squares(work, seconds))
    assert (found >= 0).all()
    assert (work @ found).sum() == pytest.approx(seconds.sum())


def written_run(path: Path, steps: int = 12, mode: str = "async", engines: int = 1) -> Path:
    """A run directory as the runtime would leave it, with speeds that are known exactly."""
    config: Config = small(
        schedule={"mode": mode, "max_staleness": 2}, run={"steps": steps}, rollout={"slots": 3, "parked": 3}
    )
    directory = RunDirectory.create(path, config)
    with MetricsWriter(path / "metrics.jsonl") as metrics, TimelineWriter(directory.timeline_path) as timeline:
        rollouts = RolloutWriter(directory)
        for step in range(1, steps + 1):
            start = float(step)
            timeline.write("learner", "train", start, start + 0.5, step - 1)
            timeline.write("learner", "publish", start + 0.5, start + 0.6, step)
            timeline.write("learner", "wait", start + 0.6, start + 0.9, step)
            timeline.write("engine-0", "sync", start + 0.6, start + 0.65, step)
            steps_done, tokens, read = 5 + step % 3, 12 + step % 5, 20 + step % 7
            seconds = 0.02 * steps_done + 0.003 * tokens + 0.001 * read
            work = {
                "decode_steps": steps_done,
                "sampled_tokens": tokens,
                "prefilled_tokens": read,
                "tool_seconds": [0.25],
            }
            for engine in range(engines):
                timeline.write(f"engine-{engine}", "generate", start, start + seconds, step, work)
            metrics.write(step, line(step))
            rollouts.write(step, [row for group in range(2) for row in rows(config, 2 * step + group, step)])
        rollouts.close()
    directory.close()
    return path


def line(step: int) -> dict[str, float]:
    return {
        "time/step": 1.0,
        "wall_time": float(step),
        "tokens/action": 12.0,
        "throughput/generated_tokens_per_second": 12.0,
        "time/engine_idle_fraction": 0.4,
        "time/learner_idle_fraction": 0.3,
        "staleness/inter_mean": 1.0,
        "staleness/intra_mean": 0.5,
    }


def rows(config: Config, group: int, step: int) -> list[Any]:
    action = np.array([0, 0, 0, 0, 1, 1, 0, 0, 1], bool)
    found = []
    for sibling in range(2):
        values = np.where(action, -0.5, np.nan).astype(np.float32)
        segment = Segment(
            np.arange(9, dtype=np.int32), action, values, -values, np.where(action, 0, -1).astype(np.int32)
        )
        trajectory = Trajectory(
            group, sibling, 0, f"task-{group}", "prompt", 1, [segment], turns=2, finish_reason="stop"
        )
        found += rows_from(
            trajectory, Settlement("trained", trained_step=step, target_version=step - 1), config.rollout
        )
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_run(tmp_path_factory.mktemp("plan") / "run")


def test_a_run_gives_its_own_parameters(run: Path) -> None:
    found = calibrate(run)
    plan = found.plan
    assert plan.engine.seconds_per_step == pytest.approx(0.02)
    assert plan.engine.seconds_per_row == pytest.approx(0.003)
    assert plan.engine.seconds_per_prefill_token == pytest.approx(0.001)
    tokens = 4 * 9  # of an optimizer step
    assert plan.learner.seconds_per_step + tokens * plan.learner.seconds_per_token == pytest.approx(0.5)
    assert plan.weights.publish_seconds == pytest.approx(0.1)
    assert plan.weights.sync_seconds == pytest.approx(0.05)
    assert (plan.cluster.engines, plan.cluster.slots, plan.schedule.max_staleness) == (1, 3, 2)
    assert set(found.groups[0]) == {Profile(4, (2, 1), (2,))}
    assert set(found.tool_seconds) == {0.25}
    assert found.measured.trained_tokens_per_second == pytest.approx(12.0)
    slower = change_plan(plan, ["tools.latency=fixed", "tools.latency_seconds=3"])
    assert found.workload(plan).waits(0, 0, 0, 2) == [0.25, 0.25]
    assert found.workload(slower).waits(0, 0, 0, 2) == [3.0, 3.0]


def test_a_synchronous_run_takes_turns_on_its_machines(tmp_path: Path) -> None:
    plan = calibrate(written_run(tmp_path / "run", mode="sync", engines=2)).plan
    assert (plan.cluster.engines, plan.cluster.learner_ranks, plan.gpus, plan.staleness_bound) == (2, 2, 2, 0)
    tokens = 4 * 9
    learner = plan.learner
    assert learner.seconds_per_step + tokens * learner.seconds_per_token / 2 == pytest.approx(0.5)


def test_a_run_without_decode_steps_is_refused(tmp_path: Path) -> None:
    path = written_run(tmp_path / "run")
    timeline = path / "timeline.jsonl"
    spans = [json.loads(text) for text in timeline.read_text().splitlines()]
    timeline.write_text("".join(json.dumps({k: v for k, v in s.items() if k != "decode_steps"}) + "\n" for s in spans))
    with pytest.raises(UsageError, match="does not say how many decode steps"):
        calibrate(path)


def test_a_run_that_is_too_short_or_none_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too few to plan from"):
        calibrate(written_run(tmp_path / "run", steps=3))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UsageError):
        calibrate(tmp_path / "nothing")


# ---------------------------------------------------------------------- the command


def test_the_command_prints_a_table_and_answers(small_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = estr(capsys, "plan", small_plan)
    assert outcome.status == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0].split()[:2] == ["GPUs", "engines"]
    assert sum(text.endswith("×") for text in lines) == 2 + 6
    assert any("trained action tokens a second" in text for text in lines)


def test_json_is_strict_and_complete(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = estr(capsys, "plan", run, "--json", "--set", "simulation.steps=6", "--set", "sweep.max_staleness=[0, 2]")
    assert outcome.status == 0, outcome.err
    found = json.loads(outcome.out)
    assert found.keys() == {"plan", "own", "sync", "points", "recommended", "measured"}
    assert found["own"]["max_staleness"] == 2
    assert {point["max_staleness"] for point in found["points"]} == {0, 2}
    assert found["measured"]["seconds_per_step"] == pytest.approx(1.0)


def test_the_page_is_self_contained_and_says_what_is_simulated(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", str(run), "--html", str(page), "--set", "simulation.steps=6"]) == 0
    html = page.read_text()
    assert html.count("<svg") >= 5
    assert "Every number is simulated unless it says otherwise" in html
    assert "measured in the run" in html
    assert "prefers-color-scheme: dark" in html
    assert not re.search(r"(src|href)=\"https?:", html)


def test_a_missing_file_and_a_missing_package_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert estr(capsys, "plan", tmp_path / "none.toml").status == 2
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "simpy":
            raise ModuleNotFoundError("No module named 'simpy'", name="simpy")
        return real(name, *rest, **more)

    for name in [name for name in sys.modules if name.startswith(("estr.plan", "simpy"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    outcome = estr(capsys, "plan", tmp_path / "none.toml")
    assert outcome.status == 2
    assert outcome.complaint == str(MissingExtraError("simpy", "plan"))
