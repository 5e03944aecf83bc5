"""How many log-probabilities an engine has to return where it cannot give the entropy.

``python -m benchmarks.entropy_topk``. ESTR keeps a token when δ² / (H + eps) ≤ tau. From the K most likely tokens H is
only known as an interval, and a token is undecided when its ends give different verdicts. This finds the smallest K (a
power of two) that leaves at most one token in a thousand undecided, for vocabularies of real models.

Nothing here comes from a model; a position is simulated so:

* log-probabilities fall with the rank r of a token as a·log(r + q), q uniform in [0.2, 3] (Zipf and Mandelbrot's law),
  and each gets Gaussian noise of 0.5 nats on top;
* the slope a is chosen by bisection such that H is what was drawn for the position: gamma distributed with shape 0.5,
  so that most positions are nearly certain and a few are wide open. Its mean is the regime: 0.3 nats (a model that was
  trained on a task), 1 nat, and 2.5 nats (a base model, or a high temperature);
* the learner's logits are those of the engine plus independent Gaussian noise of ``spread`` nats a token: 0.05 is the
  noise of different kernels, 0.3 and 1 are moderate and gross staleness. δ is that of a token drawn from the engine,
  four a position.

Real tails need not fall like these: the last column of the table says how much mass lies beyond K on average.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from estr.engines.interval import entropy_interval

VOCABULARIES = {"Llama 2": 32_000, "Llama 3": 128_256, "Qwen2.5": 151_936, "Gemma 3": 262_144}
REGIMES = {"trained": 0.3, "middle": 1.0, "open": 2.5}
SPREADS = (0.05, 0.3, 1.0)
SIZES = tuple(2**k for k in range(13))
TAU, EPS, ALLOWED = 1.0, 0.01, 1e-3
_ROWS = 64
_TOKENS = 4  # drawn at each position
_BISECTIONS = 24


@dataclass
class Cell:
    """One vocabulary, regime and spread: what each K leaves undecided."""

    model: str
    vocabulary: int
    regime: str
    spread: float
    positions: int
    entropy: float  # mean H, nats
    dropped: float  # share of tokens that the exact H drops
    undecided: dict[int, float]  # by K
    beyond: dict[int, float]  # mean mass beyond K, by K

    @property
    def enough(self) -> int | None:
        """The smallest K from which on at most ALLOWED is undecided."""
        bad = [k for k, share in self.undecided.items() if share > ALLOWED]
        rest = [k for k in self.undecided if k > max(bad, default=0)]
        return min(rest) if rest else None


def slopes(target: Tensor, offset: Tensor, vocabulary: int) -> Tensor:
    """a [n] such that p_r ∝ (r + q)^-a has the entropy ``target`` [n], for ``offset`` q [n]."""
    rank = torch.arange(1, vocabulary + 1, dtype=torch.float32)
    logs = (rank + offset[:, None]).log()
    low, high = torch.zeros_like(target), torch.full_like(target, 60.0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        logp = torch.log_softmax(-middle[:, None] * logs, -1)
        above = -torch.linalg.vecdot(logp.exp(), logp) > target
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return high


def positions(vocabulary: int, mean: float, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Log-probabilities [rows, V] of the engine, a few rows at a time."""
    gamma = torch.randn(count, generator=generator).square()  # shape 1/2, mean 1
    offset = 0.2 + 2.8 * torch.rand(count, generator=generator)
    coarse = min(vocabulary, 4096)  # the slope is found on a smaller vocabulary: its tail hardly adds to H
    for start in range(0, count, _ROWS):
        part = slice(start, start + _ROWS)
        a = slopes((mean * gamma[part]).clamp(1e-4, 0.9 * torch.log(torch.tensor(float(coarse)))), offset[part], coarse)
        rank = torch.arange(1, vocabulary + 1, dtype=torch.float32)
        z = -a[:, None] * (rank + offset[part, None]).log()
        z += 0.5 * torch.randn(z.shape, generator=generator)
        yield torch.log_softmax(z, -1)


def study(model: str, vocabulary: int, regime: str, count: int, seed: int) -> list[Cell]:
    """The cells of one vocabulary and regime, from the same positions."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [k for k in SIZES if k <= vocabulary]
    open_, beyond = torch.zeros(len(SPREADS), len(sizes)), torch.zeros(len(sizes))
    dropped, total = torch.zeros(len(SPREADS)), 0.0
    for logp in positions(vocabulary, REGIMES[regime], count, generator):
        exact = -torch.linalg.vecdot(logp.exp().double(), logp.double())
        total += float(exact.sum())
        token = torch.multinomial(logp.exp(), _TOKENS, replacement=True, generator=generator)
        noise = torch.randn(logp.shape, generator=generator)
        squared = torch.stack([_delta(logp, noise, token, spread).square() for spread in SPREADS])
        dropped += (squared > TAU * (exact + EPS)[:, None]).sum((1, 2))
        top = logp.topk(sizes[-1]).values
        for index, k in enumerate(sizes):
            low, high = (torch.from_numpy(end)[:, None] for end in entropy_interval(top[:, :k].numpy(), vocabulary))
            open_[:, index] += ((squared > TAU * (low + EPS)) & (squared <= TAU * (high + EPS))).sum((1, 2))
            beyond[index] += (1 - top[:, :k].exp().sum(1)).clamp(min=0).sum()
    return [
        Cell(
            model,
            vocabulary,
            regime,
            spread,
            count,
            total / count,
            float(dropped[i]) / (_TOKENS * count),
            {k: float(open_[i, j]) / (_TOKENS * count) for j, k in enumerate(sizes)},
            {k: float(beyond[j]) / count for j, k in enumerate(sizes)},
        )
        for i, spread in enumerate(SPREADS)
    ]


def _delta(logp: Tensor, noise: Tensor, token: Tensor, spread: float) -> Tensor:
    """log π − log μ of ``token`` [n, tokens], in float64."""
    other = torch.add(logp, noise, alpha=spread)
    return (other.gather(1, token) - other.logsumexp(1, keepdim=True) - logp.gather(1, token)).double()


def table(cells: list[Cell]) -> str:
    """Markdown: the K that is enough, and what 16 and 64 log-probabilities leave open."""
    lines = [
        "| vocabulary | regime (mean H) | spread | dropped | K for ≤ 0.1 % | undecided at 16 | at 64 | mass beyond K |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        k = cell.enough
        enough, beyond = ("more", "") if k is None else (f"{k:,}", f"{cell.beyond[k]:.1e}")
        at16, at64 = cell.undecided[16], cell.undecided[64]
        lines.append(
            f"| {cell.vocabulary:,} ({cell.model}) | {cell.regime} ({cell.entropy:.2f}) | {cell.spread:g} | "
            f"{cell.dropped:.2%} | {enough} | {at16:.2%} | {at64:.2%} | {beyond} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cells: list[Cell] = []
    for model, vocabulary in VOCABULARIES.items():
        for regime in REGIMES:
            cells += study(model, vocabulary, regime, arguments.positions, arguments.seed)
            print(table(cells[-len(SPREADS) :]), flush=True)
    print(table(cells))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(cell) | {"enough": cell.enough} for cell in cells], indent=1))


if __name__ == "__main__":
    main()
