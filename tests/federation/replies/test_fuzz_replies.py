"""Whatever a client sends is accepted or rejected with a reason."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fedlalr as fl
from conftest import make_clients
from federation.fuzzing import damaged, fuzz, json_values
from fedlalr.data.population import as_clients
from fedlalr.federation import Rejection
from fedlalr.federation.replies.payload import Expected, Rejected, Reply, array_from_npy
from fedlalr.federation.session import initial_state
from fedlalr.federation.storage.fingerprint import contract
from fedlalr.training.interfaces import Training
from fedlalr.training.layout import Layout
from inbox_in_memory import screen_reply

MODEL = torch.nn.Linear(3, 2).double()
TRAINING = Training(
    model=MODEL, layout=Layout.of(MODEL), clients=as_clients(make_clients(features=3)), algorithm=fl.FedLALR(),
    loss=torch.nn.functional.cross_entropy, local=fl.Steps(1), device=torch.device("cpu"),
)  # fmt: skip
EXPECTED = Expected(
    run="run",
    round=1,
    clients=frozenset({0, 1}),
    contract=contract(TRAINING),
    layout=TRAINING.layout,
    table=TRAINING.algorithm.slots,
    broadcast=initial_state(TRAINING).slots,
)


def honest() -> Reply:
    slots = {
        slot: {name: view.numpy().copy() for name, view in TRAINING.layout.views(values).items()}
        for slot, values in EXPECTED.broadcast.items()
    }
    return Reply(0, "run", 1, EXPECTED.contract, samples=3, steps=1, slots=slots)


numbers = hnp.arrays("f8", st.sampled_from([(2, 3), (2,), (3, 2), (1,), ()]))
odd_arrays = hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, max_dims=3, max_side=4)) | st.sampled_from(
    [
        np.zeros((2, 3), ">f8"),
        np.zeros((2, 3), "O"),
        np.zeros((2, 3), "V8"),
        np.zeros((2, 3), "f4"),
        np.zeros((2, 3))[:, ::-1],
        np.zeros((2, 6))[:, ::2],
        np.ma.masked_array(np.zeros((2, 3)), mask=True),
        np.float64(1),
        torch.zeros(2, 3),
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(2, 3, dtype=torch.float64, device="meta"),
        torch.zeros(2, 3, dtype=torch.float64).to_sparse(),
        torch.zeros(2, 3, dtype=torch.complex128),
    ]
)
anything = json_values | numbers | odd_arrays | st.binary(max_size=8)


@fuzz("replies", data=st.data())
def test_any_reply_is_taken_or_rejected(data):
    reply = honest()
    for _ in range(data.draw(st.integers(1, 3))):
        match data.draw(st.sampled_from(["array", "slot", "field", "extra", "number", "client"])):
            case "array":
                slot = data.draw(st.sampled_from(["x", "m", "v_hat"]))
                if isinstance(reply.slots, dict) and isinstance(reply.slots.get(slot), dict):
                    name = data.draw(st.sampled_from(["weight", "bias"]))
                    reply.slots[slot][name] = data.draw(anything)
            case "slot" if isinstance(reply.slots, dict):
                reply.slots[data.draw(st.sampled_from(["x", "m", "v_hat", "v"]))] = data.draw(json_values)
            case "extra" if isinstance(reply.slots, dict) and isinstance(reply.slots.get("x"), dict):
                reply.slots["x"][data.draw(st.text(max_size=5))] = np.zeros(2)
            case "number":
                array = np.zeros((2, 3))
                array.flat[data.draw(st.integers(0, 5))] = data.draw(st.floats())
                if isinstance(reply.slots, dict) and isinstance(reply.slots.get("v_hat"), dict):
                    reply.slots["v_hat"]["weight"] = array
            case "field":
                names = ["run", "round", "contract", "samples", "steps", "slots", "buffers", "metrics"]
                reply = replace(reply, **{data.draw(st.sampled_from(names)): data.draw(anything)})
            case "client":
                reply = replace(reply, client=data.draw(st.integers() | anything))
    outcome = screen_reply(reply, EXPECTED)
    if isinstance(outcome, Rejection):
        assert 0 < len(outcome.reason) < 1000
        return False
    assert all(torch.isfinite(values).all() for values in outcome.slots.values())
    assert (outcome.slots.v_hat >= EXPECTED.broadcast.v_hat).all()
    return True


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@fuzz("arrays", content=st.binary(max_size=200) | damaged(npy(np.arange(6.0))))
def test_any_bytes_are_the_expected_array_or_rejected(content):
    try:
        assert array_from_npy("x", content, (6,), torch.float64).shape == (6,)
    except Rejected:
        return False
    return True
