"""Gradients of any length are clipped to a norm, in every form of the local step."""

from __future__ import annotations

import pytest
import torch

from fedlalr.algorithms import Context, FedAvg, Slots
from fedlalr.training.clipping import Regularisation, clip_factor
from fedlalr.training.fused_steps import CPUStep, FusedUpdate
from fedlalr.training.local_step import local_step
from fedlalr.training.stacked.linear_rounds import clip
from training.jobs import make_training


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float32, 3e38), (torch.float32, 2e19), (torch.float64, 1e308), (torch.float64, 2e154)]
)
@pytest.mark.parametrize("size", [1, 5000])
def test_a_gradient_whose_squares_overflow_keeps_its_direction(dtype, largest, size):
    gradient = torch.linspace(-1, 1, size + 1, dtype=dtype)[None, 1:] * largest
    clipped = gradient * clip_factor(gradient, 0.5)
    wanted = gradient / largest
    torch.testing.assert_close(clipped, 0.5 * wanted / wanted.norm(), rtol=1e-4, atol=0)


def test_no_gradient_grows_and_every_client_has_its_own_factor():
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [1e-30, 0.0], [3e25, 4e25]])
    torch.testing.assert_close(clip_factor(rows, 1.0)[:, 0], torch.tensor([0.2, 1.0, 1.0, 1.0, 2e-26]))
    assert clip_factor(rows, 1e30).tolist() == [[1.0]] * 5


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_does_not_become_so(broken):
    gradient = torch.tensor([[1.0, broken], [3e25, 4e25]])
    clipped = gradient * clip_factor(gradient, 1.0)
    assert not clipped[0].isfinite().all()
    torch.testing.assert_close(clipped[1], torch.tensor([0.6, 0.8]))


def test_every_form_of_the_step_cuts_an_overflowing_gradient_alike():
    training = make_training("logistic", "fedavg", clip_norm=1.0, weight_decay=0.0, decoupled_weight_decay=0.0)
    gradient = torch.tensor([[3e25, 4e25, 0.0], [3.0, 4.0, 0.0]])
    start, wanted = torch.zeros(2, 3), torch.tensor([[-0.6, -0.8, 0.0]] * 2)
    context = Context(round=1, lr=1.0, steps=1, step=1)
    assert isinstance(training.algorithm, FedAvg)
    torch.testing.assert_close(local_step(training, Slots(x=start), gradient, Slots(), context).x, wanted)
    step = CPUStep(FusedUpdate(), training.algorithm)
    step(Slots(x=start), gradient.clone(), Slots(), context, Regularisation(clip_norm=1.0))
    torch.testing.assert_close(start, wanted)
    layers = [gradient[:, :1].clone(), gradient[:, 1:].clone()]
    clip(layers, 1.0)
    torch.testing.assert_close(torch.cat(layers, 1), -wanted)
