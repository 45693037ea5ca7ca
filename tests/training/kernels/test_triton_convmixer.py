"""ConvMixer with GroupNorm and in evaluation mode through the Triton kernels.

On a GPU or, started by `test_interpreted.py`, under Triton's interpreter.
"""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlalr.federation.evaluation import evaluate
from fedlalr.models import ConvMixer
from fedlalr.training.kernels import plain
from fedlalr.training.kernels.plain import GroupNorm, Norm
from fedlalr.training.stacked.forms import inference_form, stacked_form
from training.interpreter import DEVICE, INTERPRETED, mended_interpreter  # noqa: F401
from training.kernel_checks import check_form, check_statistics, relative

MAPS = [(8, 3, 9)] if INTERPRETED else [(16, 5, 50), (16, 3, 7), (8, 5, 64), (8, 3, 301)]
BATCHES = [1, 49, 50, 51, 103, 130]
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


def convmixer(norm: Literal["batch", "group"] = "batch") -> tuple[ConvMixer, int]:
    """A small network that has seen data, in evaluation mode, and the size of its images."""
    torch.manual_seed(0)
    if not INTERPRETED:
        module = ConvMixer(dim=64, depth=3, norm=norm)
    elif norm == "batch":
        module = ConvMixer(dim=2, depth=1, kernel=3)
    else:
        module = ConvMixer(dim=4, depth=1, kernel=3)
        for name in ("patches_norm", "blocks.0.depthwise_norm", "blocks.0.pointwise_norm"):
            module.set_submodule(name, nn.GroupNorm(2, 4))  # so that a group is more than a channel
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm):
            nn.init.normal_(layer.weight, 1, 0.3)
            nn.init.normal_(layer.bias, 0, 0.3)
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            nn.init.normal_(layer.running_mean, 0, 0.3)
            nn.init.uniform_(layer.running_var, 0.3, 2)
    return module.to(DEVICE).eval(), 16 if INTERPRETED else 32


@pytest.mark.parametrize(("size", "kernel", "batch"), MAPS)
@pytest.mark.parametrize("operation", ["norm", "pooled", "depthwise"])
def test_frozen_layers_agree_with_the_plain_operations(operation: str, size: int, kernel: int, batch: int) -> None:
    from fedlalr.training.kernels import maps

    torch.manual_seed(0)
    x = torch.randn(2, 3, batch, size, size, device=DEVICE).bfloat16()
    taps, (bias, weight, shift, mean, var) = (
        torch.randn(2, 3, 1, kernel, kernel, device=DEVICE) * 0.3,
        torch.rand(5, 2, 3, device=DEVICE).unbind(),
    )

    def run(operations: object, dtype: torch.dtype, maps_dtype: torch.dtype) -> plain.Normed:
        norm = Norm(*(part.to(dtype) for part in (weight, shift, mean, var)), 0.1, 1e-5, frozen=True)
        given = [part.to(dtype) for part in ([taps, bias] if operation == "depthwise" else [bias])]
        if operation == "depthwise":
            return operations.depthwise_gelu_norm(x.to(maps_dtype), *given, norm, None)  # type: ignore[attr-defined, no-any-return]
        return operations.gelu_norm(x.to(maps_dtype), *given, norm, None, operation == "pooled")  # type: ignore[attr-defined, no-any-return]

    mine, right = run(maps, torch.float32, torch.bfloat16), run(plain, torch.float64, torch.float64)
    assert relative(mine.output, right.output) < (1e-5 if operation == "pooled" else 6e-3)
    assert torch.equal(mine.running_mean, mean)
    assert torch.equal(mine.running_var, var)


@pytest.mark.parametrize(("norm", "batch"), [*(("batch", batch) for batch in BATCHES), ("group", 1), ("group", 17)])
def test_evaluation_through_the_kernels_is_the_modules_to_bfloat16(norm: Literal["batch", "group"], batch: int) -> None:
    module, size = convmixer(norm)
    images = torch.randn(batch, 3, size, size, device=DEVICE)
    forward = inference_form(module, torch.bfloat16, images.shape[1:])
    assert forward is not None
    outputs = forward(images)
    assert not outputs.requires_grad
    assert relative(outputs, module(images)) < 2e-2


def test_an_inference_form_follows_the_modules_parameters_and_buffers() -> None:
    module, size = convmixer()
    images = torch.randn(3, 3, size, size, device=DEVICE)
    forward = inference_form(module, torch.bfloat16, images.shape[1:])
    assert forward is not None
    before = forward(images)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.mul_(1.5 if tensor.is_floating_point() else 1)
    assert relative(forward(images), before) > 0.1
    assert relative(forward(images), module(images)) < 2e-2


def test_evaluate_gives_the_modules_loss_and_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    module, size = convmixer()
    module.train()
    images = torch.randn(21, 3, size, size, device=DEVICE)
    with torch.no_grad():
        right = copy.deepcopy(module).eval()(images)
    targets = right.argmax(1)
    targets[:5] = (targets[:5] + 1) % 10

    def refuse(*_: Tensor) -> None:
        raise AssertionError("the module itself was run")

    monkeypatch.setattr(ConvMixer, "forward", refuse)
    mine = evaluate(module, (images, targets), F.cross_entropy, batch_size=10, compute=torch.bfloat16)
    assert mine.loss == pytest.approx(float(F.cross_entropy(right, targets)), rel=2e-2)
    assert mine.accuracy == pytest.approx(16 / 21, abs=0.1)
    assert all(layer.training for layer in module.modules())


def test_statistics_through_the_kernels_are_the_modules_to_bfloat16() -> None:
    module, size = convmixer()
    sizes = (5, 3) if INTERPRETED else (7, 12, 4, 5, 2)
    check_statistics(module, size, torch.bfloat16, tolerance=2e-2, sizes=sizes)


def test_a_module_with_hooks_is_evaluated_itself() -> None:
    module, size = convmixer()
    module.head.register_forward_hook(lambda *_: None)
    assert inference_form(module, torch.bfloat16, torch.Size((3, size, size))) is None


# ---- GroupNorm -----------------------------------------------------------------------------------------------------


# the mean over the pixels of a group of one channel has no gradient
GROUPED = [("norm", 1), ("norm", 2), ("pooled", 2), ("depthwise", 2)]
LARGE = [(operation, grouped) for operation in ("norm", "pooled", "depthwise") for grouped in (8, 16)]


@pytest.mark.parametrize(("operation", "grouped"), GROUPED if INTERPRETED else GROUPED + LARGE)
@pytest.mark.parametrize(("size", "kernel", "batch"), MAPS)
def test_layers_with_group_norm_agree_with_the_plain_operations(
    operation: str, grouped: int, size: int, kernel: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedlalr.training.kernels import maps

    if INTERPRETED:  # few images for several programs and products
        monkeypatch.setattr(maps, "DEPTHWISE", {**maps.DEPTHWISE, "WINDOWS": 16, "PRODUCTS": 1})
        monkeypatch.setitem(maps.DEPTHWISE_BACKWARD, "WINDOWS", 16)
    torch.manual_seed(0)
    clients, groups = 2, 2
    channels = groups * grouped
    x = torch.randn(clients, channels, batch, size, size, device=DEVICE).bfloat16()
    flat = torch.randn(clients, channels * (kernel * kernel + 3) + 5, device=DEVICE) * 0.3  # rows at odd places
    taps, bias, weight, shift = flat[:, 5:].split([channels * kernel * kernel, channels, channels, channels], dim=1)
    learned = [taps.unflatten(1, (channels, 1, kernel, kernel)), bias, 1 + weight, shift]
    generator = torch.Generator(DEVICE).manual_seed(1)
    slope = torch.randn(x.shape[:3] if operation == "pooled" else x.shape, device=DEVICE, generator=generator)
    slope[1, :, -2:] = 0  # padding

    def run(operations: object, dtype: torch.dtype, maps_dtype: torch.dtype) -> list[Tensor]:
        inputs = x.to(maps_dtype).requires_grad_()
        taps, bias, weight, shift = leaves = [part.to(dtype).requires_grad_() for part in learned]
        norm = GroupNorm(weight, shift, groups, 1e-5)
        if operation == "depthwise":
            output = operations.depthwise_gelu_norm(inputs, taps, bias, norm, None).output  # type: ignore[attr-defined]
        else:
            output = operations.gelu_norm(inputs, bias, norm, None, operation == "pooled").output  # type: ignore[attr-defined]
            leaves = leaves[1:]
        given = slope.bfloat16().to(output.dtype)
        return [output, *torch.autograd.grad(output, [inputs, *leaves], given)]

    mine = run(maps, torch.float32, torch.bfloat16)
    again = mine if INTERPRETED else run(maps, torch.float32, torch.bfloat16)
    right = run(plain, torch.float64, torch.float64)
    assert relative(mine[0], right[0]) < (1e-5 if operation == "pooled" else 6e-3)
    assert max(relative(a, b) for a, b in zip(mine[1:], right[1:], strict=True)) < 2e-2
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


@pytest.mark.parametrize("padded", [True] if INTERPRETED else [False, True])
def test_group_norm_through_the_kernels_gives_the_modules_gradient_to_bfloat16(padded: bool) -> None:
    module, size = convmixer("group")
    inputs = torch.randn(2, 3, 3, size, size, device=DEVICE)
    check_form(module, inputs, 10, torch.bfloat16, padded, tolerance=2e-2, gradient_tolerance=5e-2)


def test_kernels_take_maps_and_groups_of_some_sizes_alone() -> None:
    def fits(images: int, dim: int, kernel: int = 3) -> bool:
        module = ConvMixer(dim=dim, depth=1, kernel=kernel, norm="group").to(DEVICE)
        return stacked_form(module, torch.bfloat16, torch.Size((3, images, images))) is not None

    assert fits(32, dim=256)
    assert fits(16, dim=8, kernel=5)
    assert not fits(32, dim=36)  # nine channels in a group
    assert not fits(24, dim=8)
    assert not fits(32, dim=8, kernel=7)
