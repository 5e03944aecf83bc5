"""Forward and backward of each recipe against grpo on the same tokens: what an objective costs beside the model.

    python benchmarks/objectives.py [--tokens 1000000] [--repeats 7] [--threads 1] [--recipes estr,icepop] [--short]

A flat batch of float32 tokens is made once; what is timed is ``objective(batch)`` and ``loss.backward()`` down to
log π, metrics included. Every measurement of a recipe stands right after one of grpo, and the ratio is taken pair by
pair, so that what else goes on in the machine cancels. Median and range over the repeats.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time

import torch

from estr import TokenBatch, objective, recipes

BASE = "grpo"
TOP = 20  # most likely tokens, for the two recipes that read them
LENGTH = 500  # mean tokens of a sequence
GROUP = 8
AIM = 1.15  # of grpo's time, for estr


def make_batch(tokens: int, topk: bool, seed: int = 0) -> TokenBatch:
    """Tokens with μ ≠ q ≠ π, most ratios near 1 and a few far away."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    sequences = max(GROUP, tokens // LENGTH // GROUP * GROUP)
    sequence = torch.randint(sequences, (tokens,), generator=generator).sort().values
    entropy = normal(tokens).square()
    behavior = -entropy * normal(tokens).square() - 1e-3
    spread = (entropy + 0.01).sqrt() * 0.3
    proximal = behavior + spread * normal(tokens)
    fields = {}
    if topk:
        likely = normal(tokens, TOP).log_softmax(-1)
        fields = {
            "topk_ids": torch.randint(50_000, (tokens, TOP), generator=generator),
            "behavior_topk_logprob": likely - 0.1,
            "topk_logprob": (likely - 0.1 + 0.05 * normal(tokens, TOP)).requires_grad_(),
        }
    return TokenBatch(
        logprob=(proximal + spread * normal(tokens)).requires_grad_(),
        behavior_logprob=behavior,
        advantage=normal(sequences)[sequence],
        sequence=sequence,
        sequences=sequences,
        behavior_entropy=entropy,
        proximal_logprob=proximal,
        proximal_entropy=entropy * (1 + 0.05 * normal(tokens)),
        reference_logprob=behavior + spread * normal(tokens),
        entropy=entropy * (1 + 0.05 * normal(tokens)),
        version=torch.randint(5, (tokens,), generator=generator),
        target_version=5,
        group=torch.arange(sequences) // GROUP,
        reward=torch.randint(2, (sequences,), generator=generator).float(),
        advantage_scope="token",
        **fields,
    )


def seconds(name: str, batch: TokenBatch) -> float:
    """One forward and backward pass."""
    batch.logprob.grad = None
    if batch.topk_logprob is not None:
        batch.topk_logprob.grad = None
    recipe = objective(name)
    generator = torch.Generator().manual_seed(0)
    start = time.perf_counter()
    recipe(batch, generator=generator).loss.backward()
    return time.perf_counter() - start


def measure(name: str, batch: TokenBatch, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of the recipe, and its time over grpo's right before it."""
    seconds(BASE, batch), seconds(name, batch)
    times, ratios = [], []
    for _ in range(repeats):
        base = seconds(BASE, batch)
        own = seconds(name, batch)
        times.append(own)
        ratios.append(own / base)
    return times, ratios


def spread(values: list[float], scale: float = 1.0) -> str:
    low, middle, high = min(values) * scale, statistics.median(values) * scale, max(values) * scale
    return f"{middle:8.2f} ({low:.2f} to {high:.2f})"


def processor() -> str:
    """The processor's name where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--recipes", default="", help="names separated by commas; default: all")
    parser.add_argument("--short", action="store_true", help="few tokens, to show that it works")
    arguments = parser.parse_args()
    tokens, repeats = arguments.tokens, arguments.repeats
    if arguments.short:
        tokens, repeats = 50_000, 3
    torch.set_num_threads(arguments.threads)
    names = arguments.recipes.split(",") if arguments.recipes else list(recipes())
    print(
        f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s), torch {torch.__version__}, "
        f"{tokens:,} tokens in float32, {repeats} pairs"
    )
    print(f"{'recipe':<34} {'ms':>8} {'':<20} {'of grpo':>9}")
    batches = {topk: make_batch(tokens, topk) for topk in {"topk_logprob" in objective(name).needs for name in names}}
    for name in names:
        times, ratios = measure(name, batches["topk_logprob" in objective(name).needs], repeats)
        verdict = ""
        if name == "estr":
            verdict = f"  aim {AIM}: {'met' if statistics.median(ratios) <= AIM else 'missed'}"
        print(f"{name:<34} {spread(times, 1000):<29} {spread(ratios)}{verdict}")


if __name__ == "__main__":
    main()
