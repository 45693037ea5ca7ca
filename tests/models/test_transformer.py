"""GPT and ViT: sizes, causality, values against the equations written out, and gradient checkpointing."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import fedlalr as fl
from fedlalr.models import GPT, ViT
from fedlalr.training.layout import Layout
from fedlalr.training.memory import peak_memory
from fedlalr.training.stacked.vmap import VmapForward


def shaken(model: nn.Module) -> nn.Module:
    """The model in float64 with every parameter away from its starting value."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.add_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def layer(dim: int) -> int:
    """Parameters of a layer: two norms, attention and a perceptron of four times the width."""
    return 2 * 2 * dim + (3 + 1) * dim * dim + 4 * dim + 8 * dim * dim + 5 * dim


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (GPT.tiny(65), 65 * 128 + 128 * 128 + 4 * layer(128) + 256),
        (GPT.small(65), 65 * 384 + 256 * 384 + 6 * layer(384) + 768),
        (GPT(65, 16, 32, 2, 4, positions="rotary"), 65 * 32 + 2 * layer(32) + 64),
        (GPT(65, 16, 32, 2, 4, tied=False), 2 * 65 * 32 + 16 * 32 + 2 * layer(32) + 64),
        (ViT.tiny(), 48 * 192 + 192 + 64 * 192 + 6 * layer(192) + 2 * 192 + 1930),
    ],
    ids=["tiny", "small", "rotary", "untied", "ViT"],
)
def test_sizes_follow_from_the_layers(model, size):
    assert parameters(model) == size


def test_medium_models_have_twelve_layers_of_768():
    with torch.device("meta"):
        assert parameters(GPT.medium(80)) == 80 * 768 + 512 * 768 + 12 * layer(768) + 1536
        assert parameters(ViT.medium()) == 49 * 768 + 64 * 768 + 12 * layer(768) + 1536 + 7690
        assert parameters(ViT.small()) == 49 * 384 + 64 * 384 + 12 * layer(384) + 768 + 3850


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def turned(x: Tensor) -> Tensor:
    """Rotary positions with complex numbers, for `[length, features]`."""
    half = x.shape[-1] // 2
    angle = torch.tensor([[t / 10000 ** (i / half) for i in range(half)] for t in range(len(x))], dtype=torch.float64)
    pairs = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def blocks_by_hand(state: dict[str, Tensor], x: Tensor, layers: int, heads: int, causal: bool, rotary: bool) -> Tensor:
    """One sequence `[length, dim]` through all layers, one head at a time."""
    length, dim = x.shape
    size = dim // heads
    for i in range(layers):
        part = {name.removeprefix(f"blocks.{i}."): value for name, value in state.items()}
        y = norm(x, part["attention_norm.weight"], part["attention_norm.bias"])
        together = y @ part["attention.inputs.weight"].T + part["attention.inputs.bias"]
        outputs = []
        for head in range(heads):
            q, k, v = (together[:, start : start + size] for start in range(head * size, 3 * dim, dim))
            if rotary:
                q, k = turned(q), turned(k)
            scores = q @ k.T / math.sqrt(size)
            if causal:
                scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            outputs.append((scores.exp() / scores.exp().sum(1, keepdim=True)) @ v)
        x = x + torch.cat(outputs, 1) @ part["attention.outputs.weight"].T + part["attention.outputs.bias"]
        y = norm(x, part["mlp_norm.weight"], part["mlp_norm.bias"]) @ part["mlp.0.weight"].T + part["mlp.0.bias"]
        y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
        x = x + y @ part["mlp.2.weight"].T + part["mlp.2.bias"]
    return norm(x, state["norm.weight"], state["norm.bias"])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("tied", [True, False])
def test_gpt_equals_its_equations(positions, tied):
    model = shaken(GPT(11, 9, 16, 2, 2, positions=positions, tied=tied))
    state = model.state_dict()
    tokens = torch.randint(0, 11, (3, 7))
    logits = model(tokens)
    assert logits.shape == (3, 11, 7)
    for sequence, mine in zip(tokens, logits, strict=True):
        x = state["embedding.weight"][sequence]
        if positions == "learned":
            x = x + state["positions"][:7]
        x = blocks_by_hand(state, x, 2, 2, causal=True, rotary=positions == "rotary")
        right = x @ state["embedding.weight" if tied else "head.weight"].T
        torch.testing.assert_close(mine.T, right, rtol=1e-10, atol=1e-10)


def test_vit_equals_its_equations():
    model = shaken(ViT(classes=4, channels=2, size=6, patch=3, dim=12, layers=2, heads=3))
    state = model.state_dict()
    images = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    for image, mine in zip(images, model(images), strict=True):
        patches = [image[:, i : i + 3, j : j + 3].flatten() for i in (0, 3) for j in (0, 3)]
        x = torch.stack(patches) @ state["embedding.weight"].T + state["embedding.bias"] + state["positions"]
        x = blocks_by_hand(state, x, 2, 3, causal=False, rotary=False)
        right = state["head.weight"] @ x.mean(0) + state["head.bias"]
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_logit_depends_on_no_later_token(positions):
    model = shaken(GPT(11, 9, 16, 2, 2, positions=positions))
    tokens = torch.randint(0, 11, (2, 9))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[..., :5], after[..., :5])
    assert not torch.isclose(before[..., 5:], after[..., 5:]).any(1).any()


def test_dropout_is_off_by_default_and_only_acts_in_training():
    tokens = torch.randint(0, 11, (2, 9))
    still, noisy = GPT(11, 9, 16, 1, 2), GPT(11, 9, 16, 1, 2, dropout=0.5)
    assert torch.equal(still(tokens), still(tokens))
    assert not torch.equal(noisy(tokens), noisy(tokens))
    assert torch.equal(noisy.eval()(tokens), noisy(tokens))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPT(dim=10, heads=3), "10 is not a multiple of 3"),
        (lambda: GPT(dropout=1.0), r"dropout must lie in \[0, 1\), not 1.0"),
        (lambda: GPT(positions="none"), "'learned', 'rotary', not 'none'"),
        (lambda: GPT(dim=9, heads=3, positions="rotary"), "even number of features per head, not 3"),
        (lambda: GPT(layers=0), "layers"),
        (lambda: ViT(size=30, patch=4), "30 × 30 do not split into patches of 4 × 4"),
        (lambda: GPT(11, 4, 16, 1, 2)(torch.zeros(1, 5, dtype=torch.long)), "5 tokens are longer than its length of 4"),
    ],
)
def test_sizes_that_do_not_fit_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize(
    ("make", "inputs", "targets"),
    [
        (partial(GPT, 11, 6, 8, 2, 2), torch.arange(48).view(8, 6) % 11, torch.arange(48).view(8, 6) % 7),
        (partial(ViT, 3, 1, 4, 2, 8, 2, 2), torch.rand(8, 1, 4, 4, dtype=torch.float64), torch.arange(8) % 3),
    ],
    ids=["gpt", "vit"],
)
def test_gradient_checkpointing_computes_layers_twice_and_gets_the_same(make, inputs, targets, engine):
    """Also with dropout, which is drawn the same in the second run."""
    clients = [(inputs, targets), (inputs[:5], targets[:5])]
    results, calls = [], []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = shaken(make(dropout=0.3, gradient_checkpointing=checkpointed))
        model.blocks[0].mlp_norm.register_forward_hook(lambda *_: calls.append(1))
        result = fl.run(model, clients, fl.FedAvg(), rounds=2, batch_size=4, engine=engine, device="cpu")
        results += [result.model.state_dict(), len(calls)]
    right, once, mine, both = results
    for name, value in right.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-12)
    assert both - once >= once + 4  # two rounds of two steps


def test_gradient_checkpointing_takes_less_memory_in_a_stack():
    tokens = torch.zeros(2, 4, 16, dtype=torch.int64)
    peaks = []
    for checkpointed in (False, True):
        model = GPT(7, 16, 16, 8, 2, gradient_checkpointing=checkpointed)
        forward, layout = VmapForward(model, nn.functional.cross_entropy), Layout.of(model)
        x = layout.flatten(dict(model.named_parameters())).expand(2, -1).clone().requires_grad_()

        def gradient(forward=forward, layout=layout, x=x):
            outputs, _ = forward(layout.views(x), {}, tokens)
            return torch.autograd.grad(outputs.sum(), x)

        peaks.append(peak_memory(gradient, torch.device("cpu")))
    assert peaks[1] < peaks[0] / 2
