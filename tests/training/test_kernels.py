"""The stacked operations and networks: plain ones against torch's own layers, kernels against the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedlalr.algorithms import FedAdam, FedAvg, FedLALR, FedProx
from fedlalr.algorithms.slots import Algorithm, Context, Slots
from fedlalr.models import CharLSTM, ConvMixer
from fedlalr.training.kernels import kernels_available, plain
from fedlalr.training.kernels.fused_step import fused_step
from fedlalr.training.kernels.plain import Norm
from fedlalr.training.layout import Layout
from fedlalr.training.local import local_step
from fedlalr.training.stacked_forms import stacked_form
from fedlalr.training.work import Training

CLIENTS = 3
NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor, int]]] = {
    "convmixer": lambda: (ConvMixer(dim=8, depth=2), torch.randn(CLIENTS, 6, 3, 32, 32, dtype=torch.float64), 10),
    "convmixer, patches that leave a rest": lambda: (
        ConvMixer(classes=4, dim=6, depth=1, kernel=3, patch=3, channels=1),
        torch.randn(CLIENTS, 5, 1, 13, 16, dtype=torch.float64),
        4,
    ),
    "lstm": lambda: (CharLSTM(vocabulary=30, hidden=12), torch.randint(30, (CLIENTS, 6, 7)), 30),
}


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


def test_plain_batch_norm_of_a_client_without_images_is_finite() -> None:
    norm = Norm(torch.ones(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), 0.1, 1e-5)
    normed = plain.batch_norm(torch.randn(1, 2, 3, 4, 4), norm, torch.zeros(1, 3, dtype=torch.bool))
    assert all(part.isfinite().all() for part in normed)


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
    assert stacked_form(ConvMixer(dim=8, depth=1, norm="group"), None, images) is None
    frozen = ConvMixer(dim=8, depth=1)
    frozen.patches.weight.requires_grad_(False)
    assert stacked_form(frozen, None, images) is None
    cumulative = ConvMixer(dim=8, depth=1)
    cast(nn.BatchNorm2d, cumulative.patches_norm).momentum = None
    assert stacked_form(cumulative, None, images) is None
    assert stacked_form(ConvMixer(dim=8, depth=1), torch.float16, images) is None


def test_without_a_gpu_there_are_no_kernels_and_no_bfloat16_forms() -> None:
    assert not kernels_available("cpu")
    assert fused_step(FedLALR(), "cpu") is None
    assert stacked_form(ConvMixer(dim=8, depth=1), torch.bfloat16, torch.Size((3, 32, 32))) is None


# ---- kernels against the plain operations --------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_kernels_gelu_is_the_exact_one() -> None:
    from fedlalr.training.kernels.maps import gelu_norm

    # BatchNorm of γ = σ, β = μ is the identity, so the layer's pooled output is the GELU of single pixels of 8 × 8.
    y = torch.linspace(-4, 4, 4096, device="cuda").bfloat16().view(1, 1, -1, 1, 1).expand(1, 1, 4096, 8, 8)
    exact = F.gelu(y[0, 0, :, 0, 0].double())
    one = torch.ones(1, 1, device="cuda")
    norm = Norm(one * exact.std(correction=0), one * exact.mean(), one, one, 0.1, 0.0)
    mine = gelu_norm(y, torch.zeros_like(one), norm, pooled=True).output[0, 0]
    assert float((mine.double() - exact).abs().max()) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("size", "kernel", "batch"), [(16, 5, 50), (16, 3, 7), (8, 5, 64), (8, 3, 33)])
@pytest.mark.parametrize("operation", ["norm", "pooled", "depthwise"])
def test_kernels_on_maps_agree_with_the_plain_operations(
    operation: str, size: int, kernel: int, batch: int, padded: bool
) -> None:
    from fedlalr.training.kernels import maps

    torch.manual_seed(0)
    clients, channels = CLIENTS, 16
    x = torch.randn(clients, channels, batch, size, size, device="cuda").bfloat16()
    mask = mask_of(clients, batch, "cuda") if padded else None
    flat = torch.randn(clients, channels * (kernel * kernel + 3) + 5, device="cuda") * 0.3  # rows at odd places
    taps, bias, weight, shift = flat[:, 5:].split([channels * kernel * kernel, channels, channels, channels], dim=1)
    learned = [taps.unflatten(1, (channels, 1, kernel, kernel)), bias, 1 + weight, shift]
    running = torch.rand(2, clients, channels, device="cuda")

    def run(operations: object, dtype: torch.dtype, maps_dtype: torch.dtype) -> list[Tensor]:
        inputs = x.to(maps_dtype).requires_grad_()
        taps, bias, weight, shift = leaves = [part.to(dtype).requires_grad_() for part in learned]
        norm = Norm(weight, shift, *running.to(dtype).unbind(), 0.1, 1e-5)
        if operation == "depthwise":
            normed = operations.depthwise_gelu_norm(inputs, taps, bias, norm, mask)  # type: ignore[attr-defined]
        else:
            normed = operations.gelu_norm(inputs, bias, norm, mask, operation == "pooled")  # type: ignore[attr-defined]
            leaves = leaves[1:]
        generator = torch.Generator("cuda").manual_seed(1)
        slope = torch.randn(normed.output.shape, device="cuda", generator=generator).bfloat16()
        if mask is not None:
            slope *= mask.view(clients, 1, batch, *[1] * (slope.dim() - 3))
        return [*normed, *torch.autograd.grad(normed.output, [inputs, *leaves], slope.to(normed.output.dtype))]

    mine = run(maps, torch.float32, torch.bfloat16)
    again = run(maps, torch.float32, torch.bfloat16)
    right = run(plain, torch.float64, torch.float64)
    # the bias before a normalisation has a small gradient that is left of a sum of large numbers
    assert max(relative(a, b) for a, b in zip(mine, right, strict=True)) < 2e-2
    assert relative(mine[0], right[0]) < 6e-3
    assert relative(mine[3], right[3]) < 1e-2
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "batch", "steps"), [(128, 100, 80), (16, 5, 3), (64, 33, 1)])
def test_the_lstm_kernels_agree_with_the_plain_recurrence(size: int, batch: int, steps: int) -> None:
    from fedlalr.training.kernels import recurrence

    torch.manual_seed(0)
    x = torch.randn(CLIENTS, steps, batch, 24, device="cuda").bfloat16()
    slope = torch.randn(CLIENTS, steps, batch, size, device="cuda").bfloat16()
    scales = {(4, size, 24): 0.2, (4, size, size): 0.8 / size**0.5, (4, size): 0.1}
    learned = [torch.randn(CLIENTS, *shape, device="cuda") * scale for shape, scale in scales.items()]

    def run(operations: object, dtype: torch.dtype, state: torch.dtype) -> list[Tensor]:
        inputs, leaves = x.to(state).requires_grad_(), [part.to(dtype).requires_grad_() for part in learned]
        outputs = operations.lstm_layer(inputs, *leaves)  # type: ignore[attr-defined]
        return [outputs, *torch.autograd.grad(outputs, [inputs, *leaves], slope.to(state))]

    mine, right = run(recurrence, torch.float32, torch.bfloat16), run(plain, torch.float64, torch.float64)
    assert max(relative(a, b) for a, b in zip(mine, right, strict=True)) < 2e-2


@pytest.mark.gpu
def test_the_embedding_kernel_sums_the_gradients_of_each_symbol() -> None:
    from fedlalr.training.kernels import recurrence

    torch.manual_seed(0)
    tokens = torch.randint(30, (CLIENTS, 9, 11), device="cuda")
    table = torch.randn(CLIENTS, 30, 8, device="cuda").bfloat16().float()
    slope = torch.randn(CLIENTS, 9, 11, 8, device="cuda").bfloat16()
    leaf, exact = table.clone().requires_grad_(), table.double().requires_grad_()
    mine, right = recurrence.embed(leaf, tokens), plain.embed(exact, tokens)
    assert torch.equal(mine.double(), right)
    (gradient,) = torch.autograd.grad(mine, leaf, slope)
    assert relative(gradient, torch.autograd.grad(right, exact, slope.double())[0]) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 1000, 1024, 50_001])
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("algorithm", [FedLALR(lr=0.01), FedAvg(lr=0.01), FedAdam(lr=0.01)])
def test_the_fused_step_is_the_algorithms_own_with_everything_around_it(
    size: int, guarded: bool, algorithm: Algorithm
) -> None:
    fused = fused_step(algorithm, "cuda")
    assert fused is not None
    assert fused_step(FedProx(lr=0.1), "cuda") is None
    torch.manual_seed(0)
    everything = Slots(
        x=torch.randn(CLIENTS, size, device="cuda"),
        m=torch.randn(CLIENTS, size, device="cuda"),
        v=torch.rand(CLIENTS, size, device="cuda"),
        v_hat=torch.rand(CLIENTS, size, device="cuda"),
    )
    state = everything if isinstance(algorithm, FedLALR) else everything.only("x")
    gradient = torch.randn(CLIENTS, size, device="cuda")
    options = {"clip_norm": 0.5, "weight_decay": 1e-3, "decoupled_weight_decay": 1e-2} if guarded else {}
    active = torch.tensor([True, False, True], device="cuda") if guarded else None
    around = {"clip_norm": None, "weight_decay": 0.0, "decoupled_weight_decay": 0.0, **options}
    training = cast(Training, SimpleNamespace(algorithm=algorithm, **around))
    context = Context(round=1, lr=0.01, steps=1)
    right = local_step(training, state.map(Tensor.double), gradient.double(), state, context)
    mine = state.map(Tensor.clone)
    fused(mine, gradient, torch.tensor(0.01, device="cuda"), active=active, **options)  # type: ignore[arg-type]
    for name in state:
        expected = right[name] if active is None else torch.where(active[:, None], right[name], state[name].double())
        assert relative(mine[name], expected) < 1e-6, name


@pytest.mark.gpu
def test_the_fused_step_refuses_slots_that_are_not_stacks_of_their_own() -> None:
    fused = fused_step(FedLALR(), "cuda")
    assert fused is not None
    one = torch.zeros(5, device="cuda")
    shared = Slots(**dict.fromkeys(("x", "m", "v", "v_hat"), one.expand(CLIENTS, 5)))
    with pytest.raises(ValueError, match="contiguous stack"):
        fused(shared, torch.zeros(CLIENTS, 5, device="cuda"), 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("network", ["convmixer", "lstm"])
def test_a_network_through_the_kernels_gives_the_modules_gradient_to_bfloat16(network: str, padded: bool) -> None:
    torch.manual_seed(0)
    if network == "convmixer":
        module: nn.Module = ConvMixer(dim=64, depth=4)
        inputs, classes = torch.randn(CLIENTS, 10, 3, 32, 32, device="cuda"), 10
    else:
        module, classes = CharLSTM(), 80
        inputs = torch.randint(80, (CLIENTS, 20, 80), device="cuda")
    check_form(module.cuda(), inputs, classes, torch.bfloat16, padded, tolerance=2e-2, gradient_tolerance=5e-2)


@pytest.mark.gpu
def test_a_captured_step_replays_what_the_step_does() -> None:
    torch.manual_seed(0)
    module = ConvMixer(dim=32, depth=2).cuda()
    layout, algorithm = Layout.of(module), FedLALR(lr=1e-3)
    inputs, targets = torch.randn(CLIENTS, 8, 3, 32, 32, device="cuda"), torch.randint(10, (CLIENTS, 8), device="cuda")
    form = stacked_form(module, torch.bfloat16, inputs.shape[2:])
    fused = fused_step(algorithm, "cuda")
    assert form is not None
    assert fused is not None
    start = algorithm.start(algorithm.init(layout.flatten(dict(module.named_parameters()))), Slots())
    state = start.map(lambda slot: slot.expand(CLIENTS, -1).clone())
    buffers = {name: buffer.expand(CLIENTS, *buffer.shape).clone() for name, buffer in module.named_buffers()}
    lr = torch.tensor(1e-3, device="cuda")

    def step() -> None:
        x = state.x.detach().requires_grad_()
        logits, _ = form(layout.views(x), buffers, inputs)
        (gradient,) = torch.autograd.grad(stacked_loss(logits, targets, None).sum(), x)
        fused(state, gradient, lr)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    before = state.map(Tensor.clone)
    step()
    stepped = state.map(Tensor.clone)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for name, slot in state.items():
        slot.copy_(before[name])
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(state[name], stepped[name]) for name in state)
    assert not torch.equal(state.x, before.x)
