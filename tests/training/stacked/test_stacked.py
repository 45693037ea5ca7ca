"""The stacked engine's own parts: what it refuses, how it copes with trouble, and its fast forms against the plain
ones."""

from __future__ import annotations

import copy
import random
import re
import resource
import warnings
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import fedlalr as fl
from closeness import assert_close
from fedlalr.algorithms import ALGORITHMS
from fedlalr.algorithms.slots import Context, Slots
from fedlalr.data.partition import Partition
from fedlalr.data.population import DatasetClients, Population, as_clients
from fedlalr.federation.round import Rules, run_round
from fedlalr.federation.session import initial_state
from fedlalr.models import CharLSTM, ConvMixer
from fedlalr.training import Epochs, Steps
from fedlalr.training.clipping import Regularisation
from fedlalr.training.engines.registry import create_engine
from fedlalr.training.fused_steps import fused_step
from fedlalr.training.interfaces import Training
from fedlalr.training.local_step import local_step, starting_slots
from fedlalr.training.memory import free_memory, is_out_of_memory, peak_memory
from fedlalr.training.stacked import feed as feed_module
from fedlalr.training.stacked import grouped_layers
from fedlalr.training.stacked.cuda_graphs import StaticSteps, WatchedContext, keeps_its_slots, rounded
from fedlalr.training.stacked.engine import StackedEngine
from fedlalr.training.stacked.feed import Shape
from fedlalr.training.stacked.forms import stacked_form
from fedlalr.training.stacked.forms.char_lstm import CharLSTMForm
from fedlalr.training.stacked.gradient import Batch, ForwardGradient
from fedlalr.training.stacked.linear import LinearGradient, linear_chain
from fedlalr.training.stacked.masked_loss import mean_loss
from fedlalr.training.stacked.masked_norm import masked, masked_norm
from fedlalr.training.stacked.patch_convolution import PatchConvolution
from fedlalr.training.stacked.trial import CannotStack, StackingTrial, choose_gradient
from fedlalr.training.stacked.vmap import VmapForward
from training.jobs import MODELS, assert_same_outcomes, federate, make_training, started

CPU = torch.device("cpu")


def with_model(module: nn.Module, **options: object):
    """The contract's job with another network."""
    MODELS["own"] = lambda: copy.deepcopy(module)
    try:
        return make_training("own", **options)
    finally:
        del MODELS["own"]


# What it refuses


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, images):
        return self.head(self.lstm(images.squeeze(1))[0][:, -1])


class Centring(nn.Module):
    """Mixes the samples of a batch."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, images):
        x = images.flatten(1)
        return self.head(x - x.mean(0))


def test_a_module_that_vmap_cannot_batch_is_refused_with_the_reason():
    with pytest.raises(CannotStack, match="cannot be batched over clients"):
        StackedEngine(with_model(Recurrent()))


class Undecided(nn.Module):
    """Chooses by the values of its inputs."""

    def forward(self, inputs):
        return inputs if inputs.sum() > 0 else -inputs


class Counting(nn.Module):
    """Reads a number of its inputs."""

    def forward(self, inputs):
        return inputs * inputs.sum().item()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return 2 * inputs

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Doubling(nn.Module):
    """A function in torch's old style."""

    def forward(self, inputs):
        return Double.apply(inputs)


class Recomputing(nn.Module):
    """Checkpoints its layers by itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)).double()

    def forward(self, inputs):
        return checkpoint(self.layers, inputs, use_reentrant=False)


@pytest.mark.parametrize(
    ("layer", "place"),
    [
        (
            Undecided(),
            rf"; in layer '2', Undecided; {re.escape(__file__)}, line \d+: return inputs if inputs\.sum\(\) > 0.*"
            r"To stack it, .*torch\.where\. Use engine='auto'",
        ),
        (nn.RReLU(), r"aten::rrelu.*; in layer '2', RReLU\)\. Use engine='auto'"),
        (Counting(), r"calling \.item\(\).*keep the number in that line as a tensor"),
        (Doubling(), r"in layer '2', Doubling; .*line \d+: return Double\.apply.*setup_context and generate_vmap_rule"),
        (Recomputing(), r"in layer '2.*turn off torch\.utils\.checkpoint inside the model"),
    ],
    ids=["own", "torch's", "item", "function", "checkpoint"],
)
def test_a_refusal_of_vmap_names_the_layer_and_the_line_and_keeps_its_cause(layer, place):
    training = with_model(nn.Sequential(nn.Flatten(), nn.Linear(36, 3), layer))
    with pytest.raises(CannotStack, match=place) as refusal:
        create_engine("stacked", training, cohort=4)
    assert isinstance(refusal.value.__cause__.__cause__, RuntimeError)


class Renormed(nn.Linear):
    """Calls an operation that torch batches in a loop."""

    def forward(self, inputs):
        return super().forward(torch.renorm(inputs.flatten(1), 2, 0, 1.0))


def test_torchs_warnings_of_slow_batching_are_not_shown(recwarn):
    training = with_model(Renormed(36, 3))
    engine, _ = create_engine("stacked", training, cohort=4)
    run_round(initial_state(training), torch.arange(4), 0.01, engine, training, Rules())
    assert [str(warning.message) for warning in recwarn] == []
    torch.func.vmap(lambda row: torch.renorm(row, 2, 0, 1.0))(torch.ones(2, 3, 4))
    assert "batching rule for aten::renorm" in str(recwarn.pop(UserWarning).message)  # the caller's own are


def test_a_layer_that_mixes_samples_is_refused_only_where_batches_would_be_padded():
    with pytest.raises(CannotStack, match="padding changes the result"):
        StackedEngine(with_model(Centring()))
    training = with_model(Centring(), sizes=(8,) * 5)
    assert_same_outcomes(federate("stacked", training), federate("reference", training))


@pytest.mark.parametrize("model", ["perceptron", "groupnorm"])
def test_a_loss_that_is_no_mean_over_samples_is_refused_only_where_batches_would_be_padded(model):
    def total(outputs, targets):
        return (outputs.softmax(1) - F.one_hot(targets, 3)).square().sum()

    with pytest.raises(CannotStack, match="the loss must be a mean over samples"):
        StackedEngine(make_training(model, loss=total))
    training = make_training(model, loss=total, sizes=(10,) * 5)
    assert_same_outcomes(federate("stacked", training), federate("reference", training))


@pytest.mark.parametrize("model", ["perceptron", "groupnorm"])
def test_a_loss_of_one_number_in_a_row_is_stacked_in_chunks_of_any_size(model):
    def row(outputs, targets):
        return F.cross_entropy(outputs, targets).reshape(1)

    training = make_training(model, loss=row)
    with started("stacked", training) as (engine, private):
        engine.chunk = 3
        given = run_round(initial_state(private), torch.arange(4), 0.05, engine, private, Rules())
    with started("reference", training) as (engine, private):
        wanted = run_round(initial_state(private), torch.arange(4), 0.05, engine, private, Rules())
    assert_same_outcomes([given], [wanted])


def test_a_refusal_names_what_to_do_when_the_engine_was_asked_for():
    with pytest.raises(CannotStack, match=r"engine='stacked' cannot train this job.*Use engine='auto'"):
        create_engine("stacked", with_model(Recurrent()), cohort=3)


class CentringAndDropping(nn.Module):
    """Mixes the samples of a batch, and drops some of what comes out without a layer for that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(36, 8), nn.Linear(8, 3)

    def forward(self, images):
        hidden = self.first(images.flatten(1))
        return self.last(nn.functional.dropout(hidden - hidden.mean(0), 0.5, self.training))


def test_a_batch_of_one_sample_is_refused_for_the_references_reason():
    training = make_training("batchnorm", "fedavg", sizes=(8, 9, 12, 13))  # in batches of 4
    given, wanted = (federate(engine, training)[0] for engine in ("stacked", "reference"))
    assert [rejection.client for rejection in wanted.rejected] == [1, 3]
    assert "more than 1 value per channel" in wanted.rejected[0].reason
    assert wanted.rejected[0].reason.endswith("leave out a client with a single sample")  # drop_last keeps it
    assert given.rejected == wanted.rejected


def test_dropout_without_a_layer_hides_no_mixing_of_samples():
    with pytest.raises(CannotStack, match="no layer but torch's BatchNorm may mix samples"):
        StackedEngine(with_model(CentringAndDropping()))


class Attending(nn.Module):
    """Attention that drops some of what it attends to."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.last = nn.MultiheadAttention(6, 2, dropout, batch_first=True), nn.Linear(6, 3)

    def forward(self, images):
        rows = images.flatten(1, 2)
        return self.last(self.attention(rows, rows, rows, need_weights=False)[0].mean(1))


def test_attention_that_drops_is_tried_without_dropping_and_trained_with_it():
    dropped, again, whole = (federate("stacked", with_model(Attending(p)))[0].train_loss for p in (0.5, 0.5, 0.0))
    assert dropped == again != whole


def test_trying_the_network_draws_nothing_from_the_generator():
    dropping = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Dropout(), nn.Linear(8, 3))
    training = with_model(dropping)
    torch.manual_seed(5)
    StackedEngine(training)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


# Trouble


class Broken(Dataset):
    """Raises on its third sample."""

    def __init__(self, pairs, broken):
        self.pairs, self.broken = pairs, broken

    def __len__(self):
        return len(self.pairs[1])

    def __getitem__(self, index):
        if self.broken and index == 2:
            raise OSError("the disk is gone")
        return self.pairs[0][index], self.pairs[1][index]


@pytest.mark.filterwarnings("error")
def test_one_client_whose_data_raises_is_named_and_the_others_stay_in_the_stack():
    base = make_training("groupnorm")
    pool = base.clients
    datasets = [Broken((pool.inputs[rows], pool.targets[rows]), i == 4) for i, rows in enumerate(pool.partition)]
    training = make_training("groupnorm")
    object.__setattr__(training, "clients", DatasetClients(datasets))
    given, wanted = federate("stacked", training, cohort=6), federate("reference", training, cohort=6)
    assert given[0].rejected[0].client == 4
    assert "the disk is gone" in given[0].rejected[0].reason
    assert_same_outcomes(given, wanted)


def test_a_stack_that_runs_out_of_memory_is_halved_until_it_fits_and_stays_that_size():
    training = make_training()
    with started("stacked", training) as (engine, private):
        gradient, sizes = engine._gradient, []

        def scarce(x, buffers, batch):
            if len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            sizes.append(len(x))
            return gradient(x, buffers, batch)

        engine._gradient = scarce
        engine.chunk = 6
        state = initial_state(private)
        first = run_round(state, torch.arange(6), 0.05, engine, private, Rules())
        attempts = engine.chunk
        run_round(first.state, torch.arange(6), 0.05, engine, private, Rules())
    assert attempts <= 2
    assert max(sizes) == 2
    with started("reference", training) as (engine, private):
        right = run_round(initial_state(private), torch.arange(6), 0.05, engine, private, Rules())
    assert_same_outcomes([first], [right])


def test_a_client_that_only_the_stack_cannot_train_is_trained_alone_and_that_is_said():
    training = make_training()
    with started("stacked", training) as (engine, private):

        def broken(x, buffers, batch):
            raise RuntimeError("no kernel")

        engine._gradient = broken
        with pytest.warns(RuntimeWarning, match="raised RuntimeError: no kernel"):
            given = run_round(initial_state(private), torch.arange(3), 0.05, engine, private, Rules())
    with started("reference", training) as (engine, private):
        right = run_round(initial_state(private), torch.arange(3), 0.05, engine, private, Rules())
    assert_same_outcomes([given], [right])


def test_clients_that_only_a_large_stack_cannot_train_are_trained_in_smaller_ones_and_that_is_said():
    training = make_training()
    with started("stacked", training) as (engine, private):
        gradient = engine._gradient

        def narrow(x, buffers, batch):
            if len(x) > 2:
                raise RuntimeError("no kernel for so many")
            return gradient(x, buffers, batch)

        engine._gradient = narrow
        with pytest.warns(RuntimeWarning, match="smaller stacks, .* raised RuntimeError: no kernel") as told:
            given = run_round(initial_state(private), torch.arange(4), 0.05, engine, private, Rules())
        assert len(told) == 1
    with started("reference", training) as (engine, private):
        right = run_round(initial_state(private), torch.arange(4), 0.05, engine, private, Rules())
    assert_same_outcomes([given], [right])


def test_a_stacked_form_that_gives_no_numbers_where_autograd_does_is_not_taken():
    training, nan = make_training("perceptron"), float("nan")
    trial = StackingTrial(training)
    right = choose_gradient(training)

    def spoilt(x, buffers, batch):
        losses, gradients, after = right(x, buffers, batch)
        return losses, gradients * torch.tensor([[1.0], [nan]], dtype=gradients.dtype), after

    trial.check(right)
    with pytest.raises(CannotStack, match="differs from plain autograd's"):
        trial.check(spoilt)


def recalibrated(engine: str, training, spoil=lambda take: take):
    """A round with recalibrated statistics, where `spoil` makes another thing of what takes a batch's."""
    training = replace(training, buffers="recalibrate")
    with started(engine, training) as (engine, private):
        if isinstance(engine, StackedEngine):
            engine._statistics.statistics = spoil(engine._statistics.statistics)
        return run_round(initial_state(private), torch.arange(6), 0.05, engine, private, Rules())


@pytest.mark.filterwarnings("error")
def test_statistics_that_run_out_of_memory_are_taken_of_fewer_clients_at_a_time():
    sizes = []

    def scarce(take):
        def statistics(parameters, buffers, inputs, mask, seen):
            if len(inputs) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            sizes.append(len(inputs))
            return take(parameters, buffers, inputs, mask, seen)

        return statistics

    given = recalibrated("stacked", make_training("batchnorm"), scarce)
    assert max(sizes) == 2
    assert_same_outcomes([given], [recalibrated("reference", make_training("batchnorm"))])


def test_statistics_that_only_the_stack_cannot_take_are_taken_alone_and_that_is_said():
    def broken(take):
        def statistics(*arguments, **options):
            raise RuntimeError("no kernel")

        return statistics

    with pytest.warns(RuntimeWarning, match="statistics of 6 clients .* raised RuntimeError: no kernel"):
        given = recalibrated("stacked", make_training("batchnorm"), broken)
    assert_same_outcomes([given], [recalibrated("reference", make_training("batchnorm"))])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_size_of_chunks_does_not_matter(size):
    training = make_training()
    with started("stacked", training) as (engine, private):
        engine.chunk = size
        given = run_round(initial_state(private), torch.arange(6), 0.05, engine, private, Rules())
    with started("reference", training) as (engine, private):
        right = run_round(initial_state(private), torch.arange(6), 0.05, engine, private, Rules())
    assert_same_outcomes([given], [right])


def test_an_index_beyond_an_embedding_spoils_its_own_client_and_no_other():
    module = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2)).double()
    forward = VmapForward(module)
    parameters = {name: p.detach().expand(2, *p.shape).contiguous() for name, p in module.named_parameters()}
    indices = torch.tensor([[[0, 5]], [[1, -1]]])  # the last row of the first client's table lies before the second's
    outputs, _ = forward(parameters, {}, indices)
    assert outputs.isnan().all()
    right = torch.tensor([[[0, 4]], [[1, 0]]])
    assert_close(forward(parameters, {}, right)[0][1], module(right[1]))


class TwoNames(nn.Module):
    """One embedding under two names, of which the second is called."""

    def __init__(self):
        super().__init__()
        self.known = self.called = nn.Embedding(5, 3)

    def forward(self, indices):
        return self.called(indices).sum((1, 2))


def test_an_index_beyond_an_embedding_of_two_names_spoils_its_own_client_and_no_other():
    module = TwoNames().double()
    parameters = {name: p.detach().expand(2, *p.shape).contiguous() for name, p in module.named_parameters()}
    outputs, _ = VmapForward(module)(parameters, {}, torch.tensor([[[0, 5]], [[1, 2]]]))
    assert outputs[0].isnan().all()
    assert_close(outputs[1], module(torch.tensor([[1, 2]])))


def test_dropout_differs_between_clients_and_repeats_with_the_seed():
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    training = with_model(module, algorithm="fedavg", sizes=(8,) * 4)
    rows = training.clients.partition
    for rows_of_others in rows[1:]:  # every client has the same data
        training.clients.inputs[rows_of_others] = training.clients.inputs[rows[0]]
        training.clients.targets[rows_of_others] = training.clients.targets[rows[0]]
    with started("stacked", training) as (engine, private):
        work = _work(private, torch.arange(4))
        losses = []
        for _ in range(2):
            torch.manual_seed(11)
            losses.append(engine.train(work).losses)
    assert torch.equal(losses[0], losses[1])
    assert len(set(losses[0].tolist())) == 4


def _work(training, clients):
    from fedlalr.training.interfaces import Work

    state = initial_state(training)
    kept = Slots(**{n: torch.zeros(len(clients), training.layout.size) for n in training.algorithm.slots.kept})
    down = state.slots.only(*training.algorithm.slots.down)
    return Work(1, 0.1, clients, down, state.buffers, kept, len(clients), len(training.clients))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("cut_on", [{"cpu"}, set()])
def test_half_precision_compute_keeps_the_parameters_precision_and_stays_close_to_the_reference(cut_on, monkeypatch):
    monkeypatch.setattr(grouped_layers, "PRODUCTS_ON", cut_on)
    torch.manual_seed(0)
    training = make_training("groupnorm", algorithm="fedavg", compute=torch.bfloat16)
    for part in (training.model, training.clients):
        part.float() if isinstance(part, nn.Module) else setattr(part, "inputs", part.inputs.float())
    object.__setattr__(training, "layout", type(training.layout).of(training.model))
    given, wanted = (federate(name, training, rounds=2)[-1].state.slots.x for name in ("stacked", "reference"))
    assert given.dtype == torch.float32
    assert float((given - wanted).norm() / wanted.norm()) < 0.02


# Steps in fixed memory: what a GPU captures, here without capturing

ragged = (6, 8, 10, 12, 14, 16, 18, 20) * 3


FIXED = ("fedlalr", "fedavg", "lafedopt", "localadam", "scaffold", "adaalter", "mimelite", "deltasgd", "alignedlalr")
ALTERNATELY = [
    pytest.param(
        name, model, 0.01 * ((place + other) % 2), marks=[pytest.mark.slow] if (place // 2 + other) % 2 else []
    )
    for place, name in enumerate([*FIXED, "fedmuon"])
    for other, model in enumerate(["batchnorm", "perceptron"])
]
"""Every method on one of the models, the other is slow; with decay and without: without it a step may hand the very
memory of x on to another slot."""


@pytest.mark.parametrize(("algorithm", "model", "decay"), ALTERNATELY)
def test_steps_in_fixed_memory_give_the_references_result(algorithm, model, decay):
    training = make_training(model, algorithm, sizes=ragged, local=Epochs(1), decoupled_weight_decay=decay)
    wanted = federate("reference", training, rounds=2, cohort=18)
    with started("stacked", training) as (engine, private):
        engine._static = StaticSteps(private, engine._gradient, engine._fused, capture=False)
        state, given = initial_state(private), []
        for t in (1, 2):
            cohort = fl.federation.sampling.sample(len(private.clients), 18, private.seed, t)
            given.append(run_round(state, cohort, 0.9**t * 0.05, engine, private, Rules()))
            state = given[-1].state
    assert_same_outcomes(given, wanted)


def test_a_shrinking_stack_is_rounded_up_to_few_sizes():
    sizes = {rounded(Shape(active, 10, False), clients=50, width=10).active for active in range(1, 51)}
    assert max(sizes) == 50
    assert len(sizes) <= 9
    assert rounded(Shape(50, 7, False), 50, 10) == Shape(50, 7, False)


def test_an_algorithm_that_reads_the_round_is_noticed():
    context = WatchedContext(round=3, lr=0.1, steps=2, step=1)
    assert context.lr == 0.1
    assert not context.round_was_read
    assert context.round == 3
    assert context.round_was_read


@pytest.mark.parametrize("draw", [np.random.rand, random.random])
def test_a_model_that_draws_outside_torch_is_not_captured(draw):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(36, 3)

        def forward(self, images):
            return self.head(images.flatten(1) * (1 + draw()))

    training = with_model(Noisy(), algorithm="fedavg", sizes=(8,) * 4, local=Steps(3))
    with started("stacked", training) as (engine, private):
        work, drawn = _work(private, torch.arange(4)), []
        for capture in (True, False):
            engine._static = StaticSteps(private, engine._gradient, engine._fused, capture=capture)
            random.seed(5)
            np.random.seed(5)
            noticed = pytest.warns(RuntimeWarning, match="draws from NumPy's or Python's generator")
            with noticed if capture else nullcontext():
                drawn.append(engine.train(work).losses)
    assert torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_gives_back_the_slots_it_started_with(name):
    training = make_training("perceptron", name)
    assert keeps_its_slots(training, torch.ones(training.layout.size))


# Fast forms against plain ones


@pytest.mark.parametrize(
    "algorithm",
    [
        fl.FedAvg(),
        fl.FedLALR(),
        fl.FedAdam(),
        fl.FedLALR(bias_correction=True, eps=0.1),
        fl.AlignedLALR(),
        fl.AlignedLALR(align=0.0, bias_correction=True),
        fl.LAFedOpt(),
        fl.LocalAdam(moments="restart"),
        fl.LocalAdam(moments="average"),
        fl.DiLoCo(),
        fl.FedAdamW(),
        fl.FedAdamW(align=0.0),
    ],
)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=torch.float64)])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("active", [None, torch.tensor([True, False, True])])
def test_fused_steps_on_a_cpu_agree_with_the_algorithms_own(algorithm, lr, clip, active):
    decayed = None if clip is None else torch.tensor([1, 0, 0, 1, 1, 0, 1], dtype=torch.float64)
    around = Regularisation(clip, 1e-2, 1e-2, decayed)
    training = SimpleNamespace(algorithm=algorithm, regularisation=around)
    step = fused_step(algorithm, CPU, torch.float64)
    broadcast = algorithm.init(torch.randn(7, dtype=torch.float64))
    start = starting_slots(algorithm, broadcast).map(lambda slot: slot.repeat(3, 1) + 0.1)
    if clip is not None:  # clients and coordinates with different histories, as personal parameters have
        if "n" in start:
            each = torch.arange(float(start.n.shape[-1]), dtype=torch.float64)
            start = start.replace(n=torch.tensor([[1.0], [4.0], [2.0]], dtype=torch.float64) + each)
        broadcast = broadcast.map(lambda slot: slot + torch.arange(7, dtype=torch.float64))
    mine = start.map(torch.clone)
    if "d" in broadcast:
        broadcast = broadcast.replace(d=torch.randn(7, dtype=torch.float64))
    steps = 3 if active is None else torch.tensor([[3.0], [5.0], [4.0]])
    for k in (1, 2, 3):
        gradient = torch.randn(3, 7, dtype=torch.float64)
        context = Context(1, lr, steps, k)
        new = local_step(training, start, gradient, broadcast, context)
        start = new if active is None else Slots(**{n: torch.where(active[:, None], new[n], start[n]) for n in new})
        assert step is not None
        step(mine, gradient.clone(), broadcast, context, around, active)
    for name, slot in start.items():
        torch.testing.assert_close(mine[name], slot, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("correction", ["local", "joint"])
def test_lafedopt_with_a_correction_has_no_fused_step(correction):
    assert fused_step(fl.LAFedOpt(correction=correction), CPU, torch.float64) is None


@pytest.mark.filterwarnings("error:.*trained by the reference engine")
@pytest.mark.parametrize("model", ["perceptron", "logistic"])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam"])
def test_a_bare_gradient_step_of_linear_layers_gives_the_references_result(model, algorithm):
    bare = {"clip_norm": None, "weight_decay": 0.0, "decoupled_weight_decay": 0.0}
    training = make_training(model, algorithm, **bare)
    rounds = StackedEngine(training)._linear
    assert rounds is not None
    assert rounds.descends
    assert_same_outcomes(federate("stacked", training), federate("reference", training))


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(36, 3)),
        nn.Sequential(
            nn.Flatten(), nn.Linear(36, 7, bias=False), nn.ReLU(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)
        ),
        nn.Sequential(nn.Flatten(), nn.Linear(36, 6), nn.Identity(), nn.Linear(6, 3), nn.Sigmoid()),
        fl.models.Logistic(36, 3),
        fl.models.MLP(36, (9, 5), 3),
    ],
)
@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(label_smoothing=0.2)])
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_chain_of_linear_layers_has_the_gradient_of_the_batched_module(module, loss, is_padded):
    training = with_model(module, loss=loss)
    layers = linear_chain(training, torch.Size((1, 6, 6)))
    assert layers
    x = torch.randn(4, training.layout.size, dtype=torch.float64)
    targets = torch.randint(0, 3, (4, 5))
    targets[2, 1] = -100  # passed over, as torch does
    mask = torch.arange(5) < torch.tensor([[5], [1], [3], [4]]) if is_padded else None
    batch = Batch(torch.randn(4, 5, 1, 6, 6, dtype=torch.float64), targets, mask)
    mine = LinearGradient(training, layers)(x, {}, batch)
    right = ForwardGradient(training, VmapForward(training.model))(x, {}, batch)
    torch.testing.assert_close(mine[0], right[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(mine[1], right[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Dropout(), nn.Linear(8, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.GELU(), nn.Linear(8, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Linear(36, 36), nn.LayerNorm(36), nn.Linear(36, 3)),
        nn.Sequential(nn.Linear(6, 3), nn.Flatten(), nn.Linear(18, 3)),
        Centring(),
    ],
)
def test_anything_else_is_no_chain_of_linear_layers(module):
    training = with_model(module, sizes=(8,) * 3)
    assert linear_chain(training, torch.Size((1, 6, 6))) is None
    assert isinstance(choose_gradient(training), ForwardGradient)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_convmixer_on_a_cpu_goes_through_grouped_layers(norm):
    module = ConvMixer(dim=4, depth=1, kernel=3, norm=norm).double()
    clients = [(torch.randn(n, 3, 8, 8, dtype=torch.float64), torch.randint(0, 10, (n,))) for n in (5, 7)]
    training = replace(with_model(module), clients=as_clients(clients))
    assert stacked_form(module, None, torch.Size((3, 8, 8))) is not None
    chosen = choose_gradient(training).forward
    assert isinstance(chosen, VmapForward)
    assert any(isinstance(layer, grouped_layers.GroupedConv2d) for layer in chosen.model.modules())


def test_a_char_lstm_on_a_cpu_goes_through_its_form():
    module = CharLSTM(hidden=4).double()
    clients = [(torch.randint(0, 80, (n, 5)), torch.randint(0, 80, (n,))) for n in (5, 7)]
    training = replace(with_model(module), clients=as_clients(clients))
    assert isinstance(choose_gradient(training).forward, CharLSTMForm)


def test_a_layer_used_twice_is_no_chain():
    shared = nn.Linear(36, 36)
    training = with_model(nn.Sequential(nn.Flatten(), shared, nn.ReLU(), shared))
    assert linear_chain(training, torch.Size((1, 6, 6))) is None
    assert_same_outcomes(federate("stacked", training), federate("reference", training))


@settings(max_examples=25, deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 2),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 1)),
    dilation=st.integers(1, 2),
)
def test_a_convolution_over_patches_is_every_clients_own_convolution(kernel, stride, padding, dilation):
    torch.manual_seed(0)
    images = torch.randn(3, 2, 4, 7, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, 4, *kernel, dtype=torch.float64, requires_grad=True)
    options = ((stride, stride), padding, (dilation, dilation))
    given = PatchConvolution.apply(images, weight, *options)
    right = torch.stack([F.conv2d(x, w, None, *options) for x, w in zip(images, weight, strict=True)])
    torch.testing.assert_close(given, right, rtol=1e-12, atol=1e-12)
    slope = torch.randn_like(right)
    for mine, theirs in zip(
        *(torch.autograd.grad(out, (images, weight), slope) for out in (given, right)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", ["batchnorm", "groupnorm"])
def test_convolutions_over_patches_give_the_references_result(model, monkeypatch):
    monkeypatch.setattr(grouped_layers, "PRODUCTS_ON", {"cpu"})
    training = make_training(model)
    chosen = choose_gradient(training).forward.model
    assert any(isinstance(layer, grouped_layers.GroupedConv2d) for layer in chosen.modules())
    assert_same_outcomes(federate("stacked", training), federate("reference", training))


@settings(max_examples=40, deadline=None)
@given(
    dimensions=st.integers(1, 3),
    real=st.integers(2, 5),
    padding=st.integers(0, 3),
    momentum=st.sampled_from([0.1, 0.7, None]),
    affine=st.booleans(),
    tracks=st.booleans(),
)
def test_masked_batchnorm_is_the_stock_layer_on_the_real_samples(dimensions, real, padding, momentum, affine, tracks):
    torch.manual_seed(real + 10 * padding)
    kind = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dimensions - 1]
    stock = kind(4, momentum=momentum, affine=affine, track_running_stats=tracks).double()
    mine = copy.deepcopy(stock)
    mine.__class__ = masked_norm(stock)
    places = (2, 3, 2)[:dimensions]
    mask = torch.arange(real + padding) < real
    for _ in range(2):
        x = torch.randn(real + padding, 4, *places, dtype=torch.float64).requires_grad_()
        right = stock(x[:real])
        with masked([mine], mask):
            given = mine(x)[:real]
        torch.testing.assert_close(given, right, rtol=1e-12, atol=1e-12)
        slopes = [torch.autograd.grad(out.pow(3).sum(), x, retain_graph=True)[0] for out in (given, right)]
        torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-10, atol=1e-10)
    for name, buffer in stock.named_buffers():
        torch.testing.assert_close(dict(mine.named_buffers())[name], buffer, rtol=1e-12, atol=1e-12)


WEIGHT = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        partial(F.cross_entropy, weight=WEIGHT, ignore_index=2),
        nn.CrossEntropyLoss(label_smoothing=0.3),
        nn.CrossEntropyLoss(weight=WEIGHT),
        lambda outputs, targets: F.nll_loss(outputs.log_softmax(1), targets),
        lambda outputs, targets: (outputs - F.one_hot(targets, 3)).square().mean(),
    ],
)
@settings(max_examples=15, deadline=None)
@given(real=st.integers(1, 6), padding=st.integers(0, 3))
def test_a_masked_loss_is_the_loss_of_the_real_samples(loss, real, padding):
    torch.manual_seed(real)
    outputs = torch.randn(real + padding, 3, dtype=torch.float64)
    targets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, 2, (real + padding - 1,))])
    mask = torch.arange(real + padding) < real
    torch.testing.assert_close(mean_loss(loss, outputs, targets, mask), loss(outputs[:real], targets[:real]))


# Memory


def test_the_height_of_memory_is_measured_and_not_the_sum():
    def function():
        for _ in range(5):
            first = torch.ones(1000, dtype=torch.float64)
            second = first + 1  # both live here: the height
            del first
            second.view(10, 100).sum()
            del second

    assert peak_memory(function, CPU) == pytest.approx(16_000, abs=100)


def test_chunks_are_measured_from_the_memory_of_a_step():
    training = make_training("groupnorm")
    with started("stacked", training) as (engine, private):
        work = _work(private, torch.arange(6))
        size = engine._chunk_size(work)
    each = 0.5 * free_memory(CPU) / size
    parameters = training.layout.size * 8
    assert 3 * parameters < each < 1000 * parameters


def test_running_out_of_memory_is_told_from_other_errors():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_a_million_clients_cost_their_index_arrays_and_a_round_of_fifty():
    clients, samples = 1_000_000, 2
    indices = np.arange(clients * samples) % 1000
    data = Population(
        torch.randn(1000, 8), torch.randint(0, 3, (1000,)), Partition(indices, np.arange(clients + 1) * samples)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = fl.run(
        fl.models.MLP(8, 4, 3), data, fl.SCAFFOLD(), rounds=3, clients_per_round=50, batch_size=2, engine="stacked"
    )
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert [record.clients for record in result.history] == [50, 50, 50]
    assert grown < 40 * clients  # a handful of integers a client, far from anything model-sized


# On a GPU


def on_gpu(training: Training) -> Training:
    device = torch.device("cuda", 0)
    training.model.to(device)
    return replace(training, clients=training.clients.to(device), device=device)


@pytest.mark.gpu
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sizes", [(12,) * 6, (7, 12, 6, 10, 11, 23)])
def test_statistics_are_taken_in_the_stack_on_a_gpu_too(sizes):
    training = on_gpu(make_training("batchnorm", sizes=sizes))
    assert_same_outcomes([recalibrated("stacked", training)], [recalibrated("reference", training)])


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["fedlalr", "fedavg", "lafedopt", "localadam", "scaffold"])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("sizes", [(12,) * 18, ragged])
def test_captured_steps_give_the_references_result(algorithm, model, sizes):
    training = on_gpu(make_training(model, algorithm, sizes=sizes, local=Epochs(3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = federate("reference", training, rounds=3, cohort=18)
        with started("stacked", training) as (engine, private):
            state, given = initial_state(private), []
            for t in (1, 2, 3):
                cohort = fl.federation.sampling.sample(len(private.clients), 18, private.seed, t)
                given.append(run_round(state, cohort, 0.9**t * 0.05, engine, private, Rules()))
                state = given[-1].state
            assert engine._static is not None
            assert engine._static._graphs, engine._static.reason
    assert_same_outcomes(given, wanted)


@pytest.mark.gpu
def test_a_step_that_waits_for_the_host_is_not_captured_but_still_right():
    class Waiting(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(36, 3)

        def forward(self, images):
            torch.cuda.current_stream().synchronize()
            return self.head(images.flatten(1)).tanh() * 2

    training = on_gpu(with_model(Waiting(), local=Steps(6)))
    with pytest.warns(RuntimeWarning, match="cannot be captured as a CUDA graph"):
        mine = federate("stacked", training)
    assert_same_outcomes(mine, federate("reference", training))
    assert torch.rand(9, device=training.device).unique().numel() > 1, "the broken capture has left the generator alone"


def test_a_planned_round_is_the_round_and_a_plan_for_others_is_not_used(monkeypatch):
    training = make_training("batchnorm", "fedlalr", sizes=(8, 6, 7, 6))
    cohort, others = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 3])
    state, plan = initial_state(training), feed_module.plan

    def trained(*planned: tuple[int, torch.Tensor]) -> torch.Tensor:
        with closing(StackedEngine(training)) as engine:
            engine.chunk = 3  # known after the first round
            for round, clients in planned:
                engine.plan(round, clients)
            made: list[int] = []
            monkeypatch.setattr(feed_module, "plan", lambda *given: made.append(1) or plan(*given))
            outcome = run_round(state, cohort, 0.01, engine, training, Rules())
            plans.append(len(made))
            return outcome.state.slots.x

    plans: list[int] = []
    runs = [trained(), trained((1, cohort)), trained((1, others)), trained((2, cohort))]
    assert all(torch.equal(x, runs[0]) for x in runs)
    assert plans == [1, 0, 1, 1]
