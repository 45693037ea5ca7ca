"""A Flower message with arbitrary records is accepted as a reply, or rejected with a reason."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

import fedlalr as fl
from conftest import make_clients
from federation.fuzzing import damaged, fuzz
from fedlalr.data.population import as_clients
from fedlalr.federation import Rejection
from fedlalr.federation.replies.payload import Expected, Rejected
from fedlalr.federation.session import initial_state
from fedlalr.federation.storage.fingerprint import contract
from fedlalr.flower.wire.arrays import LAYOUTS, encode
from fedlalr.flower.wire.records import NPY, reply_in
from fedlalr.training.interfaces import Training
from fedlalr.training.layout import Layout
from flower.in_process import to_npy
from inbox_in_memory import screen_reply

MODEL = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
TRAINING = Training(
    model=MODEL, layout=Layout.of(MODEL), clients=as_clients(make_clients(features=3)), algorithm=fl.FedLALR(),
    loss=nn.functional.cross_entropy, local=fl.Steps(1), device=torch.device("cpu"),
)  # fmt: skip
STATE = initial_state(TRAINING)
EXPECTED = Expected(
    run="run",
    round=1,
    clients=frozenset({0, 1}),
    contract=contract(TRAINING),
    layout=TRAINING.layout,
    table=TRAINING.algorithm.slots,
    broadcast=STATE.slots,
    buffers=STATE.buffers,
)

Parts = dict[str, dict[str, tuple[str, bytes]]]


def honest(how: str) -> tuple[Parts, dict[str, object], dict[str, object]]:
    """Arrays as (serialisation, bytes), facts and metrics of a reply that is accepted."""
    records = encode(STATE.slots, STATE.buffers, TRAINING.layout, how)
    arrays = {record: {name: (NPY, to_npy(a)) for name, a in named.items()} for record, named in records.items()}
    facts: dict[str, object] = {"run": "run", "round": 1, "client": 0, "contract": EXPECTED.contract}
    return arrays, facts, {"num-examples": 3, "steps": 1, "loss": 0.5}


def message(arrays: Parts, facts: dict[str, object] | None, metrics: dict[str, object] | None) -> RecordDict:
    content = RecordDict(
        {
            record: ArrayRecord({name: Array("float64", (1,), kind, data) for name, (kind, data) in named.items()})
            for record, named in arrays.items()
        }
    )
    if facts is not None:
        content["fedlalr"] = ConfigRecord(facts)
    if metrics is not None:
        content["metrics"] = MetricRecord(metrics)
    return content


def take(content: RecordDict, how: str) -> bool:
    try:
        outcome = screen_reply(reply_in(content, EXPECTED, how), EXPECTED)
    except Rejected as rejected:
        outcome = Rejection(0, str(rejected))
    if isinstance(outcome, Rejection):
        assert 0 < len(outcome.reason) < 1000
        return False
    assert all(torch.isfinite(values).all() for values in outcome.slots.values())
    assert (outcome.slots.v_hat >= STATE.slots.v_hat).all()
    return True


@pytest.mark.parametrize("how", LAYOUTS)
def test_the_unchanged_message_is_accepted(how):
    assert take(message(*honest(how)), how)


names = st.sampled_from(["x", "m", "v_hat", "buffers", "arrays", "x/0.weight", "0.weight", "0.bias"]) | st.text(
    max_size=6
)
numbers = st.integers(-(2**63), 2**63 - 1) | st.floats()
lists = st.lists(st.integers(-9, 9), max_size=3) | st.lists(st.floats(), max_size=3) | st.lists(st.text(), max_size=3)
values = numbers | lists | st.booleans() | st.text(max_size=20) | st.binary(max_size=20)


@fuzz("messages", data=st.data(), how=st.sampled_from(LAYOUTS))
def test_any_message_is_accepted_or_rejected(data, how):
    arrays, facts, metrics = honest(how)
    for _ in range(data.draw(st.integers(1, 3))):
        record = data.draw(st.sampled_from(sorted(arrays))) if arrays else "x"
        name = data.draw(st.sampled_from(sorted(arrays.get(record) or ["0.weight"])))
        match data.draw(st.sampled_from(["damage", "kind", "drop", "drop record", "extra", "fact", "metric", "none"])):
            case "damage" if name in arrays.get(record, {}):
                arrays[record][name] = (NPY, data.draw(damaged(arrays[record][name][1])))
            case "kind" if name in arrays.get(record, {}):
                arrays[record][name] = (data.draw(st.text(max_size=20)), arrays[record][name][1])
            case "drop":
                arrays.get(record, {}).pop(name, None)
            case "drop record":
                arrays.pop(record, None)
            case "extra":
                content = data.draw(st.binary(max_size=20))
                arrays.setdefault(data.draw(names), {})[data.draw(names)] = (NPY, content)
            case "fact" if facts is not None:
                facts[data.draw(st.sampled_from(sorted(facts)))] = data.draw(values)
            case "metric" if metrics is not None:
                metrics[data.draw(st.sampled_from(sorted(metrics)))] = data.draw(numbers | st.just([1, 2]))
            case "none":
                facts, metrics = data.draw(st.sampled_from([(None, metrics), (facts, None)]))
    return take(message(arrays, facts, metrics), how)
