"""A run directory that looks like a real one, made up in a second: for tests and for looking at the report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CONFIG = """[run]
seed = {seed}
steps = {planned}
eval_every = 10
[model]
path = "builtin:tiny"
[task]
name = "calculator"
[rollout]
group_size = 8
[schedule]
mode = "{mode}"
max_staleness = 4
[objective]
recipe = "{recipe}"
advantage = "grpo"
[learner]
learning_rate = 3e-4
"""

PROMPT = "<|user|>\n{name} has {a} boxes of {b} pencils and gives away {c}. How many are left?\n<|assistant|>\n"
THINK = "Each of the boxes holds the same number.\n<calc>{a}*{b}-{c}</calc>"
TOOL = "\n<|tool|>\n{result}\n<|assistant|>\n"
ANSWER = "So the answer is\n#### {result}<|end|>"
SPECIAL = ("<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")


def write_run(
    directory: Path,
    steps: int = 60,
    *,
    seed: int = 0,
    recipe: str = "estr",
    mode: str = "async",
    planned: int | None = None,
    rollouts_every: int = 1,
    per_step: int = 8,
    poison: str = "",
) -> Path:
    """Write a plausible run of ``steps`` optimizer steps; ``poison`` is text that every assistant turn begins with."""
    rng = np.random.default_rng(seed)
    directory.mkdir(parents=True)
    planned = steps if planned is None else planned
    (directory / "config.toml").write_text(CONFIG.format(seed=seed, planned=planned, mode=mode, recipe=recipe))
    tokenizer = _tokenizer(directory / "checkpoints" / f"step-{steps:06d}" / "tokenizer.json", poison)
    skill = 1 / (1 + np.exp(-(np.arange(steps) / max(steps, 1) * 7 - 2.5 + rng.normal(0, 0.25, steps))))
    clock = _timeline(directory / "timeline.jsonl", steps, mode, rng)
    (directory / "rollouts").mkdir()
    with open(directory / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(_metrics(step, steps, float(skill[step - 1]), clock[step - 1], rng)) + "\n")
    for step in range(1, steps + 1, rollouts_every):
        rows = [
            _trajectory(step, index, float(skill[step - 1]), tokenizer, rng, poison, mode) for index in range(per_step)
        ]
        write_rollouts(directory / "rollouts" / f"{step:06d}.parquet", rows)
    return directory


def write_rollouts(path: Path, rows: list[dict]) -> None:
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(kind)


SCHEMA = pa.schema(
    [
        ("trajectory_id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("prompt", pa.string()),
        ("tokens", _list(pa.int32())),
        ("action", _list(pa.bool_())),
        ("logprob", _list(pa.float32())),
        ("entropy", _list(pa.float32())),
        ("version", _list(pa.int32())),
        ("learner_logprob", _list(pa.float32())),
        ("proximal_logprob", _list(pa.float32())),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("finish_reason", pa.string()),
        ("turns", pa.int32()),
        ("state", pa.string()),
        ("drop_reason", pa.string()),
        ("trained_step", pa.int32()),
        ("target_version", pa.int32()),
        ("text", pa.string()),
        ("parent_id", pa.string()),
        ("segment", pa.int32()),
    ]
)


def _tokenizer(path: Path, poison: str):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = {"name": "Ada", "a": 7, "b": 12, "c": 5, "result": 79}
    corpus = [text.format(**words) for text in (PROMPT, THINK, TOOL, ANSWER)] * 4 + [poison]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    path.parent.mkdir(parents=True)
    tokenizer.save(str(path))
    return tokenizer


def _metrics(step: int, steps: int, skill: float, wall: float, rng: np.random.Generator) -> dict[str, float]:
    progress = step / steps
    delta = 0.03 + 0.05 * progress + abs(rng.normal(0, 0.008))
    row = {
        "step": step,
        "version": step,
        "wall_time": wall,
        "reward/mean": float(np.clip(skill + rng.normal(0, 0.08), 0, 1)),
        "policy/entropy": float(0.62 * np.exp(-1.6 * progress) + 0.05 + rng.normal(0, 0.01)),
        "mismatch/kl": float(0.5 * delta**2 * np.exp(rng.normal(0, 0.3))),
        "mismatch/ratio_deviation": float(delta * np.exp(rng.normal(0.1, 0.1))),
        "mismatch/delta_abs": float(delta),
        "gate/masked_fraction": float(np.clip(0.012 + 0.01 * progress + rng.normal(0, 0.003), 0, 1)),
        "clip/fraction": float(np.clip(0.03 + rng.normal(0, 0.006), 0, 1)),
        "tokens/action": int(rng.integers(1800, 2600)),
        "tokens/invalid": 0,
        "staleness/inter_mean": float(1.2 + rng.normal(0, 0.2)),
        "staleness/intra_mean": float(0.7 + rng.normal(0, 0.1)),
        "grad/norm": float(np.exp(rng.normal(-0.4, 0.35))),
        "learner/learning_rate": 3e-4 * min(1.0, step / 10),
        "throughput/trained_tokens_per_second": float(2100 + rng.normal(0, 120)),
        "throughput/generated_tokens_per_second": float(2300 + rng.normal(0, 220)),
        "time/engine_idle_fraction": float(abs(rng.normal(0.03, 0.01))),
        "time/learner_idle_fraction": float(abs(rng.normal(0.12, 0.04))),
    }
    if step % 10 == 0 or step == 1:
        row["eval/reward"] = float(np.clip(skill + rng.normal(0, 0.015), 0, 1))
    return row


def _timeline(path: Path, steps: int, mode: str, rng: np.random.Generator) -> list[float]:
    spans, now, ends = [], 0.0, []
    for step in range(1, steps + 1):
        wait, train = float(abs(rng.normal(0.15, 0.08))) + 0.02, float(abs(rng.normal(1.0, 0.1))) + 0.1
        if mode != "async":
            wait = 1.1
            spans.append(("engine-0", "generate", now, now + wait, step - 1))
            spans.append(("engine-0", "idle", now + wait, now + wait + train, step - 1))
        spans.append(("learner", "wait", now, now + wait, step - 1))
        spans.append(("learner", "train", now + wait, now + wait + train, step))
        now += wait + train
        spans.append(("learner", "publish", now, now + 0.012, step))
        now += 0.012
        if step % 10 == 0:
            spans.append(("learner", "evaluate", now, now + 1.5, step))
            now += 1.5
        if step % 25 == 0:
            spans.append(("learner", "checkpoint", now, now + 0.3, step))
            now += 0.3
        ends.append(now)
    if mode == "async":
        clock = 0.0
        while clock < now:
            busy = float(abs(rng.normal(1.6, 0.5))) + 0.1
            spans.append(("engine-0", "generate", clock, min(clock + busy, now), -1))
            spans.append(("engine-0", "idle", min(clock + busy, now), min(clock + busy + 0.05, now), -1))
            clock += busy + 0.05
    keys = ("actor", "kind", "start", "end", "version")
    path.write_text("".join(json.dumps(dict(zip(keys, span, strict=True))) + "\n" for span in spans))
    return ends


def _trajectory(step, index, skill, tokenizer, rng, poison, mode) -> dict:
    values = {"name": rng.choice(["Ada", "Noor", "Ravi", "Lin"]), "a": int(rng.integers(2, 30))}
    values |= {"b": int(rng.integers(2, 40)), "c": int(rng.integers(1, 9))}
    values["result"] = values["a"] * values["b"] - values["c"]
    right = rng.random() < skill
    prompt = PROMPT.format(**values)
    parts = [(prompt, False), (poison + THINK.format(**values), True), (TOOL.format(**values), False)]
    answer = values | {"result": values["result"] + (0 if right else int(rng.integers(1, 50)))}
    parts.append((ANSWER.format(**answer), True))
    ids, action = [], []
    for text, acted in parts:
        encoded = tokenizer.encode(text).ids
        ids += encoded
        action += [acted] * len(encoded)
    columns = _token_columns(np.array(action), step, rng, mode)
    group = step * 100 + index // 4
    return {
        "trajectory_id": f"{group:08d}-{index % 4:03d}",
        "group_id": f"{group:08d}",
        "task_id": f"calculator/{group}",
        "prompt": prompt,
        "tokens": ids,
        "action": action,
        **columns,
        "proximal_logprob": None,
        "reward": float(right),
        "advantage": float(right) - skill,
        "finish_reason": "stop",
        "turns": 2,
        "state": "trained",
        "drop_reason": None,
        "trained_step": step,
        "text": tokenizer.decode(ids, skip_special_tokens=False),
        "parent_id": None,
        "segment": 0,
    }


def _token_columns(action: np.ndarray, step: int, rng: np.random.Generator, mode: str) -> dict:
    n = int(action.sum())
    entropy = np.minimum(np.exp(rng.normal(-2.6, 2.2, n)), 3.5)
    chance = np.exp(-np.maximum(rng.exponential(1.0, n) * entropy, 1e-7))
    logprob = np.log(np.clip(chance, 1e-6, 1 - 1e-7))
    target = step - 1
    inter = 0 if mode == "sync" else int(rng.integers(0, 3))
    last = max(target - inter, 0)
    intra = 0 if mode == "sync" else min(int(rng.poisson(0.9)), last)
    switches = np.sort(rng.integers(0, max(n, 1), intra))
    version = last - intra + np.searchsorted(switches, np.arange(n), side="right")
    lag = target - version
    noise = rng.standard_t(3, n) * np.sqrt((0.012 + 0.02 * lag) * entropy + 1e-7)
    rare = rng.random(n) < 0.004
    delta = np.where(rare, rng.normal(0, 0.4, n), noise)
    full = {"logprob": logprob, "entropy": entropy, "learner_logprob": np.minimum(logprob + delta, -1e-8)}
    out = {}
    for name, values in full.items():
        column = np.full(len(action), np.nan, np.float32)
        column[action] = values
        out[name] = column.tolist()
    stamped = np.full(len(action), -1, np.int32)
    stamped[action] = version
    return {**out, "version": stamped.tolist(), "target_version": target}
