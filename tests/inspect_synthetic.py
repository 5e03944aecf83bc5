"""A tiny policy with real logits, an engine with noise and stale weights, and one fault at a time in what is stored."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

PROMPT = 5


@dataclass(frozen=True)
class World:
    """How rollouts are made; ``fault`` is a row of FAULTS.md, with a suffix where it can be planted in several ways."""

    trajectories: int = 160
    vocabulary: int = 48
    shortest: int = 12
    longest: int = 40
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    noise: float = 0.01  # standard deviation of what the engine adds to its logits; "bf16" rounds them
    rounding: str = ""
    drift: float = 0.05  # how far one optimizer step moves each logit
    bias: float = 0.0  # how far it moves the logits of a token in every context alike
    sharpen: float = 0.0  # by which share it makes all logits larger
    quantized: float = 0.0  # error of the engine's weights, the same at every use
    inter: int = 3  # at most
    switch: float = 0.05  # probability of new weights before a token
    group: int = 4
    seed: int = 0
    fault: str = ""


@dataclass
class Rollouts:
    """Padded arrays [S, L] with ``alive`` [S, L]; scalars [S]."""

    world: World
    alive: np.ndarray
    tokens: np.ndarray
    prompt: np.ndarray
    columns: dict[str, np.ndarray]
    target: np.ndarray
    reward: np.ndarray
    advantage: np.ndarray
    group: np.ndarray
    step: np.ndarray


def simulate(world: World) -> Rollouts:
    rng = np.random.default_rng(world.seed)
    S, L, V = world.trajectories, world.longest, world.vocabulary
    length = rng.integers(world.shortest, L + 1, S)
    alive = np.arange(L) < length[:, None]
    version, target = _versions(world, rng, alive)
    weights = _weights(world, rng, int(target.max()) + 1)
    draft = weights[0] + rng.normal(0, 0.8, (V, V))
    error = rng.normal(0, world.quantized, (V, V))
    prompt = rng.integers(0, V, (S, PROMPT))
    tokens = np.zeros((S, L), np.int64)
    columns = {name: np.full((S, L), np.nan) for name in ("mu", "pi", "H", "H_pi")} | {"version": version.astype(float)}
    seen = np.zeros((S, V), bool)
    np.put_along_axis(seen, prompt, True, axis=1)
    previous = prompt[:, -1]
    for t in range(L):
        found = _position(world, rng, weights, (draft, error), version[:, t], target, previous, seen)
        previous = tokens[:, t] = found.pop("token")
        seen[np.arange(S), previous] = True
        for name, value in found.items():
            columns[name][:, t] = value
    for column in columns.values():
        column[~alive] = np.nan
    group = np.arange(S) // world.group
    reward = (rng.random(S) < 0.5).astype(float) + 0.1 * rng.random(S)
    advantage = _advantage(reward, group)
    step = np.argsort(np.argsort(target, kind="stable"), kind="stable") // 32 + 1
    rollouts = Rollouts(world, alive, tokens, prompt, columns, target, reward, advantage, group, step)
    _after(rollouts, rng)
    return rollouts


def _versions(world: World, rng: Any, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    S, L = alive.shape
    start = rng.integers(0, 4, S)
    moves = rng.random((S, L)) < world.switch
    moves[:, 0] = False
    version = start[:, None] + np.cumsum(moves & alive, axis=1)
    target = version[:, -1] + rng.integers(0, world.inter + 1, S)
    return version, target


def _weights(world: World, rng: Any, versions: int) -> np.ndarray:
    """Logits [versions, V, V] by the token before; some rows sharp, some flat; a random walk over versions."""
    V = world.vocabulary
    sharpness = rng.uniform(0.3, 4.0, V)
    first = rng.normal(0, 1, (V, V)) * sharpness[:, None]
    steps = rng.normal(0, world.drift, (versions, V, V)) + rng.normal(0, world.bias, (versions, 1, V))
    steps[0] = 0
    scale = (1 + world.sharpen) ** np.arange(versions)
    return (first + np.cumsum(steps, axis=0)) * scale[:, None, None]


def _position(
    world: World, rng: Any, weights: Any, others: Any, version: Any, target: Any, previous: Any, seen: Any
) -> dict[str, np.ndarray]:
    rows = np.arange(len(previous))
    T, fault = world.temperature, world.fault
    draft, error = others
    clean = weights[version, previous] + error[previous]
    z = _bf16(clean) if world.rounding == "bf16" else clean + rng.normal(0, world.noise, clean.shape)
    if fault == "A4":
        z = np.where(seen, np.where(z > 0, z / 1.15, z * 1.15), z)
    learner = weights[target, previous]
    support = _support(z / T, world)
    mu = _log_softmax(np.where(support, z / T, -np.inf))
    token = (mu + rng.gumbel(size=mu.shape)).argmax(1)
    whole = np.ones_like(support)
    pi = _log_softmax(np.where(whole if fault == "A3" else support, learner / T, -np.inf))
    out = {"token": token, "mu": mu[rows, token], "pi": pi[rows, token], "H": _entropy(mu), "H_pi": _entropy(pi)}
    if fault == "A1-learner":
        out["pi"] = _log_softmax(learner)[rows, token] / T
    if fault == "A1-engine":
        out["mu"] = _log_softmax(z)[rows, token] / T
    if fault == "A2":
        out["mu"] = _log_softmax(z)[rows, token]
    if fault == "A3-entropy":
        out["H"] = _entropy(_log_softmax(z / T))
    if fault == "A13-sampled":
        out["H"] = -out["mu"]
    if fault.startswith("A13-top"):
        out["H"] = _entropy(_log_softmax(np.where(_top(mu, int(fault.removeprefix("A13-top"))), mu, -np.inf)))
    if fault == "A15":
        out["H"] = _entropy(_log_softmax(np.where(support, z, -np.inf)))
    if fault == "A20-draft":
        out["mu"] = _log_softmax(draft[previous] / T)[rows, token]
    return out


def _after(rollouts: Rollouts, rng: Any) -> None:
    """Faults of bookkeeping: values that are right but stand in the wrong place, or do not stand at all."""
    fault, columns, alive = rollouts.world.fault, rollouts.columns, rollouts.alive
    if fault == "A5":
        columns["mu"][alive & (rng.random(alive.shape) < 0.01)] = np.nan
    if fault == "A10":
        columns["H"][:, :-1] = columns["H"][:, 1:].copy()
        columns["H"][~alive] = np.nan
        _fill_last(columns["H"], alive)
    if fault == "A20-shift":
        columns["mu"][:, 1:] = columns["mu"][:, :-1].copy()
        columns["mu"][~alive] = np.nan
    if fault == "A12-rows":
        columns["H"] = columns["H"][rng.permutation(len(alive))]
    if fault == "A12-packed":
        order = np.argsort(-alive.sum(1), kind="stable")
        flat = np.concatenate([columns["H"][row][alive[row]] for row in order])
        columns["H"][alive] = flat
    if fault == "A12-reward":
        rollouts.reward = rollouts.reward[rng.permutation(len(alive))]


def _fill_last(values: np.ndarray, alive: np.ndarray) -> None:
    """The last token of a row has no next one; the entropy after the end of the text stands there."""
    last = alive.sum(1) - 1
    rows = np.arange(len(alive))
    missing = np.isnan(values[rows, last])
    values[rows[missing], last[missing]] = 0.7


def _advantage(reward: np.ndarray, group: np.ndarray) -> np.ndarray:
    mean = np.bincount(group, reward) / np.bincount(group)
    centered = reward - mean[group]
    count = np.maximum(np.bincount(group) - 1, 1)
    return centered / (np.sqrt(np.bincount(group, centered**2) / count)[group] + 1e-6)


def _support(z: np.ndarray, world: World) -> np.ndarray:
    support = np.ones_like(z, bool)
    if world.top_k:
        support &= _top(z, world.top_k)
    if world.top_p < 1:
        p = np.exp(_log_softmax(np.where(support, z, -np.inf)))
        order = np.argsort(-p, axis=1)
        before = np.cumsum(np.take_along_axis(p, order, 1), axis=1) - np.take_along_axis(p, order, 1)
        inside = np.zeros_like(support)
        np.put_along_axis(inside, order, before < world.top_p, axis=1)
        support &= inside
    return support


def _top(z: np.ndarray, k: int) -> np.ndarray:
    return z >= np.sort(z, axis=1)[:, -k][:, None]


def _log_softmax(z: np.ndarray) -> np.ndarray:
    top = z.max(1, keepdims=True)
    return z - top - np.log(np.exp(z - top).sum(1, keepdims=True))


def _entropy(logp: np.ndarray) -> np.ndarray:
    return -(np.exp(logp) * np.where(np.isfinite(logp), logp, 0.0)).sum(1)


def _bf16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


# --- the same rollouts in several shapes ----------------------------------------------------------------------------


def _rows(rollouts: Rollouts) -> list[dict[str, Any]]:
    """Rows of the contract's Parquet columns."""
    world, rows = rollouts.world, []
    for s in range(len(rollouts.alive)):
        n = int(rollouts.alive[s].sum())
        column = {name: rollouts.columns[name][s, :n] for name in rollouts.columns}
        front = np.full(PROMPT, np.nan)
        rows.append(
            {
                "trajectory_id": f"{rollouts.group[s]:08d}-{s % world.group:03d}",
                "group_id": f"{rollouts.group[s]:08d}",
                "tokens": [*rollouts.prompt[s].tolist(), *rollouts.tokens[s, :n].tolist()],
                "action": [False] * PROMPT + [True] * n,
                "logprob": np.concatenate([front, column["mu"]]).astype(np.float32),
                "entropy": np.concatenate([front, column["H"]]).astype(np.float32),
                "version": [-1] * PROMPT + column["version"].astype(int).tolist(),
                "entropy_kind": "exact",
                "entropy_upper": None,
                "temperature": world.temperature,
                "top_p": world.top_p,
                "top_k": world.top_k,
                "learner_logprob": np.concatenate([front, column["pi"]]).astype(np.float32),
                "learner_entropy": np.concatenate([front, column["H_pi"]]).astype(np.float32),
                "proximal_logprob": None,
                "reward": float(rollouts.reward[s]),
                "advantage": float(rollouts.advantage[s]),
                "state": "trained",
                "trained_step": int(rollouts.step[s]),
                "target_version": int(rollouts.target[s]),
                "text": f"text of {s}",
            }
        )
    return rows


def write_ours(rollouts: Rollouts, path: Path, without: tuple[str, ...] = ()) -> Path:
    rows = [{name: value for name, value in row.items() if name not in without} for row in _rows(rollouts)]
    columns = {name: pa.array([row[name] for row in rows], type=_type(name)) for name in rows[0]}
    pq.write_table(pa.table(columns), path)
    return path


def _type(name: str) -> pa.DataType | None:
    floats = ("logprob", "entropy", "entropy_upper", "learner_logprob", "learner_entropy", "proximal_logprob")
    return pa.list_(pa.float32()) if name in floats else None


def write_ours_jsonl(rollouts: Rollouts, path: Path, without: tuple[str, ...] = ()) -> Path:
    """Our names as JSON lines; NaN becomes null."""
    return _lines(path, [{k: v for k, v in row.items() if k not in without} for row in _rows(rollouts)])


def write_trl(rollouts: Rollouts, path: Path, batch: int = 16) -> Path:
    """Padded batches under the names of TRL's GRPOTrainer, one batch a line: prompts padded left, completions right."""
    S = len(rollouts.alive)
    lines = []
    for first in range(0, S, batch):
        part = slice(first, first + batch)
        alive = rollouts.alive[part]
        pad = np.full((len(alive), 2), 0)
        lines.append(
            {
                "prompt_ids": np.concatenate([pad, rollouts.prompt[part]], axis=1).tolist(),
                "prompt_mask": np.concatenate([pad, np.ones_like(rollouts.prompt[part])], axis=1).tolist(),
                "completion_ids": np.where(alive, rollouts.tokens[part], 0).tolist(),
                "completion_mask": alive.astype(int).tolist(),
                "sampling_per_token_logps": np.where(alive, rollouts.columns["mu"][part], 0.0).tolist(),
                "old_per_token_logps": np.where(alive, rollouts.columns["pi"][part], 0.0).tolist(),
                "advantages": rollouts.advantage[part].tolist(),
            }
        )
    return _lines(path, lines)


def write_verl(rollouts: Rollouts, path: Path) -> Path:
    """Padded rows under the names of verl's DataProto."""
    S = len(rollouts.alive)
    lines = []
    for s in range(S):
        alive = rollouts.alive[s]
        lines.append(
            {
                "uid": f"prompt {rollouts.group[s]}",
                "prompts": rollouts.prompt[s].tolist(),
                "responses": np.where(alive, rollouts.tokens[s], 0).tolist(),
                "response_mask": alive.astype(int).tolist(),
                "rollout_log_probs": np.where(alive, rollouts.columns["mu"][s], 0.0).tolist(),
                "old_log_probs": np.where(alive, rollouts.columns["pi"][s], 0.0).tolist(),
                "entropys": np.where(alive, rollouts.columns["H_pi"][s], 0.0).tolist(),
                "advantages": np.where(alive, rollouts.advantage[s], 0.0).tolist(),
                "token_level_scores": [0.0] * (int(alive.sum()) - 1) + [float(rollouts.reward[s])],
                "step": int(rollouts.step[s]),
            }
        )
    return _lines(path, lines)


def write_prime(rollouts: Rollouts, path: Path) -> Path:
    """Flat rows under the names of prime-rl's token export."""
    lines = []
    for s in range(len(rollouts.alive)):
        n = int(rollouts.alive[s].sum())
        front = [0.0] * PROMPT
        lines.append(
            {
                "schema_version": 1,
                "step": int(rollouts.step[s]),
                "token_ids": [*rollouts.prompt[s].tolist(), *rollouts.tokens[s, :n].tolist()],
                "loss_mask": [False] * PROMPT + [True] * n,
                "inference_logprobs": front + rollouts.columns["mu"][s, :n].tolist(),
                "trainer_logprobs": front + rollouts.columns["pi"][s, :n].tolist(),
                "entropy": front + rollouts.columns["H_pi"][s, :n].tolist(),
                "advantages": front + [float(rollouts.advantage[s])] * n,
            }
        )
    return _lines(path, lines)


def write_slime(rollouts: Rollouts, path: Path) -> Path:
    """Samples of slime as JSON lines: tokens cover the prompt, all else only the response."""
    lines = []
    for s in range(len(rollouts.alive)):
        n = int(rollouts.alive[s].sum())
        versions = list(dict.fromkeys(rollouts.columns["version"][s, :n].astype(int).tolist()))
        lines.append(
            {
                "group_index": int(rollouts.group[s]),
                "index": s,
                "tokens": [*rollouts.prompt[s].tolist(), *rollouts.tokens[s, :n].tolist()],
                "response": f"text of {s}",
                "response_length": n,
                "loss_mask": [1] * n,
                "rollout_log_probs": rollouts.columns["mu"][s, :n].tolist(),
                "log_probs": rollouts.columns["pi"][s, :n].tolist(),
                "weight_versions": [str(version) for version in versions],
                "reward": float(rollouts.reward[s]),
                "status": "completed",
            }
        )
    return _lines(path, lines)


def write_flat(rollouts: Rollouts, path: Path) -> Path:
    """One object with flat columns [N] and a sequence index, the layout of ``TokenBatch``."""
    alive = rollouts.alive
    row = np.repeat(np.arange(len(alive)), alive.sum(1))
    record = {
        "sequence": row.tolist(),
        "tokens": rollouts.tokens[alive].tolist(),
        "logprob": rollouts.columns["mu"][alive].tolist(),
        "learner_logprob": rollouts.columns["pi"][alive].tolist(),
        "entropy": rollouts.columns["H"][alive].tolist(),
        "version": rollouts.columns["version"][alive].tolist(),
        "target_version": rollouts.target.tolist(),
        "reward": rollouts.reward.tolist(),
        "advantage": rollouts.advantage.tolist(),
        "group_id": rollouts.group.tolist(),
        "temperature": rollouts.world.temperature,
        "top_p": rollouts.world.top_p,
        "top_k": rollouts.world.top_k,
    }
    return _lines(path, [record])


def write_tokens(rollouts: Rollouts, path: Path) -> Path:
    """One token a row, as a table of tokens would be."""
    alive = rollouts.alive
    row = np.repeat(np.arange(len(alive)), alive.sum(1))
    columns = {
        "trajectory_id": [f"t{index}" for index in row],
        "tokens": rollouts.tokens[alive],
        "logprob": rollouts.columns["mu"][alive],
        "learner_logprob": rollouts.columns["pi"][alive],
        "entropy": rollouts.columns["H"][alive],
        "version": rollouts.columns["version"][alive].astype(int),
        "target_version": rollouts.target[row],
        "temperature": np.full(len(row), rollouts.world.temperature),
    }
    pq.write_table(pa.table(columns), path)
    return path


def _lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(_plain(record)) + "\n" for record in records))
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def planted(fault: str, **changes: Any) -> Rollouts:
    """Rollouts with one fault, in a world in which it can show."""
    settings: dict[str, Any] = {"fault": fault}
    if fault.startswith(("A1-", "A15")) or fault == "A2":
        settings["temperature"] = 0.6
    if fault.startswith("A3"):
        settings["top_p"] = 0.9
    if fault == "A17":
        settings |= {"noise": 0.05, "inter": 0, "switch": 0.0}
    return simulate(replace(World(), **(settings | changes)))
