"""What clients keep between their rounds."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.data.population import as_clients
from fedlalr.federation.round import Rules, run_round
from fedlalr.federation.session import initial_state
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.interfaces import Replies, Training, Work
from fedlalr.training.layout import Layout


class Spoil(ReferenceEngine):
    """Sends NaN in one client's x in the rounds after the first."""

    def train(self, work: Work) -> Replies:
        replies = super().train(work)
        if work.round == 1:
            return replies
        spoilt = replies.slots.x.clone()
        spoilt[2] = math.nan
        return replace(replies, slots=replies.slots.replace(x=spoilt))


def training() -> Training:
    model = make_model()
    return Training(
        model=model,
        layout=Layout.of(model),
        clients=as_clients(make_clients()),
        algorithm=fl.SCAFFOLD(lr=0.1),
        loss=torch.nn.functional.cross_entropy,
        local=fl.Steps(3),
        device=torch.device("cpu"),
        batch_size=4,
    )


def test_a_rejected_reply_leaves_what_its_client_keeps_as_it_was():
    setting = training()
    engine, cohort = Spoil(setting), torch.arange(5)
    first = run_round(initial_state(setting), cohort, 0.1, engine, setting, Rules()).state
    outcome = run_round(first, cohort, 0.1, engine, setting, Rules())
    assert [rejection.client for rejection in outcome.rejected] == [2]
    for client in range(5):
        changed = not torch.equal(first.kept[client].c_i, outcome.state.kept[client].c_i)
        assert changed == (client != 2)


def test_only_clients_that_took_part_keep_anything():
    setting = training()
    state = run_round(
        initial_state(setting), torch.tensor([1, 3]), 0.1, ReferenceEngine(setting), setting, Rules()
    ).state
    assert set(state.kept) == {1, 3}


def test_the_state_that_went_in_is_not_changed():
    setting = training()
    state = initial_state(setting)
    before = {name: tensor.clone() for name, tensor in state.slots.items()}
    run_round(state, torch.arange(5), 0.1, ReferenceEngine(setting), setting, Rules())
    assert state.round == 0
    assert not state.kept
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.slots.items())
