import math

import numpy as np
import pytest
import torch

from fedlalr.paper.synthetic import Synthetic

PROBLEM = Synthetic()
STEEPEST = 9 / (16 * math.sqrt(3))  # the largest slope of one coordinate, at 1/√3
LINE = torch.linspace(-6, 6, 120_001, dtype=torch.float64)


def value(x):
    """f, over the last dimension."""
    return (x**2 / (1 + x**2)).sum(-1) / 2


def test_gradient_is_the_derivative_of_the_value():
    x = torch.randn(20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (derivative,) = torch.autograd.grad(value(x).sum(), x)
    torch.testing.assert_close(PROBLEM.gradient(x.detach()), derivative)


def test_smoothness_is_one_and_the_loss_is_not_convex():
    curvature = torch.diff(PROBLEM.gradient(LINE)) / torch.diff(LINE)
    assert curvature.abs().max().item() == pytest.approx(1, abs=1e-6)
    assert curvature.min() < -0.2


def test_slope_is_bounded_by_the_stated_constant():
    assert PROBLEM.gradient(LINE).abs().max().item() == pytest.approx(STEEPEST, abs=1e-8)


def test_least_value_is_zero_at_the_origin():
    assert value(torch.zeros(8)) == 0
    assert (value(LINE[:, None]) >= 0).all()


@pytest.mark.parametrize("clients", [2, 4, 64])
def test_shifts_have_the_stated_size_and_cancel_exactly(clients):
    shifts = PROBLEM.shifts(clients, 3, np.random.default_rng(0))
    assert shifts.shape == (3, clients, 8)
    assert (shifts.abs() == PROBLEM.shift).all()
    assert (shifts.sum(1) == 0).all()


def test_a_single_client_has_no_shift_and_an_odd_number_is_refused():
    assert (PROBLEM.shifts(1, 2, np.random.default_rng(0)) == 0).all()
    with pytest.raises(ValueError, match="even number, not 3"):
        PROBLEM.shifts(3, 2, np.random.default_rng(0))


def test_noise_is_centred_bounded_and_of_the_stated_variance():
    noise = PROBLEM.noises((50_000, 8), np.random.default_rng(0))
    assert noise.abs().max() <= PROBLEM.noise
    assert noise.mean().abs() < 0.01
    assert (noise**2).sum(-1).mean().item() == pytest.approx(PROBLEM.noise**2 * PROBLEM.d / 3, rel=0.01)
