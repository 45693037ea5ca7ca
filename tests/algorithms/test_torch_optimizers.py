"""Methods that are torch's own optimisers with one client, or on one side of the network."""

from __future__ import annotations

import torch
from torch import nn

import fedlalr as fl
from closeness import assert_close
from fedlalr.algorithms.server_optimizers import nesterov
from fedlalr.algorithms.slots import Slots


def test_with_one_client_and_decoupled_weight_decay_local_adam_is_torchs_adamw() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    inputs, targets = torch.randn(9, 4, dtype=torch.float64), torch.randint(0, 3, (9,))
    settings = {"rounds": 3, "local": fl.Steps(4), "batch_size": None, "decoupled_weight_decay": 0.5, "decayed": "*"}
    for moments in ("keep", "average"):
        mine = fl.run(
            model, [(inputs, targets)], fl.LocalAdam(lr=0.05, moments=moments), engine="reference", **settings
        )
        theirs = nn.Linear(4, 3).double()
        theirs.load_state_dict(model.state_dict())
        optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.05, weight_decay=0.5)
        for _ in range(12):
            optimizer.zero_grad()
            nn.functional.cross_entropy(theirs(inputs), targets).backward()
            optimizer.step()
        for name, parameter in theirs.named_parameters():
            assert_close(mine.state["x"][name], parameter)


def test_the_nesterov_server_is_torchs_sgd_on_the_negative_change() -> None:
    torch.manual_seed(0)
    server = Slots(x=torch.randn(5, dtype=torch.float64), m=torch.zeros(5, dtype=torch.float64))
    theirs = nn.Parameter(server.x.clone())
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        delta = torch.randn(5, dtype=torch.float64)
        server = nesterov(server, delta, lr=0.7, beta=0.9)
        theirs.grad = -delta
        optimizer.step()
        assert_close(server.x, theirs)
