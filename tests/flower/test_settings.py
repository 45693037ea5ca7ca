"""Settings on Flower are the options of `fl.run`."""

import inspect

import pytest

import fedlalr as fl
from conftest import make_model
from fedlalr.flower import FederatedStrategy
from fedlalr.flower.settings import read_settings, settings_names


def test_only_options_without_meaning_on_flower_are_missing():
    options = {name for name, p in inspect.signature(fl.run).parameters.items() if p.kind is p.KEYWORD_ONLY}
    absent = {"observers", "test", "metrics", "client_tests", "engine", "debug", "progress", "speeds"}
    assert options - set(settings_names()) == absent


def test_unknown_settings_are_rejected_with_the_nearest_name():
    with pytest.raises(TypeError, match="Did you mean 'batch_size'"):
        read_settings({"batchsize": 3})


def test_recalibration_is_rejected_because_it_needs_the_clients_data_again():
    with pytest.raises(ValueError, match="recalibrate"):
        read_settings({"buffers": "recalibrate"})


def test_a_strategy_rejects_what_the_simulator_rejects():
    with pytest.raises(ValueError, match="batch_size must be"):
        FederatedStrategy(make_model(), fl.FedLALR(), {"batch_size": 0}, population=1)
    with pytest.raises(TypeError, match="is the class FedLALR"):
        FederatedStrategy(make_model(), fl.FedLALR, population=1)
