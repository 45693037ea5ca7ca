"""A failing client is named with its error, and debug=True trains it alone and shows its data."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import fedlalr as fl
from conftest import make_clients, make_model

ENGINES = ["reference", "stacked"]


class Picky(nn.Module):
    """A module that raises on some inputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, inputs):
        if (inputs == 99).any():
            raise ArithmeticError("cannot stand 99")
        return self.layer(inputs)


def run(clients, model=None, **options):
    settings = {"rounds": 2, "local": fl.Steps(3), "batch_size": 4, "engine": "reference"}
    return fl.run(model or make_model(), clients, fl.FedLALR(), **(settings | options))


def test_a_client_that_raises_is_rejected_and_shown_once_with_its_traceback(capsys):
    clients = make_clients()
    clients[3] = (torch.full_like(clients[3][0], 99.0), clients[3][1])
    result = run(clients, Picky(), debug=True)
    assert [r.rejected for r in result.history] == [(fl.Rejection(3, "ArithmeticError: cannot stand 99"),)] * 2
    shown = capsys.readouterr().err
    assert shown.count("client 3, round 1: ArithmeticError: cannot stand 99") == 1
    assert "9 samples" in shown
    assert "inputs: 9 × 4 float64, from 99 to 99, mean 99" in shown
    assert "samples of each label: 0: " in shown
    assert 'raise ArithmeticError("cannot stand 99")' in shown
    assert "round 2" not in shown


def test_numbers_that_stop_being_finite_are_shown_with_the_step(capsys):
    clients = make_clients()
    clients[1] = (clients[1][0].clone(), clients[1][1])
    clients[1][0][0, 2] = math.nan
    run(clients, debug=True, rounds=1, batch_size=None)
    shown = capsys.readouterr().err
    assert "client 1, round 1: x is not finite" in shown
    assert "mean" in shown
    assert "; 1 NaN" in shown
    assert "norms of its slots after its 3 local steps, trained alone:" in shown
    assert "step 1: x nan, m nan" in shown
    assert "its numbers are not finite from step 1 on" in shown


def test_the_clients_of_a_round_that_fails_are_shown_too(capsys):
    clients = [(torch.full_like(x, math.inf), y) for x, y in make_clients()]
    with pytest.raises(fl.RoundFailed):
        run(clients, debug=True)
    assert capsys.readouterr().err.count("x is not finite") == 5


def test_data_that_cannot_be_read_is_shown_as_such(capsys):
    class Own(Dataset):
        def __init__(self, pair, broken):
            self.pair, self.broken = pair, broken

        def __len__(self):
            return len(self.pair[1])

        def __getitem__(self, index):
            if self.broken and index == 2:
                raise OSError("disk gone")
            return self.pair[0][index], self.pair[1][index]

    clients = [Own(pair, broken=i == 4) for i, pair in enumerate(make_clients())]
    result = run(clients, debug=True, rounds=1, batch_size=None)
    assert result.history[0].rejected == (fl.Rejection(4, "OSError: disk gone"),)
    assert "10 samples, which cannot be read: OSError: disk gone" in capsys.readouterr().err


def test_nothing_is_shown_without_the_switch_or_without_a_fault(capsys):
    clients = make_clients()
    run(clients, debug=True)
    clients[1] = (torch.full_like(clients[1][0], math.nan), clients[1][1])
    run(clients)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("engine", ENGINES)
def test_looking_changes_nothing(engine, capsys):
    clients = make_clients()
    clients[3] = (torch.full_like(clients[3][0], math.nan), clients[3][1])
    plain, looked = (run(clients, debug=debug, engine=engine) for debug in (False, True))
    assert "client 3" in capsys.readouterr().err
    for slot, values in plain.state.items():
        assert all(torch.equal(value, looked.state[slot][name]) for name, value in values.items())


class Greedy(nn.Module):
    """A module that requests more memory than any machine has, on some inputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, inputs):
        if (inputs == 99).any():
            torch.empty(1 << 55)
        return self.layer(inputs)


@pytest.mark.parametrize("engine", ["reference", pytest.param("workers:2", marks=pytest.mark.faults)])
def test_a_client_that_runs_out_of_memory_is_rejected_with_its_error_and_the_others_continue(engine):
    clients = make_clients()
    clients[3] = (torch.full_like(clients[3][0], 99.0), clients[3][1])
    result = run(clients, Greedy(), engine=engine, rounds=1)
    [rejected] = result.history[0].rejected
    assert rejected.client == 3
    assert "allocate" in rejected.reason or "torch.empty" in rejected.reason
    assert result.history[0].clients == 4
