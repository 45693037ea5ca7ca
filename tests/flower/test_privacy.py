"""Private runs on Flower: the simulator's mechanism with secret noise and cohorts, and nodes that send no numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Array, Message

import fedlalr as fl
from fedlalr.federation.privacy.accounting import epsilon
from fedlalr.federation.privacy.mechanism import BudgetSpent
from flower.federation import PAIRS, SETTINGS, InProcessGrid, cohorts, nodes, simulated, strategy, with_buffers

QUIET = {"privacy": fl.Privacy(clip=1e6, noise_multiplier=1e-25, units={"m": 0.1, "v_hat": 0.01})}
"""Hardly any noise, so that runs can be compared."""
PRIVATE: dict[str, Any] = {"privacy": {"clip": 0.1, "noise_multiplier": 1.0, "delta": 1e-3}}


def flat(result: fl.Result | None, slot: str = "x") -> torch.Tensor:
    assert result is not None
    return torch.cat([value.flatten() for value in result.state[slot].values()])


@pytest.mark.parametrize("layout", ["records", "packed"])
def test_a_private_run_is_the_simulators_up_to_the_noise(tmp_path, layout):
    method = fl.FedLALR(lr=0.05, eps=0.05)
    server = strategy(method, settings=QUIET, layout=layout)
    server.start(InProcessGrid(nodes(method, tmp_path, settings=QUIET)))
    wanted = simulated(method, settings=QUIET)
    for slot in wanted.state:
        torch.testing.assert_close(flat(server.result, slot), flat(wanted, slot), rtol=1e-9, atol=1e-12)


def test_buffers_and_a_derived_second_moment_are_as_in_the_simulator(tmp_path):
    method = fl.FedLALR(lr=0.05, eps=0.05, momentum="restart")
    privacy = fl.Privacy(clip=1e6, noise_multiplier=1e-25, units={"buffers": 0.1}, second_moment="server")
    settings = {"privacy": privacy}
    server = strategy(method, with_buffers, settings)
    grid = InProcessGrid(nodes(method, tmp_path, with_buffers, settings))
    server.start(grid)
    wanted = simulated(method, with_buffers, settings)
    torch.testing.assert_close(flat(server.result, "v_hat"), flat(wanted, "v_hat"), rtol=1e-9, atol=1e-12)
    assert server.result is not None
    for name, buffer in wanted.model.named_buffers():
        torch.testing.assert_close(dict(server.result.model.named_buffers())[name], buffer, rtol=1e-9, atol=1e-12)


def test_nodes_send_neither_losses_nor_counts(tmp_path):
    replies: list[Message] = []
    everyone = nodes(fl.FedAvg(lr=0.1), tmp_path, settings=PRIVATE)
    for node in everyone.values():
        node.tamper = lambda message, reply: replies.append(reply) or reply
    server = strategy(fl.FedAvg(lr=0.1), settings=PRIVATE)
    found = server.start(InProcessGrid(everyone))
    assert replies
    for reply in replies:
        assert {record: dict(numbers) for record, numbers in reply.content.metric_records.items()} == {"metrics": {}}
        assert reply.content.config_records.keys() == {"fedlalr"}
        assert reply.content.config_records["fedlalr"].keys() == {"run", "round", "client", "contract"}
    record = server.result.history[-1]
    assert math.isnan(record.train_loss)
    assert record.epsilon == epsilon(1.0, 1.0, 2, 1e-3)
    assert dict(found.train_metrics_clientapp[2]) == {"epsilon": record.epsilon, "clients": 5, "rejected": 0}


def test_noise_is_not_that_of_the_seed_and_never_the_same(tmp_path):
    def private() -> torch.Tensor:
        server = strategy(fl.FedAvg(lr=0.1), settings=PRIVATE)
        server.start(InProcessGrid(nodes(fl.FedAvg(lr=0.1), tmp_path, settings=PRIVATE)))
        return flat(server.result)

    first, second = private(), private()
    simulation = flat(simulated(fl.FedAvg(lr=0.1), settings=PRIVATE))
    for one, other in ((first, second), (first, simulation)):
        assert not (one == other).any()  # two secret draws may well be close, in one of 51 parameters


def test_cohorts_are_drawn_from_the_secret_and_may_be_empty(tmp_path):
    """25 rounds of 5 clients, each with probability 1/5: a round without any has probability 0.33."""
    settings = PRIVATE | {"clients_per_round": 1, "rounds": 25}
    grids = [InProcessGrid(nodes(fl.FedAvg(lr=0.1), tmp_path, settings=settings)) for _ in range(2)]
    for grid in grids:
        server = strategy(fl.FedAvg(lr=0.1), settings=settings)
        server.start(grid)
        assert [record.clients for record in server.result.history] == [
            len(cohorts(grid).get(t, [])) for t in range(1, 26)
        ]
        told = {message.content.config_records["fedlalr"]["cohort"] for message in grid.sent if _trains(message)}
        assert told == {1}, "nodes are told the expected number, not the private one"
    first, second = map(cohorts, grids)
    assert first != second
    assert len(first) < 25


def _trains(message: Message) -> bool:
    return message.metadata.message_type == "train"


def test_lost_malformed_and_poisoned_replies_count_as_zero(tmp_path):
    """One node is silent, one sends NaN, one the wrong shape: the others' sum is still divided by five."""
    method, settings = fl.FedAvg(lr=0.1), QUIET | {"rounds": 1}
    settings["privacy"] = fl.Privacy(clip=1e6, noise_multiplier=1e-25)
    everyone = nodes(method, tmp_path, settings=settings)
    lost, poisoned, malformed, *_ = everyone.values()
    lost.tamper = lambda message, reply: None
    poisoned.tamper = lambda message, reply: _changed(reply, lambda array: array * math.nan)
    malformed.tamper = lambda message, reply: _changed(reply, lambda array: array[:1])
    server = strategy(method, settings=settings)
    server.start(InProcessGrid(everyone))
    start = torch.cat([p.detach().flatten() for p in server.problem.model.parameters()])
    two = fl.run(
        server.problem.model,
        PAIRS,
        method,
        **(SETTINGS | {"rounds": 1, "clients_per_round": 2, "sampling": lambda *_: [3, 4]}),
    )
    torch.testing.assert_close(flat(server.result) - start, (flat(two) - start) * 2 / 5, rtol=1e-9, atol=1e-12)
    assert [rejection.client for rejection in server.result.history[0].rejected] == [0, 1, 2]


def _changed(reply: Message, change: Any) -> Message:
    record = reply.content["x"]
    record["2.bias"] = Array(change(record["2.bias"].numpy()))
    return reply


def test_a_round_without_any_reply_is_valid(tmp_path):
    server = strategy(fl.FedAvg(lr=0.1), settings=PRIVATE | {"rounds": 1})
    server.start(InProcessGrid({}))
    assert server.result.history[0].clients == 0
    start = torch.cat([p.detach().flatten() for p in server.problem.model.parameters()])
    assert 0 < (flat(server.result) - start).norm() < 10 * 0.1 / 5 * math.sqrt(len(start))


def test_a_node_that_is_not_told_of_privacy_takes_no_part(tmp_path):
    server = strategy(fl.FedAvg(lr=0.1), settings=PRIVATE | {"rounds": 1})
    server.start(InProcessGrid(nodes(fl.FedAvg(lr=0.1), tmp_path)))
    assert server.result.history[0].clients == 0
    assert "other settings" in server.result.history[0].rejected[0].reason


def test_a_resumed_run_continues_the_account(tmp_path):
    settings = PRIVATE | {"run_dir": str(tmp_path / "run"), "resume": True}
    for rounds in (2, 3):
        server = strategy(fl.FedAvg(lr=0.1), settings=settings | {"rounds": rounds})
        server.start(InProcessGrid(nodes(fl.FedAvg(lr=0.1), tmp_path, settings=settings | {"rounds": rounds})))
    assert [record.epsilon for record in server.result.history] == [epsilon(1.0, 1.0, t, 1e-3) for t in (1, 2, 3)]


def test_more_rounds_than_the_noise_was_computed_for_are_rejected(tmp_path):
    settings = {"privacy": {"clip": 0.1, "epsilon": 5.0, "delta": 1e-3}}
    server = strategy(fl.FedAvg(lr=0.1), settings=settings)
    with pytest.raises(BudgetSpent, match="round 3 would spend more than epsilon=5"):
        server.start(InProcessGrid(nodes(fl.FedAvg(lr=0.1), tmp_path, settings=settings)), num_rounds=3)


def test_scores_of_nodes_are_rejected():
    with pytest.raises(ValueError, match="privacy on Flower and evaluation of the clients cannot be combined"):
        strategy(fl.FedAvg(lr=0.1), settings=PRIVATE, client_tests=True)


def test_personal_parameters_stay_on_the_nodes_of_a_private_run(tmp_path):
    settings = QUIET | {"personal": "2.*", "privacy": fl.Privacy(clip=1e6, noise_multiplier=1e-25)}
    server = strategy(fl.FedAvg(lr=0.1), settings=settings)
    server.start(InProcessGrid(nodes(fl.FedAvg(lr=0.1), tmp_path, settings=settings)))
    wanted = simulated(fl.FedAvg(lr=0.1), settings=settings)
    torch.testing.assert_close(flat(server.result), flat(wanted), rtol=1e-9, atol=1e-12)
    assert isinstance(wanted.model, nn.Module)
