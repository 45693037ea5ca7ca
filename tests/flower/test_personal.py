"""Personal parameters and local buffers live on the nodes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.data.population import as_clients
from fedlalr.federation.evaluation import Score
from fedlalr.federation.replies.payload import Rejected
from fedlalr.flower import client_app
from fedlalr.flower.wire.instruction import Instruction
from fedlalr.flower.wire.records import score_content, score_in
from flower.federation import PAIRS, POPULATION, SETTINGS, nodes, same, simulated, strategy, with_buffers
from flower.in_process import InProcessGrid, Node

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


@pytest.mark.parametrize("settings", [PERSONAL, {"batch_size": 5}])
def test_nodes_evaluate_and_send_only_numbers(tmp_path, settings):
    algorithm, settings = fl.FedLALR(lr=0.05), settings | {"holdout": 0.3, "evaluate_every": 1}
    grid = InProcessGrid(nodes(algorithm, tmp_path, with_buffers, settings))
    server = strategy(algorithm, with_buffers, settings)
    server.start(grid)
    wanted = simulated(algorithm, with_buffers, settings)
    assert [record.per_client for record in server.result.history] == [record.per_client for record in wanted.history]
    assert [record.bytes_down for record in server.result.history] == [record.bytes_down for record in wanted.history]
    asked = [message for message in grid.sent if message.metadata.message_type == "evaluate"]
    assert len(asked) == 2 * POPULATION
    names = {record for message in asked for record in message.content.array_records}
    assert names == ({"x"} if "personal" in settings else {"x", "buffers"})


def test_nodes_evaluate_on_test_samples_of_their_own(tmp_path):
    algorithm, tests = fl.FedAvg(lr=0.05), make_clients((4,) * POPULATION, seed=3)
    grid = InProcessGrid(
        {
            client: Node(
                client_app(
                    lambda context: make_model(),
                    lambda context: PAIRS[int(context.node_config["partition-id"])],
                    algorithm,
                    SETTINGS,
                    test=(lambda context: tests[int(context.node_config["partition-id"])]) if client != 3 else None,
                ),
                {"partition-id": client, "state-dir": str(tmp_path)},
            )
            for client in range(POPULATION)
        }
    )
    server = strategy(algorithm, client_tests=True)
    server.start(grid)
    wanted = fl.run(make_model(), PAIRS, algorithm, client_tests=tests, engine="reference", **SETTINGS)
    assert not server.result.history[0].per_client
    found = server.result.history[-1].per_client["loss"]
    assert found.clients == POPULATION - 1  # client 3 has no test samples, and the log says so
    assert found.worst == pytest.approx(wanted.history[-1].per_client["loss"].worst)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content["metrics"].update({"loss": float("nan")}), "loss is missing or not finite"),
        (lambda content: content["metrics"].update({"accuracy": 1.5}), "accuracy is not a number between 0 and 1"),
        (lambda content: content["fedlalr"].update({"client": 4}), "client is not that of the evaluation"),
        (lambda content: content.pop("fedlalr"), "no record"),
        (lambda content: content.pop("metrics"), "loss is missing"),
    ],
)
def test_a_malformed_score_is_left_out(change, words):
    asked = Instruction("ab", 3, 0.0, 1, 0, 5, 0, "c", "records")
    content = score_content(Score(0.5, 0.75), asked)
    assert score_in(content, asked) == Score(0.5, 0.75)
    change(content)
    with pytest.raises(Rejected, match=words):
        score_in(content, asked)


def test_a_node_has_one_kind_of_test_samples(tmp_path):
    settings = SETTINGS | {"holdout": 0.2}
    app = client_app(
        lambda context: make_model(), lambda context: PAIRS[0], fl.FedAvg(), settings, test=lambda context: PAIRS[1]
    )
    grid = InProcessGrid({0: Node(app, {"partition-id": 0, "state-dir": str(tmp_path)})})
    with pytest.raises(fl.RoundFailed, match="holdout in its settings; give one of them"):
        strategy(fl.FedAvg(), settings=settings, population=1).start(grid)


def test_the_test_set_of_a_population_is_not_used_with_personal_parameters(tmp_path):
    plain = as_clients(PAIRS)
    population = fl.data.Population(plain.inputs, plain.targets, plain.partition, test=PAIRS[0])
    server = strategy(fl.FedAvg(), with_buffers, PERSONAL, test=population)
    server.start(InProcessGrid(nodes(fl.FedAvg(), tmp_path, with_buffers, PERSONAL)))
    assert server.result.history[-1].accuracy is None
    assert strategy(fl.FedAvg(), with_buffers, test=population).problem.test is not None
    with pytest.raises(ValueError, match="incomplete with personal parameters"):
        strategy(fl.FedAvg(), with_buffers, PERSONAL, test=PAIRS[0])


def test_a_node_with_one_sample_trains_on_it_and_is_not_evaluated(tmp_path, logged):
    settings, data = SETTINGS | {"holdout": 0.5}, [PAIRS[0], (PAIRS[1][0][:1], PAIRS[1][1][:1])]
    grid = InProcessGrid(
        {
            client: Node(
                client_app(lambda context: make_model(), lambda context, own=own: own, fl.FedAvg(), settings),
                {"partition-id": client, "state-dir": str(tmp_path)},
            )
            for client, own in enumerate(data)
        }
    )
    server = strategy(fl.FedAvg(), settings=settings, population=2)
    server.start(grid)
    assert [record.clients for record in server.result.history] == [2, 2]
    assert server.result.history[-1].per_client["accuracy"].clients == 1
    assert "client 1 was not evaluated: its client app raised an error: client 1 has no test samples" in "".join(logged)
