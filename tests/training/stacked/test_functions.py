"""Functions of transformers over a stack of clients, against torch's own for one client after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

import fedlalr as fl
from fedlalr.benchmark.jobs import gpt
from fedlalr.data.population import as_clients
from fedlalr.federation.round import Rules, run_round
from fedlalr.federation.session import initial_state
from fedlalr.models import GPT, ViT
from fedlalr.training import Training
from fedlalr.training.layout import Layout
from fedlalr.training.stacked.functions import batched_functions
from fedlalr.training.stacked.gradient import Batch, ForwardGradient
from fedlalr.training.stacked.trial import choose_gradient
from fedlalr.training.stacked.vmap import VmapForward
from fedlalr.training.torch_internals import DispatchMode
from training.jobs import assert_same_outcomes, federate, started

CLIENTS = 3


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def tokens(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape)


def fast(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Tensor) -> Tensor:
        with batched_functions():
            return function(*args)

    return run


PER_CLIENT, SHARED = 0, None
ATTENTION = (normal(3, 2, 4, 5, 6),) * 3
LATER = torch.ones(5, 5).tril().bool()
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], tuple[int | None, ...]]] = {
    "linear": (F.linear, (normal(3, 2, 5, 4), normal(3, 7, 4), normal(3, 7)), (0, 0, 0)),
    "linear, no bias": (F.linear, (normal(3, 5, 4), normal(3, 7, 4)), (0, 0)),
    "linear, one sample": (F.linear, (normal(3, 4), normal(3, 7, 4), normal(3, 7)), (0, 0, 0)),
    "linear, shared weight": (F.linear, (normal(3, 5, 4), normal(7, 4), normal(7)), (0, None, None)),
    "linear, shared weight, own bias": (F.linear, (normal(3, 5, 4), normal(7, 4), normal(3, 7)), (0, None, 0)),
    "linear, shared input": (F.linear, (normal(5, 4), normal(3, 7, 4)), (None, 0)),
    "linear, clients last": (F.linear, (normal(5, 4, 3), normal(7, 3, 4)), (2, 1)),
    "linear, a vector": (F.linear, (normal(3, 5, 4), normal(3, 4)), (0, 0)),
    "addmm": (torch.addmm, (normal(3, 7), normal(3, 5, 4), normal(3, 4, 7)), (0, 0, 0)),
    "addmm, scaled": (partial(torch.addmm, alpha=2.0), (normal(3, 7), normal(3, 5, 4), normal(3, 4, 7)), (0, 0, 0)),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (4,), w, b, 1e-3), (normal(3, 2, 5, 4), normal(3, 4), normal(3, 4)), (0, 0, 0)
    ),
    "layer norm, shared": (
        lambda x, w, b: F.layer_norm(x, (4,), w, b), (normal(3, 2, 5, 4), normal(4), normal(4)), (0, None, None)
    ),
    "layer norm, two dimensions": (
        lambda x, w: F.layer_norm(x, (5, 4), w), (normal(3, 2, 5, 4), normal(3, 5, 4)), (0, 0)
    ),
    "rms norm": (lambda x, w: F.rms_norm(x, (4,), w, 1e-3), (normal(3, 2, 5, 4), normal(3, 4)), (0, 0)),
    "rms norm, bare": (lambda x: F.rms_norm(x, (4,)), (normal(3, 5, 4),), (0,)),
    "attention": (partial(F.scaled_dot_product_attention, is_causal=True), ATTENTION, (0, 0, 0)),
    "attention, shared keys": (
        F.scaled_dot_product_attention, (normal(3, 2, 4, 5, 6), normal(2, 4, 5, 6), normal(2, 4, 5, 6)), (0, None, None)
    ),
    "attention, mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, LATER, scale=0.3), ATTENTION, (0, 0, 0)
    ),
    "attention, mask by sample": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, LATER.expand(2, 1, 5, 5)), ATTENTION, (0, 0, 0)
    ),
    "attention, mask by client": (
        F.scaled_dot_product_attention, (*ATTENTION, normal(3, 2, 1, 5, 5)), (0, 0, 0, 0)
    ),
    "attention, small mask by client": (F.scaled_dot_product_attention, (*ATTENTION, normal(3, 5, 5)), (0, 0, 0, 0)),
    "attention, grouped": (
        partial(F.scaled_dot_product_attention, enable_gqa=True),
        (normal(3, 2, 4, 5, 6), normal(3, 2, 2, 5, 6), normal(3, 2, 2, 5, 6)),
        (0, 0, 0),
    ),
    "attention, one sequence": (F.scaled_dot_product_attention, (normal(3, 5, 6),) * 3, (0, 0, 0)),
    "cross-entropy": (F.cross_entropy, (normal(3, 5, 4), tokens(4, 3, 5)), (0, 0)),
    "cross-entropy, positions": (F.cross_entropy, (normal(3, 2, 4, 5), tokens(4, 3, 2, 5)), (0, 0)),
    "cross-entropy, ignored": (
        partial(F.cross_entropy, ignore_index=1), (normal(3, 2, 4, 5), tokens(4, 3, 2, 5)), (0, 0)
    ),
    "cross-entropy, smoothed": (
        partial(F.cross_entropy, label_smoothing=0.1), (normal(3, 5, 4), tokens(4, 3, 5)), (0, 0)
    ),
    "cross-entropy, probabilities": (F.cross_entropy, (normal(3, 5, 4), normal(3, 5, 4).softmax(-1)), (0, 0)),
    "cross-entropy, layer": (nn.CrossEntropyLoss(), (normal(3, 5, 4), tokens(4, 3, 5)), (0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_function_over_the_stack_is_torchs_for_each_client(name):
    function, args, dims = CASES[name]
    args = tuple(arg.detach().requires_grad_(arg.is_floating_point()) for arg in args)
    mine = vmap(fast(function), in_dims=dims)(*args)
    each = [
        function(*(arg if dim is None else arg.select(dim, client) for arg, dim in zip(args, dims, strict=True)))
        for client in range(CLIENTS)
    ]
    right = torch.stack(each)
    torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(right)
    wanted = [arg for arg in args if arg.requires_grad]
    for given, slope in zip(
        torch.autograd.grad(mine, wanted, weights), torch.autograd.grad(right, wanted, weights), strict=True
    ):
        torch.testing.assert_close(given, slope, rtol=1e-11, atol=1e-12)


def test_calls_without_any_tensor_of_a_client_are_torchs():
    x, weight, targets = normal(5, 4), normal(4, 4), tokens(4, 5)

    def function(shift: Tensor) -> Tensor:
        y = F.layer_norm(F.linear(x, weight), (4,))
        return F.cross_entropy(F.scaled_dot_product_attention(y[None], y[None], y[None])[0], targets) + shift

    torch.testing.assert_close(vmap(fast(function))(normal(3) * 0), function(normal(3) * 0))


class Seen(DispatchMode):
    """The names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("linear", "baddbmm"),
        ("linear, shared weight", "addmm"),
        ("addmm", "baddbmm"),
        ("attention", "_scaled_dot_product_flash_attention_for_cpu"),
        ("cross-entropy, positions", "nll_loss_forward"),
    ],
)
def test_all_clients_take_one_operator(name, operator):
    function, args, dims = CASES[name]
    with Seen() as seen, torch.no_grad():
        vmap(fast(function), in_dims=dims)(*args)
    assert seen.names.count(operator) == 1
    assert not {"mm", "bmm", "_softmax"} & set(seen.names)


def token_clients(sizes: tuple[int, ...] = (3, 6, 4), below: int = 11) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    whole = [torch.randint(0, below, (n, 9), generator=generator) for n in sizes]
    return [(part[:, :-1], part[:, 1:].contiguous()) for part in whole]


def image_clients() -> list[tuple[Tensor, Tensor]]:
    return [(normal(n, 2, 6, 6), tokens(4, n)) for n in (3, 6, 4)]


def training(model: nn.Module, clients: list[tuple[Tensor, Tensor]], **options: Any) -> Training:
    settings = {"local": fl.Epochs(2), "batch_size": 4, "algorithm": fl.FedLALR(), "device": torch.device("cpu")}
    return Training(model=model, layout=Layout.of(model), clients=as_clients(clients), **(settings | options))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, list[tuple[Tensor, Tensor]]]]] = {
    "GPT": lambda: (GPT(11, 8, 16, 2, 2), token_clients()),
    "GPT, rotary, untied": lambda: (GPT(11, 8, 16, 1, 2, positions="rotary", tied=False), token_clients()),
    "ViT": lambda: (ViT(4, 2, 6, 3, 12, 1, 3), image_clients()),
    "LoRA": lambda: (gpt(11, 8, 16, 2, 2, lora=True), token_clients()),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_stack_of_transformers_trains_as_the_reference_engine_does(name):
    model, clients = NETWORKS[name]()
    job = training(model.double(), clients)
    assert choose_gradient(job).forward.grouped
    assert_same_outcomes(federate("stacked", job, 2, 3), federate("reference", job, 2, 3))


class Logits(nn.Module):
    """A language model of Hugging Face as a function from tokens to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits.transpose(1, 2)


def hugging_face(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    ends = {"vocab_size": 11, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "GPT-2":
        config = transformers.GPT2Config(n_positions=8, n_embd=16, n_layer=1, n_head=2, **ends)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        return Logits(transformers.GPT2LMHeadModel(config))
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 8}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes, **ends)
    return Logits(transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize(
    ("kind", "operators"),
    [("GPT-2", {"baddbmm": 4, "gelu": 1}), ("Llama", {"bmm": 3 * 8})],  # eight layers, forward and twice backward
)
def test_models_of_hugging_face_take_the_fast_functions(kind, operators):
    job = training(hugging_face(kind).double(), token_clients())
    gradient = choose_gradient(job)
    assert gradient.forward.grouped
    x = job.layout.flatten(dict(job.model.named_parameters())).repeat(2, 1)
    inputs, targets = job.clients.batch(1, torch.arange(4))
    batch = Batch(inputs.expand(2, -1, -1), targets.expand(2, -1, -1))
    with Seen() as seen:
        gradient(x, {}, batch)
    for name, count in operators.items():
        # each for both clients; older versions of torch and transformers have a few more products
        assert count <= seen.names.count(name) < 2 * count, name
    if kind == "GPT-2" or torch.__version__ >= (2, 9):  # older versions lack it for Llama's shared keys
        assert "_scaled_dot_product_flash_attention_for_cpu" in seen.names
    assert_same_outcomes(federate("stacked", job, 1, 3), federate("reference", job, 1, 3))


@pytest.mark.parametrize("lora", [False, True])
def test_half_precision_stays_close_to_the_full_one(lora):
    model = gpt(11, 8, 16, 2, 2, lora=lora)  # eleven outputs: odd rows
    clients = token_clients((4, 4, 4))
    half, full = (
        ForwardGradient(training(made, clients, compute=compute), VmapForward(made))
        for made, compute in ((model, torch.bfloat16), (model, None))
    )
    x = half.training.layout.flatten(dict(model.named_parameters()))
    x = x + 0.1 * torch.randn(CLIENTS, x.numel())
    batch = Batch(*(torch.stack(part) for part in zip(*clients, strict=True)))
    losses, gradient, _ = half(x, {}, batch)
    right_losses, right, _ = full(x, {}, batch)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(losses, right_losses, rtol=0.02, atol=0.0)
    assert (gradient - right).norm() < 0.05 * right.norm()


# On a GPU


def on_gpu(name: str, **options: Any) -> Training:
    model, clients = NETWORKS[name]()
    model = (model if options else model.double()).to("cuda")
    clients = [(inputs if options or inputs.dim() < 4 else inputs.double(), targets) for inputs, targets in clients]
    job = training(model, clients, device=torch.device("cuda", 0), **options)
    return replace(job, clients=job.clients.to(job.device))


@pytest.mark.gpu
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", NETWORKS)
def test_captured_steps_of_transformers_give_the_references_result(name):
    job = on_gpu(name)
    with started("stacked", job) as (engine, private):
        state, given = initial_state(private), []
        for _ in range(3):
            given.append(run_round(state, torch.arange(3), 0.05, engine, private, Rules()))
            state = given[-1].state
        assert engine._static._graphs, engine._static.reason
    with started("reference", job) as (engine, private):
        state = initial_state(private)
        for mine in given:
            right = run_round(state, torch.arange(3), 0.05, engine, private, Rules())
            assert_same_outcomes([mine], [right])
            state = right.state


@pytest.mark.gpu
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["GPT", "GPT, rotary, untied", "LoRA"])
def test_a_run_in_bfloat16_stays_close_to_the_reference_engine(name):
    job = on_gpu(name, compute=torch.bfloat16, algorithm=fl.FedAvg(lr=0.1))
    mine, right = (federate(engine, job, 4, 3) for engine in ("stacked", "reference"))
    for given, wanted in zip(mine, right, strict=True):
        assert given.train_loss == pytest.approx(wanted.train_loss, rel=0.01)
