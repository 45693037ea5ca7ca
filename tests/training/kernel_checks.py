"""What tests of stacked operations compare with: distances, masks, and a stacked network's module client by client."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedlalr.data.partition import Partition
from fedlalr.data.population import Population
from fedlalr.training.interfaces import Training
from fedlalr.training.layout import Layout
from fedlalr.training.stacked.forms import stacked_form
from fedlalr.training.stacked.forms.convmixer import ConvMixerForm
from fedlalr.training.stacked.statistics import stacked_statistics


def relative(mine: Tensor, right: Tensor) -> float:
    """The distance of two tensors relative to the second."""
    mine, right = mine.detach().double().cpu(), right.detach().double().cpu()
    assert mine.shape == right.shape
    return float((mine - right).norm() / right.norm().clamp(min=1e-30))


def mask_of(clients: int, batch: int, device: str = "cpu") -> Tensor:
    """All samples of the first client are real, fewer of each further one."""
    return (
        torch.arange(batch, device=device)
        < (batch - torch.arange(clients, device=device).clamp(max=batch - 2))[:, None]
    )


def stacked_loss(logits: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
    """Every client's mean cross-entropy over its real samples."""
    keep = torch.ones_like(targets, dtype=logits.dtype) if mask is None else mask.to(logits.dtype)
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (each * keep).sum(1) / keep.sum(1)


def check_form(
    module: nn.Module,
    inputs: Tensor,
    classes: int,
    compute: torch.dtype | None,
    padded: bool,
    *,
    tolerance: float,
    gradient_tolerance: float | None = None,
) -> None:
    """Compare a stacked form with its module in float64, client by client: logits, gradient and buffers."""
    clients, batch = inputs.shape[:2]
    device = inputs.device
    layout = Layout.of(module)
    targets = torch.randint(classes, (clients, batch), device=device)
    mask = mask_of(clients, batch, str(device)) if padded else None
    start = layout.flatten(dict(module.named_parameters()))
    x = (start + 0.05 * torch.randn(clients, layout.size, device=device, dtype=start.dtype)).requires_grad_()
    buffers = {name: buffer.expand(clients, *buffer.shape).clone() for name, buffer in module.named_buffers()}

    form = stacked_form(module, compute, inputs.shape[2:])
    assert form is not None
    logits, after = form(layout.views(x), buffers, inputs, mask)
    (gradient,) = torch.autograd.grad(stacked_loss(logits, targets, mask).sum(), x)

    exact = module.double()
    wide = inputs.double() if inputs.is_floating_point() else inputs
    for client in range(clients):
        real = torch.ones(batch, dtype=torch.bool) if mask is None else mask[client]
        mine = x[client].detach().double().requires_grad_()
        named = {name: buffer.clone() for name, buffer in exact.named_buffers()}
        right = functional_call(exact, {**layout.views(mine), **named}, (wide[client][real],))
        (slope,) = torch.autograd.grad(F.cross_entropy(right, targets[client][real]), mine)
        assert relative(logits[client][real], right) < tolerance
        assert relative(gradient[client], slope) < (gradient_tolerance or tolerance)
        for name in named:
            assert relative(after[name][client], named[name]) < tolerance, name
    assert set(after) == set(buffers)


def check_statistics(
    module: nn.Module,
    size: int,
    compute: torch.dtype | None,
    *,
    tolerance: float,
    sizes: tuple[int, ...] = (7, 12, 4, 5, 2),
) -> None:
    """Compare the statistics that a stacked form takes of clients of several sizes with the module's own, by client."""
    batch_size = 4
    first = next(module.parameters())
    clients = [torch.randn(n, 3, size, size, dtype=first.dtype, device=first.device) for n in sizes]
    ends = np.cumsum([0, *sizes])
    pool = Population(
        torch.cat(clients), torch.zeros(ends[-1], dtype=torch.int64), Partition(np.arange(ends[-1]), ends)
    )
    form, layout = stacked_form(module, compute, clients[0].shape[1:]), Layout.of(module)
    assert isinstance(form, ConvMixerForm)
    x, buffers = layout.flatten(dict(module.named_parameters())), dict(module.named_buffers())
    training = cast(Training, SimpleNamespace(layout=layout, clients=pool, batch_size=batch_size))
    mine = stacked_statistics(form, training, x, buffers, torch.arange(len(sizes)))
    assert set(mine) == set(buffers)
    for client, own in enumerate(clients):
        exact = copy.deepcopy(module).double().train()
        for layer in exact.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = None
                layer.reset_running_stats()
        for batch in torch.split(own.double(), batch_size):
            if len(batch) > 1:
                exact(batch)
        for name, right in exact.named_buffers():
            assert relative(mine[name][client], right) < tolerance, (client, name)
