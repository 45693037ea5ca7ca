"""Checks that a network can be trained as a stack, by trying it before the run starts.

A few samples of one client go through the stack and through plain autograd. Losses, gradients and buffers must agree,
also for a padded batch if clients differ in size. So a module that vmap cannot batch, a loss that is not a mean over
samples, or a layer that mixes samples is rejected here, with the reason, before it can give wrong results.
"""

from __future__ import annotations

import linecache
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fedlalr.data.population import DatasetClients, Population
from fedlalr.data.trees import Tree, device_of, leaves, map_tree, rows
from fedlalr.training.calling import MODEL_LOSS, call, prediction
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.interfaces import Buffers, Training, real_numbers
from fedlalr.training.stacked.checkpointing import checkpointed_layers
from fedlalr.training.stacked.forms import stacked_form
from fedlalr.training.stacked.gradient import Batch, ForwardGradient, StackedGradient
from fedlalr.training.stacked.linear import LinearGradient, linear_chain
from fedlalr.training.stacked.masked_loss import IGNORED_LABEL, has_tokens, ignored_label, padding_label
from fedlalr.training.stacked.no_dropout import NoDropout
from fedlalr.training.stacked.vmap import VmapForward
from fedlalr.training.torch_state import copied, get_buffers, set_buffers

_LIBRARIES = (torch.__path__[0] + os.sep, str(Path(__file__).parents[2]) + os.sep)
_ADVICE = {
    "data-dependent control flow": "replace the choice by values in that line, for example by torch.where",
    "calling .item()": "keep the number in that line as a tensor",
    "must override the setup_context": "give the autograd.Function in that line setup_context and generate_vmap_rule",
    "may have escaped": "turn off torch.utils.checkpoint inside the model",
    "_NoopSaveInputs": "turn off torch.utils.checkpoint inside the model",  # the same in torch up to 2.11
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
    for gradient in _candidates(training, trial.sample_shape(), trial.ignored_label()):
        try:
            trial.check(gradient)
        except CannotStack as error:
            errors.append(error)
        else:
            return gradient
    raise errors[-1]


def _candidates(training: Training, sample: torch.Size | None, ignored: int | None) -> Iterator[StackedGradient]:
    """The ways to compute the gradient, fastest first. `sample` is the shape of an input; None if it is no tensor, or
    the model computes the loss: then only vmap is general enough.

    In full precision on a CPU, grouped layers under vmap come before a form. A step of five ConvMixers of 64 channels
    and four blocks on 20 images each takes 0.32 s with them and 0.66 s with the form, with GroupNorm 0.31 and 0.42 s
    (one thread). vmap cannot batch CharLSTM's recurrence, so its form is used there too.
    """
    layers = None if sample is None else linear_chain(training, sample)
    if layers is not None:
        yield LinearGradient(training, layers, ignored=ignored)
    form = None if sample is None else stacked_form(training.model, training.compute, sample)
    form_first = training.device.type != "cpu" or training.compute is not None
    if form is not None and form_first:
        yield ForwardGradient(training, form, ignored=ignored)
    yield ForwardGradient(training, VmapForward(training.model, training.loss), ignored=ignored)
    if form is not None and not form_first:
        yield ForwardGradient(training, form, ignored=ignored)
    yield ForwardGradient(training, VmapForward(training.model, training.loss, grouped=False), ignored=ignored)


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
        self.collated = isinstance(training.clients, DatasetClients) and training.clients.collate_fn is not None
        self.padded = bool(sizes.min() < sizes.max()) or self.collated
        self.count = min(SAMPLES, int(sizes.max()))
        self._first = _first_samples(training, self.count)
        self.inputs, self.targets = self._first(self.count)
        x = training.layout.flatten(dict(training.model.named_parameters()))
        self.x = torch.stack([x, 1.01 * x])  # two clients that differ
        self._model = copied(training.model)
        if not self._model.training:
            self._model.train()
        for layer in checkpointed_layers(self._model):
            layer.gradient_checkpointing = False  # the second run would draw dropout, which is turned off in the first
        self._buffers = get_buffers(self._model)
        self._reference = ReferenceEngine(replace(training, model=self._model))

    def sample_shape(self) -> torch.Size | None:
        """The shape of one input, if inputs and targets are single tensors and the loss is the caller's."""
        if isinstance(self.inputs, Tensor) and isinstance(self.targets, Tensor) and self.training.loss != MODEL_LOSS:
            return self.inputs.shape[1:]
        return None

    def ignored_label(self) -> int | None:
        """The label that the caller's own loss leaves out, or None. Only needed if its mean may weigh samples
        differently: over tokens, or over labels of which some are ignored."""
        training = self.training
        if training.loss == MODEL_LOSS or not self.padded or ignored_label(training.loss) is not None:
            return None
        targets = training.clients.targets if isinstance(training.clients, Population) else self.targets
        if not has_tokens(targets) and not any(bool((leaf == IGNORED_LABEL).any()) for leaf in leaves(targets)):
            return None
        with torch.no_grad():
            outputs = prediction(call(copied(self._model).eval(), self.inputs))
        return padding_label(training.loss, outputs, self.targets)

    def check(self, gradient: StackedGradient) -> None:
        """Reject a stacked gradient that raises or differs from plain autograd."""
        with NoDropout(), without_tf32():
            if not self._agrees(gradient, self.count):
                raise CannotStack("batched over clients, the model's gradient differs from plain autograd's")
            if self.padded and not self._agrees(gradient, max(self.count - 3, 2)):
                raise CannotStack(
                    f"{'collate_fn pads batches' if self.collated else 'clients differ in size'}, and padding "
                    f"changes the result: the loss must be a mean over samples, or over targets other than "
                    f"{IGNORED_LABEL}, and no layer but torch's BatchNorm may mix samples"
                    + (" or see what attention_mask hides" if self.collated else "")
                )

    def _agrees(self, gradient: StackedGradient, short: int) -> bool:
        """Whether a client with all samples and one with the first few, padded, both agree with plain autograd."""
        losses, gradients, buffers = self._stacked(gradient, short)
        for row, count in enumerate((self.count, short)):
            right = self._plain(row, count)
            mine = losses[row], gradients[row], {name: buffer[row] for name, buffer in buffers.items()}
            repeatable = self._close(self._plain(row, count), right)  # a module may draw random numbers
            if repeatable and not self._close(mine, right):
                return False
        return True

    def _stacked(self, gradient: StackedGradient, short: int) -> Result:
        both = self.inputs, self.targets
        inputs, targets = map_tree(lambda leaf: leaf.expand(2, *leaf.shape).clone(), both)
        mask = None
        if short < self.count:
            mask = torch.ones(2, self.count, dtype=torch.bool, device=device_of(targets))
            mask[1, short:] = False
            for leaf in leaves((inputs, targets)):
                leaf[1, short:] = leaf[1, 0].clone()
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
        set_buffers(self._model, self._buffers)
        self.training.layout.load(self._model, self.x[row])
        try:
            loss, gradient = self._reference.gradient_at_once(*self._first(count))
        except Exception as error:
            raise CannotStack(
                f"the model raises on {count} samples of the largest client ({type(error).__name__}: {error})"
            ) from error
        return loss, gradient, get_buffers(self._model)

    def _close(self, mine: Result, right: Result) -> bool:
        tolerance = 1e-6 if self.training.layout.dtype == torch.float64 else 1e-2
        if self.training.compute is not None:
            tolerance = 0.25  # half precision rounds differently in another order of operations
        pairs = [(mine[0], right[0]), (mine[1], right[1]), *((mine[2][name], right[2][name]) for name in right[2])]
        return all(_close(real_numbers(a).double(), real_numbers(b).double(), tolerance) for a, b in pairs)


def _first_samples(training: Training, count: int) -> Callable[[int], tuple[Tree, Tree]]:
    """A function that gives the batch of the first of some samples of the largest client, which are read once, from its
    first to its last. If collate_fn pads them, the longest come last: the first ones are padded less on their own than
    together with the others."""
    clients, largest = training.clients, int(training.clients.sizes.argmax())
    last = int(clients.sizes[largest]) - 1
    places = torch.arange(count, device="cpu") * last // max(count - 1, 1)
    if isinstance(clients, DatasetClients) and clients.collate_fn is not None:
        collate = partial(clients.collate, whose=f"client {largest}'s")
        alone = [(collate([one]), one) for one in clients.read(largest, places)]
        alone.sort(key=lambda each: sum(leaf.numel() for leaf in leaves(each[0])))
        return lambda first: collate([one for _, one in alone[:first]])
    whole = clients.training_batch(largest, places, training.seed, 1, 1)
    return lambda first: rows(whole, slice(first))


def _close(mine: Tensor, right: Tensor, tolerance: float) -> bool:
    """Whether two tensors agree relative to their norm, or both vanish."""
    if not torch.equal(mine.isfinite(), right.isfinite()):
        return False
    mine, right = (torch.nan_to_num(tensor, posinf=0.0, neginf=0.0) for tensor in (mine, right))
    return float((mine - right).norm()) <= tolerance * float(right.norm()) + 1e-12


def _place(error: Exception, gradient: StackedGradient) -> str:
    """Where an error arose: the layer, and the last line of code that is neither torch's nor ours."""
    forward = gradient.forward if isinstance(gradient, ForwardGradient) else None
    names = {layer: name for name, layer in forward.model.named_modules()} if isinstance(forward, VmapForward) else {}
    layer = line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner, file = frame.f_locals.get("self"), frame.f_code.co_filename
        if isinstance(owner, nn.Module) and owner in names:
            layer = f"; in {f'layer {names[owner]!r}' if names[owner] else 'the model'}, {type(owner).__name__}"
        if not file.startswith(_LIBRARIES) and frame.f_globals.get("__name__") != "contextlib":
            line = f"; {file}, line {number}: {linecache.getline(file, number).strip()}"
    return layer + line
