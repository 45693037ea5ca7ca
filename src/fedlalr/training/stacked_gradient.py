"""The gradients of many clients at once.

A *gradient form* takes the parameters of a stack of clients as one tensor `[C, P]`, a batch of each, and gives every
client's loss and gradient. `VmapGradient` is the general one: it runs an ordinary module over the stack with
`torch.func.vmap`. A form written for one network can stand in its place.
"""

from __future__ import annotations

import copy
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fedlalr.training.masked_loss import masked_loss
from fedlalr.training.masked_norm import masked, replace_norms
from fedlalr.training.work import Buffers, Training


class Batch(NamedTuple):
    """One local batch of every client of a stack."""

    inputs: Tensor
    """`[C, B, …]`"""
    targets: Tensor
    """`[C, B, …]`"""
    mask: Tensor | None = None
    """Which samples are real, bool `[C, B]`; None where all are. The rest are copies of the client's own samples."""
    lone: bool = False
    """Whether some client has only one real sample in a padded batch."""


class StackedGradient(Protocol):
    """What the stacked engine needs of a network."""

    def __call__(self, x: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Tensor, Buffers]:
        """Losses `[C]`, gradients `[C, P]` of the mean loss over each client's real samples, and the buffers
        afterwards.

        `x` is `[C, P]` in the layout's order and dtype, `buffers` are `[C, …]` and may be written into. No client's
        numbers may depend on another's.
        """
        ...


class VmapGradient:
    """An ordinary module, batched over clients by vmap; the backward pass is plain autograd on the stack."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.model = copy.deepcopy(training.model)
        if not self.model.training:
            self.model.train()
        self.norms = replace_norms(self.model)
        parameters = dict(self.model.named_parameters())
        self._dtypes = {name: parameters[name].dtype for name in training.layout.names}
        self._losses = vmap(self._loss, in_dims=(0, 0, 0, 0, None, None), randomness="different")
        self._masked_losses = vmap(self._loss, in_dims=(0, 0, 0, 0, 0, None), randomness="different")
        self._forwards = vmap(self._forward, in_dims=(None, 0, 0, 0, None), randomness="different")

    def __call__(self, x: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Tensor, Buffers]:
        training = self.training
        leaf = x.detach().requires_grad_()
        losses_of = self._losses if batch.mask is None else self._masked_losses
        with torch.enable_grad():
            with torch.autocast(
                training.device.type, training.compute, enabled=training.compute is not None, cache_enabled=False
            ):
                parameters = training.layout.views(leaf)
                losses, after = losses_of(parameters, buffers, batch.inputs, batch.targets, batch.mask, batch.lone)
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), gradient, after

    @torch.no_grad()
    def statistics(self, x: Tensor, buffers: Buffers, inputs: Tensor, mask: Tensor, lone: bool) -> Buffers:
        """The buffers after one model `[P]` has seen a batch of each client, with cumulative running statistics."""
        modes = {module: module.training for module in self.model.modules()}
        momenta = [layer.momentum for layer in self.norms]
        self.model.train()
        try:
            for layer in self.norms:
                layer.momentum = None
            after: Buffers = self._forwards(self.training.layout.views(x), buffers, inputs, mask, lone)
        finally:
            for layer, momentum in zip(self.norms, momenta, strict=True):
                layer.momentum = momentum
            for module, mode in modes.items():
                module.training = mode
        return after

    def fresh_statistics(self) -> dict[str, float]:
        """The buffers that hold running statistics, by name, and the value each starts at."""
        start = {"running_mean": 0.0, "running_var": 1.0, "num_batches_tracked": 0.0}
        return {
            f"{path}.{name}" if path else name: start[name]
            for path, layer in self.model.named_modules()
            if layer in self.norms
            for name, buffer in layer.named_buffers(recurse=False)
            if name in start
        }

    def _loss(
        self,
        parameters: dict[str, Tensor],
        buffers: Buffers,
        inputs: Tensor,
        targets: Tensor,
        mask: Tensor | None,
        lone: bool,
    ) -> tuple[Tensor, Buffers]:
        """One client's loss and buffers."""
        outputs, after = self._run(parameters, buffers, inputs, mask, lone)
        loss = self.training.loss
        value = loss(outputs, targets) if mask is None else masked_loss(loss, outputs, targets, mask)
        return value, after

    def _forward(
        self, parameters: dict[str, Tensor], buffers: Buffers, inputs: Tensor, mask: Tensor, lone: bool
    ) -> Buffers:
        return self._run(parameters, buffers, inputs, mask, lone)[1]

    def _run(
        self, parameters: dict[str, Tensor], buffers: Buffers, inputs: Tensor, mask: Tensor | None, lone: bool
    ) -> tuple[object, Buffers]:
        named = {name: value.to(self._dtypes[name]) for name, value in parameters.items()} | buffers
        with masked(self.norms, mask, lone):
            outputs = functional_call(self.model, named, (inputs,))
        return outputs, {name: named[name].detach() for name in buffers}  # written in place, or put in the dict's place
