import numpy as np
import pytest
import torch

from fedlalr.paper.synthetic import STEEPEST, Synthetic

PROBLEM = Synthetic()
LINE = torch.linspace(-6, 6, 120_001, dtype=torch.float64)


def test_gradient_is_the_derivative_of_the_value():
    x = torch.randn(20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (derivative,) = torch.autograd.grad(PROBLEM.value(x).sum(), x)
    torch.testing.assert_close(PROBLEM.gradient(x.detach()), derivative)


def test_smoothness_is_one_and_the_loss_is_not_convex():
    curvature = torch.diff(PROBLEM.gradient(LINE)) / torch.diff(LINE)
    assert curvature.abs().max().item() == pytest.approx(1, abs=1e-6)
    assert curvature.min() < -0.2


def test_slope_is_bounded_by_the_stated_constant():
    assert PROBLEM.gradient(LINE).abs().max().item() == pytest.approx(STEEPEST, abs=1e-8)


def test_least_value_is_zero_at_the_origin():
    assert PROBLEM.value(torch.zeros(8)) == 0
    assert (PROBLEM.value(LINE[:, None]) >= 0).all()


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
    theory = PROBLEM.theory(eps=0.5, beta1=0.9)
    assert noise.abs().max() <= PROBLEM.noise
    assert noise.mean().abs() < 0.01
    assert (noise**2).sum(-1).mean().item() == pytest.approx(theory.sigma**2, rel=0.01)


def test_constants_given_to_the_theory_bound_every_gradient():
    theory = PROBLEM.theory(eps=0.5, beta1=0.9)
    assert theory.gap == pytest.approx(8 * 0.5 * 2.25 / 3.25)
    assert theory.G_inf == pytest.approx(STEEPEST + PROBLEM.shift + PROBLEM.noise)
    assert (theory.L, theory.d, theory.eps, theory.beta1) == (1, 8, 0.5, 0.9)
