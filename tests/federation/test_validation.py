"""Wrong input: each case with the message a person gets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedlalr as fl
from fedlalr.federation.run import RepliesRefused

PAIR = (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))


def run(model=None, clients=None, algorithm=None, **options):
    return fl.run(
        model or nn.Linear(4, 3), [PAIR, PAIR] if clients is None else clients, algorithm or fl.FedAvg(0.1), **options
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": []}, "there are no clients"),
        ({"clients": [PAIR, (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))]}, "client 1 has no samples"),
        (
            {"clients": [PAIR, (torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))]},
            "client 1 has 3 inputs but 2 targets",
        ),
        ({"clients": [PAIR, (torch.zeros(3, 5), PAIR[1])]}, r"client 1's inputs are \(5,\)"),
        ({"clients_per_round": 3}, "clients_per_round is 3 but there are only 2 clients"),
        ({"clients_per_round": 0}, "clients_per_round must be a whole number of at least 1"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1, not 0"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"lr_decay": 0.0}, "lr_decay must be a finite number above 0"),
        ({"weight_decay": -1.0}, "weight_decay must be a finite number of at least 0"),
        ({"clip_norm": 0.0}, "clip_norm must be a finite number above 0"),
        ({"weighting": "sizes"}, "weighting must be one of 'uniform', 'samples', not 'sizes'"),
        ({"buffers": "none"}, "buffers must be one of 'average', 'recalibrate'"),
        ({"engine": "turbo"}, "engine must be one of 'auto', 'reference'"),
        ({"min_clients": 3}, "min_clients is 3 but only 2 clients take part"),
        ({"resume": True}, "resume=True needs run_dir"),
        ({"clients": [(PAIR[0], torch.tensor([0, 1, 7]))]}, "client 0 has label 7, but the model has classes 0 to 2"),
        ({"test": (PAIR[0], torch.tensor([0, 1, -1]))}, "the test set has label -1"),
        ({"test": (PAIR[0], PAIR[1][:2])}, "the test set has 3 inputs but 2 targets"),
        ({"test": (PAIR[0][:0], PAIR[1][:0])}, "the test set is empty"),
        ({"clients": [(PAIR[0], torch.zeros(3))]}, r"targets are \(2,\) torch.float32.*use targets.long\(\)"),
        ({"model": nn.Linear(4, 1)}, r"the model has one output, \(2, 1\).*for each class"),
        (
            {"model": nn.Linear(4, 1), "clients": [(PAIR[0], torch.zeros(3))], "loss": nn.functional.mse_loss},
            r"outputs, \(2, 1\) torch.float32, and client 0's targets, \(2,\).*broadcasting.*targets.unsqueeze\(1\)",
        ),
        ({"loss": lambda outputs, targets: 1 / 0}, "the loss cannot be computed of .*: ZeroDivisionError"),
        ({"loss": lambda outputs, targets: outputs.sum(1)}, r"one number.*not \(2,\) torch.float32"),
        ({"device": "gpu"}, "there is no device 'gpu'; use 'auto', 'cpu'"),
        ({"clients": [(torch.zeros(3, 9), PAIR[1])]}, r"the model cannot run on client 0's inputs, \(3, 9\)|\(2, 9\)"),
    ],
)
def test_bad_values_are_refused_with_a_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": fl.FedLALR}, "pass an instance, such as FedLALR()"),
        ({"algorithm": "fedavg"}, "algorithm must be one of fedlalr's"),
        ({"model": "resnet"}, "model must be a torch.nn.Module, not 'resnet'"),
        ({"seed": 1.5}, "seed must be a whole number, not 1.5"),
        ({"test": PAIR[0]}, r"test must be a pair \(inputs, targets\), not Tensor"),
        ({"local": 5}, "local must be fl.Steps"),
        ({"clients": {1: PAIR}}, "clients must be a sequence"),
        ({"clients": [PAIR, "two"]}, "client 1 is a str"),
        ({"clients": [PAIR, (PAIR[0].numpy(), PAIR[1].numpy())]}, r"client 1 is made of NumPy.*torch.from_numpy"),
        ({"test": (PAIR[0].numpy(), PAIR[1])}, "the test set is made of NumPy.*torch.from_numpy"),
    ],
)
def test_wrong_kinds_are_refused_with_a_sentence(options, message):
    with pytest.raises(TypeError, match=message):
        run(**options)


def test_a_model_with_nothing_to_train_is_refused():
    model = nn.Linear(4, 3).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter with requires_grad=True"):
        run(model=model)


def test_mixed_devices_are_refused():
    elsewhere = (torch.zeros(3, 4, device="meta"), torch.zeros(3, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match="client 1's inputs are on meta but client 0's on cpu"):
        run(clients=[PAIR, elsewhere])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no usable CUDA device"):
        run(device="cuda")


def test_a_client_that_raises_is_named_and_the_others_go_on():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, inputs):
            if (inputs == 99).any():
                raise ArithmeticError("cannot stand 99")
            return self.layer(inputs)

    bad = (torch.full((3, 4), 99.0), PAIR[1])
    with pytest.warns(RepliesRefused, match="client 1"):
        result = run(model=Picky(), clients=[PAIR, bad, PAIR], engine="reference", rounds=1)
    assert result.metrics[0].rejected == (fl.Rejection(1, "ArithmeticError: cannot stand 99"),)
    assert result.metrics[0].clients == 2
