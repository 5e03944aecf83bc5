"""One head-and-loss pass, forward and backward, in a process of its own: how far resident memory rose, as JSON.

    python -m benchmarks.head_memory fused|plain VOCABULARY ACTIONS FOLDER

Weights and their gradients exist before the baseline is taken. The gradients are left in FOLDER for comparison.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from estr import TokenBatch, objective
from estr.models.head import linear_logprob_entropy

WIDTH = 128


def resident(key: str) -> int:
    """Bytes: ``VmRSS`` now, ``VmHWM`` the most since the mark was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    full = (hidden @ weight.t()).log_softmax(-1)
    with torch.no_grad():
        entropy = -(full.exp() * full).sum(-1)
    return full.gather(-1, target[:, None])[:, 0], entropy


def main() -> None:
    path, vocabulary, actions, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = (torch.randn(vocabulary, WIDTH) * 0.05).requires_grad_()
    hidden = torch.randn(actions, WIDTH, requires_grad=True)
    target = torch.randint(vocabulary, (actions,))
    weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
    sequence, advantage = torch.arange(actions) // 32, torch.randn(actions)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = resident("VmRSS"), time.perf_counter()
    logprob, entropy = (linear_logprob_entropy if path == "fused" else plain)(hidden, weight, target)
    behavior = logprob.detach() + 0.05
    batch = TokenBatch(
        logprob=logprob,
        behavior_logprob=behavior,
        behavior_entropy=entropy.detach(),
        advantage=advantage,
        sequence=sequence,
        advantage_scope="token",
    )
    objective("estr")(batch).loss.backward()
    seconds = time.perf_counter() - start
    print(json.dumps({"bytes": resident("VmHWM") - before, "seconds": seconds}))
    torch.save({"weight": weight.grad, "hidden": hidden.grad}, folder / f"{path}.pt")


if __name__ == "__main__":
    main()
