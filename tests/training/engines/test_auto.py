"""`engine="auto"` follows its documented rule and reports its choice and the reason."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import fedlalr as fl
from fedlalr.data.population import as_clients
from fedlalr.training.engines import auto
from fedlalr.training.engines.registry import create_engine
from fedlalr.training.layout import Layout
from training.jobs import make_training


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})


def test_a_small_chain_of_linear_layers_is_stacked():
    engine, reason = create_engine("auto", make_training("perceptron"), cohort=4)
    assert engine.name == "stacked"
    assert "linear layers" in reason


def test_one_client_a_round_needs_no_stack():
    engine, reason = create_engine("auto", make_training("perceptron"), cohort=1)
    assert (engine.name, reason) == ("reference", "one client per round")


def test_a_small_round_of_another_network_is_left_to_the_reference(two_cores):
    assert create_engine("auto", make_training("batchnorm"), cohort=4)[0].name == "reference"


def test_a_large_round_goes_to_workers_where_there_are_several_cores(two_cores, monkeypatch):
    training = make_training("batchnorm")
    monkeypatch.setattr(auto, "WORTH_PROCESSES", 1e4)
    assert auto.candidates(training, cohort=4)[0][0] == "workers"
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    assert auto.candidates(training, cohort=4)[0][0] == "reference"


def test_a_large_chain_is_not_stacked(monkeypatch):
    monkeypatch.setattr(auto, "MOST_PARAMETERS", 100)
    assert auto.candidates(make_training("perceptron"), cohort=4)[0][0] == "reference"


def test_multiplications_are_counted_and_the_module_is_left_as_it_was():
    training = make_training("groupnorm")
    assert auto.multiplications(training) == 4 * 4 * 4 * 9 + 16 * 3  # 4 maps of 4 × 4 from 3 × 3 patches, then linear
    assert training.model.training


class Transposed(nn.Module):
    """A linear layer as in GPT-2: its own weight parameter, with the inputs first."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, tokens):
        return torch.addmm(self.bias, tokens.flatten(0, -2), self.weight).view(*tokens.shape[:-1], -1)


LENGTH, WIDTH, HIDDEN = 6, 6, 8  # a picture of the jobs, read as a sequence of its lines
ATTENTION = 4 * LENGTH * WIDTH * WIDTH + 2 * LENGTH * LENGTH * WIDTH  # projections, scores and weighted sums
LAYERS = {
    "a linear layer of another kind": (lambda: Transposed(WIDTH, HIDDEN), LENGTH * WIDTH * HIDDEN),
    "a layer of a transformer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, batch_first=True),
        ATTENTION + 2 * LENGTH * WIDTH * HIDDEN,
    ),
    "a transposed convolution": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, LENGTH)), nn.ConvTranspose2d(1, 4, 3)),
        LENGTH * WIDTH * 4 * 9,
    ),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("make", "expected"), LAYERS.values(), ids=LAYERS)
def test_multiplications_of_any_module_are_counted(make, expected, frozen):
    model = nn.Sequential(nn.Flatten(1, 2), make()).double().requires_grad_(not frozen)
    training = replace(make_training("perceptron"), model=model)
    assert auto.multiplications(training) == expected
    assert torch.backends.mha.get_fastpath_enabled()


def test_recurrent_layers_count_as_heavy(two_cores):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(6, 5, batch_first=True)

        def forward(self, images):
            return self.lstm(images.squeeze(1))[0][:, -1, :3]

    training = make_training("perceptron")
    object.__setattr__(training, "model", Recurrent().double())
    assert auto.candidates(training, cohort=4)[0][0] == "workers"


def test_a_rejected_stack_becomes_the_reference_with_the_reason(monkeypatch):
    def total(outputs, targets):
        return (outputs.softmax(1) - nn.functional.one_hot(targets, 3)).square().sum()

    engine, reason = create_engine("auto", make_training("perceptron", loss=total), cohort=4)
    assert engine.name == "reference"
    assert "cannot be stacked" in reason
    assert "mean over samples" in reason


def test_a_run_says_what_was_picked(clients, model):
    result = fl.run(model, clients, fl.FedAvg(0.1), rounds=1, batch_size=4)
    assert result.info.engine == "stacked"
    assert result.info.reason
    same = fl.run(model, clients, fl.FedAvg(0.1), rounds=1, batch_size=4, engine="reference")
    for name, value in same.state["x"].items():
        torch.testing.assert_close(result.state["x"][name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore::fedlalr.federation.session.RepliesRejected")
@pytest.mark.parametrize(("engine", "threshold"), [("auto", 1e4), ("auto", 1e12), ("reference", 1e4)])
def test_the_time_of_a_large_run_is_estimated_beforehand(engine, threshold, two_cores, monkeypatch):
    monkeypatch.setattr(auto, "WORTH_PROCESSES", threshold)
    training = make_training("batchnorm")
    clients = list(pairs_of(training.clients))
    clients[0] = clients[0][0][:1], clients[0][1][:1]  # BatchNorm cannot train on a single sample
    info = fl.run(training.model, clients, fl.FedAvg(0.1), rounds=2, engine=engine).info
    if (engine, threshold) == ("auto", 1e4):
        assert info.seconds > 0
    else:
        assert info.seconds is None
    assert all(parameter.grad is None for parameter in training.model.parameters())


def test_what_cannot_be_given_to_workers_is_left_to_the_reference(two_cores, monkeypatch):
    training = make_training("batchnorm")
    nn.utils.parametrizations.weight_norm(training.model[0])  # torch does not pickle a parametrised layer
    training = replace(training, layout=Layout.of(training.model))
    monkeypatch.setattr(auto, "WORTH_PROCESSES", 1e4)
    engine, reason = create_engine("auto", training, cohort=4)
    assert engine.name == "reference"
    assert "cannot be sent to worker processes" in reason


class Listed(Dataset):
    """Samples in a list, which is copied to every process."""

    def __init__(self, inputs, targets):
        self.samples = [(sample.numpy().tobytes(), target) for sample, target in zip(inputs, targets, strict=True)]
        self.shape = inputs.shape[1:]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample, target = self.samples[index]
        return torch.frombuffer(bytearray(sample), dtype=torch.float64).view(self.shape), target


@pytest.mark.parametrize("kind", ["pool", "list"])
def test_data_too_large_to_copy_are_left_to_the_reference(kind, two_cores, monkeypatch):
    training = make_training("batchnorm")
    bytes_of_data = training.clients.inputs.nbytes
    if kind == "list":
        training = replace(training, clients=as_clients([Listed(*pair) for pair in pairs_of(training.clients)]))
    monkeypatch.setattr(auto, "WORTH_PROCESSES", 1e4)
    monkeypatch.setattr("fedlalr.training.engines.registry.memory", lambda: 8 * bytes_of_data)
    engine, reason = create_engine("auto", training, cohort=4)
    assert engine.name == "reference"
    assert re.search(r"would take more than .* GB; keep arrays in files .*mmap_mode='r'.* engine='workers'", reason)


def pairs_of(population):
    for client, size in enumerate(population.sizes.tolist()):
        yield population.batch(client, torch.arange(size))
