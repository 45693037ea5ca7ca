"""Personal parameters (FedPer) and local buffers (FedBN) in a run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fedlalr as fl
from closeness import assert_close
from conftest import make_clients, make_model
from fedlalr.training import memory
from fedlalr.training.engines.reference import ReferenceEngine

HEAD = ("2.*",)
OPTIONS = {"rounds": 3, "local": fl.Steps(2), "batch_size": None, "device": "cpu", "engine": "reference"}


def norm_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=1.0), nn.Tanh(), nn.Linear(6, 3)).double()


def fedper(model, clients, rounds, steps, lr):
    """FedPer in plain torch: the mean of the base layer, each client's own head."""
    models = [copy.deepcopy(model) for _ in clients]
    for _ in range(rounds):
        for mine, (inputs, targets) in zip(models, clients, strict=True):
            optimiser = torch.optim.SGD(mine.parameters(), lr)
            for _ in range(steps):
                optimiser.zero_grad()
                nn.functional.cross_entropy(mine(inputs), targets).backward()
                optimiser.step()
        for name in ("weight", "bias"):
            mean = torch.stack([getattr(mine[0], name).data for mine in models]).mean(0)
            for mine in models:
                getattr(mine[0], name).data.copy_(mean)
    return models


def test_fedavg_with_a_personal_head_is_fedper():
    model, clients = make_model(), make_clients()
    result = fl.run(model, clients, fl.FedAvg(lr=0.1), personal=HEAD, **OPTIONS)
    for client, wanted in enumerate(fedper(model, clients, rounds=3, steps=2, lr=0.1)):
        found = result.client_model(client).state_dict()
        for name, value in wanted.state_dict().items():
            assert_close(found[name], value)
    assert torch.equal(result.model[2].weight, model[2].weight)


def test_statistics_stay_with_their_client():
    clients = [(inputs + 10 * client, targets) for client, (inputs, targets) in enumerate(make_clients())]
    options = OPTIONS | {"personal": ["1.*"], "buffers": "local", "local": fl.Steps(1)}
    result = fl.run(norm_model(), clients, fl.FedAvg(lr=1e-9), **options)
    for client, (inputs, _) in enumerate(clients):
        layer = result.client_model(client)[1]
        assert_close(layer.running_mean, result.model[0](inputs).mean(0).detach(), tolerance=1e-6)  # of the last batch
        assert layer.num_batches_tracked == 3
    assert not result.model[1].running_mean.any()


def test_what_stays_is_neither_sent_nor_counted():
    whole = fl.run(norm_model(), make_clients(), fl.FedLALR(), **OPTIONS)
    apart = fl.run(norm_model(), make_clients(), fl.FedLALR(), personal=("1.*", "3.*"), buffers="local", **OPTIONS)
    sent = 5 * 3 * 8 * (4 * 6 + 6)  # clients, slots, bytes, the first layer
    assert (apart.history[0].bytes_up, apart.history[0].bytes_down) == (sent, sent)
    assert whole.history[0].bytes_up == 5 * (3 * 8 * (30 + 12 + 21) + 8 * 13)


def test_a_client_that_never_took_part_has_the_initial_personal_parameters():
    model = make_model()
    result = fl.run(model, make_clients(), fl.FedAvg(), personal=HEAD, clients_per_round=1, **OPTIONS | {"rounds": 1})
    (client,) = result.personal
    for other in range(5):
        head = result.client_model(other)[2].weight
        assert torch.equal(head, model[2].weight) == (other != client)
        assert torch.equal(result.client_model(other)[0].weight, result.model[0].weight)
    with pytest.raises(ValueError, match="there is no client 5; the clients are numbered 0 to 4"):
        result.client_model(5)
    with pytest.raises(ValueError, match="there is no client 'a'; the clients are numbered 0 to 4"):
        result.client_model("a")


def test_without_personal_parameters_every_client_has_the_servers_model():
    result = fl.run(make_model(), make_clients(), fl.FedAvg(), **OPTIONS)
    for name, value in result.client_model(3).state_dict().items():
        assert torch.equal(value, result.model.state_dict()[name])


@pytest.mark.parametrize("algorithm", [fl.SCAFFOLD(lr=0.1), fl.FedAdam(lr=0.1)])
def test_a_resumed_run_gives_the_same_bits(tmp_path, algorithm):
    options = OPTIONS | {"personal": ("1.*", "3.*"), "buffers": "local", "clients_per_round": 2}
    whole = fl.run(norm_model(), make_clients(), algorithm, **options | {"rounds": 6})
    fl.run(norm_model(), make_clients(), algorithm, run_dir=tmp_path, **options | {"rounds": 2})
    other = norm_model()
    nn.init.zeros_(other[3].weight)  # a new client starts from the model that the run was started with
    parts = fl.run(other, make_clients(), algorithm, run_dir=tmp_path, resume=True, **options | {"rounds": 6})
    assert set(parts.personal) == set(whole.personal)
    for client in range(5):
        mine, theirs = (result.client_model(client).state_dict() for result in (parts, whole))
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_run_with_other_personal_parameters_is_not_resumed(tmp_path):
    fl.run(make_model(), make_clients(), fl.FedAvg(), run_dir=tmp_path, personal=HEAD, **OPTIONS)
    with pytest.raises(RuntimeError, match="personal was"):
        fl.run(make_model(), make_clients(), fl.FedAvg(), run_dir=tmp_path, resume=True, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"personal": [2]}, "personal must be patterns of parameter names"),
        ({"personal": ("*",)}, "covers every trainable parameter"),
        ({"personal": "2.wieght"}, "'2.wieght', which matches no trainable parameter; close names are 2.weight"),
        ({"personal": HEAD, "buffers": "recalibrate"}, "needs the server's model, which is incomplete"),
        ({"buffers": "local", "reduce": {"buffers": "median"}}, "with buffers='local' they are not sent"),
        ({"personal": HEAD, "test": make_clients((9,))[0]}, "incomplete with personal parameters"),
    ],
)
def test_options_that_contradict_each_other_are_rejected(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        fl.run(make_model(), make_clients(), fl.FedAvg(), **options)


def test_a_run_whose_clients_keep_more_than_fits_is_rejected(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 800)
    with pytest.raises(ValueError, match=r"the clients keep personal.x between rounds: 0.000168 MB for each of 5 .*"):
        fl.run(make_model(), make_clients(), fl.FedAvg(), personal=("2.*",), **OPTIONS | {"rounds": 10})


class Spoilt(ReferenceEngine):
    """Returns NaN in the head of client 2."""

    def train(self, work):
        replies = super().train(work)
        replies.slots.x[2, -1] = torch.nan
        return replies


def test_a_client_whose_personal_parameters_diverge_is_rejected_and_keeps_the_old_ones():
    options = OPTIONS | {"engine": Spoilt, "rounds": 1}
    with pytest.warns(fl.RepliesRejected, match="client 2 .kept personal.x is not finite"):
        result = fl.run(make_model(), make_clients(), fl.FedAvg(), personal=HEAD, **options)
    assert sorted(result.personal) == [0, 1, 3, 4]


def test_local_buffers_of_a_module_without_buffers_change_nothing():
    plain, local = (
        fl.run(make_model(), make_clients(), fl.FedAvg(), buffers=how, **OPTIONS) for how in ("average", "local")
    )
    assert torch.equal(plain.model[2].weight, local.model[2].weight)
    assert local.client_model(0) is not local.model
