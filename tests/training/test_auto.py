"""`engine="auto"` follows its stated rule and says what it picked and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedlalr as fl
from fedlalr.training.engines.registry import auto, create_engine
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
    assert (engine.name, reason) == ("reference", "one client a round")


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
    assert not training.model[0]._forward_hooks


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


def test_a_refused_stack_becomes_the_reference_with_the_reason(monkeypatch):
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


def test_what_cannot_be_given_to_workers_is_left_to_the_reference(two_cores, monkeypatch):
    training = make_training("batchnorm")
    nn.utils.parametrizations.weight_norm(training.model[0])  # torch refuses to pickle a parametrised layer
    training = replace(training, layout=Layout.of(training.model))
    monkeypatch.setattr(auto, "WORTH_PROCESSES", 1e4)
    engine, reason = create_engine("auto", training, cohort=4)
    assert engine.name == "reference"
    assert "cannot be given to worker processes" in reason
