"""The strategy with real client apps in one process: the simulator's bits, and every fault handled."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import make_model

pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedlalr as fl
from fedlalr.flower import FederatedStrategy, client_app
from flower.federation import (
    PAIRS,
    POPULATION,
    SETTINGS,
    Cohorts,
    InProcessGrid,
    cohorts,
    nodes,
    same,
    simulated,
    strategy,
    with_buffers,
)
from flower.in_process import Node
from training.tokens import Rows, pad_tokens, token_clients, token_model, token_samples
from variants import VARIANTS

LALR = fl.FedLALR(lr=0.05)


def without_buffers():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_method_gives_the_simulators_bits(name, tmp_path):
    server = strategy(VARIANTS[name])
    server.start(InProcessGrid(nodes(VARIANTS[name], tmp_path)))
    assert same(server.result, simulated(VARIANTS[name]))


@pytest.mark.parametrize("options", [{}, {"compression": "balanced"}, {"personal": ("1.*", "3.*")}], ids=repr)
def test_a_clipped_change_leaves_a_client_of_scaffold_where_the_simulator_leaves_it(options, tmp_path):
    algorithm = fl.SCAFFOLD(0.05)
    settings = {"rounds": 4, "max_norm_ratio": 1.0, "run_dir": tmp_path / "run", "resume": True, **options}
    model = with_buffers if "personal" in options else make_model
    wanted = simulated(algorithm, model, options | {"rounds": 4, "max_norm_ratio": 1.0})
    assert all(record.clipped for record in wanted.history)
    for rounds in (2, 4):
        server = strategy(algorithm, model, settings | {"rounds": rounds})
        server.start(InProcessGrid(nodes(algorithm, tmp_path / "state", model, settings | {"rounds": rounds})))
    assert same(server.result, wanted)


class OtherNames(fl.SCAFFOLD):
    """SCAFFOLD with another name for c_i."""

    @property
    def slots(self):
        return replace(super().slots, kept=("change",), follows=("change", "delta_c"))

    def start(self, broadcast, kept):
        return super().start(broadcast, fl.Slots(c_i=kept.change))

    def finish(self, client, broadcast, context):
        upload, kept = super().finish(client, broadcast, context)
        return upload, fl.Slots(change=kept.c_i)


def test_a_kept_slot_may_have_any_name(tmp_path):
    settings = {"rounds": 3, "max_norm_ratio": 1.0}
    server = strategy(OtherNames(0.05), settings=settings)
    server.start(InProcessGrid(nodes(OtherNames(0.05), tmp_path, settings=settings)))
    assert same(server.result, simulated(fl.SCAFFOLD(0.05), settings=settings))


@pytest.mark.parametrize("layout", ["records", "packed"])
def test_buffers_weights_cohorts_and_any_order_of_arrival_give_the_simulators_bits(layout, tmp_path):
    settings = {"clients_per_round": 3, "weighting": "samples", "rounds": 4}
    server = strategy(LALR, with_buffers, settings, layout=layout, deadline=60, join_deadline=60)
    grid = InProcessGrid(nodes(LALR, tmp_path, with_buffers, settings), backwards=True)
    server.start(grid)
    wanted = simulated(LALR, with_buffers, settings | {"observers": [Cohorts(cohorts(grid))]})
    assert same(server.result, wanted)
    assert max(grid.pulled) == 1, "replies are pulled one at a time"


@pytest.mark.parametrize("algorithm", [LALR, fl.SCAFFOLD(0.05)])
def test_schedules_accumulation_and_groups_of_parameters_give_the_simulators_bits(algorithm, tmp_path):
    settings = {
        "rounds": 3,
        "schedule": fl.schedules.Cosine(warmup=1),
        "batch_size": 3,
        "accumulate": 2,
        "trainable": ("3.*", "0.weight"),
        "decoupled_weight_decay": 0.5,
        "decayed": ("3.*",),
    }
    server = strategy(algorithm, without_buffers, settings)
    server.start(InProcessGrid(nodes(algorithm, tmp_path, without_buffers, settings)))
    assert same(server.result, simulated(algorithm, without_buffers, settings))
    assert set(server.result.state["x"]) == {"0.weight", "3.weight", "3.bias"}
    assert all(parameter.requires_grad for parameter in server.result.model.parameters())


def test_a_test_set_on_the_server_is_evaluated_as_in_the_simulator(tmp_path):
    metrics = {"largest": lambda outputs, targets: outputs.max()}
    server = strategy(LALR, test=PAIRS[0], metrics=metrics)
    server.start(InProcessGrid(nodes(LALR, tmp_path)))
    wanted = fl.run(make_model(), PAIRS, LALR, engine="reference", test=PAIRS[0], metrics=metrics, **SETTINGS)
    assert same(server.result, wanted)
    assert wanted.history[-1].accuracy is not None
    assert server.result.history[-1].metrics == wanted.history[-1].metrics


@pytest.mark.parametrize("ragged", [False, True])
def test_nodes_train_on_dicts_of_tensors_with_the_models_loss(ragged, tmp_path):
    clients = [Rows(samples, ragged=True) for samples in token_clients()] if ragged else token_clients()
    settings = {"loss": "model", "rounds": 2, "batch_size": 4, "device": "cpu"}
    settings |= {"collate_fn": pad_tokens} if ragged else {}
    app = client_app(
        lambda context: token_model(), lambda context: clients[context.node_config["partition-id"]], LALR, settings
    )
    grid = InProcessGrid({i: Node(app, {"partition-id": i, "state-dir": str(tmp_path)}) for i in range(len(clients))})
    test = token_samples(5, seed=99)
    server = FederatedStrategy(
        token_model(), LALR, settings, population=len(clients), test=Rows(test, ragged=ragged), poll=0.001
    )
    server.start(grid)
    wanted = fl.run(token_model(), clients, LALR, engine="reference", test=Rows(test, ragged=ragged), **settings)
    assert same(server.result, wanted)


def test_start_accepts_flowers_arguments(tmp_path):
    other = make_model(seed=3)
    seen = {}

    def evaluate(round, arrays):
        seen[round] = arrays["0.weight"].numpy()
        return MetricRecord({"norm": float(np.linalg.norm(seen[round]))})

    server = strategy(LALR)
    found = server.start(
        grid=InProcessGrid(nodes(LALR, tmp_path)),
        initial_arrays=ArrayRecord(other.state_dict()),
        num_rounds=2,
        timeout=1.0,
        train_config=ConfigRecord({"note": "hello"}),
        evaluate_fn=evaluate,
    )
    wanted = simulated(LALR, lambda: make_model(seed=3), {"rounds": 2})
    assert same(server.result, wanted)
    assert list(seen) == [0, 1, 2]
    assert np.array_equal(seen[0], other.state_dict()["0.weight"].numpy())
    assert np.array_equal(seen[2], wanted.state["x"]["0.weight"].numpy())
    assert np.array_equal(found.arrays["0.weight"].numpy(), seen[2])
    assert [found.train_metrics_clientapp[t]["clients"] for t in (1, 2)] == [POPULATION] * 2
    assert found.evaluate_metrics_serverapp[2]["norm"] > 0
    with pytest.raises(ValueError, match="evaluate_config must be None"):
        server.start(InProcessGrid({}), evaluate_config=ConfigRecord())


def test_flowers_loop_gives_the_same_model(tmp_path):
    """The two halves of a round also work under the loop of Flower's base class."""
    from flwr.serverapp.strategy import Strategy

    server = strategy(LALR)
    found = Strategy.start(server, InProcessGrid(nodes(LALR, tmp_path)), ArrayRecord(), num_rounds=2)
    wanted = simulated(LALR).state["x"]
    assert all(np.array_equal(found.arrays[name].numpy(), value.numpy()) for name, value in wanted.items())


def edit(record, name, change):
    """A node that changes one array of its replies."""

    def tamper(message, reply):
        array = np.array(reply.content[record][name].numpy())
        reply.content[record][name] = Array(change(array))
        return reply

    return tamper


def state_facts(**changes):
    """A node that changes the facts in its replies."""

    def tamper(message, reply):
        reply.content["fedlalr"] = ConfigRecord({**reply.content["fedlalr"], **changes})
        return reply

    return tamper


def state_metrics(**changes):
    def tamper(message, reply):
        reply.content["metrics"] = MetricRecord({**reply.content["metrics"], **changes})
        return reply

    return tamper


def raising(message, reply):
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "Traceback\nValueError: broken"), reply_to=message)


def without(record):
    def tamper(message, reply):
        del reply.content[record]
        return reply

    return tamper


def unknown_serialisation(message, reply):
    array = reply.content["x"]["0.bias"]
    reply.content["x"]["0.bias"] = Array(array.dtype, tuple(array.shape), "pickle", array.data)
    return reply


def with_content(content):
    """A node that sends a message that Flower's clients never create."""

    def tamper(message, reply):
        reply.__dict__["_content"] = content
        return reply

    return tamper


FAULTS = {
    "NaN": (edit("m", "0.bias", lambda a: a * np.nan), "m is not finite"),
    "infinity": (edit("x", "2.bias", lambda a: a + np.inf), "x is not finite"),
    "v_hat below the broadcast": (edit("v_hat", "0.bias", lambda a: a * 0), "v_hat fell below the broadcast"),
    "a shape that would broadcast": (edit("x", "0.bias", lambda a: a[:1]), "has shape (1,)"),
    "another dtype": (edit("x", "0.bias", lambda a: a.astype(np.float32)), "is <f4"),
    "a missing slot": (without("m"), "m' is missing"),
    "no facts": (without("fedlalr"), "no record 'fedlalr'"),
    "no metrics": (without("metrics"), "no record 'metrics'"),
    "no content": (with_content(None), "its reply cannot be read: ValueError"),
    "content of another kind": (with_content(ArrayRecord()), "its reply cannot be read: AttributeError"),
    "another serialisation": (unknown_serialisation, "not 'pickle'"),
    "a stale round": (state_facts(round=1), "belongs to round 1"),
    "another run": (state_facts(run="ff"), "belongs to run"),
    "another client": (state_facts(client=1), "answered as client 1"),
    "a client that is not a number": (state_facts(client="2"), "client must be int, not str"),
    "different hyper-parameters": (state_facts(contract="0"), "different hyper-parameters"),
    "no samples": (state_metrics(**{"num-examples": 0}), "samples is 0"),
    "1e30 samples": (state_metrics(**{"num-examples": 1e30}), "samples is 1e+30"),
    "steps it cannot have made": (state_metrics(steps=10**9), "steps is 1,000,000,000, but a client with"),
    "an app that raises": (raising, "its client app raised an error: ValueError: broken"),
    "no reply": (lambda message, reply: None, "no reply within the deadline of 0.05 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_reply_is_rejected_and_the_round_continues(fault, tmp_path):
    """Client 2 is faulty from round 2 on: the result is the simulator's without client 2."""
    tamper, reason = FAULTS[fault]
    everyone = nodes(LALR, tmp_path)
    bad = everyone[900 - 14]
    bad.tamper = lambda message, reply: tamper(message, reply) if message.metadata.group_id == "2" else reply
    server = strategy(LALR, settings={"rounds": 2, "min_clients": 4})
    server.start(InProcessGrid(everyone))
    rejected = server.result.history[1].rejected
    assert [r.client for r in rejected] == [2]
    assert reason in rejected[0].reason
    assert server.result.history[1].clients == 4
    assert server.result.history[0].rejected == ()
    assert all(torch.isfinite(v).all() for v in server.result.state["x"].values())


def test_a_huge_change_is_clipped(tmp_path):
    """Client 2 sends 1e9 from round 2 on; its change is clipped to the bound that the others' changes give."""
    everyone = nodes(LALR, tmp_path)
    huge = edit("x", "0.weight", lambda a: a + 1e9)
    everyone[900 - 14].tamper = lambda message, reply: (
        huge(message, reply) if message.metadata.group_id == "2" else reply
    )
    server = strategy(LALR, settings={"rounds": 2, "min_clients": 5})
    server.start(InProcessGrid(everyone))
    assert [record.clipped for record in server.result.history] == [(), (2,)]
    assert [record.rejected for record in server.result.history] == [(), ()]
    assert max(value.abs().max() for value in server.result.state["x"].values()) < 100


def test_a_client_rejected_in_three_consecutive_rounds_is_named(tmp_path, logged):
    everyone = nodes(LALR, tmp_path)
    everyone[900 - 14].tamper = edit("m", "0.bias", lambda a: a * np.nan)
    server = strategy(LALR, settings={"rounds": 3, "min_clients": 4})
    server.start(InProcessGrid(everyone))
    assert [record.repeatedly for record in server.result.history] == [(), (), (2,)]
    assert "client 2 has been rejected in each of its last 3 rounds" in "".join(logged)


class Garbled(InProcessGrid):
    """Joins the replies of one node from their parts, as Flower does, with one part missing."""

    bad = 900 - 14

    def pull_messages(self, message_ids):
        return [self._joined(reply) for reply in super().pull_messages(message_ids)]

    def _joined(self, reply):
        parts = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
        if reply.metadata.src_node_id == self.bad and reply.metadata.message_type == "train":
            del parts[next(iter(parts))]
        joined = inflate_object_from_contents(reply.object_id, parts)
        joined.metadata.__dict__["_message_id"] = reply.object_id
        return joined


def test_a_reply_that_flower_cannot_join_is_rejected_and_the_round_continues(tmp_path):
    server = strategy(LALR, settings={"rounds": 2})
    server.start(Garbled(nodes(LALR, tmp_path)))
    for record in server.result.history:
        [(client, reason)] = record.rejected
        assert client == 2
        assert reason.startswith("Flower cannot read its reply: KeyError")


def test_a_metric_that_is_not_a_number_is_dropped_and_the_reply_kept(tmp_path):
    everyone = nodes(LALR, tmp_path)
    everyone[900].tamper = state_metrics(loss=math.nan)
    server = strategy(LALR)
    server.start(InProcessGrid(everyone))
    wanted = simulated(LALR)
    assert [r.clients for r in server.result.history] == [POPULATION] * 2
    assert torch.equal(server.result.state["x"]["0.weight"], wanted.state["x"]["0.weight"])
    assert math.isfinite(server.result.history[0].train_loss)


def test_a_second_reply_to_the_same_message_is_rejected(tmp_path):
    everyone = nodes(LALR, tmp_path)
    everyone[900].tamper = lambda message, reply: [reply, reply]
    server = strategy(LALR)
    server.start(InProcessGrid(everyone))
    assert torch.equal(server.result.state["x"]["0.weight"], simulated(LALR).state["x"]["0.weight"])
    assert {r.clients for r in server.result.history} == {POPULATION}
    assert [r.rejected for r in server.result.history] == [((0, "the client has already replied"),)] * 2


def test_a_reply_to_an_older_round_is_ignored(tmp_path):
    held = []

    def late(message, reply):
        held.append(reply)
        return [held[0], reply] if len(held) > 1 else reply

    everyone = nodes(LALR, tmp_path)
    everyone[900].tamper = late
    server = strategy(LALR)
    server.start(InProcessGrid(everyone))
    assert same(server.result, simulated(LALR))


def test_too_few_usable_replies_fail_the_round_and_name_the_clients(tmp_path):
    everyone = nodes(LALR, tmp_path)
    for node in (900, 893):
        everyone[node].tamper = raising
    server = strategy(LALR, settings={"min_clients": 4})
    with pytest.raises(
        fl.RoundFailed, match=r"3 usable replies, but min_clients is 4.*client 0: .*broken; client 1"
    ) as failed:
        server.start(InProcessGrid(everyone))
    assert [rejection.client for rejection in failed.value.rejected] == [0, 1]


def test_a_failed_round_is_retried_as_often_as_requested(tmp_path):
    failures = iter([True, True])
    everyone = nodes(LALR, tmp_path)
    everyone[900].tamper = lambda m, reply: raising(m, reply) if next(failures, False) else reply
    settings = {"min_clients": POPULATION}
    with pytest.raises(fl.RoundFailed):
        strategy(LALR, settings=settings, retries=1).start(InProcessGrid(everyone))
    failures = iter([True, True])
    server = strategy(LALR, settings=settings, retries=2)
    server.start(InProcessGrid(everyone))
    assert same(server.result, simulated(LALR))


def test_missing_nodes_are_counted_and_not_waited_for_twice(tmp_path, logged):
    everyone = nodes(LALR, tmp_path)
    absent = everyone.pop(900 - 7)
    grid = InProcessGrid(everyone)
    server = strategy(LALR, settings={"rounds": 1, "min_clients": 4})
    server.start(grid)
    assert [(r.client, "no connected node serves it" in r.reason) for r in server.result.history[0].rejected] == [
        (1, True)
    ]
    assert sum("waiting up to" in message for message in logged) <= 1
    grid.nodes[5] = absent
    server = strategy(LALR)
    server.start(grid)
    assert same(server.result, simulated(LALR)), "a node that comes back under another id serves its client again"


def test_no_client_trains_for_a_round_that_cannot_succeed(tmp_path):
    everyone = nodes(LALR, tmp_path)
    del everyone[900]
    grid = InProcessGrid(everyone)
    with pytest.raises(fl.RoundFailed, match="0 usable replies, but min_clients is 5"):
        strategy(LALR, settings={"min_clients": 5}).start(grid)
    assert grid.trained == []


def test_unknown_duplicate_and_disagreeing_nodes_do_not_take_part(tmp_path):
    everyone = nodes(LALR, tmp_path)
    everyone[1] = nodes(LALR, tmp_path)[900]
    everyone[1].config = {"partition-id": 77}
    everyone[2] = nodes(LALR, tmp_path)[900]
    everyone[3] = nodes(fl.FedLALR(lr=0.01), tmp_path)[900]
    everyone[4] = nodes(LALR, tmp_path)[900]
    everyone[4].config = {}
    grid = InProcessGrid(everyone)
    server = strategy(LALR)
    server.start(grid)
    assert same(server.result, simulated(LALR))
    assert not {1, 2, 3, 4} & set(grid.trained)


def test_a_client_with_other_settings_is_excluded_with_the_reason(tmp_path):
    everyone = nodes(LALR, tmp_path)
    everyone[900] = nodes(LALR, tmp_path, settings={"batch_size": 5})[900]
    server = strategy(LALR, settings={"rounds": 1})
    server.start(InProcessGrid(everyone))
    assert "other settings" in server.result.history[0].rejected[0].reason


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    for name, algorithm in (("fedlalr", LALR), ("scaffold", fl.SCAFFOLD(lr=0.05))):
        folder = tmp_path / name
        settings = {"rounds": 5, "run_dir": folder / "run", "resume": True, "clients_per_round": 3, "min_clients": 3}
        before = InProcessGrid(nodes(algorithm, folder / "state"))
        for node in before.nodes.values():
            node.tamper = lambda message, reply: raising(message, reply) if message.metadata.group_id == "3" else reply
        with pytest.raises(fl.RoundFailed):
            strategy(algorithm, settings=settings).start(before)
        server, after = strategy(algorithm, settings=settings), InProcessGrid(nodes(algorithm, folder / "state"))
        server.start(after)
        asked = cohorts(before) | cohorts(after)
        wanted = simulated(algorithm, settings={"rounds": 5, "clients_per_round": 3, "observers": [Cohorts(asked)]})
        assert same(server.result, wanted)
        assert server.result.info.first_round == 3


def test_a_run_on_flower_is_not_resumed_with_other_settings(tmp_path):
    settings = {"run_dir": tmp_path / "run", "resume": True}
    strategy(LALR, settings=settings).start(InProcessGrid(nodes(LALR, tmp_path)))
    with pytest.raises(RuntimeError, match="seed was 5 and is now 6"):
        strategy(LALR, settings=settings | {"seed": 6}).start(InProcessGrid(nodes(LALR, tmp_path)))


def test_a_clients_state_changes_only_if_its_reply_is_accepted(tmp_path):
    """As in the simulator with a client that fails in round 2, although the node has trained and stored its state."""
    algorithm = fl.SCAFFOLD(lr=0.05)
    everyone = nodes(algorithm, tmp_path / "state")
    everyone[900].tamper = lambda message, reply: None if message.metadata.group_id == "2" else reply
    server = strategy(algorithm, settings={"rounds": 4})
    server.start(InProcessGrid(everyone))

    class FailsInRoundTwo(fl.Observer):
        round = 0

        def include(self, round):
            FailsInRoundTwo.round = round
            return ()

    class Broken(torch.utils.data.Dataset):
        def __init__(self, pair, breaks):
            self.pair, self.breaks = pair, breaks

        def __len__(self):
            return len(self.pair[1])

        def __getitem__(self, index):
            if self.breaks and FailsInRoundTwo.round == 2:
                raise RuntimeError("not this round")
            return self.pair[0][index], self.pair[1][index]

    datasets = [Broken(pair, client == 0) for client, pair in enumerate(PAIRS)]
    wanted = fl.run(
        make_model(),
        datasets,
        algorithm,
        engine="reference",
        observers=[FailsInRoundTwo()],
        **(SETTINGS | {"rounds": 4}),
    )
    assert [r.clients for r in wanted.history] == [5, 4, 5, 5]
    assert same(server.result, wanted)
    stored = sorted(path.name for path in (tmp_path / "state").rglob("client-000001/*"))
    assert stored == [f"round-{t:06d}.safetensors" for t in (2, 3, 4)], "older ones can no longer be requested"


def test_a_node_that_lost_its_clients_state_says_so(tmp_path):
    algorithm = fl.SCAFFOLD(lr=0.05)
    everyone = nodes(algorithm, tmp_path / "state")

    def lose(message, reply):
        if message.metadata.group_id == "1":
            for path in (tmp_path / "state").rglob("client-000000/*"):
                path.unlink()
        return reply

    everyone[900].tamper = lose
    server = strategy(algorithm, settings={"rounds": 2})
    server.start(InProcessGrid(everyone))
    assert "should continue from its state after round 1" in server.result.history[1].rejected[0].reason


def test_a_node_without_a_partition_id_says_what_to_do():
    app = client_app(lambda context: make_model(), lambda context: PAIRS[0], LALR, SETTINGS)
    from flwr.app import Context, RecordDict

    grid = InProcessGrid({})
    question = Message(RecordDict(), 3, "query")
    assert grid is not None
    with pytest.raises(ValueError, match="start it with --node-config 'partition-id=N'"):
        app(question, Context(1, 3, {}, RecordDict(), {}))


def test_settings_and_method_may_depend_on_the_runs_configuration(tmp_path):
    from flwr.app import Context, RecordDict

    app = client_app(
        lambda context: make_model(),
        lambda context: PAIRS[0],
        lambda context: fl.FedLALR(lr=float(context.run_config["lr"])),
        lambda context: SETTINGS | {"batch_size": int(context.run_config["batch"])},
    )
    InProcessGrid({})
    replies = [
        app(Message(RecordDict(), 3, "query"), Context(1, 3, {"partition-id": 0}, RecordDict(), {"lr": lr, "batch": b}))
        for lr, b in ((0.1, 4), (0.1, 4), (0.2, 4), (0.1, 5))
    ]
    contracts = [reply.content["fedlalr"]["contract"] for reply in replies]
    assert contracts[0] == contracts[1]
    assert len(set(contracts)) == 3


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"population": 0}, ValueError, "population must be"),
        ({"deadline": 0}, ValueError, "deadline must be"),
        ({"layout": "flat"}, ValueError, "layout"),
        ({"retries": -1}, ValueError, "retries must be"),
        ({"settings": {"min_clients": 9}}, ValueError, "min_clients is 9"),
        ({"settings": {"engine": "stacked"}}, TypeError, "no option 'engine'"),
    ],
)
def test_invalid_options_are_rejected(options, error, reason):
    with pytest.raises(error, match=reason):
        strategy(LALR, **options)


def test_initial_arrays_of_another_module_are_rejected():
    with pytest.raises(ValueError, match=r"no '0\.weight'"):
        strategy(LALR).start(InProcessGrid({}), initial_arrays=ArrayRecord())


def test_observers_see_every_round(tmp_path):
    class Seen(fl.Observer):
        def __init__(self):
            self.rounds, self.info, self.result = [], None, None

        def on_start(self, info):
            self.info = info

        def include(self, round):
            return (4,)

        def on_round(self, record):
            self.rounds.append(record.round)

        def on_end(self, result):
            self.result = result

    seen = Seen()
    server = strategy(LALR, settings={"clients_per_round": 2}, observers=[seen])
    grid = InProcessGrid(nodes(LALR, tmp_path))
    server.start(grid)
    assert seen.rounds == [1, 2]
    assert (seen.info.engine, seen.info.population) == ("flower", POPULATION)
    assert seen.result is server.result
    assert grid.trained.count(900 - 28) == 2, "the client that an observer insists on"


def test_a_round_must_be_started_before_it_is_closed():
    with pytest.raises(RuntimeError, match="no round to close"):
        strategy(LALR).aggregate_train(1, [])


def test_a_reply_to_no_message_is_ignored_in_flowers_loop(tmp_path, logged):
    grid = InProcessGrid(nodes(LALR, tmp_path))
    server, other = strategy(LALR), strategy(LALR)
    stray = grid.send_and_receive(other.configure_train(1, ArrayRecord(), ConfigRecord(), grid))
    mine = grid.send_and_receive(server.configure_train(1, ArrayRecord(), ConfigRecord(), grid))
    _, metrics = server.aggregate_train(1, [*stray, *mine])
    assert metrics["clients"] == POPULATION
    assert sum("a reply that answers no message of round 1" in message for message in logged) == POPULATION


def test_a_node_with_an_invalid_answer_is_asked_again(tmp_path, monkeypatch):
    from fedlalr.flower.server import nodes as nodes_module

    monkeypatch.setattr(nodes_module, "ASK_AGAIN", 0.0)
    everyone = nodes(LALR, tmp_path)
    answers = iter([None, "two", 0])
    honest = everyone[900].app

    def app(message, context):
        reply = honest(message, context)
        if message.metadata.message_type == "query":
            announced = next(answers, 0)
            reply.content["fedlalr"] = ConfigRecord(
                {} if announced is None else {**reply.content["fedlalr"], "client": announced}
            )
        return reply

    everyone[900].app = app
    server = strategy(LALR, join_deadline=60)
    server.start(InProcessGrid(everyone))
    assert same(server.result, simulated(LALR))


def test_nodes_that_disconnect_between_rounds_are_noticed(tmp_path):
    everyone = nodes(LALR, tmp_path)
    grid = InProcessGrid(everyone)
    everyone[900].tamper = lambda message, reply: (grid.nodes.pop(872), reply)[1] if 872 in grid.nodes else reply
    server = strategy(LALR)
    server.start(grid)
    assert [(r.client, r.reason) for r in server.result.history[1].rejected] == [(4, "no connected node serves it")]


def clipped(tmp_path, layout):
    from flwr.clientapp.mod import fixedclipping_mod

    everyone = nodes(LALR, tmp_path, mods=[fixedclipping_mod])
    server = strategy(LALR, settings={"rounds": 1, "max_norm_ratio": None}, layout=layout)
    server.start(InProcessGrid(everyone), train_config=ConfigRecord({"clipping_norm": 0.01}))
    return server.result


def test_flowers_mods_accept_the_packed_layout(tmp_path):
    """Clipping scales the change of x, m and v̂ jointly, which keeps v̂ above its broadcast."""
    found = clipped(tmp_path, "packed")
    assert found.history[0].clients == POPULATION
    start = LALR.init(torch.cat([p.detach().reshape(-1) for p in make_model().parameters()]))
    change = torch.cat([torch.cat([t.reshape(-1) for t in found.state[name].values()]) - start[name] for name in start])
    assert 0 < change.norm() <= 0.01 + 1e-12


def test_flowers_mods_reject_several_records(tmp_path):
    with pytest.raises(fl.RoundFailed, match="a mod of its client app rejected the message"):
        clipped(tmp_path, "records")


def test_train_config_cannot_change_the_instruction(tmp_path):
    with pytest.raises(ValueError, match="train_config contains 'lr'"):
        strategy(LALR).start(InProcessGrid(nodes(LALR, tmp_path)), train_config=ConfigRecord({"lr": 9.0}))


def test_an_observer_that_probes_local_steps_is_rejected(tmp_path):
    class Probing(fl.Observer):
        def probe(self, round):
            return object()

    class Deciding(fl.Observer):
        def on_start(self, info):
            self.rounds = [2]

        def probe(self, round):
            return object() if round in self.rounds else None

    for observer, round in ((Probing(), 1), (Deciding(), 2), (fl.Trajectory(clients=[0], rounds=[2]), 2)):
        grid = InProcessGrid(nodes(LALR, tmp_path))
        with pytest.raises(
            ValueError, match=rf"a {type(observer).__name__} observes .* round {round}, .*only in the simulator"
        ):
            strategy(LALR, observers=[observer]).start(grid)
        assert not grid.trained, "rejected before any client has trained"


def test_an_observer_that_probes_later_is_rejected_then(tmp_path):
    class Curious(fl.Observer):
        wants = False

        def on_round(self, record):
            self.wants = record.round == 1

        def probe(self, round):
            return object() if self.wants else None

    with pytest.raises(ValueError, match="a Curious observes the local steps of round 2"):
        strategy(LALR, observers=[Curious()]).start(InProcessGrid(nodes(LALR, tmp_path)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test": DataLoader(TensorDataset(*PAIRS[0]))}, r"test must be a pair \(inputs, targets\), .* not DataLoader"),
        ({"test": (PAIRS[0][0].numpy(), PAIRS[0][1])}, "the test set's samples are NumPy arrays"),
        ({"observers": [fl.Observer]}, "one of observers is the class Observer; pass an instance"),
    ],
)
def test_an_invalid_test_set_or_observer_is_rejected_before_the_first_round(options, message):
    with pytest.raises(TypeError, match=message):
        strategy(LALR, **options)


def test_the_strategy_is_a_flower_strategy():
    from flwr.serverapp.strategy import Strategy

    assert issubclass(FederatedStrategy, Strategy)
