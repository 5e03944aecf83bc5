import pytest
import torch

from estr.models.muon import Muon, orthogonalized


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8)])
def test_singular_values_are_about_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalized(matrix)
    singular = torch.linalg.svdvals(result)
    assert singular.max() < 1.3
    assert singular.median() > 0.65
    mixed = u.T @ result @ v.T  # diagonal: the singular vectors stay
    torch.testing.assert_close(mixed, torch.diag(mixed.diagonal()), rtol=0, atol=1e-4)


def test_zeros_stay():
    assert torch.equal(orthogonalized(torch.zeros(3, 5)), torch.zeros(3, 5))


def test_first_step_by_hand():
    p = torch.nn.Parameter(torch.zeros(4, 9))
    p.grad = torch.eye(4, 9) * 7
    Muon([p], lr=0.1, momentum=0.9).step()
    shrunk = orthogonalized(torch.eye(4, 9))
    torch.testing.assert_close(p.detach(), -0.1 * 0.2 * 3 * shrunk)


def test_weight_decay_is_decoupled():
    p = torch.nn.Parameter(torch.ones(2, 2))
    p.grad = torch.zeros(2, 2)
    Muon([p], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(p.detach(), torch.full((2, 2), 0.95))


def test_it_minimizes():
    target = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    p = torch.nn.Parameter(torch.zeros(6, 6))
    optimizer = Muon([p], lr=0.3)
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 0.3 * (1 - step / 200)
        p.grad = p.detach() - target
        optimizer.step()
    assert (p.detach() - target).norm() < 0.05 * target.norm()
