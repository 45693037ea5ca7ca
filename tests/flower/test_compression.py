"""Compressed slots on Flower: the simulator's bits, the bytes that the record states, and hostile bytes rejected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Array, Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

import fedlalr as fl
from conftest import make_clients, make_model
from federation.fuzzing import damaged, fuzz
from fedlalr.data.population import as_clients
from fedlalr.federation import Rejection
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.compression.compression import compression_for
from fedlalr.federation.replies.payload import ENCODED, Expected, Rejected, Reply
from fedlalr.federation.session import initial_state
from fedlalr.flower.wire.arrays import broadcast_from, decode, encode
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.interfaces import Training
from fedlalr.training.layout import Layout
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
)
from flower.in_process import to_npy
from inbox_in_memory import screen_reply
from variants import VARIANTS

BEST = fl.FedLALR(lr=0.05, momentum="restart", second_moment="max")
SMALLEST: dict[str, Any] = {"compression": "smallest", "rounds": 4}


@pytest.mark.parametrize("name", ["fedlalr restart max", "lafedopt joint", "sharedamsgrad"])
def test_a_compressed_run_gives_the_simulators_bits(name, tmp_path):
    settings = SMALLEST | {"rounds": 2}
    server = strategy(VARIANTS[name], settings=settings)
    server.start(InProcessGrid(nodes(VARIANTS[name], tmp_path, settings=settings)))
    assert same(server.result, simulated(VARIANTS[name], settings=settings))


def test_errors_are_kept_on_the_nodes_and_only_with_an_accepted_reply(tmp_path):
    """A client whose replies are lost in two rounds has the errors of its last accepted one, as in the simulator."""
    settings = {"compression": "smallest", "rounds": 5}
    everyone = nodes(fl.SCAFFOLD(0.05), tmp_path / "state", settings=settings)
    server = strategy(fl.SCAFFOLD(0.05), settings=settings)
    everyone[900].tamper = lambda message, reply: None if message.metadata.group_id in ("2", "3") else reply
    server.start(InProcessGrid(everyone))
    wanted = fl.run(make_model(), PAIRS, fl.SCAFFOLD(0.05), **(SETTINGS | settings), engine=LosesReplies)
    assert [record.clients for record in server.result.history] == [5, 4, 4, 5, 5]
    assert [record.clients for record in wanted.history] == [5, 4, 4, 5, 5]
    assert torch.equal(_flat(server.result), _flat(wanted))


class LosesReplies(ReferenceEngine):
    """Loses client 0's reply in rounds 2 and 3."""

    def train(self, work: fl.Work) -> fl.Replies:
        replies = super().train(work)
        if work.round not in (2, 3):
            return replies
        return replace(replies.rows(torch.nonzero(replies.clients != 0)[:, 0]), failures={0: "lost"})


def _flat(result: fl.Result) -> torch.Tensor:
    return torch.cat([value.flatten() for slot in result.state.values() for value in slot.values()])


def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path):
    def run(folder: str, rounds: int) -> fl.Result:
        settings = SMALLEST | {"clients_per_round": 3, "run_dir": tmp_path / folder, "resume": True, "rounds": rounds}
        server = strategy(BEST, settings=settings)
        grid = InProcessGrid(nodes(BEST, tmp_path / "state", settings=SMALLEST))
        server.start(grid)
        asked.update(cohorts(grid))
        return server.result

    asked: dict[int, list[int]] = {}
    run("run", 2)
    resumed = run("run", 4)
    wanted = simulated(BEST, settings=SMALLEST | {"clients_per_round": 3, "observers": [Cohorts(asked)]})
    assert same(resumed, wanted)


def test_a_node_with_another_compression_is_excluded(tmp_path):
    server = strategy(BEST, settings=SMALLEST, retries=0)
    with pytest.raises(fl.RoundFailed, match="uses other settings"):
        server.start(InProcessGrid(nodes(BEST, tmp_path, settings={"compression": "balanced", "rounds": 4})))


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 40_000), nn.Tanh(), nn.Linear(40_000, 3)).double()


def flower_bytes(message: Message) -> int:
    """The size of a message as Flower sends it."""
    return sum(len(each.deflate()) for each in get_all_nested_objects(message).values())


@pytest.mark.parametrize("short", ["balanced", "smallest"])
def test_flower_sends_the_recorded_bytes(short, tmp_path):
    sent = {"up": 0, "down": 0}

    def count(message: Message, reply: Message) -> Message:
        sent["down"] += flower_bytes(message)
        sent["up"] += flower_bytes(reply)
        return reply

    settings = {"compression": short, "rounds": 2}
    everyone = nodes(BEST, tmp_path, wide, settings)
    for node in everyone.values():
        node.tamper = count
    server = strategy(BEST, wide, settings, deadline=60, join_deadline=60)
    server.start(InProcessGrid(everyone))
    assert sent["up"] == pytest.approx(server.result.bytes_up, rel=0.01)
    assert sent["down"] == pytest.approx(server.result.bytes_down, rel=0.01)
    assert [record.clients for record in server.result.history] == [POPULATION] * 2


MODEL = make_model()
TRAINING = Training(model=MODEL, layout=Layout.of(MODEL), clients=as_clients(make_clients()), algorithm=BEST)
STATE = initial_state(TRAINING)
CHANNEL = Channel.of(compression_for("balanced", BEST), TRAINING, 1)
EXPECTED = Expected(
    run="run",
    round=1,
    clients=frozenset({0, 1}),
    contract="",
    layout=TRAINING.layout,
    table=CHANNEL.table,
    broadcast=CHANNEL.broadcast(STATE.slots),
    channel=CHANNEL,
)


def upload() -> dict[str, torch.Tensor]:
    """The bytes of an honest reply."""
    trained = STATE.slots.replace(x=STATE.slots.x + 0.1, v_hat=EXPECTED.broadcast.v_hat * 1.5)
    kept = fl.Slots(**{"residual.x": torch.zeros_like(STATE.slots.x)})
    return CHANNEL.upload(trained, EXPECTED.broadcast, kept, 0)[1]


def records() -> dict[str, dict[str, bytes]]:
    arrays = encode(STATE.slots, {}, TRAINING.layout, "records", content=upload())
    return {record: {name: to_npy(array) for name, array in named.items()} for record, named in arrays.items()}


def take(given: dict[str, dict[str, bytes]]) -> bool:
    try:
        slots, _ = decode(given, CHANNEL.table.up, TRAINING.layout, {}, "records", encoded=EXPECTED.encoded)
        outcome = screen_reply(Reply(0, "run", 1, "", 3, 1, slots), EXPECTED)
    except Rejected as rejected:
        outcome = Rejection(0, str(rejected))
    if isinstance(outcome, Rejection):
        assert 0 < len(outcome.reason) < 1000
        return False
    assert all(torch.isfinite(values).all() for values in outcome.slots.values())
    assert (outcome.slots.v_hat >= EXPECTED.broadcast.v_hat).all()
    return True


def test_an_honest_reply_is_accepted():
    assert take(records())


@fuzz("encoded slots", data=st.data())
def test_any_bytes_are_accepted_or_rejected(data):
    given = records()
    slot = data.draw(st.sampled_from(sorted(given)))
    content = given[slot][ENCODED]
    match data.draw(st.sampled_from(["damage", "bytes", "name", "numbers"])):
        case "damage":
            given[slot][ENCODED] = data.draw(damaged(content))
        case "bytes":
            size = EXPECTED.encoded[slot]
            drawn = data.draw(st.binary(min_size=size, max_size=size))
            given[slot][ENCODED] = content[:-size] + drawn
        case "name":
            given[slot][data.draw(st.sampled_from(["0.weight", "x", ""]))] = given[slot].pop(ENCODED)
        case "numbers":
            given[slot] = {name: to_npy(part.numpy()) for name, part in TRAINING.layout.views(STATE.slots.x).items()}
    return take(given)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros(10**6, np.uint8), "more than an array of shape"),
        (np.zeros(3, np.uint8), "has shape"),
        (np.zeros(59, np.int8), "is |i1, but |u1 is expected"),
    ],
)
def test_bytes_of_another_size_or_kind_are_rejected_before_they_are_decoded(array, reason):
    given = records()
    given["x"][ENCODED] = to_npy(array)
    with pytest.raises(Rejected, match=reason.replace("|", r"\|")):
        decode(given, CHANNEL.table.up, TRAINING.layout, {}, "records", encoded=EXPECTED.encoded)


def test_a_codec_that_fails_rejects_the_reply():
    class Failing(fl.codecs.BFloat16):
        def decode(self, *given: object) -> torch.Tensor:
            raise IndexError("out of range")

    compression = fl.Compression(up={"x": Failing()})
    channel = Channel.of(compression, TRAINING, 1)
    expected = Expected(**{**vars(EXPECTED), "channel": channel})
    numbers = {name: part.numpy() for name, part in TRAINING.layout.views(STATE.slots.v_hat).items()}
    content = {ENCODED: np.zeros(2 * TRAINING.layout.size, np.uint8)}
    outcome = screen_reply(Reply(0, "run", 1, "", 3, 1, {"x": content, "v_hat": numbers}), expected)
    assert outcome == Rejection(0, "x cannot be decoded: IndexError: out of range")


def test_a_broadcast_without_its_bytes_is_rejected_by_name():
    content = CHANNEL.encode_broadcast(STATE.slots)
    arrays = encode(STATE.slots, {}, TRAINING.layout, "records", content=content)
    given = {record: {name: to_npy(array) for name, array in named.items()} for record, named in arrays.items()}
    slots, _ = broadcast_from(given, CHANNEL.slots.down, CHANNEL, TRAINING.layout, {}, "records")
    assert all(torch.equal(slots[name], EXPECTED.broadcast[name]) for name in slots)
    del given["v_hat"]
    with pytest.raises(Rejected, match="did not send the bytes of v_hat"):
        broadcast_from(given, CHANNEL.slots.down, CHANNEL, TRAINING.layout, {}, "records")


def test_a_mod_that_computes_with_numbers_cannot_change_bytes(tmp_path):
    """The server rejects what such a mod returns: the array is no longer of bytes."""

    def doubling(message, context, call_next):
        reply = call_next(message, context)
        for record in list(reply.content.array_records.values()):
            for name, array in list(record.items()):
                record[name] = Array(array.numpy() * 2.0)
        return reply

    server = strategy(BEST, settings=SMALLEST)
    with pytest.raises(fl.RoundFailed, match=r"x/encoded (is <f8|has .* bytes)"):
        server.start(InProcessGrid(nodes(BEST, tmp_path, settings=SMALLEST, mods=[doubling])))
