"""Settings on Flower are the options of `fl.run`."""

import inspect
from dataclasses import fields

import pytest

import fedlalr as fl
from conftest import make_model
from fedlalr.flower.client_data import RemoteClients
from fedlalr.flower.settings import Settings


def test_every_setting_is_an_option_of_run_with_the_same_default():
    options = inspect.signature(fl.run).parameters
    assert {field.name: field.default for field in fields(Settings)} == {
        field.name: options[field.name].default for field in fields(Settings)
    }


def test_only_what_has_no_meaning_on_flower_is_missing():
    options = {name for name, p in inspect.signature(fl.run).parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert options - {field.name for field in fields(Settings)} == {"observers", "test", "measures", "engine", "debug"}


def test_unknown_settings_are_refused_with_the_nearest_name():
    with pytest.raises(TypeError, match="Did you mean 'batch_size'"):
        Settings.of({"batchsize": 3})


def test_what_the_simulator_refuses_is_refused_here_too():
    with pytest.raises(ValueError, match="batch_size must be"):
        Settings.of({"batch_size": 0}).training(make_model(), fl.FedLALR(), RemoteClients(1))
    with pytest.raises(TypeError, match="is the class FedLALR"):
        Settings().training(make_model(), fl.FedLALR, RemoteClients(1))


def test_recalibration_is_refused_because_it_needs_the_clients_data_again():
    with pytest.raises(ValueError, match="recalibrate"):
        Settings.of({"buffers": "recalibrate"}).training(make_model(), fl.FedLALR(), RemoteClients(1))
