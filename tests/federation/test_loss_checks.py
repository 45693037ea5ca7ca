"""Losses and targets that do not fit are rejected with the fix; those that fit are trained."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedlalr as fl


def column(targets, **options):
    """A model with one output on two clients of these targets."""
    clients = [(torch.randn(len(targets), 4), targets)] * 2
    return fl.run(nn.Linear(4, 1), clients, fl.FedAvg(0.1), rounds=1, **options)


class Two(nn.Module):
    """Several outputs, in a tuple or in a dict."""

    def __init__(self, named):
        super().__init__()
        self.layer, self.named = nn.Linear(4, 1), named

    def forward(self, x):
        found = self.layer(x), x.mean(1)
        return dict(zip(("a", "b"), found, strict=True)) if self.named else found


def hinge(outputs, targets):
    assert targets.abs().eq(1).all(), "only real targets"
    return F.relu(1 - outputs.squeeze(1) * targets).mean()


def ranking(outputs, targets):
    scores = outputs.squeeze(1)
    return F.softplus(-(scores[0::2] - scores[1::2]) * (targets[0::2] - targets[1::2])).mean()


def all_pairs(outputs, targets):
    return F.softplus(-(outputs - outputs.squeeze(1)) * (targets[:, None] - targets)).mean()


def moment(outputs, targets):
    return (outputs.mean() - targets.mean()) ** 2


def fixed_weights(outputs, targets):
    return ((outputs.squeeze(1) - targets) ** 2 * torch.tensor([1.0, 2.0])).mean()


@pytest.mark.parametrize("loss", [hinge, ranking, all_pairs, moment, fixed_weights])
def test_an_own_loss_sees_real_samples_only_and_may_combine_them_as_it_likes(loss):
    result = column(torch.tensor([1.0, -1.0] * 4), batch_size=2, loss=loss)
    assert math.isfinite(result.history[0].train_loss)


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize(
    "loss", [lambda o, t: (o - t).abs().mean(), lambda o, t: F.poisson_nll_loss(o, t), lambda o, t: F.huber_loss(o, t)]
)
def test_a_loss_that_pairs_every_output_with_every_target_is_rejected(loss, samples):
    with pytest.raises(ValueError, match=r"would broadcast .* for example with targets.unsqueeze\(1\)"):
        column(torch.rand(samples), loss=loss)


@pytest.mark.parametrize("named", [False, True])
def test_a_model_of_several_outputs_is_trained_on_numbers(named):
    clients = [(torch.randn(6, 4), torch.randn(6))] * 2
    first = "a" if named else 0
    right = fl.run(Two(named), clients, fl.FedAvg(0.1), rounds=1, loss=lambda o, t: F.mse_loss(o[first][:, 0], t))
    assert math.isfinite(right.history[0].train_loss)
    with pytest.raises(ValueError, match=r"would broadcast .* give the targets the shape of the outputs$"):
        fl.run(Two(named), clients, fl.FedAvg(0.1), rounds=1, loss=lambda o, t: F.mse_loss(o[first], t))


def test_a_loss_of_a_model_that_returns_a_tuple_is_rejected_with_the_fix():
    clients = [(torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))] * 2
    with pytest.raises(ValueError, match=r"a tuple: .*return_dict=True, .*cross_entropy\(outputs\[0\], targets"):
        fl.run(Two(False), clients, fl.FedAvg(0.1), rounds=1)


@pytest.mark.parametrize("row", [[0.2, -0.3, 1.1], [1.0, 0.0, 1.0]], ids=["numbers", "several labels"])
def test_targets_that_are_not_probabilities_are_rejected_by_cross_entropy(row):
    clients = [(torch.zeros(4, 4), torch.tensor([row] * 4))] * 2
    with pytest.raises(ValueError, match=r"not probabilities, .*mse_loss for numbers or binary_cross_entropy_with"):
        fl.run(nn.Linear(4, 3), clients, fl.FedAvg(0.1), rounds=1)
    fl.run(nn.Linear(4, 3), clients, fl.FedAvg(0.1), rounds=1, loss=F.mse_loss)


def test_a_sample_of_several_labels_is_found_among_those_of_one():
    targets = F.one_hot(torch.arange(6) % 3, 3).float()
    clients = [(torch.zeros(6, 4), targets), (torch.zeros(6, 4), targets.clone())]
    clients[1][1][4, :] = 1.0
    with pytest.raises(ValueError, match="not probabilities"):
        fl.run(nn.Linear(4, 3), clients, fl.FedAvg(0.1), rounds=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_soft_labels_are_trained(dtype):
    soft = torch.softmax(torch.randn(6, 3), dim=1)
    soft[2] = 0.0  # a sample that does not count
    clients = [(torch.randn(6, 4), soft.to(dtype).float())] * 2
    assert math.isfinite(fl.run(nn.Linear(4, 3), clients, fl.FedAvg(0.1), rounds=1).history[0].train_loss)


@pytest.mark.parametrize(
    "loss", [lambda o, t: F.mse_loss(o.detach(), t[:, None]), lambda o, t: (o.squeeze(1).round() != t).float().mean()]
)
def test_a_loss_without_a_gradient_is_rejected(loss):
    with pytest.raises(ValueError, match=r"no gradient .* leave out detach"):
        column(torch.rand(4), loss=loss)


def test_a_loss_may_write_into_the_outputs():
    column(torch.rand(4), loss=lambda o, t: F.mse_loss(o.mul_(2).squeeze(1), t))


@pytest.mark.parametrize("engine", ["reference", "workers"])
def test_a_last_batch_of_one_sample_before_a_normalisation_is_rejected_with_the_fix(engine):
    sizes = [(torch.randn(n, 4), torch.arange(n) % 3) for n in (9, 8)]
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.warns(fl.RepliesRejected, match="drop_last=True leaves out"):
        fl.run(model, sizes, fl.FedAvg(0.1), rounds=1, batch_size=4, engine=engine)
    result = fl.run(model, sizes, fl.FedAvg(0.1), rounds=1, batch_size=4, engine=engine, drop_last=True)
    assert not result.history[0].rejected
