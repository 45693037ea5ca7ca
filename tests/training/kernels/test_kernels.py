"""The stacked operations and networks in plain PyTorch against torch's own layers and modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from fedlalr.algorithms import FedLALR, FedProx
from fedlalr.models import CharLSTM, ConvMixer
from fedlalr.models.convmixer import MixerBlock
from fedlalr.training.fused_steps import CPUStep, fused_step
from fedlalr.training.kernels import kernels_available, plain
from fedlalr.training.kernels.plain import GroupNorm, Norm
from fedlalr.training.stacked.forms import inference_form, stacked_form
from training.kernel_checks import check_form, check_statistics, mask_of, relative

CLIENTS = 3
NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor, int]]] = {
    "convmixer": lambda: (ConvMixer(dim=8, depth=2), torch.randn(CLIENTS, 6, 3, 32, 32, dtype=torch.float64), 10),
    "convmixer, patches that leave a rest": lambda: (
        ConvMixer(classes=4, dim=6, depth=1, kernel=3, patch=3, channels=1),
        torch.randn(CLIENTS, 5, 1, 13, 16, dtype=torch.float64),
        4,
    ),
    "convmixer, groups": lambda: (
        ConvMixer(dim=36, depth=2, kernel=3, norm="group"),  # nine channels in a group
        torch.randn(CLIENTS, 4, 3, 16, 16, dtype=torch.float64),
        10,
    ),
    "lstm": lambda: (CharLSTM(vocabulary=30, hidden=12), torch.randint(30, (CLIENTS, 6, 7)), 30),
}


# ---- plain operations against torch's layers -----------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
def test_plain_batch_norm_is_torchs_layer_on_each_clients_real_images(padded: bool) -> None:
    torch.manual_seed(0)
    maps = torch.randn(CLIENTS, 4, 6, 3, 5, dtype=torch.float64)  # [C, D, B, H, W]
    mask = mask_of(CLIENTS, 6) if padded else None
    layers = [nn.BatchNorm2d(4).double() for _ in range(CLIENTS)]
    for layer in layers:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    names = ("weight", "bias", "running_mean", "running_var")
    norm = Norm(*(torch.stack([getattr(layer, name).detach() for layer in layers]) for name in names), 0.1, 1e-5)
    normed = plain.batch_norm(maps, norm, mask)
    for client, layer in enumerate(layers):
        real = slice(None) if mask is None else mask[client]
        right = layer(maps[client].transpose(0, 1)[real])
        assert relative(normed.output[client].transpose(0, 1)[real], right) < 1e-12
        assert relative(normed.running_mean[client], cast(Tensor, layer.running_mean)) < 1e-12
        assert relative(normed.running_var[client], cast(Tensor, layer.running_var)) < 1e-12


def test_frozen_plain_batch_norm_is_torchs_layer_in_evaluation_mode() -> None:
    torch.manual_seed(0)
    maps = torch.randn(1, 4, 6, 3, 5, dtype=torch.float64)
    layer = nn.BatchNorm2d(4).double()
    layer(torch.randn(9, 4, 3, 5, dtype=torch.float64) * 2 + 1)
    learned = (nn.init.normal_(layer.weight), nn.init.normal_(layer.bias), layer.running_mean, layer.running_var)
    norm = Norm(*(cast(Tensor, part).detach()[None] for part in learned), 0.1, 1e-5, frozen=True)
    normed = plain.batch_norm(maps, norm, None)
    assert relative(normed.output[0].transpose(0, 1), layer.eval()(maps[0].transpose(0, 1))) < 1e-12
    assert normed.running_mean is norm.running_mean
    assert normed.running_var is norm.running_var


def test_plain_batch_norm_of_a_client_without_images_is_finite() -> None:
    norm = Norm(torch.ones(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), 0.1, 1e-5)
    normed = plain.batch_norm(torch.randn(1, 2, 3, 4, 4), norm, torch.zeros(1, 3, dtype=torch.bool))
    assert all(part.isfinite().all() for part in normed)


def test_plain_group_norm_is_torchs_layer_on_each_client() -> None:
    torch.manual_seed(0)
    maps = torch.randn(CLIENTS, 6, 5, 3, 4, dtype=torch.float64)
    layers = [nn.GroupNorm(2, 6).double() for _ in range(CLIENTS)]
    weight, bias = (
        torch.stack([nn.init.normal_(getattr(layer, name)).detach() for layer in layers]) for name in ("weight", "bias")
    )
    normed = plain.group_norm(maps, GroupNorm(weight, bias, 2, 1e-5))
    for client, layer in enumerate(layers):
        assert relative(normed[client].transpose(0, 1), layer(maps[client].transpose(0, 1))) < 1e-12


def test_plain_depthwise_is_torchs_grouped_convolution() -> None:
    torch.manual_seed(0)
    maps = torch.randn(CLIENTS, 4, 5, 8, 8, dtype=torch.float64)
    layers = [nn.Conv2d(4, 4, 5, padding=2, groups=4).double() for _ in range(CLIENTS)]
    taps, bias = (torch.stack([getattr(layer, name).detach() for layer in layers]) for name in ("weight", "bias"))
    y = plain.depthwise(maps, taps, bias)
    for client, layer in enumerate(layers):
        assert relative(y[client].transpose(0, 1), layer(maps[client].transpose(0, 1))) < 1e-12


def test_plain_lstm_layer_is_torchs_lstm() -> None:
    torch.manual_seed(0)
    x = torch.randn(CLIENTS, 7, 5, 4, dtype=torch.float64)
    layers = [nn.LSTM(4, 6).double() for _ in range(CLIENTS)]
    w_ih = torch.stack([layer.weight_ih_l0.detach().view(4, 6, 4) for layer in layers])
    w_hh = torch.stack([layer.weight_hh_l0.detach().view(4, 6, 6) for layer in layers])
    bias = torch.stack([(layer.bias_ih_l0 + layer.bias_hh_l0).detach().view(4, 6) for layer in layers])
    y = plain.lstm_layer(x, w_ih, w_hh, bias)
    for client, layer in enumerate(layers):
        assert relative(y[client], layer(x[client])[0]) < 1e-12


# ---- stacked networks against their modules ------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_stacked_network_gives_each_clients_own_gradient_and_buffers(network: str, padded: bool) -> None:
    torch.manual_seed(0)
    module, inputs, classes = NETWORKS[network]()
    check_form(module.double(), inputs, classes, None, padded, tolerance=1e-12)


def test_a_stacked_network_takes_each_clients_own_statistics() -> None:
    torch.manual_seed(0)
    check_statistics(ConvMixer(dim=6, depth=2, kernel=3).double(), 8, None, tolerance=1e-12)


def test_a_stacked_network_keeps_its_precision_under_autocast() -> None:
    torch.manual_seed(0)
    module, inputs, _ = NETWORKS["lstm"]()
    module = module.double()
    form = stacked_form(module, None, inputs.shape[2:])
    assert form is not None
    parameters = {name: p.detach().expand(CLIENTS, *p.shape).clone() for name, p in module.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = form(parameters, {}, inputs)
    assert logits.dtype == torch.float64
    assert relative(logits, torch.stack([module(part) for part in inputs])) < 1e-12


def test_networks_without_a_stacked_form_have_none() -> None:
    images = torch.Size((3, 32, 32))
    assert stacked_form(nn.Linear(3, 2), None, torch.Size((3,))) is None
    frozen = ConvMixer(dim=8, depth=1)
    frozen.patches.weight.requires_grad_(False)
    assert stacked_form(frozen, None, images) is None
    cumulative = ConvMixer(dim=8, depth=1)
    cast(nn.BatchNorm2d, cumulative.patches_norm).momentum = None
    assert stacked_form(cumulative, None, images) is None
    assert stacked_form(ConvMixer(dim=8, depth=1), torch.float16, images) is None


class OtherBlock(MixerBlock):
    pass


CHANGES: dict[str, Callable[[ConvMixer], object]] = {
    "padding of another kind": lambda m: setattr(m.get_submodule("blocks.0.depthwise"), "padding_mode", "circular"),
    "another stride": lambda m: setattr(m.patches, "stride", (1, 1)),
    "a dilation": lambda m: setattr(m.get_submodule("blocks.1.depthwise"), "dilation", (2, 2)),
    "no bias": lambda m: setattr(m, "patches", nn.Conv2d(3, 8, 2, stride=2, bias=False)),
    "a kernel of its own": lambda m: setattr(
        m.get_submodule("blocks.1"), "depthwise", nn.Conv2d(8, 8, 3, padding=1, groups=8)
    ),
    "an even kernel": lambda m: setattr(
        m, "blocks", nn.Sequential(*(MixerBlock(8, 4, "batch") for _ in range(len(m.blocks))))
    ),
    "another block": lambda m: setattr(m, "blocks", nn.Sequential(OtherBlock(8, 5, "batch"))),
    "no list of blocks": lambda m: setattr(m, "blocks", MixerBlock(8, 5, "batch")),
    "another head": lambda m: setattr(m, "head", nn.Bilinear(8, 8, 10)),
    "another convolution": lambda m: setattr(
        m.get_submodule("blocks.0"), "pointwise", nn.LazyConv2d(8, 1, device="cpu")
    ),
    "another norm": lambda m: setattr(m, "patches_norm", nn.InstanceNorm2d(8, affine=True)),
    "a group norm that learns nothing": lambda m: setattr(m, "patches_norm", nn.GroupNorm(2, 8, affine=False)),
    "a norm without running statistics": lambda m: setattr(
        m, "patches_norm", nn.BatchNorm2d(8, track_running_stats=False)
    ),
    "a weight by its direction": lambda m: nn.utils.parametrizations.weight_norm(m.head),
    "a shared layer": lambda m: setattr(
        m.get_submodule("blocks.1"), "pointwise", m.get_submodule("blocks.0.pointwise")
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_convmixer_with_a_layer_that_is_not_its_own_has_no_stacked_form(change: str) -> None:
    images = torch.Size((3, 32, 32))
    module = ConvMixer(dim=8, depth=2)
    assert stacked_form(module, None, images) is not None
    CHANGES[change](module)
    assert stacked_form(module, None, images) is None


def test_without_a_gpu_there_are_no_kernels_and_no_bfloat16_forms() -> None:
    assert not kernels_available("cpu")
    assert isinstance(fused_step(FedLALR(), "cpu", torch.float32), CPUStep)
    assert fused_step(FedProx(), "cpu", torch.float32) is None
    module, images = ConvMixer(dim=8, depth=1), torch.Size((3, 32, 32))
    assert stacked_form(module, torch.bfloat16, images) is None
    assert inference_form(module, torch.bfloat16, images) is None
    assert inference_form(module, None, images) is None
