"""Personal parameters and local buffers live on the nodes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import fedlalr as fl
from flower.federation import POPULATION, nodes, same, simulated, strategy, with_buffers
from flower.in_process import InProcessGrid

PERSONAL = {"personal": ("1.*", "3.*"), "buffers": "local", "batch_size": 5}


@pytest.mark.parametrize("algorithm", [fl.FedLALR(lr=0.05), fl.SCAFFOLD(lr=0.05), fl.FedAdam(lr=0.05)])
def test_nodes_give_the_simulators_result_and_send_only_what_is_shared(tmp_path, algorithm):
    grid = InProcessGrid(nodes(algorithm, tmp_path, with_buffers, PERSONAL))
    server = strategy(algorithm, with_buffers, PERSONAL)
    server.start(grid)
    wanted = simulated(algorithm, with_buffers, PERSONAL)
    assert same(server.result, wanted)
    for message in grid.sent:
        for arrays in message.content.array_records.values():
            assert set(arrays) == {"0.weight", "0.bias"}
    for client in range(POPULATION):
        (place,) = tmp_path.glob(f"*/client-{client:06d}/round-000002.safetensors")
        state = load_file(place)
        own = wanted.client_model(client).state_dict()
        assert torch.equal(state["buffer.1.running_mean"], own["1.running_mean"])
        head = torch.cat([own[name].flatten() for name in ("1.weight", "1.bias", "3.weight", "3.bias")])
        assert torch.equal(state["personal.x"], head)
    with pytest.raises(RuntimeError, match="on their own machines"):
        server.result.client_model(0)


def test_a_resumed_deployment_continues_with_the_nodes_own_parameters(tmp_path):
    algorithm, folder = fl.FedLALR(lr=0.05), tmp_path / "run"
    whole = simulated(algorithm, with_buffers, PERSONAL | {"rounds": 3})
    for rounds in (1, 3):
        settings = PERSONAL | {"rounds": rounds, "run_dir": folder, "resume": True}
        server = strategy(algorithm, with_buffers, settings)
        server.start(InProcessGrid(nodes(algorithm, tmp_path, with_buffers, settings)))
    assert same(server.result, whole)


def test_a_node_with_other_personal_parameters_takes_no_part(tmp_path):
    algorithm = fl.FedAvg(lr=0.05)
    grid = InProcessGrid(nodes(algorithm, tmp_path, with_buffers, PERSONAL | {"personal": ("3.*",)}))
    with pytest.raises(fl.RoundFailed, match="other settings"):
        strategy(algorithm, with_buffers, PERSONAL).start(grid)


def test_a_node_whose_personal_parameters_diverge_is_rejected(tmp_path):
    algorithm, settings = fl.FedAvg(lr=1e308), {"personal": ("0.*",)}
    grid = InProcessGrid(nodes(algorithm, tmp_path, settings=settings))
    with pytest.raises(fl.RoundFailed, match=r"kept personal.x of client . is no longer finite"):
        strategy(algorithm, settings=settings).start(grid)
