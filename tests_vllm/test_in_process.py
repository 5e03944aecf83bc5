"""vLLM's engine in a process of ours, with real models: the learner's log μ and H, in-flight weights, prefix caches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from estr.engines.interval import entropy_interval
from estr.engines.local import EngineSettings, LocalEngine
from estr.learner.scoring import score
from estr.models.forward import prepare_model
from estr.trajectory import Segment
from vllm_models import CONTEXT, TEMPERATURE, VOCABULARY, engine, finish, moved, replayed, saved, small_model, tensors

PROMPTS = {"a": [1, 2, 3], "b": [9, 8, 7, 6], "c": list(range(20, 60))}
CANARY = [(7 * i + 3) % VOCABULARY for i in range(16)]


def learner(model, rows: list[Segment], temperature: float = TEMPERATURE) -> tuple[np.ndarray, np.ndarray]:
    """log π and H of the action tokens, as the learner scores them."""
    prepare_model(model)
    pairs = score(model, rows, temperature)
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])


def actions(rows: list[Segment], name: str) -> np.ndarray:
    return np.concatenate([getattr(row, name)[row.action] for row in rows])


def generated(running, seed: int = 0, limit: int = 12) -> list[Segment]:
    for number, (key, prompt) in enumerate(PROMPTS.items()):
        running.start(key, prompt, seed=seed + number, limit=limit)
    finish(running)
    return [running.release(key) for key in PROMPTS]


def agrees(path: Path, tied: bool) -> dict[str, float]:
    model, running, worst = small_model(tied), engine(path, topk=8), {}

    def note(name: str, error: float) -> None:
        worst[name] = max(worst.get(name, 0.0), error)

    for version in range(4):
        running.set_weights(version, tensors(moved(model)))
        canary = Segment(
            np.array(CANARY, np.int32), np.arange(16) > 0, *(np.zeros(16, np.float32),) * 2, np.zeros(16, np.int32)
        )
        note("canary", float(np.abs(running.canary(CANARY) - learner(model, [canary])[0]).max()))
        rows = generated(running, seed=10 * version)
        assert {int(v) for row in rows for v in row.version[row.action]} == {version}
        logprob, entropy = learner(model, rows)
        note("logprob", float(np.abs(actions(rows, "logprob") - logprob).max()))
        note("entropy", float(np.abs(actions(rows, "entropy") - entropy).max()))
        top = np.concatenate([row.topk_logprob for row in rows])
        low, high = entropy_interval(top, VOCABULARY)
        assert (low <= actions(rows, "entropy")).all()
        assert (actions(rows, "entropy") <= high).all()
        assert (high - low).max() > 0.01, "the interval says less than the number"
        note("local", local_entropies(model, rows[0]))
    running.close()
    return worst


def local_entropies(model, row: Segment) -> float:
    """How far the local engine's entropies are from those of a row, place by place."""
    local = LocalEngine(model, EngineSettings(temperature=TEMPERATURE, max_context=CONTEXT, slots=16))
    local.set_weights(0, tensors(model), own=True)
    places = np.flatnonzero(row.action).tolist()
    for place in places:
        local.start(str(place), row.tokens[:place].tolist(), seed=place, limit=1)
    while local.busy:
        local.step()
    found = {place: local.release(str(place)).entropy[place] for place in places}
    return max(abs(float(found[place] - row.entropy[place])) for place in places)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_log_probabilities_and_entropies_are_the_learners_after_every_sync(apart, tmp_path, tied):
    worst = apart(agrees, saved(small_model(tied), tmp_path), tied)
    assert max(worst.values()) <= 1e-4, worst


def in_flight(path: Path, kv: str) -> tuple[float, int, bool]:
    model = small_model(True)
    models, running = {}, engine(path, kv=kv, end_ids=())
    for version in range(3):
        models[version] = small_model(True)
        models[version].load_state_dict(moved(model).state_dict())
    running.set_weights(0, tensors(models[0]))
    running.start("long", [1, 2, 3, 4], seed=5, limit=30)
    running.start("other", list(range(30, 64)), seed=6, limit=30)
    for version in (1, 2):
        for _ in range(8):
            running.step()
        running.set_weights(version, tensors(models[version]))
        running.canary(CANARY)
    finish(running)
    rows = [running.release(key) for key in ("long", "other")]
    worst, whole = 0.0, True
    for row in rows:
        versions = row.version[row.action]
        whole &= len(versions) == 30 and (np.diff(versions) >= 0).all() and set(versions.tolist()) == {0, 1, 2}
        for place, distribution in zip(np.flatnonzero(row.action).tolist(), expected(models, row, kv), strict=True):
            worst = max(worst, abs(float(distribution[row.tokens[place]]) - float(row.logprob[place])))
            worst = max(worst, abs(float(torch.special.entr(distribution.exp()).sum()) - float(row.entropy[place])))
    running.close()
    return worst, running.counters.sampled_tokens, whole


@torch.no_grad()
def expected(models, row: Segment, kv: str):
    if kv == "keep":
        return replayed(models, row)
    found, ids = [], torch.from_numpy(row.tokens).long()
    for place in np.flatnonzero(row.action).tolist():
        logits = models[int(row.version[place])](ids[None, :place]).logits[0, -1]
        found.append(torch.log_softmax(logits.double() / TEMPERATURE, -1))
    return found


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_weights_reach_generations_that_run_and_lose_none(apart, tmp_path, kv):
    worst, sampled, whole = apart(in_flight, saved(small_model(True), tmp_path), kv)
    assert sampled == 60
    assert whole, "every row is complete and spans all versions in order"
    assert worst <= 1e-4


def after_a_sync(path: Path) -> tuple[float, float, list[int]]:
    """The same long prompt twice before and once after an update, while another request holds blocks of the cache."""
    model, running = small_model(True), engine(path, end_ids=())
    prompt, shared = list(range(100, 200)), []
    running.set_weights(0, tensors(model))
    running.start("holds", [5, 6], seed=1, limit=60)
    running.step()
    for key in ("first", "second"):
        running.start(key, prompt, seed=2, limit=2)
        for _ in range(4):
            running.step()
        running.release(key)
        shared.append(running.counters.shared_tokens)
    old = small_model(True)
    running.set_weights(1, tensors(moved(model, 0.3)))
    running.start("after", prompt, seed=3, limit=4)
    finish(running)
    shared.append(running.counters.shared_tokens)
    row = running.release("after")
    logprob, _ = learner(model, [row])
    stale, _ = learner(old, [row])
    running.close()
    return float(np.abs(row.logprob[row.action] - logprob).max()), float(np.abs(stale - logprob).max()), shared


def test_fault_D1_no_prefix_outlives_a_version(apart, tmp_path):
    error, distance, shared = apart(after_a_sync, saved(small_model(True), tmp_path))
    assert shared[0] == 0
    assert shared[1] >= 64, "within a version a prompt is read once"
    assert shared[2] == shared[1], "nothing of an older version is reused, though a request still held blocks"
    assert error <= 1e-4
    assert distance > 0.05, "old keys and values would have been noticed"


def truncated(path: Path) -> tuple[float, int]:
    model, running = small_model(True), engine(path, temperature=1.3, top_k=6, top_p=0.9)
    running.set_weights(0, tensors(model))
    rows = generated(running)
    logprob, entropy = learner(model, rows, 1.3)
    error = max(
        float(np.abs(actions(rows, "logprob") - logprob).max()), float(np.abs(actions(rows, "entropy") - entropy).max())
    )
    sizes = {len(row.support[i]) for row in rows for i in range(len(row.support))}
    running.close()
    return error, max(sizes) if max(sizes) <= 6 and len(sizes) > 1 else 99


def test_fault_A3_the_support_of_truncated_sampling_is_recorded(apart, tmp_path):
    error, largest = apart(truncated, saved(small_model(True), tmp_path))
    assert error <= 1e-4
    assert largest <= 6


def conversation(path: Path) -> list[list[int]]:
    running = engine(path, end_ids=(), slots=2)
    running.set_weights(0, tensors(small_model(True)))
    for key in "abc":
        running.start(key, [1, 2, 3], seed=ord(key), limit=4)
    finish(running)
    assert running.extend("a", [50, 51], seed=9, limit=3)
    assert not running.extend("b", list(range(CONTEXT)), seed=9, limit=3)
    closed = running.fork("b", [4, 5], seed=8, limit=2)
    running.cancel("c")
    running.cancel("nobody")
    finish(running)
    rows = [running.release("a"), closed, running.release("b")]
    again = engine_copy(running, rows[0])
    assert running.running == 0
    running.close()
    return [row.action.astype(int).tolist() for row in [*rows, again]]


def engine_copy(running, row: Segment) -> Segment:
    """The row handed to another conversation, as after a crash, and extended."""
    running.start("again", [60], seed=4, limit=2, history=row)
    finish(running)
    copy = running.release("again")
    assert copy.logprob[: len(row.tokens)].tobytes() == row.logprob.tobytes()
    return copy


def test_turns_follow_turns_as_in_the_local_engine(apart, tmp_path):
    first = [0, 0, 0, 1, 1, 1, 1]
    assert apart(conversation, saved(small_model(True), tmp_path)) == [
        [*first, 0, 0, 1, 1, 1],
        first,
        [0, 0, 1, 1],
        [*first, 0, 0, 1, 1, 1, 0, 1, 1],
    ]


def sockets(path: Path) -> list[str]:
    """Local addresses of what this process listens on."""
    import os

    running = engine(path)
    running.set_weights(0, tensors(small_model(True)))
    mine = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.append(fields[1].partition(":")[0])
    running.close()
    return found


def test_nothing_listens_beyond_loopback(apart, tmp_path):
    assert set(apart(sockets, saved(small_model(True), tmp_path))) <= {"0100007F", "0" * 24 + "01000000"}


def lacking(path: Path) -> str:
    from estr.errors import RunError

    running = engine(path)
    weights = tensors(small_model(True))
    del weights["model.layers.1.mlp.down_proj.weight"]
    try:
        running.set_weights(0, weights)
    except RunError as error:
        return str(error)
    return ""


def test_fault_D5_a_missing_weight_is_noticed(apart, tmp_path):
    assert "lacks weights of the engine's model" in apart(lacking, saved(small_model(True), tmp_path))
