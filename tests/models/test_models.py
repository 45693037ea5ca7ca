"""The networks: sizes, values against an independent construction, and behaviour under vmap."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedlalr.models import CNN, MLP, CharLSTM, ConvMixer, DenseCNN, Logistic


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def shaken(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in float64 with every parameter and running statistic away from its starting value."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("classes", "size"), [(10, 594_186), (100, 617_316)])
def test_convmixer_has_the_papers_number_of_parameters(classes, size, norm):
    assert parameters(ConvMixer(classes=classes, norm=norm)) == size


@pytest.mark.parametrize(("dim", "groups"), [(256, 32), (32, 4), (20, 2), (6, 1)])
def test_groups_have_several_channels_so_that_their_means_differ(dim, groups):
    model = ConvMixer(dim=dim, depth=1, kernel=3, norm="group")
    assert model.patches_norm.num_groups == groups
    first, second = model(torch.randn(2, 3, 8, 8))
    assert not torch.allclose(first, second)


def test_char_lstm_has_the_papers_number_of_parameters():
    assert parameters(CharLSTM()) == 133_520


@pytest.mark.parametrize(
    ("model", "shape", "size"),
    [
        (CNN(), (1, 28, 28), 16 * 26 + 32 * 401 + 32 * 49 * 10 + 10),
        (CNN(classes=7, channels=3, size=8), (3, 8, 8), 16 * 76 + 32 * 401 + 32 * 4 * 7 + 7),
        (DenseCNN(), (3, 32, 32), 32 * 28 + 64 * 289 + 64 * 14 * 14 * 128 + 128 + 1290),
        (DenseCNN(dropout=True), (3, 32, 32), 32 * 28 + 64 * 289 + 64 * 14 * 14 * 128 + 128 + 1290),
        (MLP(784, 64, 10), (1, 28, 28), 785 * 64 + 65 * 10),
        (MLP(20, (8, 6), 3), (20,), 21 * 8 + 9 * 6 + 7 * 3),
        (MLP(20, (), 3), (20,), 21 * 3),
        (Logistic(64, 10), (8, 8), 65 * 10),
    ],
)
def test_small_networks_give_logits_and_have_the_sizes_of_their_layers(model, shape, size):
    logits = model(torch.randn(5, *shape))
    assert parameters(model) == size
    assert logits.shape[0] == 5
    assert logits.dim() == 2


def normalised(x: Tensor, groups: int, weight: Tensor, bias: Tensor) -> Tensor:
    """Group normalisation by its formula."""
    parts = x.reshape(len(x), groups, -1)
    centred = parts - parts.mean(dim=2, keepdim=True)
    scaled = centred / (centred.square().mean(dim=2, keepdim=True) + 1e-5).sqrt()
    return scaled.reshape(x.shape) * weight[:, None, None] + bias[:, None, None]


def batch_normalised(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(dim=(0, 2, 3), keepdim=True)
    scaled = centred / (centred.square().mean(dim=(0, 2, 3), keepdim=True) + 1e-5).sqrt()
    return scaled * weight[:, None, None] + bias[:, None, None]


def shifted(x: Tensor, down: int, right: int) -> Tensor:
    """out[..., i, j] = x[..., i + down, j + right], zero where that lies outside."""
    out = torch.zeros_like(x)
    height, width = x.shape[2:]
    for i in range(height):
        for j in range(width):
            if 0 <= i + down < height and 0 <= j + right < width:
                out[:, :, i, j] = x[:, :, i + down, j + right]
    return out


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def convmixer_by_hand(model: ConvMixer, images: Tensor, norm: str, patch: int, kernel: int) -> Tensor:
    """ConvMixer from sums, products and shifts alone, reading the parameters in the order of their definition."""
    values = iter(p.detach() for p in model.parameters())

    def norm_after(x: Tensor) -> Tensor:
        weight, bias = next(values), next(values)
        if norm == "batch":
            return batch_normalised(x, weight, bias)
        return normalised(x, {32: 4, 12: 1, 8: 1}[x.shape[1]], weight, bias)

    weight, bias = next(values), next(values)
    n, channels, height, width = images.shape
    cut = images.reshape(n, channels, height // patch, patch, width // patch, patch)
    x = norm_after(gelu(torch.einsum("nchpwq,dcpq->ndhw", cut, weight) + bias[:, None, None]))
    for _ in range(len(model.blocks)):
        weight, bias = next(values), next(values)
        mixed = bias[:, None, None].expand(x.shape).clone()
        for a in range(kernel):
            for b in range(kernel):
                mixed += shifted(x, a - kernel // 2, b - kernel // 2) * weight[:, 0, a, b, None, None]
        x = x + norm_after(gelu(mixed))
        weight, bias = next(values), next(values)
        x = norm_after(gelu(torch.einsum("nchw,dc->ndhw", x, weight[:, :, 0, 0]) + bias[:, None, None]))
    weight, bias = next(values), next(values)
    assert next(values, None) is None
    return x.sum(dim=(2, 3)) / (x.shape[2] * x.shape[3]) @ weight.T + bias


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("patch", "kernel", "dim"), [(2, 5, 32), (1, 3, 12), (4, 5, 8)])
def test_convmixer_equals_its_formula(norm, patch, kernel, dim):
    model = shaken(ConvMixer(classes=4, dim=dim, depth=2, kernel=kernel, patch=patch, norm=norm))
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = convmixer_by_hand(model, images, norm, patch, kernel)
    torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-10)


def test_convmixer_evaluates_with_running_statistics():
    model = shaken(ConvMixer(dim=8, depth=1, patch=4)).eval()
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(images)[:1], model(images[:1]), rtol=1e-12, atol=1e-12)
    before = model.patches_norm.running_mean.clone()
    model.train()(images)
    assert not torch.equal(model.patches_norm.running_mean, before)


def lstm_by_hand(model: CharLSTM, characters: Tensor) -> Tensor:
    """One window, one layer, one step, one gate at a time, from the LSTM's equations."""
    state = model.state_dict()
    hidden = state["head.weight"].shape[1]
    rows = []
    for window in characters.tolist():
        sequence = [state["embedding.weight"][number] for number in window]
        for layer in range(model.lstm.num_layers):
            w, u, b, d = (state[f"lstm.{name}_l{layer}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
            h, c, outputs = torch.zeros(hidden).double(), torch.zeros(hidden).double(), []
            for x in sequence:
                gates = [
                    w[k : k + hidden] @ x + u[k : k + hidden] @ h + b[k : k + hidden] + d[k : k + hidden]
                    for k in range(0, 4 * hidden, hidden)
                ]
                inlet, forget, outlet = (1 / (1 + torch.exp(-gates[k])) for k in (0, 1, 3))
                c = forget * c + inlet * torch.tanh(gates[2])
                h = outlet * torch.tanh(c)
                outputs.append(h)
            sequence = outputs
        rows.append(state["head.weight"] @ sequence[-1] + state["head.bias"])
    return torch.stack(rows)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_char_lstm_equals_its_equations(fused, layers):
    model = shaken(CharLSTM(vocabulary=11, embedding=4, hidden=7, layers=layers, fused=fused))
    characters = torch.randint(0, 11, (3, 9), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model(characters), lstm_by_hand(model, characters), rtol=1e-10, atol=1e-10)


def test_the_papers_lstm_is_the_same_fused_and_by_steps():
    model = CharLSTM().double()
    characters = torch.randint(0, 80, (2, 80), generator=torch.Generator().manual_seed(3))
    fused = model(characters)
    model.fused = False
    torch.testing.assert_close(model(characters), fused, rtol=1e-10, atol=1e-10)


def small_networks() -> list[tuple[str, nn.Module, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    pictures = torch.randn(3, 5, 3, 8, 8, generator=generator, dtype=torch.float64)
    characters = torch.randint(0, 11, (3, 5, 6), generator=generator)
    return [
        ("ConvMixer, BatchNorm", ConvMixer(dim=8, depth=2, patch=2), pictures),
        ("ConvMixer, GroupNorm", ConvMixer(dim=8, depth=2, patch=2, norm="group"), pictures),
        ("CharLSTM by steps", CharLSTM(11, 4, 7, fused=False), characters),
        ("CNN", CNN(channels=3, size=8), pictures),
        ("DenseCNN", DenseCNN(size=8), pictures),
        ("MLP", MLP(192, 16), pictures),
        ("Logistic", Logistic(192), pictures),
    ]


@pytest.mark.parametrize(("name", "model", "inputs"), small_networks(), ids=lambda v: v if isinstance(v, str) else "")
def test_a_stack_of_clients_under_vmap_equals_one_client_at_a_time(name, model, inputs):
    clients = [shaken(copy.deepcopy(model), seed) for seed in range(3)]
    stacked, buffers = stack_module_state(clients)
    stacked = {key: value.detach() for key, value in stacked.items()}

    def loss(params, buffers, x):
        logits = functional_call(model, (params, buffers), (x,))
        return logits.square().sum(), logits

    gradients, logits = vmap(grad(loss, has_aux=True))(stacked, buffers, inputs)
    for i, client in enumerate(clients):
        alone = client(inputs[i])
        torch.testing.assert_close(logits[i], alone, rtol=1e-10, atol=1e-10)
        expected = torch.autograd.grad(alone.square().sum(), list(client.parameters()))
        for (key, _), value in zip(client.named_parameters(), expected, strict=True):
            torch.testing.assert_close(gradients[key][i], value, rtol=1e-8, atol=1e-8)
        for key, value in client.named_buffers():
            torch.testing.assert_close(buffers[key][i], value)


def test_vmap_in_a_forward_pass_needs_the_lstm_by_steps():
    model = CharLSTM(11, 4, 7, fused=False)
    stacked, _ = stack_module_state([CharLSTM(11, 4, 7) for _ in range(3)])
    characters = torch.randint(0, 11, (3, 5, 6))
    logits = vmap(lambda params, x: functional_call(model, params, (x,)))(stacked, characters)
    assert logits.shape == (3, 5, 11)


def test_batch_norm_under_vmap_refuses_buffers_that_are_not_stacked():
    model = ConvMixer(dim=8, depth=1)
    stacked, _ = stack_module_state([ConvMixer(dim=8, depth=1) for _ in range(2)])
    buffers = dict(model.named_buffers())
    with pytest.raises(RuntimeError, match="running_mean"):
        vmap(lambda p, x: functional_call(model, (p, buffers), (x,)))(stacked, torch.randn(2, 4, 3, 8, 8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConvMixer(kernel=4), "kernel must be odd"),
        (lambda: ConvMixer(norm="layer"), "norm must be one of 'batch', 'group', not 'layer'"),
        (lambda: ConvMixer(depth=0), "depth must be a whole number of at least 1, not 0"),
        (lambda: CharLSTM(hidden=-1), "hidden must be a whole number"),
        (lambda: CNN(size=3), "at least 4 pixels"),
        (lambda: CNN(classes=2.5), "classes must be a whole number"),
        (lambda: DenseCNN(size=5), "at least 6 pixels"),
        (lambda: MLP(10, (5, 0), 2), "hidden must be a whole number of at least 1, not 0"),
        (lambda: MLP(10, "big", 2), "hidden must be a whole number of at least 1, not 'big'"),
        (lambda: Logistic(0), "inputs must be a whole number"),
    ],
)
def test_wrong_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
