"""The Triton kernels against plain operations in float64, on a GPU.

Under Triton's interpreter (`TRITON_INTERPRET=1`) the same tests run on small CPU tensors: `test_interpreted.py` starts
them so where there is no GPU.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedlalr.algorithms import AlignedLALR, DiLoCo, FedAdam, FedAdamW, FedAvg, FedLALR, FedProx, LAFedOpt, LocalAdam
from fedlalr.algorithms.slots import Algorithm, Context, Slots
from fedlalr.benchmark.jobs import gpt
from fedlalr.data.population import as_clients
from fedlalr.models import CharLSTM, ConvMixer
from fedlalr.training.clipping import Regularisation
from fedlalr.training.fused_steps import fused_step
from fedlalr.training.interfaces import Training
from fedlalr.training.kernels import plain
from fedlalr.training.kernels.plain import Norm
from fedlalr.training.layout import Layout
from fedlalr.training.local_step import local_step, starting_slots
from fedlalr.training.stacked.forms import stacked_form
from fedlalr.training.stacked.gradient import Batch, ForwardGradient
from fedlalr.training.stacked.trial import choose_gradient
from fedlalr.training.stacked.vmap import VmapForward
from training.interpreter import DEVICE, INTERPRETED, mended_interpreter  # noqa: F401
from training.kernel_checks import check_form, mask_of, relative, stacked_loss

CLIENTS = 3
POINTS = 128 if INTERPRETED else 4096
MAPS = [(8, 3, 9)] if INTERPRETED else [(16, 5, 50), (16, 3, 7), (8, 5, 64), (8, 3, 33)]
SEQUENCES = [(16, 5, 3)] if INTERPRETED else [(128, 100, 80), (16, 5, 3), (64, 33, 1)]
LENGTHS = [1, 1100] if INTERPRETED else [1, 1000, 1024, 50_001]
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


def test_the_kernels_gelu_is_the_exact_one() -> None:
    from fedlalr.training.kernels.maps import gelu_norm

    # BatchNorm of γ = σ, β = μ is the identity, so the layer's pooled output is the GELU of single pixels of 8 × 8.
    y = torch.linspace(-4, 4, POINTS, device=DEVICE).bfloat16().view(1, 1, -1, 1, 1).expand(1, 1, POINTS, 8, 8)
    exact = F.gelu(y[0, 0, :, 0, 0].double())
    one = torch.ones(1, 1, device=DEVICE)
    norm = Norm(one * exact.std(correction=0), one * exact.mean(), one, one, 0.1, 0.0)
    mine = gelu_norm(y, torch.zeros_like(one), norm, None, True).output[0, 0]
    assert float((mine.double() - exact).abs().max()) < 1e-5


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("size", "kernel", "batch"), MAPS)
@pytest.mark.parametrize("operation", ["norm", "pooled", "depthwise"])
def test_kernels_on_maps_agree_with_the_plain_operations(
    operation: str, size: int, kernel: int, batch: int, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedlalr.training.kernels import maps

    if INTERPRETED:  # few images for several products
        for options in (maps.DEPTHWISE_FORWARD, maps.DEPTHWISE_NORM_BACKWARD):
            monkeypatch.setitem(options, "WINDOWS", 16)
    torch.manual_seed(0)
    clients, channels = (2, 2) if INTERPRETED else (CLIENTS, 16)
    x = torch.randn(clients, channels, batch, size, size, device=DEVICE).bfloat16()
    mask = mask_of(clients, batch, DEVICE) if padded else None
    flat = torch.randn(clients, channels * (kernel * kernel + 3) + 5, device=DEVICE) * 0.3  # rows at odd places
    taps, bias, weight, shift = flat[:, 5:].split([channels * kernel * kernel, channels, channels, channels], dim=1)
    learned = [taps.unflatten(1, (channels, 1, kernel, kernel)), bias, 1 + weight, shift]
    running = torch.rand(2, clients, channels, device=DEVICE)

    def run(operations: object, dtype: torch.dtype, maps_dtype: torch.dtype) -> list[Tensor]:
        inputs = x.to(maps_dtype).requires_grad_()
        taps, bias, weight, shift = leaves = [part.to(dtype).requires_grad_() for part in learned]
        norm = Norm(weight, shift, *running.to(dtype).unbind(), 0.1, 1e-5)
        if operation == "depthwise":
            normed = operations.depthwise_gelu_norm(inputs, taps, bias, norm, mask)  # type: ignore[attr-defined]
        else:
            normed = operations.gelu_norm(inputs, bias, norm, mask, operation == "pooled")  # type: ignore[attr-defined]
            leaves = leaves[1:]
        generator = torch.Generator(DEVICE).manual_seed(1)
        slope = torch.randn(normed.output.shape, device=DEVICE, generator=generator).bfloat16()
        if mask is not None:
            slope *= mask.view(clients, 1, batch, *[1] * (slope.dim() - 3))
        return [*normed, *torch.autograd.grad(normed.output, [inputs, *leaves], slope.to(normed.output.dtype))]

    mine = run(maps, torch.float32, torch.bfloat16)
    again = mine if INTERPRETED else run(maps, torch.float32, torch.bfloat16)
    right = run(plain, torch.float64, torch.float64)
    # the bias before a normalisation has a small gradient that is left of a sum of large numbers
    assert max(relative(a, b) for a, b in zip(mine, right, strict=True)) < 2e-2
    assert relative(mine[0], right[0]) < 6e-3
    assert relative(mine[3], right[3]) < 1e-2
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


@pytest.mark.parametrize(("pooled", "padded"), [(False, True), (True, False)])
def test_a_row_need_not_fit_into_registers(pooled: bool, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedlalr.training.kernels import maps

    torch.manual_seed(0)
    y = torch.randn(2, 2, 11, 8, 8, device=DEVICE).bfloat16()
    mask = mask_of(2, 11, DEVICE) if padded else None
    bias, weight, shift, mean, variance = torch.rand(5, 2, 2, device=DEVICE)

    def run(held: int) -> plain.Normed:
        monkeypatch.setattr(maps, "NORM_FORWARD", {**maps.NORM_FORWARD, "TILE": 256, "HELD": held})
        return maps.gelu_norm(y, bias, Norm(weight, shift, mean, variance, 0.1, 1e-5), mask, pooled)

    whole = run(3)
    for held in (1, 2):
        assert max(relative(part, all_of_it) for part, all_of_it in zip(run(held), whole, strict=True)) < 1e-3


@pytest.mark.parametrize(("size", "batch", "steps"), SEQUENCES)
def test_the_lstm_kernels_agree_with_the_plain_recurrence(size: int, batch: int, steps: int) -> None:
    from fedlalr.training.kernels import recurrence

    torch.manual_seed(0)
    x = torch.randn(CLIENTS, steps, batch, 24, device=DEVICE).bfloat16()
    slope = torch.randn(CLIENTS, steps, batch, size, device=DEVICE).bfloat16()
    scales = {(4, size, 24): 0.2, (4, size, size): 0.8 / size**0.5, (4, size): 0.1}
    learned = [torch.randn(CLIENTS, *shape, device=DEVICE) * scale for shape, scale in scales.items()]

    def run(operations: object, dtype: torch.dtype, state: torch.dtype) -> list[Tensor]:
        inputs, leaves = x.to(state).requires_grad_(), [part.to(dtype).requires_grad_() for part in learned]
        outputs = operations.lstm_layer(inputs, *leaves)  # type: ignore[attr-defined]
        return [outputs, *torch.autograd.grad(outputs, [inputs, *leaves], slope.to(state))]

    mine, right = run(recurrence, torch.float32, torch.bfloat16), run(plain, torch.float64, torch.float64)
    assert max(relative(a, b) for a, b in zip(mine, right, strict=True)) < 2e-2


def test_the_embedding_kernel_sums_the_gradients_of_each_symbol() -> None:
    from fedlalr.training.kernels import recurrence

    torch.manual_seed(0)
    tokens = torch.randint(30, (CLIENTS, 9, 11), device=DEVICE)
    table = torch.randn(CLIENTS, 30, 8, device=DEVICE).bfloat16().float()
    slope = torch.randn(CLIENTS, 9, 11, 8, device=DEVICE).bfloat16()
    leaf, exact = table.clone().requires_grad_(), table.double().requires_grad_()
    mine, right = recurrence.embed(leaf, tokens), plain.embed(exact, tokens)
    assert torch.equal(mine.double(), right)
    (gradient,) = torch.autograd.grad(mine, leaf, slope)
    tolerance = 5e-3 if INTERPRETED else 1e-5  # on the CPU sums of bfloat16 come rounded
    assert relative(gradient, torch.autograd.grad(right, exact, slope.double())[0]) < tolerance


@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize(("guarded", "masked"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "algorithm",
    [
        FedLALR(lr=0.01),
        FedLALR(lr=0.01, bias_correction=True, eps=0.1),
        AlignedLALR(lr=0.01),
        AlignedLALR(lr=0.01, align=0.0, bias_correction=True),
        FedAvg(lr=0.01),
        FedAdam(lr=0.01, bias_correction=True),
        LAFedOpt(lr=0.01),
        LocalAdam(lr=0.01, moments="restart"),
        LocalAdam(lr=0.01, moments="average"),
        DiLoCo(lr=0.01),
        FedAdamW(lr=0.01),
        FedAdamW(lr=0.01, eps=0.1, align=0.0),
    ],
)
def test_the_fused_step_is_the_algorithms_own_with_everything_around_it(
    size: int, guarded: bool, masked: bool, algorithm: Algorithm
) -> None:
    fused = fused_step(algorithm, DEVICE, torch.float32)
    assert fused is not None
    assert fused_step(FedProx(lr=0.1), DEVICE, torch.float32) is None
    torch.manual_seed(0)
    everything = Slots(
        x=torch.randn(CLIENTS, size, device=DEVICE),
        m=torch.randn(CLIENTS, size, device=DEVICE),
        v=torch.rand(CLIENTS, size, device=DEVICE),
        v_hat=torch.rand(CLIENTS, size, device=DEVICE),
    )
    broadcast = Slots(t=torch.arange(size, device=DEVICE) % 7.0, d=torch.randn(size, device=DEVICE))
    state = starting_slots(algorithm, broadcast.replace(**everything.map(lambda slot: slot[0]), n=everything.x[0]))
    if "n" in state:
        counts = torch.arange(1.0, CLIENTS + 1, device=DEVICE)[:, None]
        everything = everything.replace(n=counts + torch.arange(state.n.shape[-1], device=DEVICE) % 5)
    state = everything.only(*state)
    if masked:  # every client has its own broadcast, as with personal parameters
        broadcast = broadcast.map(lambda slot: torch.stack([slot * (row + 1) for row in range(CLIENTS + 1)]))
    gradient = torch.randn(CLIENTS, size, device=DEVICE)
    around = Regularisation(0.5, 1e-3, 1e-2) if guarded else Regularisation()
    if masked:  # strong, so that a coordinate with another coordinate's decay is noticed
        decayed = (torch.arange(size, device=DEVICE) % 3 > 0).float()
        around = replace(around, decoupled_weight_decay=10.0, decayed=decayed)
    active = torch.tensor([True, False, True], device=DEVICE) if guarded else None
    training = cast(Training, SimpleNamespace(algorithm=algorithm, regularisation=around))
    steps = torch.tensor([[3.0], [5.0], [4.0]], device=DEVICE) if guarded else 3
    context = Context(round=1, lr=0.01, steps=steps, step=2)
    exact = broadcast.map(lambda slot: slot.double() if slot.dim() == 1 else slot[:CLIENTS].double())
    right = local_step(training, state.map(Tensor.double), gradient.double(), exact, context)
    mine = state.map(Tensor.clone)
    on_device = replace(
        context, lr=torch.tensor(0.01, device=DEVICE), step=torch.tensor(2.0, dtype=torch.float64, device=DEVICE)
    )
    fused(mine, gradient, broadcast, on_device, around, active)
    for name in state:
        expected = right[name] if active is None else torch.where(active[:, None], right[name], state[name].double())
        assert relative(mine[name], expected) < 1e-6, name


def test_the_fused_step_refuses_slots_that_are_not_stacks_of_their_own() -> None:
    fused = fused_step(FedLALR(), DEVICE, torch.float32)
    assert fused is not None
    one = torch.zeros(5, device=DEVICE)
    shared = Slots(**dict.fromkeys(("x", "m", "v", "v_hat"), one.expand(CLIENTS, 5)))
    with pytest.raises(ValueError, match="contiguous stack"):
        fused(shared, torch.zeros(CLIENTS, 5, device=DEVICE), Slots(), Context(1, 0.1, 1), Regularisation())


@pytest.mark.parametrize("padded", [True] if INTERPRETED else [False, True])
@pytest.mark.parametrize("network", ["convmixer", "lstm"])
def test_a_network_through_the_kernels_gives_the_modules_gradient_to_bfloat16(network: str, padded: bool) -> None:
    torch.manual_seed(0)
    if network == "convmixer":
        module: nn.Module = ConvMixer(dim=3, depth=1, kernel=3) if INTERPRETED else ConvMixer(dim=64, depth=4)
        shape, classes = (2, 3, 3, 16, 16) if INTERPRETED else (CLIENTS, 10, 3, 32, 32), 10
        inputs = torch.randn(shape, device=DEVICE)
    else:
        module, classes = CharLSTM(hidden=12) if INTERPRETED else CharLSTM(), 80
        inputs = torch.randint(80, (CLIENTS, 3, 4) if INTERPRETED else (CLIENTS, 20, 80), device=DEVICE)
    check_form(module.to(DEVICE), inputs, classes, torch.bfloat16, padded, tolerance=2e-2, gradient_tolerance=5e-2)


@pytest.mark.gpu
def test_a_captured_step_replays_what_the_step_does() -> None:
    torch.manual_seed(0)
    module = ConvMixer(dim=32, depth=2).cuda()
    layout, algorithm = Layout.of(module), FedLALR(lr=1e-3)
    inputs, targets = torch.randn(CLIENTS, 8, 3, 32, 32, device=DEVICE), torch.randint(10, (CLIENTS, 8), device=DEVICE)
    form = stacked_form(module, torch.bfloat16, inputs.shape[2:])
    fused = fused_step(algorithm, DEVICE, torch.float32)
    assert form is not None
    assert fused is not None
    start = algorithm.start(algorithm.init(layout.flatten(dict(module.named_parameters()))), Slots())
    state = start.map(lambda slot: slot.expand(CLIENTS, -1).clone())
    buffers = {name: buffer.expand(CLIENTS, *buffer.shape).clone() for name, buffer in module.named_buffers()}
    context = Context(round=1, lr=torch.tensor(1e-3, device=DEVICE), steps=1, step=1)

    def step() -> None:
        x = state.x.detach().requires_grad_()
        logits, _ = form(layout.views(x), buffers, inputs)
        (gradient,) = torch.autograd.grad(stacked_loss(logits, targets, None).sum(), x)
        fused(state, gradient, Slots(), context, Regularisation())

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


SHAPES = {  # batch, channels, features, height and width, kernel, stride, padding, dilation, with a shift
    "plain": (2, 3, 8, (8, 8), (3, 3), (1, 1), (0, 0), (1, 1), True),
    "odd sizes, stride and padding": (2, 16, 20, (6, 7), (3, 5), (2, 1), (1, 2), (1, 1), True),
    "dilated, more than a block of features": (1, 5, 70, (7, 7), (3, 3), (1, 2), (1, 0), (2, 1), False),
    "one by one": (3, 20, 16, (9, 5), (1, 1), (2, 2), (0, 0), (1, 1), True),
}


KINDS = [(False, torch.float32), (True, torch.bfloat16)]
IMAGES = [(shape, *kind) for shape in SHAPES for kind in KINDS]


@pytest.mark.parametrize(  # every shape, and each kind with two of them, where an image takes a second
    ("shape", "channels_innermost", "dtype"), [IMAGES[place] for place in (0, 3, 4, 7)] if INTERPRETED else IMAGES
)
def test_a_stacked_convolution_is_each_clients_own(
    shape: str, channels_innermost: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedlalr.training.kernels.convolution import StackedConvolution

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    batch, channels, features, size, kernel, stride, padding, dilation, shifted = SHAPES[shape]
    clients = 2 if INTERPRETED else CLIENTS
    images = torch.randn(clients, batch, channels, *size, device=DEVICE).to(dtype)
    if channels_innermost:
        images = images.movedim(2, 4).contiguous().movedim(4, 2)
    weight = torch.randn(clients, features, channels, *kernel, device=DEVICE).to(dtype).float()
    bias = torch.randn(clients, features, device=DEVICE) if shifted else None

    def run(wide: bool) -> list[Tensor]:
        given = [images, weight] if bias is None else [images, weight, bias]
        leaves = [(part.double() if wide else part).detach().requires_grad_() for part in given]
        shifts = None if bias is None else leaves[2]
        if wide:
            each = [
                F.conv2d(leaves[0][c], leaves[1][c], None if shifts is None else shifts[c], stride, padding, dilation)
                for c in range(clients)
            ]
            output = torch.stack(each)
        else:
            output = StackedConvolution.apply(leaves[0], leaves[1], shifts, stride, padding, dilation)  # type: ignore[no-untyped-call]
        slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
        return [output, *torch.autograd.grad(output, leaves, slope.to(output.dtype))]

    mine, right = run(wide=False), run(wide=True)
    assert mine[0].dtype == dtype
    assert all(gradient.dtype == torch.float32 for gradient in mine[2:])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert max(relative(a, b) for a, b in zip(mine, right, strict=True)) < tolerance


def test_a_convolution_gives_no_gradient_of_images_that_need_none() -> None:
    from fedlalr.training.kernels.convolution import StackedConvolution

    images, weight = torch.ones(1, 1, 1, 3, 3, device=DEVICE), torch.ones(1, 1, 1, 2, 2, device=DEVICE)
    weight.requires_grad_()
    output = StackedConvolution.apply(images, weight, None, (1, 1), (0, 0), (1, 1))  # type: ignore[no-untyped-call]
    (slope,) = torch.autograd.grad(output.sum(), weight)
    assert torch.equal(slope, torch.full_like(weight, 4.0))


@pytest.mark.parametrize(("size", "kernel"), [((8, 6), (2, 2)), ((7, 9), (2, 3)), ((6, 6), (3, 1))])
def test_pooling_takes_the_first_of_equals_like_torchs_and_keeps_what_is_no_number(
    size: tuple[int, int], kernel: tuple[int, int]
) -> None:
    from fedlalr.training.kernels.convolution import StackedPooling

    torch.manual_seed(0)
    images = torch.randint(4, (5, *size, 6), device=DEVICE).float()  # many are equal
    images[1, 1, 0, 2] = torch.nan
    leaf = images.movedim(3, 1).requires_grad_()
    mine = StackedPooling.apply(leaf, *kernel)  # type: ignore[no-untyped-call]
    right = F.max_pool2d(leaf, kernel)
    assert torch.equal(mine.nan_to_num(9.0), right.nan_to_num(9.0))
    assert mine.isnan().sum() == 1
    slope = torch.randn(right.shape, device=DEVICE)
    of_mine, of_right = (torch.autograd.grad(output, leaf, slope)[0] for output in (mine, right))
    assert torch.equal(of_mine, of_right)


def test_only_small_windows_side_by_side_are_pooled_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedlalr.training.kernels import convolution
    from fedlalr.training.stacked.grouped_layers import pool

    kernel_of = convolution.StackedPooling.apply

    pooled: list[tuple[int, ...]] = []

    def recorded(images: Tensor, *kernel: int) -> Tensor:
        pooled.append(kernel)
        return kernel_of(images, *kernel)  # type: ignore[no-untyped-call, no-any-return]

    monkeypatch.setattr(convolution, "StackedPooling", SimpleNamespace(apply=recorded))
    images = torch.randn(2, 20, 20, 4, device=DEVICE).movedim(3, 1)
    for options in (
        (2, 2, 0, 1, False),
        ((3, 2), (3, 2), (0, 0), (1, 1), False),
        (3, 2, 0, 1, False),
        (2, 2, 1, 1, False),
    ):
        assert torch.equal(pool(images, *options), F.max_pool2d(images, *options))
    assert torch.equal(pool(images, 10, 10, 0, 1, False), F.max_pool2d(images, 10))
    assert torch.equal(pool(images.contiguous(), 2, 2, 0, 1, False), F.max_pool2d(images, 2))
    with pytest.raises(RuntimeError, match="too small"):
        pool(images, (21, 2), (21, 2), 0, 1, False)
    assert pooled == [(2, 2), (3, 2)]


FEW_ROWS = [(10, 70, 960)] if INTERPRETED else [(10, 70, 960), (16, 64, 2048), (1, 129, 700)]


@pytest.mark.parametrize(("rows", "outputs", "columns"), FEW_ROWS)
def test_products_of_few_rows_and_their_gradients(rows: int, outputs: int, columns: int) -> None:
    from fedlalr.training.kernels import narrow

    torch.manual_seed(0)
    flat = torch.randn(CLIENTS, outputs * columns + 5, device=DEVICE)  # a matrix that is not aligned
    weight = flat[:, 3:-2].view(CLIENTS, outputs, columns)
    x, slope = torch.randn(CLIENTS, rows, columns, device=DEVICE), torch.randn(CLIENTS, rows, outputs, device=DEVICE)
    assert narrow.fits(x, weight)
    place = torch.full_like(flat, 7.0)
    mine = narrow.weight_gradient(slope, x, place[:, 3:-2].view(weight.shape))
    pairs = [
        (narrow.product(x, weight), x.double() @ weight.double().mT),
        (narrow.input_gradient(slope, weight), slope.double() @ weight.double()),
        (mine, slope.double().mT @ x.double()),
    ]
    assert max(relative(a, b) for a, b in pairs) < 1e-5
    assert torch.equal(place[:, [0, 1, 2, -2, -1]], torch.full((CLIENTS, 5), 7.0, device=DEVICE))


class Lopsided(nn.Module):
    """One layer has most of the parameters; it may be used twice."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.first, self.large, self.last = nn.Linear(5, 260), nn.Linear(260, 260), nn.Linear(260, 3)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.large(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.large(x)) if self.twice else x)


@pytest.mark.parametrize("twice", [False, True])
def test_a_large_layer_writes_its_gradient_where_it_belongs(twice: bool) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(8, 5), torch.randint(3, (8,))) for _ in range(CLIENTS)]
    module = Lopsided(twice).to(DEVICE)
    layout = Layout.of(module)
    training = Training(
        module, layout, as_clients(data).to(torch.device(DEVICE)), FedAvg(), device=torch.device(DEVICE)
    )
    gradient = ForwardGradient(training, VmapForward(module))
    assert gradient._direct
    flat = layout.flatten(dict(module.named_parameters()))
    x = torch.stack([flat + 0.01 * place for place in range(CLIENTS)])
    inputs, targets = (torch.stack([pair[place] for pair in data]).to(DEVICE) for place in (0, 1))
    losses, mine, _ = gradient(x, {}, Batch(inputs, targets))
    wide = module.double()
    for place in range(CLIENTS):
        leaf = x[place].double().requires_grad_()
        loss = F.cross_entropy(functional_call(wide, layout.views(leaf), inputs[place].double()), targets[place])
        (right,) = torch.autograd.grad(loss, leaf)
        assert relative(losses[place], loss) < 1e-5
        assert relative(mine[place], right) < 1e-4  # up to four products, one after another, each to within about 1e-6


@pytest.mark.parametrize("size", [1, 1500, 20_000])
def test_changes_are_the_norms_of_the_replies_distances_and_name_the_rows_that_fell(size: int) -> None:
    from fedlalr.training.kernels import cohort

    torch.manual_seed(0)
    reference = torch.randn(size, device=DEVICE)
    stack = torch.zeros(4, size + 3, device=DEVICE)
    values = stack[:, :size]  # rows apart in memory
    values.copy_(reference + torch.rand(4, size, device=DEVICE))
    values[1] = reference
    values[2, -1] = reference[-1] - 1e-3
    norms, fell = cohort.changes(values, reference)
    assert norms.dtype == torch.float64
    assert relative(norms, (values.double() - reference.double()).norm(dim=1)) < 1e-6
    assert norms[1] == 0
    assert fell.tolist() == [False, False, True, False]


@pytest.mark.parametrize("size", [1, 1500])
def test_the_mean_change_is_the_broadcast_and_the_weighted_changes(size: int) -> None:
    from fedlalr.training.kernels import cohort

    torch.manual_seed(0)
    reference, values = torch.randn(size, device=DEVICE), torch.randn(5, size + 1, device=DEVICE)[:, 1:]
    share = torch.rand(5, device=DEVICE)
    share /= share.sum()
    right = reference.double() + (share.double()[:, None] * (values.double() - reference.double())).sum(0)
    mine = cohort.mean_change(values, reference, share)
    assert float((mine - right).abs().max() / values.abs().max()) < 1e-6  # terms of either sign may cancel in the mean


def test_the_servers_kernels_take_large_float32_stacks_alone() -> None:
    from fedlalr.training.kernels import cohort

    values, reference = torch.zeros(2, cohort.LARGE, device=DEVICE), torch.zeros(cohort.LARGE, device=DEVICE)
    assert cohort.fits(values, reference)
    assert cohort.fits(values, None)
    assert not cohort.fits(values[:, :100], reference[:100])
    assert not cohort.fits(values.double(), reference.double())
    assert not cohort.fits(values, reference.double())
    assert not cohort.fits(values.t(), None)
    assert not cohort.fits(reference, None)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("centred", [True, False], ids=["layer norm", "rms norm"])
@pytest.mark.parametrize(("rows", "width"), [(70, 20)] if INTERPRETED else [(1, 20), (70, 20), (1000, 384), (33, 5000)])
def test_norms_of_rows_are_torchs(rows: int, width: int, centred: bool, shared: bool) -> None:
    from fedlalr.training.kernels.layer_norm import StackedNorm

    x = torch.randn(CLIENTS, rows, width, device=DEVICE, requires_grad=True)
    weight, bias = torch.randn(2, 1 if shared else CLIENTS, width, device=DEVICE)
    parts = [x] if shared else [x, weight.requires_grad_(), bias.requires_grad_()][: 3 if centred else 2]
    mine = cast(Tensor, StackedNorm.apply(x, weight, bias if centred else None, 1e-3, centred, torch.float32))
    exact, scale, shift = (tensor.detach().double().requires_grad_() for tensor in (x, weight, bias))
    if centred:
        right = F.layer_norm(exact, (width,), eps=1e-3) * scale[:, None] + shift[:, None]
    else:
        right = F.rms_norm(exact, (width,), eps=1e-3) * scale[:, None]
    assert relative(mine, right) < 1e-5
    slope = torch.randn_like(mine)
    slopes = torch.autograd.grad(right, [exact, scale, shift][: len(parts)], slope.double())
    for given, wanted in zip(torch.autograd.grad(mine, parts, slope), slopes, strict=True):
        assert relative(given, wanted) < 1e-4
    assert cast(Tensor, StackedNorm.apply(x, weight, bias, 1e-3, centred, torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("classes", [11, 5000] if INTERPRETED else [1, 11, 4096, 50_257])
def test_cross_entropy_of_rows_is_torchs(classes: int) -> None:
    from fedlalr.training.kernels.cross_entropy import rows_cross_entropy

    logits = (3 * torch.randn(9, classes + 3, device=DEVICE))[:, :classes].requires_grad_()
    targets = torch.randint(classes, (9,), device=DEVICE)
    targets[2] = -100
    mine = rows_cross_entropy(logits, targets, -100)
    exact = logits.detach().double().requires_grad_()
    right = F.cross_entropy(exact, targets, reduction="none")
    torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5)
    slope = torch.randn_like(mine)
    (given,), (wanted,) = torch.autograd.grad(mine, logits, slope), torch.autograd.grad(right, exact, slope.double())
    torch.testing.assert_close(given.double(), wanted, rtol=1e-4, atol=1e-6)


def test_impossible_targets_give_nan_and_infinitely_small_logits_count_as_nothing() -> None:
    from fedlalr.training.kernels.cross_entropy import rows_cross_entropy

    logits = torch.randn(4, 7, device=DEVICE)
    logits[3, :3] = -torch.inf
    losses = rows_cross_entropy(logits, torch.tensor([7, -1, 2, 5], device=DEVICE), -100)
    assert losses.isnan().tolist() == [True, True, False, False]
    torch.testing.assert_close(losses[3], F.cross_entropy(logits[3, 3:], torch.tensor(2, device=DEVICE)))


def test_a_loss_taken_sample_by_sample_uses_the_same_kernel() -> None:
    clients = [tuple(torch.randint(11, (n, 8)) for _ in range(2)) for n in (2, 4, 3)]  # padded, so by sample
    model = gpt(11, 8, 16, 1, 2).to(DEVICE)
    training = Training(
        model,
        Layout.of(model),
        as_clients(clients).to(torch.device(DEVICE)),
        FedLALR(),
        device=torch.device(DEVICE),
        loss=lambda outputs, targets: F.cross_entropy(outputs, targets),  # not one that is known to be a mean
    )
    gradient = choose_gradient(training)
    assert isinstance(gradient, ForwardGradient)
    assert cast(VmapForward, gradient.forward).grouped


@pytest.mark.parametrize("lora", [False, True], ids=["all trained", "adapters"])
def test_a_stack_of_gpts_in_bfloat16_is_close_to_each_in_float64(lora: bool) -> None:
    sizes = (11, 8, 16, 1, 2) if INTERPRETED else (1001, 64, 128, 2, 2)  # an odd number of outputs
    batch = (2, sizes[1]) if INTERPRETED else (160, sizes[1])  # on a GPU large enough for a product for each client
    model = gpt(*sizes, lora=lora).to(DEVICE)
    clients = [tuple(torch.randint(sizes[0], batch, device=DEVICE) for _ in range(2)) for _ in range(CLIENTS)]
    training = Training(
        model, Layout.of(model), as_clients(clients), FedLALR(), device=torch.device(DEVICE), compute=torch.bfloat16
    )
    x = training.layout.flatten(dict(model.named_parameters()))
    x = x + 0.05 * torch.randn(CLIENTS, x.numel(), device=DEVICE)
    inputs, targets = (torch.stack(part) for part in zip(*clients, strict=True))
    losses, gradient, _ = ForwardGradient(training, VmapForward(model))(x, {}, Batch(inputs, targets))
    exact = model.double()
    for client in range(CLIENTS):
        mine = x[client].double().requires_grad_()
        loss = F.cross_entropy(functional_call(exact, training.layout.views(mine), (inputs[client],)), targets[client])
        assert relative(losses[client], loss) < 0.01
        assert relative(gradient[client], torch.autograd.grad(loss, mine)[0]) < 0.05
