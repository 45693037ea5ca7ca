"""The gradients of many clients for a chain of linear layers: logistic regression and perceptrons.

Such networks are so small that calling operators costs more than computing. Here a stack of them takes one matrix
product per layer forward and two backward, written out by hand, and each layer's gradient is written directly to its
place in the flat vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.func import grad_and_value, vmap

from fedlalr.training.interfaces import Buffers, Training
from fedlalr.training.stacked.feed import Shape
from fedlalr.training.stacked.gradient import Batch
from fedlalr.training.stacked.masked_loss import IGNORED_LABEL, mean_loss
from fedlalr.training.torch_internals import has_hooks, sigmoid_backward, tanh_backward, threshold_backward


class Activation(NamedTuple):
    """A function between two layers, and its backward pass: from the gradient of its result, and that result, to the
    gradient of its input."""

    apply: Callable[[Tensor], Tensor]
    back: Callable[[Tensor, Tensor], Tensor]


RELU = Activation(torch.relu, lambda slope, result: threshold_backward(slope, result, 0))
TANH = Activation(torch.tanh, tanh_backward)
SIGMOID = Activation(torch.sigmoid, sigmoid_backward)

MODULES: dict[type[nn.Module], Activation] = {nn.ReLU: RELU, nn.Tanh: TANH, nn.Sigmoid: SIGMOID}
FUNCTIONS = {"relu": RELU, "tanh": TANH, "sigmoid": SIGMOID}
"""By the names of functions in torch and of a tensor's methods."""

LossSlope = Callable[[Tensor], Tensor]
"""From the last layer's result `[C, features, B]` to the gradient of every client's loss. Also records the losses."""


class Layer(NamedTuple):
    """One linear layer: the names of its parameters, and the activation that follows it."""

    weight: str
    bias: str | None
    activation: Activation | None = None


class LinearGradient:
    """`StackedGradient` for a chain of linear layers on flattened samples."""

    def __init__(self, training: Training, layers: list[Layer], *, ignored: int | None = None) -> None:
        """`ignored`: as in `ForwardGradient`."""
        self.training, self.layers, self._ignored = training, layers, ignored
        self._plain_loss = is_plain_cross_entropy(training.loss)
        self._shapes = dict(zip(training.layout.names, training.layout.shapes, strict=True))

    def __call__(self, x: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Tensor, Buffers]:
        gradient, views = torch.empty(x.shape, dtype=x.dtype, device=x.device), self.training.layout.views
        losses = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        self.write(views(x), batch.inputs, partial(self.loss_slope, batch, losses), views(gradient))
        return losses, gradient, buffers

    def write(
        self, parameters: dict[str, Tensor], inputs: Tensor, loss_slope: LossSlope, gradient: dict[str, Tensor]
    ) -> None:
        """Write every layer's gradient `[C, …]` to its place."""
        for layer, slope, input in self._slopes(parameters, inputs, loss_slope):
            torch.bmm(slope, input, out=gradient[layer.weight])
            if layer.bias is not None:
                torch.sum(slope, 2, out=gradient[layer.bias])

    def descend(self, parameters: dict[str, Tensor], inputs: Tensor, loss_slope: LossSlope, lr: float) -> None:
        """A plain gradient step x ← x − α g in place, without materialising the gradient."""
        for layer, slope, input in self._slopes(parameters, inputs, loss_slope):
            parameters[layer.weight].baddbmm_(slope, input, alpha=-lr)
            if layer.bias is not None:
                parameters[layer.bias].sub_(slope.sum(2), alpha=lr)

    def labels(self, targets: Tensor, real: Tensor) -> Labels | None:
        """A whole round's targets `[K, C, B]` prepared for the loss; None if it is not plain cross-entropy."""
        if not self._plain_loss or targets.dtype != torch.int64 or targets.dim() != 3:
            return None
        classes = self._shapes[self.layers[-1].weight][0]
        return Labels.of(targets, real, classes, self.training.layout.dtype)

    def _slopes(
        self, parameters: dict[str, Tensor], inputs: Tensor, loss_slope: LossSlope
    ) -> Iterator[tuple[Layer, Tensor, Tensor]]:
        """From the last layer to the first: the layer, the gradient of its result `[C, features, B]`, and its input
        `[C, B, features]`.

        What a layer passes down is computed before it is yielded, so the caller may change its parameters.
        """
        results = [inputs.flatten(2)]
        for layer in self.layers[:-1]:
            result = torch.bmm(results[-1], parameters[layer.weight].mT)
            if layer.bias is not None:
                result += parameters[layer.bias].unsqueeze(1)
            results.append(result if layer.activation is None else layer.activation.apply(result))
        layer = self.layers[-1]
        if layer.bias is None:
            last = torch.bmm(parameters[layer.weight], results[-1].mT)  # softmax is faster along short columns
        else:
            last = torch.baddbmm(parameters[layer.bias].unsqueeze(2), parameters[layer.weight], results[-1].mT)
        if layer.activation is not None:
            last = layer.activation.apply(last)
        slope = loss_slope(last)
        if layer.activation is not None:
            slope = layer.activation.back(slope, last)
        for depth in range(len(self.layers) - 1, -1, -1):
            layer, mine = self.layers[depth], slope
            if depth:
                before = self.layers[depth - 1].activation
                slope = torch.bmm(mine.mT, parameters[layer.weight])
                if before is not None:
                    slope = before.back(slope, results[depth])
                slope = slope.mT
            yield layer, mine, results[depth]

    def bytes_each(self) -> int:
        """The memory that one client takes: its slots before and after a step, its gradient, and its activations."""
        layout, sizes, table = self.training.layout, self.training.clients.sizes, self.training.algorithm.slots
        slots = len(table.down) + len(table.up) + 2
        samples = int(sizes.max()) if self.training.batch_size is None else self.training.batch_size
        flow = self._shapes[self.layers[0].weight][1] + 4 * sum(self._shapes[layer.weight][0] for layer in self.layers)
        return layout.dtype.itemsize * (layout.size * (2 * slots + 4) + 2 * samples * flow)

    def loss_slope(self, batch: Batch, total: Tensor, outputs: Tensor) -> Tensor:
        """The gradient of every client's loss in the outputs `[C, features, B]`; adds the losses to a total `[C]`."""
        if self._plain_loss and batch.targets.dtype == torch.int64 and batch.targets.dim() == 2:
            labels = Labels.of(batch.targets, batch.mask, outputs.shape[1], outputs.dtype)
            noted = torch.zeros_like(outputs)
            slope = labels.loss_slope(noted, outputs)
            total += noted.sum((1, 2)) + labels.missing
            return slope
        where = (0, 0, None if batch.mask is None else 0)
        each = vmap(grad_and_value(self._loss), where, randomness="different")
        by_sample, losses = each(outputs.mT, batch.targets, batch.mask)
        total += losses.detach()
        return by_sample.mT

    def _loss(self, logits: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        return mean_loss(self.training.loss, logits, targets, mask, self._ignored)


def is_plain_cross_entropy(loss: object) -> bool:
    """Whether a loss is torch's cross-entropy with nothing but defaults."""
    if type(loss) is nn.CrossEntropyLoss:
        plain = loss.weight is None and not loss.label_smoothing and loss.ignore_index == IGNORED_LABEL
        return plain and loss.reduction == "mean"
    return loss is nn.functional.cross_entropy


class Labels(NamedTuple):
    """The targets of cross-entropy in a form that leaves little to do in a local step.

    As in torch, the loss skips the ignored label; a batch with no other label has a zero gradient, and NaN for a loss.
    """

    share: Tensor
    """The weight of each sample in its client's mean, `[…, C, 1, B]`."""
    taken: Tensor
    """Minus that weight at each sample's class, and zero at the others, `[…, C, classes, B]`."""
    missing: Tensor
    """What to add to the loss: zero, or NaN if a whole batch is ignored, `[…, C]`."""

    @classmethod
    def of(cls, targets: Tensor, real: Tensor | None, classes: int, dtype: torch.dtype) -> Labels:
        """Prepare targets `[…, C, B]`, of which some may be padding."""
        counts = targets != IGNORED_LABEL if real is None else (targets != IGNORED_LABEL) & real
        share = counts.to(dtype)
        number = share.sum(-1)
        ignored = (number == 0) if real is None else (number == 0) & real.any(-1)
        share = (share / number.clamp(min=1).unsqueeze(-1)).unsqueeze(-2)
        taken = share.new_zeros(*targets.shape[:-1], classes, targets.shape[-1])
        taken.scatter_(-2, targets.where(counts, 0).unsqueeze(-2), -share)
        return cls(share, taken, torch.zeros_like(number).masked_fill_(ignored, torch.nan))

    def steps(self, first: int, last: int) -> list[Labels]:
        """The labels of some rows, step by step."""
        return [Labels(*one) for one in zip(*(part[:, first:last].unbind(0) for part in self), strict=True)]

    def first(self, shape: Shape) -> Labels:
        """The labels of the clients that are still training."""
        share, taken = (part[: shape.active, :, : shape.width] for part in self[:2])
        return Labels(share, taken, self.missing[: shape.active])

    def loss_slope(self, noted: Tensor, logits: Tensor) -> Tensor:
        """The gradient of every client's mean cross-entropy in the logits `[C, classes, B]`.

        Each sample's part of the loss is added to `noted`, in the same shape, to be summed later.
        """
        logs = torch.log_softmax(logits, 1)
        noted.addcmul_(logs, self.taken)
        return torch.addcmul(self.taken, logs.exp_(), self.share)


def linear_chain(training: Training, sample: torch.Size) -> list[Layer] | None:
    """The layers of a module that is just a chain of linear layers on flat samples, or None."""
    model = training.model
    if training.compute is not None or list(model.buffers()) or any(not p.requires_grad for p in model.parameters()):
        return None
    if has_hooks(model):
        return None
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception:  # the module's code cannot be traced, so it is not a plain chain
        return None
    layers = _read_chain(list(graph.nodes), dict(model.named_modules()), flat=len(sample) == 1)
    if not layers:
        return None
    names = [name for layer in layers for name in (layer.weight, layer.bias) if name is not None]
    dtypes = {p.dtype for p in model.parameters()}
    return layers if sorted(names) == sorted(training.layout.names) and len(dtypes) == 1 else None


def _read_chain(nodes: list[fx.Node], modules: dict[str, nn.Module], flat: bool) -> list[Layer] | None:
    if len(nodes) < 3 or nodes[0].op != "placeholder" or nodes[-1].op != "output" or nodes[-1].args != (nodes[-2],):
        return None
    layers: list[Layer] = []
    for before, node in pairwise(nodes[:-1]):
        if not node.args or node.args[0] is not before or len(before.users) != 1:
            return None
        module = modules[str(node.target)] if node.op == "call_module" else None
        activation = MODULES.get(type(module)) if module is not None else _activation(node)
        if _flattens(node, module) and not layers:
            flat = True
        elif type(module) is nn.Linear and flat:
            name = str(node.target)
            layers.append(Layer(f"{name}.weight", None if module.bias is None else f"{name}.bias"))
        elif activation is not None and layers and layers[-1].activation is None:
            layers[-1] = Layer(layers[-1].weight, layers[-1].bias, activation)
        elif type(module) is not nn.Identity:
            return None
    return layers


def _activation(node: fx.Node) -> Activation | None:
    only_input = len(node.args) == 1 and not any(node.kwargs.values())
    name = getattr(node.target, "__name__", node.target)
    return FUNCTIONS.get(str(name)) if only_input and node.op in ("call_function", "call_method") else None


def _flattens(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a node flattens everything but the batch dimension."""
    if module is not None:
        return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    arguments: tuple[Any, ...] = (*node.args[1:], *node.kwargs.values())
    return node.target in (torch.flatten, "flatten") and arguments in ((1,), (1, -1))
