"""An ordinary module over a stack of clients, by `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedlalr.data.trees import Tree
from fedlalr.hf import full_masks
from fedlalr.training.calling import arguments, for_loss, own_loss
from fedlalr.training.interfaces import Buffers, Tensors
from fedlalr.training.stacked.checked_embedding import checked_embedding
from fedlalr.training.stacked.checkpointing import stack_checkpoints
from fedlalr.training.stacked.functions import batched_functions, fused_layer
from fedlalr.training.stacked.grouped_layers import grouped_layer
from fedlalr.training.stacked.masked_norm import STARTS, MaskedBatchNorm, masked, masked_norm
from fedlalr.training.torch_internals import BatchNorm, without_fallback_warnings
from fedlalr.training.torch_state import copied


class VmapForward:
    """A `StackedForward` for any module that vmap can batch. Runs a copy; parameters and buffers are passed stacked."""

    def __init__(self, module: nn.Module, loss: Any = None, *, grouped: bool = True) -> None:
        """Outputs are in the form that `loss` takes. `grouped` uses layers and functions that are faster for many
        clients than torch's; not every module works with them."""
        self.model, self._loss, self.grouped = copied(module), loss, grouped
        if not self.model.training:
            self.model.train()
        for layer in self.model.modules():
            for stand_in in (masked_norm, checked_embedding, *(grouped_layer, fused_layer) * grouped):
                layer.__class__ = stand_in(layer) or layer.__class__  # it keeps everything but its functions
        stack_checkpoints(self.model, grouped)
        self._norms = [layer for layer in self.model.modules() if isinstance(layer, MaskedBatchNorm)]
        self._dtypes = {name: parameter.dtype for name, parameter in self.model.named_parameters()}

    def __call__(
        self, parameters: Tensors, buffers: Tensors, inputs: Tree, mask: Tensor | None = None, targets: Any = None
    ) -> tuple[Any, Buffers]:
        """As in `StackedForward`; with targets, they are passed to the model, and its own losses are returned."""
        where = (0, 0, 0, None if mask is None else 0, None if targets is None else 0)
        return vmap(self._run, where, randomness="different")(parameters, buffers, inputs, mask, targets)

    @torch.no_grad()
    @without_fallback_warnings()
    def statistics(
        self, parameters: Tensors, buffers: Buffers, inputs: Tree, mask: Tensor | None, seen: int
    ) -> Buffers:
        """The buffers `[C, …]` of one network after a batch of each client: means over it and `seen` earlier ones."""
        where = (None, 0, 0, None if mask is None else 0)
        with self._averaging(restart=not seen):
            return vmap(self._run, where, randomness="different")(parameters, buffers, inputs, mask)[1]

    @property
    def needs_two_samples(self) -> bool:
        """Whether some BatchNorm averages over the samples alone and so needs at least two of them."""
        return any(layer.over_samples_alone for layer in self._norms)

    @property
    def knows_every_norm(self) -> bool:
        """Whether each BatchNorm of the module could be replaced."""
        return all(layer in self._norms for layer in self.model.modules() if isinstance(layer, BatchNorm))

    def fresh_statistics(self) -> dict[str, float]:
        """The buffers that hold running statistics, by name, with their initial values."""
        return {
            f"{path}.{name}" if path else name: STARTS[name]
            for path, layer in self.model.named_modules()
            if layer in self._norms and layer.training
            for name, _ in layer.named_buffers(recurse=False)
            if name in STARTS
        }

    def _run(
        self, parameters: Tensors, buffers: Tensors, inputs: Tree, mask: Tensor | None, targets: Tree | None = None
    ) -> tuple[Any, Buffers]:
        """One client's outputs, or the model's own loss, and buffers."""
        named = {name: value.to(self._dtypes[name]) for name, value in parameters.items()} | dict(buffers)
        with masked(self._norms, mask), batched_functions(self.grouped), full_masks():
            outputs = functional_call(self.model, named, *arguments(inputs, targets))
        read = for_loss(outputs, self._loss) if targets is None else own_loss(outputs)
        return read, {name: named[name].detach() for name in buffers}  # updated in place, or replaced in the dict

    @contextmanager
    def _averaging(self, *, restart: bool) -> Iterator[None]:
        """Make running statistics means over all inputs of a layer, continuing the previous ones unless `restart`."""
        momenta = [layer.momentum for layer in self._norms]
        try:
            for layer in self._norms:
                layer.averaging, layer.averaged = True, 0 if restart else layer.averaged
            yield
        finally:
            for layer, momentum in zip(self._norms, momenta, strict=True):
                layer.averaging, layer.momentum = False, momentum
