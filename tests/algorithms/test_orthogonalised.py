"""What Newton-Schulz does to a matrix, whatever its shape and scale."""

from __future__ import annotations

import pytest
import torch

from fedlalr.algorithms.fedmuon import orthogonalised


@pytest.mark.parametrize("shape", [(3, 5, 8), (3, 8, 5), (4, 4), (1, 6), (6, 1)])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, ...], scale: float) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    u, sigma, vh = torch.linalg.svd(matrices, full_matrices=False)
    assert (sigma / torch.linalg.matrix_norm(matrices)[..., None] > 0.002).all()
    found = orthogonalised(scale * matrices)
    values = torch.diagonal(u.mT @ found @ vh.mT, dim1=-2, dim2=-1)
    assert values.min() > 0.68
    assert values.max() < 1.21
    torch.testing.assert_close((u * values[..., None, :]) @ vh, found, rtol=0, atol=1e-4)


def test_zero_stays_zero() -> None:
    assert torch.equal(orthogonalised(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))
