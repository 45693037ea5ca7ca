import copy

import pytest
import torch
from torch import nn

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.federation.gradient_norms import GradientNorms

EQUAL = (8, 8, 8)


def squared_norm_of_the_mean_loss(model, clients):
    loss = sum(nn.functional.cross_entropy(model(inputs), targets) for inputs, targets in clients) / len(clients)
    return sum(float((g**2).sum()) for g in torch.autograd.grad(loss, list(model.parameters())))


def test_with_one_local_step_it_is_the_gradient_at_the_servers_model():
    model, clients = make_model(), make_clients(EQUAL)
    observer = GradientNorms(model, clients)
    wanted = [squared_norm_of_the_mean_loss(model, clients)]
    for rounds in (1, 2):
        trained = fl.run(model, clients, fl.FedLALR(), rounds=rounds, local=fl.Steps(1), engine="reference").model
        wanted.append(squared_norm_of_the_mean_loss(trained, clients))
    fl.run(model, clients, fl.FedLALR(), rounds=3, local=fl.Steps(1), engine="reference", observers=[observer])
    assert [value for steps in observer.values for value in steps] == pytest.approx(wanted, rel=1e-9)
    assert observer.mean == pytest.approx(sum(wanted) / 3)


def test_within_a_round_it_is_taken_at_the_average_of_the_clients_iterates():
    """Gradient descent on full batches, written out."""
    model, clients, lr = make_model(), make_clients(EQUAL), 0.5
    observer = GradientNorms(model, clients)
    fl.run(
        model,
        clients,
        fl.FedAvg(lr=lr),
        rounds=2,
        local=fl.Steps(3),
        batch_size=None,
        engine="reference",
        observers=[observer],
    )
    wanted, server = [], copy.deepcopy(model)
    for _ in range(2):
        copies = [copy.deepcopy(server) for _ in clients]
        for _ in range(3):
            average = average_of(copies)
            wanted.append(squared_norm_of_the_mean_loss(average, clients))
            for mine, (inputs, targets) in zip(copies, clients, strict=True):
                optimizer = torch.optim.SGD(mine.parameters(), lr)
                optimizer.zero_grad()
                nn.functional.cross_entropy(mine(inputs), targets).backward()
                optimizer.step()
        server = average_of(copies)
    assert [len(steps) for steps in observer.values] == [3, 3]
    assert [value for steps in observer.values for value in steps] == pytest.approx(wanted, rel=1e-9)


def average_of(models):
    average = copy.deepcopy(models[0])
    with torch.no_grad():
        for parameters in zip(average.parameters(), *(model.parameters() for model in models), strict=True):
            parameters[0].copy_(torch.stack(parameters[1:]).mean(0))
    return average


def test_the_observed_run_is_not_changed():
    model, clients = make_model(), make_clients(EQUAL)
    options = {"rounds": 2, "local": fl.Steps(2), "engine": "reference"}
    plain = fl.run(model, clients, fl.FedLALR(), **options)
    seen = fl.run(model, clients, fl.FedLALR(), observers=[GradientNorms(model, clients)], **options)
    assert all(torch.equal(plain.state["x"][name], seen.state["x"][name]) for name in plain.state["x"])


def test_other_engines_are_rejected():
    model, clients = make_model(), make_clients(EQUAL)
    with pytest.raises(ValueError, match="start a new run with engine='reference'"):
        fl.run(model, clients, fl.FedLALR(), rounds=1, engine="stacked", observers=[GradientNorms(model, clients)])


def test_clients_with_different_numbers_of_steps_are_rejected():
    model, clients = make_model(), make_clients((4, 12))
    with pytest.raises(ValueError, match="different numbers of local steps"):
        fl.run(
            model,
            clients,
            fl.FedLALR(),
            rounds=1,
            batch_size=4,
            engine="reference",
            observers=[GradientNorms(model, clients)],
        )


def test_a_model_with_statistics_is_rejected():
    with pytest.raises(ValueError, match="normalisation statistics"):
        GradientNorms(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), make_clients(EQUAL))


def test_a_rejected_reply_is_not_averaged_in_silence():
    model = make_model()
    clients = make_clients(EQUAL)
    clients[1][0][:] = float("nan")
    with pytest.raises(ValueError, match="1 replies were rejected"):
        fl.run(
            model,
            clients,
            fl.FedAvg(lr=0.1),
            rounds=1,
            local=fl.Steps(2),
            engine="reference",
            observers=[GradientNorms(model, clients)],
        )
