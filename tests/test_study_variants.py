"""The study's own methods, on the shared fixture with μ ≠ π, against gradients worked out by hand."""

from __future__ import annotations

import math
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from estr import TokenBatch, objective
from estr.objectives.objective import RECIPES

VARIANTS = Path(__file__).parent.parent / "benchmarks" / "study" / "variants.py"


@pytest.fixture(scope="module", autouse=True)
def variants() -> Iterator[None]:
    """The table of recipes holds the variants for the time of this module only."""
    before = dict(RECIPES)
    for name in EXPECTED:
        RECIPES.pop(name, None)
    runpy.run_path(str(VARIANTS))
    yield
    RECIPES.clear()
    RECIPES.update(before)


MU = [0.9, 0.5, 0.01, 0.2, 0.95, 0.3, 0.002, 0.6]
PI = [0.9, 0.55, 0.02, 0.6, 0.99, 0.1, 0.03, 0.45]
H = [0.33, 0.7, 0.06, 1.2, 0.2, 1.5, 0.02, 0.68]
A = [1.0] * 4 + [-0.5] * 4

# E = 1, 1.1, 2, 3, 1.0421, 1/3, 15, .75; S > 1 for the third and the seventh only; the fifth and the seventh are inward
EXPECTED = {
    "direction_aware": [1, 1.1, 0, 0, -0.5 * 0.99 / 0.95, 0, -0.5 * 1.28, 0],
    "outward_gate": [1, 1.1, 0, 0, -0.5 * 0.99 / 0.95, 0, -7.5, 0],
    "inward_cap": [1, 1.1, 0, 0, -0.5 * 0.99 / 0.95, 0, -0.5 * 1.28, 0],
    "estr_capped": [1, 1.1, 0, 0, -0.5 * 0.99 / 0.95, 0, 0, 0],
    "entropy_clip": [1, 1.1, 0, 0, -0.5 * 0.99 / 0.95, 0, -0.5 * math.exp(math.sqrt(0.15 * 0.03)), -0.375],
    "entropy_weight": [1, 1.1, 0, 0, -0.5 * 0.99 / 0.95, 0, -7.5 * 0.03 / math.log(15) ** 2, 0],
    "entropy_budget": [1, 1.1, 0, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_gradients_of_a_variant_by_hand(name: str) -> None:
    pi = torch.tensor(PI).log().requires_grad_()
    batch = TokenBatch(
        pi,
        torch.tensor(MU).log(),
        torch.tensor(A),
        torch.tensor([0] * 4 + [1] * 4),
        behavior_entropy=torch.tensor(H),
    )
    objective(name)(batch).loss.backward()
    assert pi.grad is not None
    assert torch.allclose(-8 * pi.grad, torch.tensor(EXPECTED[name]), atol=1e-5)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_variant_is_the_policy_gradient_where_nothing_moved(name: str) -> None:
    pi = torch.tensor(PI).log().requires_grad_()
    batch = TokenBatch(
        pi, pi.detach(), torch.tensor(A), torch.tensor([0] * 4 + [1] * 4), behavior_entropy=torch.tensor(H)
    )
    objective(name)(batch).loss.backward()
    assert pi.grad is not None
    assert torch.allclose(-8 * pi.grad, torch.tensor(A), atol=1e-6)


def test_a_region_without_bounds_is_ppo() -> None:
    pi, entropy = torch.tensor(PI).log(), torch.tensor(H)
    batch = TokenBatch(
        pi, torch.tensor(MU).log(), torch.tensor(A), torch.tensor([0] * 4 + [1] * 4), behavior_entropy=entropy
    )
    expected = objective("grpo", clip_low=0.2, clip_high=0.28)(batch).loss
    for name in ("direction_aware", "outward_gate", "entropy_weight", "entropy_budget"):
        assert torch.allclose(objective(name, tau=1e9)(batch).loss, expected), name
