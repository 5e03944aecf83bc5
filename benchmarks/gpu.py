"""Generation and the learner's step on one GPU; untested until somebody has run it on one.

    python -m benchmarks.gpu [--short] [--json PATH]

The local engine against transformers' generate, and the learner in bfloat16 against a padded loop with autocast, at
d1024 and a vocabulary of 32,000; peak memory of both learners. At most ten minutes; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import results
from benchmarks.common.rollouts import Rollout, rollouts
from benchmarks.common.timing import Spread, alternate, ratio
from benchmarks.common.turns import Script, run
from benchmarks.common.workload import ENDS, new_model, prompts
from benchmarks.learner import trajectories
from estr.config import Config
from estr.engines.local import EngineSettings, LocalEngine
from estr.learner import Learner

SIZES = {"width": 1024, "layers": 12, "vocabulary": 32_000}
SHORT = {"width": 64, "layers": 2, "vocabulary": 512}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def engine_rate(script: Script, sizes: dict[str, int], slots: int) -> Callable[[], float]:
    from benchmarks.generation import Local

    model = new_model(**sizes).to(device())
    local = Local.__new__(Local)
    settings = EngineSettings(slots=slots, parked=slots, max_context=512, end_ids=tuple(range(ENDS)))
    local.engine, local._known, local.read = LocalEngine(model, settings), set(), 0
    local.engine.set_weights(0, {name: p.detach() for name, p in model.named_parameters()})

    def measure() -> float:
        tokens, seconds = run(local, script)
        synchronize()
        return tokens / seconds

    return measure


def generate_rate(script: Script, sizes: dict[str, int], slots: int) -> Callable[[], float]:
    model: Any = new_model(**sizes).to(device())

    def measure() -> float:
        sampled, start = 0, time.perf_counter()
        for first in range(0, len(script.prompts), slots):
            rows = script.prompts[first : first + slots]
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device())
            with torch.no_grad():
                output = model.generate(
                    input_ids=ids,
                    attention_mask=(ids != 0).long(),
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=script.limit,
                    eos_token_id=list(range(ENDS)),
                    pad_token_id=0,
                )[:, width:]
            ended = (output < ENDS).cumsum(-1)
            sampled += int(((ended == 0) | ((ended == 1) & (output < ENDS))).sum())
        return sampled / (time.perf_counter() - start)

    return measure


def learner_seconds(made: list[Rollout], sizes: dict[str, int]) -> Callable[[], float]:
    section = {"learning_rate": 1e-5, "dtype": "bfloat16", "tokens_per_microbatch": 16_384}
    learner = Learner(new_model(**sizes).to(device()), Config.model_validate({"learner": section}))
    groups = trajectories(learner.model, made)

    def measure() -> float:
        start = time.perf_counter()
        list(learner.train(groups))
        synchronize()
        return time.perf_counter() - start

    return measure


def padded_seconds(made: list[Rollout], sizes: dict[str, int]) -> Callable[[], float]:
    model: Any = new_model(**sizes).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=torch.cuda.is_available())
    longest = max(len(r.prompt) + len(r.completion) for r in made)
    ids = torch.zeros(len(made), longest, dtype=torch.int64)
    action = torch.zeros(len(made), longest, dtype=torch.bool)
    for i, r in enumerate(made):
        end = len(r.prompt) + len(r.completion)
        ids[i, :end] = torch.tensor(r.prompt + r.completion)
        action[i, len(r.prompt) : end] = True
    ids, action = ids.to(device()), action.to(device())
    advantage = torch.tensor([r.advantage for r in made], device=device())[:, None]

    def measure() -> float:
        start = time.perf_counter()
        with torch.autocast(device().type, dtype=torch.bfloat16):
            logits = model(input_ids=ids, attention_mask=(ids != 0).long(), use_cache=False).logits[:, :-1]
        logprob = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = -((logprob - logprob.detach()).exp() * advantage * action[:, 1:]).sum() / action.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        return time.perf_counter() - start

    return measure


def peak(work: Callable[[], float]) -> float:
    """MiB allocated at most on the GPU during one step; 0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() / 2**20


def main() -> None:
    arguments: argparse.Namespace = results.parser(__doc__, repeats=3).parse_args()
    if not torch.cuda.is_available() and not arguments.short:
        sys.exit("benchmarks.gpu needs a GPU that torch can use; --short runs without one, to show that it works")
    sizes, slots, groups = (SHORT, 8, 2) if arguments.short else (SIZES, 256, 64)
    if arguments.short:
        arguments.repeats = 1
    result = results.begin("gpu", arguments, **sizes, slots=slots)
    script = Script(prompts(groups, 8), limit=8 if arguments.short else 256)
    rates = alternate(
        {"estr": engine_rate(script, sizes, slots), "generate": generate_rate(script, sizes, slots)}, arguments.repeats
    )
    for name, spread in rates.items():
        result.measured(f"generation: {name}", spread, "sampled tokens/s")
    result.ratio("generation: estr / generate", ratio(rates["estr"], rates["generate"]))
    made = rollouts(groups, 8, 16 if arguments.short else 256, sizes["vocabulary"])
    steps = {"estr": learner_seconds(made, sizes), "padded loop": padded_seconds(made, sizes)}
    seconds = alternate(steps, arguments.repeats)
    for name, spread in seconds.items():
        result.measured(f"learner: {name}", spread, "s a step")
        result.measured(f"learner: {name}, peak memory", Spread((peak(steps[name]),)), "MiB")
    result.ratio("learner: padded loop / estr, time", ratio(seconds["padded loop"], seconds["estr"]))
    results.finish(result, arguments.json)


if __name__ == "__main__":
    main()
