"""A full optimizer step of the learner against TRL's GRPOTrainer and a plain padded PyTorch loop.

    python -m benchmarks.learner [--repeats 4] [--threads 1] [--short] [--json PATH]

Same float32 weights (d128 and d256), same ragged rollouts: forward, objective, backward, clipping, AdamW. TRL takes
part where ``make bench-peers`` has installed it; it is given the rollouts, so that its generation is left out. Then the
memory of head and loss at a vocabulary of 150,000: the fused head against logits and log-softmax, each in a process
that says how far its resident memory rose above weights and gradients, and what gradients it got.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import results
from benchmarks.common.peer import ROOT, Peer
from benchmarks.common.profiling import operator_shares
from benchmarks.common.rollouts import Rollout, rollouts
from benchmarks.common.timing import Spread, alternate, ratio
from benchmarks.common.workload import new_model, save_model
from estr.config import Config
from estr.learner import Learner, score
from estr.trajectory import Segment, Trajectory

ENVIRONMENT = ".venv-trl"
GROUP_SIZE = 8
VOCABULARY = 512
PARTS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn"),
    "attention": ("scaled_dot_product", "flash_attention"),
    "norms": ("pow", "rsqrt", "mean", "rms_norm"),
    "optimizer, clipping": ("adam", "linalg", "foreach"),
    "copies, layout": ("copy_", "index", "cat", "clone", "zero_", "fill_"),
    "other elementwise": ("mul", "add", "silu", "exp", "sum", "neg", "sub", "div", "log"),
}


def trajectories(model: Any, made: list[Rollout]) -> list[list[Trajectory]]:
    """The rollouts as the learner takes them, log μ and H from the model itself."""
    segments = []
    for r in made:
        tokens = np.array(r.prompt + r.completion, np.int32)
        action = np.arange(len(tokens)) >= len(r.prompt)
        column = np.where(action, np.float32(0), np.float32("nan"))
        segments.append(Segment(tokens, action, column, column.copy(), np.where(action, 0, -1).astype(np.int32)))
    for segment, (logprob, entropy) in zip(segments, score(model, segments), strict=True):
        segment.logprob[segment.action], segment.entropy[segment.action] = logprob, entropy
    groups: list[list[Trajectory]] = [[] for _ in range(1 + made[-1].group)]
    for r, segment in zip(made, segments, strict=True):
        groups[r.group].append(
            Trajectory(
                group=r.group,
                sibling=len(groups[r.group]),
                attempt=0,
                task_id=str(r.group),
                prompt="",
                seed=0,
                segments=[segment],
                reward=float(r.advantage > 0),
                finish_reason="stop",
            )
        )
    return groups


def learner_step(made: list[Rollout], width: int, dtype: str, tokens: int) -> Callable[[], float]:
    """A closure that trains one step and says how long it took."""
    config = Config.model_validate(
        {"learner": {"learning_rate": 1e-5, "dtype": dtype, "tokens_per_microbatch": tokens}}
    )
    learner = Learner(new_model(width=width, vocabulary=VOCABULARY), config)
    groups = trajectories(learner.model, made)

    def step() -> float:
        start = time.perf_counter()
        list(learner.train(groups))
        return time.perf_counter() - start

    return step


def padded_step(made: list[Rollout], width: int) -> Callable[[], float]:
    """What a short script does: pad, all logits, log-softmax, clipped surrogate, AdamW."""
    model = new_model(width=width, vocabulary=VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    longest = max(len(r.prompt) + len(r.completion) for r in made)
    ids, mask, action = (torch.zeros(len(made), longest, dtype=torch.int64) for _ in range(3))
    for i, r in enumerate(made):
        end = len(r.prompt) + len(r.completion)
        ids[i, :end], mask[i, :end] = torch.tensor(r.prompt + r.completion), 1
        action[i, len(r.prompt) : end] = 1
    advantage = torch.tensor([r.advantage for r in made])[:, None]
    old = _logprob(model, ids, mask)[0].detach()

    def step() -> float:
        start = time.perf_counter()
        logprob, entropy = _logprob(model, ids, mask)
        taken = action[:, 1:].bool()
        E = torch.exp(logprob - old)
        surrogate = torch.minimum(E * advantage, E.clamp(0.8, 1.28) * advantage)
        loss = -(surrogate * taken).sum() / taken.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float((entropy * taken).sum() / taken.sum())
        return time.perf_counter() - start

    return step


def _logprob(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    full = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].log_softmax(-1)
    with torch.no_grad():
        entropy = -(full.exp() * full).sum(-1)
    return full.gather(-1, ids[:, 1:, None])[..., 0], entropy


def measure_steps(
    result: results.Result, arguments: argparse.Namespace, width: int, stack: ExitStack, *, ragged: bool = True
) -> None:
    title = f"d{width}" if ragged else f"d{width}, all of one length"
    groups, limit = (2, 32) if arguments.short else (8, 128 if ragged else 64)
    made = rollouts(groups, GROUP_SIZE, limit, VOCABULARY, ragged=ragged)
    contestants = {
        "estr": learner_step(made, width, "float32", 2048),
        "padded loop": padded_step(made, width),
    }
    if ragged and not arguments.short:  # where a processor has no bfloat16, it takes many times as long
        contestants["estr, bfloat16 autocast"] = learner_step(made, width, "bfloat16", 2048)
    if Peer.installed(ENVIRONMENT) and not arguments.short:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_model(directory, width=width, vocabulary=VOCABULARY)
        peer = stack.enter_context(Peer(ENVIRONMENT, "benchmarks.peers.trl_peer", arguments.threads))
        loaded = peer.ask(
            do="load", path=str(directory), threads=arguments.threads, batch=len(made), group_size=GROUP_SIZE
        )
        result.settings["trl"] = loaded["version"]
        rows = [(r.prompt, r.completion, r.advantage) for r in made]
        contestants["TRL"] = lambda: float(peer.ask(do="learn", rollouts=rows)["seconds"])
    elif width == 128 and ragged:
        result.notes.append("TRL did not take part: not installed (make bench-peers), or the short form")
    seconds = alternate(contestants, arguments.repeats)
    actions = sum(len(r.completion) for r in made)
    for name, spread in seconds.items():
        rate = Spread(tuple(actions / value for value in spread.values))
        result.measured(f"{title}: {name}", rate, "action tokens/s")
    result.ratio(f"{title}: estr / padded loop, tokens/s", ratio(seconds["padded loop"], seconds["estr"]))
    if "TRL" in seconds:
        result.ratio(f"{title}: estr / TRL, tokens/s", ratio(seconds["TRL"], seconds["estr"]), aim=1.5)
    parameters = sum(p.numel() for p in new_model(width=width, vocabulary=VOCABULARY).parameters())
    prompts = sum(len(r.prompt) for r in made[::GROUP_SIZE])  # siblings share theirs
    flops = 6 * parameters * (prompts + sum(len(r.completion) for r in made))
    least = flops / result.machine["gemm_float32_gflops"] / 1e9
    spread = Spread(tuple(least / value for value in seconds["estr"].values))
    result.ratio(f"{title}: machine's limit / estr's time", spread)
    if width == 128 and ragged:
        result.profile["learner step"] = operator_shares(contestants["estr"], PARTS)


def measure_memory(result: results.Result, arguments: argparse.Namespace) -> None:
    vocabulary, actions = (5000, 256) if arguments.short else (150_000, 4096)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for path in ("fused", "plain"):
            command = [sys.executable, "-m", "benchmarks.head_memory", path, str(vocabulary), str(actions), folder]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                result.notes.append(f"memory of the {path} head could not be measured: {done.stderr.strip()[-300:]}")
                return
            found[path] = json.loads(done.stdout)
        gradients = {path: torch.load(Path(folder) / f"{path}.pt", weights_only=True) for path in found}
    worst = 0.0
    for name, expected in gradients["plain"].items():
        difference = (gradients["fused"][name] - expected).abs().max() / expected.abs().max()
        worst = max(worst, float(difference))
    for path, numbers in found.items():
        result.measured(f"head and loss, {path}: memory", Spread((numbers["bytes"] / 2**20,)), "MiB")
        result.measured(f"head and loss, {path}: time", Spread((numbers["seconds"],)), "s")
    aim = None if arguments.short else 0.1
    memory = Spread((found["fused"]["bytes"] / found["plain"]["bytes"],))
    result.ratio(f"head and loss, V {vocabulary}, N {actions}: memory of plain", memory, aim, higher=False)
    result.ratio("head and loss: max|Δg| / max|g|", Spread((worst,)), aim=1e-5, higher=False)


def main() -> None:
    arguments = results.parser(__doc__, repeats=4).parse_args()
    if arguments.short:
        arguments.repeats = 1
    result = results.begin("learner", arguments, models="4 layers, V 512", group_size=GROUP_SIZE)
    torch.set_num_threads(arguments.threads)
    for width, ragged in ((128, True),) if arguments.short else ((128, True), (256, True), (128, False)):
        with ExitStack() as stack:
            measure_steps(result, arguments, width, stack, ragged=ragged)
    measure_memory(result, arguments)
    results.finish(result, arguments.json)


if __name__ == "__main__":
    main()
