"""What float32 must not lose."""

from __future__ import annotations

import pytest
import torch

import fedlalr as fl
from fedlalr.algorithms.slots import Context, Slots


@pytest.mark.parametrize("beta2", [0.0, 0.999, 0.99999])
def test_the_bias_correction_of_local_adam_is_as_exact_in_float32_as_torchs_own(beta2: float) -> None:
    method = fl.LocalAdam(lr=0.1, betas=(0.9, beta2))
    torch.manual_seed(0)
    x, zero = torch.zeros(5), torch.zeros(5)
    theirs = torch.nn.Parameter(x.clone())
    optimiser = torch.optim.Adam([theirs], lr=method.lr, betas=method.betas, eps=method.eps)
    broadcast = Slots(x=x)
    client = method.start(broadcast, Slots(m=zero, v=zero, n=zero))
    for k in range(1, 6):
        gradient = torch.randn(5)
        client = method.step(client, gradient, broadcast, Context(round=1, lr=method.lr, steps=5, step=k))
        theirs.grad = gradient.clone()
        optimiser.step()
        torch.testing.assert_close(client.x, theirs.detach(), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("make", [fl.FedLALR, fl.FedLADA, fl.SharedAMSGrad, fl.AlignedLALR])
def test_an_eps_whose_square_is_nothing_in_the_parameters_precision_is_refused(make: type) -> None:
    with pytest.raises(ValueError, match=r"its square is too small for torch.float32.* least 1.1e-19"):
        make(eps=1e-25).init(torch.zeros(2))
    for eps, dtype in ((1e-25, torch.float64), (1e-18, torch.float32)):
        v_hat = make(eps=eps).init(torch.zeros(2, dtype=dtype)).v_hat
        torch.testing.assert_close(v_hat.double() / eps**2, torch.ones(2, dtype=torch.float64), rtol=1e-6, atol=0)


def delta_sgd_steps(gradients: list[torch.Tensor]) -> Slots:
    """A client of Δ-SGD after steps with these gradients; that of a batch before a step is zero."""
    method, broadcast = fl.DeltaSGD(lr=0.5), Slots(x=torch.ones(2))
    client = method.start(broadcast, Slots())
    for k, gradient in enumerate(gradients, 1):
        context = Context(round=1, lr=method.lr, steps=len(gradients), step=k)
        client = method.step(client, gradient, broadcast, context)
    return client


def test_a_client_of_delta_sgd_that_has_nothing_to_learn_stays_where_it_is() -> None:
    client = delta_sgd_steps([torch.ones(2), *[torch.zeros(2)] * 2000])
    assert client.x.tolist() == [0.5, 0.5]
    assert float(client.eta) == 0.5


def test_a_gradient_whose_norm_overflows_does_not_bring_delta_sgd_back_to_its_first_rate() -> None:
    client = delta_sgd_steps([torch.ones(2), torch.full((2,), 1e25), torch.ones(2)])
    assert float(client.eta) < 1e-6
    torch.testing.assert_close(client.x, torch.full((2,), 0.5))
