"""Forward and backward of each recipe against grpo on the same tokens: what an objective costs beside the model.

    python -m benchmarks.objectives [--tokens 1000000] [--recipes estr,icepop] [--json FILE] [--short]

A flat batch of float32 tokens is made once; what is timed is ``objective(batch)`` and ``loss.backward()`` down to
log π, metrics included. Every measurement of a recipe stands right after one of grpo, and the ratio is taken pair by
pair, so that what else goes on in the machine cancels. Median and range over the repeats.
"""

from __future__ import annotations

import time

import torch

from benchmarks.common import results
from benchmarks.common.timing import Spread
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


def measure(name: str, batch: TokenBatch, repeats: int) -> tuple[Spread, Spread]:
    """Milliseconds of the recipe, and its time over grpo's right before it."""
    seconds(BASE, batch), seconds(name, batch)
    pairs = [(seconds(BASE, batch), seconds(name, batch)) for _ in range(repeats)]
    return Spread(tuple(1000 * own for _, own in pairs)), Spread(tuple(own / base for base, own in pairs))


def main() -> None:
    parser = results.parser(__doc__, repeats=7)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--recipes", default="", help="names separated by commas; default: all")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.tokens, arguments.repeats = 50_000, 3
    torch.set_num_threads(arguments.threads)
    names = arguments.recipes.split(",") if arguments.recipes else list(recipes())
    result = results.begin("objectives", arguments, tokens=arguments.tokens)
    batches = {
        topk: make_batch(arguments.tokens, topk) for topk in {"topk_logprob" in objective(name).needs for name in names}
    }
    for name in names:
        milliseconds, ratio = measure(name, batches["topk_logprob" in objective(name).needs], arguments.repeats)
        result.measured(name, milliseconds, "ms")
        result.ratio(f"{name} / {BASE}", ratio, AIM if name == "estr" else None, higher=False)
    results.finish(result, arguments.json)


if __name__ == "__main__":
    main()
