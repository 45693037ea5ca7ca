"""Checks that a network can be trained as a stack, by trying it before the run starts.

A few samples of one client go through the stack and through plain autograd. Losses, gradients and buffers must agree,
also for a padded batch if clients differ in size. So a module that vmap cannot batch, a loss that is not a mean over
samples, or a layer that mixes samples is rejected here, with the reason, before it can give wrong results.
"""

from __future__ import annotations

import linecache
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from fedlalr.hf import checkpointed_layers
from fedlalr.training.interfaces import Buffers, Training, real_numbers
from fedlalr.training.stacked.forms import stacked_form
from fedlalr.training.stacked.gradient import Batch, ForwardGradient, StackedGradient
from fedlalr.training.stacked.linear import LinearGradient, linear_chain
from fedlalr.training.stacked.masked_loss import mean_loss
from fedlalr.training.stacked.no_dropout import NoDropout
from fedlalr.training.stacked.vmap import VmapForward
from fedlalr.training.torch_internals import DropoutNd
from fedlalr.training.torch_state import copied, forked_generators, get_buffers, set_buffers

_LIBRARIES = (torch.__path__[0] + os.sep, str(Path(__file__).parents[2]) + os.sep)
_ADVICE = {
    "data-dependent control flow": "replace the choice by values in that line, for example by torch.where",
    "calling .item()": "keep the number in that line as a tensor",
    "must override the setup_context": "give the autograd.Function in that line setup_context and generate_vmap_rule",
    "may have escaped": "turn off torch.utils.checkpoint inside the model",
}
"""What vmap says → what the user can do about it."""
SAMPLES = 8
"""The number of samples to try."""

Result = tuple[Tensor, Tensor, Buffers]
"""Loss, gradient and buffers."""


class CannotStack(ValueError):
    """The stacked engine cannot train this network, loss or data."""


def choose_gradient(training: Training) -> StackedGradient:
    """The fastest stacked gradient that agrees with plain autograd."""
    trial = StackingTrial(training)
    errors = []
    for gradient in _candidates(training, trial.inputs.shape[1:]):
        try:
            trial.check(gradient)
        except CannotStack as error:
            errors.append(error)
        else:
            return gradient
    raise errors[-1]


def _candidates(training: Training, sample: torch.Size) -> Iterator[StackedGradient]:
    """The ways to compute the gradient, fastest first.

    In full precision on a CPU, grouped layers under vmap come before a form. A step of five ConvMixers of 64 channels
    and four blocks on 20 images each takes 0.32 s with them and 0.66 s with the form, with GroupNorm 0.31 and 0.42 s
    (one thread). vmap cannot batch CharLSTM's recurrence, so its form is used there too.
    """
    layers = linear_chain(training, sample)
    if layers is not None:
        yield LinearGradient(training, layers)
    form = stacked_form(training.model, training.compute, sample)
    form_first = training.device.type != "cpu" or training.compute is not None
    if form is not None and form_first:
        yield ForwardGradient(training, form)
    yield ForwardGradient(training, VmapForward(training.model))
    if form is not None and not form_first:
        yield ForwardGradient(training, form)
    yield ForwardGradient(training, VmapForward(training.model, grouped=False))


@contextmanager
def without_tf32() -> Iterator[None]:
    """Use full float32 products: if pooling picks another pixel, two correct gradients differ."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = False
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


class StackingTrial:
    """A few samples of a client, to compare a stacked gradient with plain autograd."""

    def __init__(self, training: Training) -> None:
        self.training = training
        sizes = training.clients.sizes
        self.padded = bool(sizes.min() < sizes.max())
        largest = int(sizes.argmax())
        count = min(SAMPLES, int(sizes[largest]))
        self.inputs, self.targets = training.clients.training_batch(
            largest, torch.arange(count, device="cpu"), training.seed, 1, 1
        )
        x = training.layout.flatten(dict(training.model.named_parameters()))
        self.x = torch.stack([x, 1.01 * x])  # two clients that differ
        self._model = copied(training.model)
        if not self._model.training:
            self._model.train()
        for layer in checkpointed_layers(self._model):
            layer.gradient_checkpointing = False  # the second run would draw dropout, which is turned off in the first
        self._buffers = get_buffers(self._model)

    def check(self, gradient: StackedGradient) -> None:
        """Reject a stacked gradient that raises or differs from plain autograd."""
        count = len(self.targets)
        modules = [*_modules(gradient), self._model]
        with forked_generators(self.training.device), without_dropout(modules), without_tf32():
            if not self._agrees(gradient, count):
                raise CannotStack("batched over clients, the model's gradient differs from plain autograd's")
            if self.padded and not self._agrees(gradient, max(count - 3, 2)):
                raise CannotStack(
                    "clients differ in size, and padding their batches changes the result: the loss must be a mean "
                    "over samples, and no layer but torch's BatchNorm may mix samples"
                )

    def _agrees(self, gradient: StackedGradient, short: int) -> bool:
        """Whether a client with all samples and one with the first few, padded, both agree with plain autograd."""
        losses, gradients, buffers = self._stacked(gradient, short)
        for row, count in enumerate((len(self.targets), short)):
            right = self._plain(row, count)
            mine = losses[row], gradients[row], {name: buffer[row] for name, buffer in buffers.items()}
            repeatable = self._close(self._plain(row, count), right)  # a module may draw random numbers
            if repeatable and not self._close(mine, right):
                return False
        return True

    def _stacked(self, gradient: StackedGradient, short: int) -> Result:
        inputs, targets = (part.expand(2, *part.shape).clone() for part in (self.inputs, self.targets))
        mask = None
        if short < len(self.targets):
            mask = torch.ones(2, len(self.targets), dtype=torch.bool, device=targets.device)
            mask[1, short:] = False
            inputs[1, short:], targets[1, short:] = inputs[1, 0], targets[1, 0]
        buffers = {name: buffer.expand(2, *buffer.shape).clone() for name, buffer in self._buffers.items()}
        try:
            return gradient(self.x, buffers, Batch(inputs, targets, mask))
        except Exception as error:
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CannotStack(
                f"the model cannot be batched over clients by torch.func.vmap ({message}{_place(error, gradient)})"
                + next((f". To stack it, {advice}" for words, advice in _ADVICE.items() if words in message), "")
            ) from error

    def _plain(self, row: int, count: int) -> Result:
        """Loss, gradient and buffers of one client by plain autograd."""
        training, model = self.training, self._model
        set_buffers(model, self._buffers)
        training.layout.load(model, self.x[row])
        parameters = [p for p in model.parameters() if p.requires_grad]
        try:
            with torch.autocast(training.device.type, training.compute, enabled=training.compute is not None):
                loss = mean_loss(training.loss, model(self.inputs[:count]), self.targets[:count], mask=None)
            slopes = torch.autograd.grad(loss, parameters, allow_unused=True)
        except Exception as error:
            raise CannotStack(
                f"the model raises on {count} samples of the largest client ({type(error).__name__}: {error})"
            ) from error
        named = {
            name: torch.zeros_like(p) if slope is None else slope.to_dense()
            for name, p, slope in zip(training.layout.names, parameters, slopes, strict=True)
        }
        return loss.detach(), training.layout.flatten(named), get_buffers(model)

    def _close(self, mine: Result, right: Result) -> bool:
        tolerance = 1e-6 if self.training.layout.dtype == torch.float64 else 1e-2
        if self.training.compute is not None:
            tolerance = 0.25  # half precision rounds differently in another order of operations
        pairs = [(mine[0], right[0]), (mine[1], right[1]), *((mine[2][name], right[2][name]) for name in right[2])]
        return all(_close(real_numbers(a).double(), real_numbers(b).double(), tolerance) for a, b in pairs)


def _close(mine: Tensor, right: Tensor, tolerance: float) -> bool:
    """Whether two tensors agree relative to their norm, or both vanish."""
    if not torch.equal(mine.isfinite(), right.isfinite()):
        return False
    mine, right = (torch.nan_to_num(tensor, posinf=0.0, neginf=0.0) for tensor in (mine, right))
    return float((mine - right).norm()) <= tolerance * float(right.norm()) + 1e-12


def _place(error: Exception, gradient: StackedGradient) -> str:
    """Where an error arose: the layer, and the last line of code that is neither torch's nor ours."""
    names = {layer: name for module in _modules(gradient) for name, layer in module.named_modules()}
    layer = line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner, file = frame.f_locals.get("self"), frame.f_code.co_filename
        if isinstance(owner, nn.Module) and owner in names:
            layer = f"; in {f'layer {names[owner]!r}' if names[owner] else 'the model'}, {type(owner).__name__}"
        if not file.startswith(_LIBRARIES) and frame.f_globals.get("__name__") != "contextlib":
            line = f"; {file}, line {number}: {linecache.getline(file, number).strip()}"
    return layer + line


def _modules(gradient: StackedGradient) -> list[nn.Module]:
    """The modules that a stacked gradient runs."""
    forward = gradient.forward if isinstance(gradient, ForwardGradient) else None
    return [forward.model] if isinstance(forward, VmapForward) else []


@contextmanager
def without_dropout(modules: list[nn.Module]) -> Iterator[None]:
    """Turn off dropout, so that two computations can be compared."""
    dropouts = [layer for module in modules for layer in module.modules() if isinstance(layer, DropoutNd)]
    training = [layer.training for layer in dropouts]
    for layer in dropouts:
        layer.training = False
    try:
        with NoDropout():
            yield
    finally:
        for layer, mode in zip(dropouts, training, strict=True):
            layer.training = mode
