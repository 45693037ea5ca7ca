"""Slots survive the conversion to named arrays bit for bit; unexpected names are rejected."""

import io
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedlalr.algorithms.slots import Slots, SlotTable
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.compression.compression import Compression
from fedlalr.federation.replies.payload import Rejected
from fedlalr.flower.wire.arrays import LAYOUTS, broadcast_from, decode, encode
from fedlalr.training.layout import Layout
from fedlalr.training.torch_state import get_buffers
from flower.in_process import to_npy

MODEL = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 1))
LAYOUT = Layout.of(MODEL)


def as_bytes(records):
    return {record: {name: to_npy(array) for name, array in arrays.items()} for record, arrays in records.items()}


def plain(names, blocks=()):
    """Slots, and a channel for them without codecs."""
    table = SlotTable(down=tuple(names), up=dict.fromkeys(blocks, "mean"), blocks=blocks)
    return names, Channel(Compression(), table, LAYOUT.size, LAYOUT.dtype, 0, 1)


def some_slots(seed=0, names=("x", "m", "v_hat")):
    generator = torch.Generator().manual_seed(seed)
    return Slots(**{name: torch.randn(LAYOUT.size, generator=generator) for name in names})


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(LAYOUTS), st.sets(st.sampled_from(["m", "v_hat", "c"])))
def test_slots_and_buffers_survive_a_round_trip(seed, how, more):
    slots = some_slots(seed, ("x", *sorted(more)))
    buffers = get_buffers(MODEL)
    records = as_bytes(encode(slots, buffers, LAYOUT, how))
    back, found = broadcast_from(records, *plain(slots), LAYOUT, buffers, how)
    assert all(torch.equal(back[name], slots[name]) for name in slots)
    assert {name: (b.shape, b.dtype) for name, b in found.items()} == {
        name: (b.shape, b.dtype) for name, b in buffers.items()
    }
    assert all(torch.equal(found[name], buffers[name]) for name in buffers)


@pytest.mark.parametrize("how", LAYOUTS)
def test_a_slot_of_blocks_travels_as_one_number_for_each_parameter(how):
    whole = some_slots()
    slots, buffers = whole.replace(m=LAYOUT.block_means(whole.m)), get_buffers(MODEL)
    records = encode(slots, buffers, LAYOUT, how, blocks=("m",))
    numbers = records["m"] if how == "records" else {k: v for k, v in records["arrays"].items() if k.startswith("m/")}
    assert [array.shape for array in numbers.values()] == [()] * len(LAYOUT.names)
    back, _ = broadcast_from(as_bytes(records), *plain(slots, ("m",)), LAYOUT, buffers, how)
    assert all(torch.equal(back[name], slots[name]) for name in slots)
    with_all_of_m = as_bytes(encode(slots, buffers, LAYOUT, how))
    with pytest.raises(Rejected, match=r"m/0.weight has shape"):
        broadcast_from(with_all_of_m, *plain(slots, ("m",)), LAYOUT, buffers, how)


def test_the_packed_layout_has_one_record_and_the_other_one_per_slot():
    slots, buffers = some_slots(), get_buffers(MODEL)
    packed = encode(slots, buffers, LAYOUT, "packed")
    assert list(packed) == ["arrays"]
    assert {"x/0.weight", "m/3.bias", "v_hat/1.weight", "buffers/1.running_mean"} <= packed["arrays"].keys()
    assert list(encode(slots, buffers, LAYOUT, "records")) == ["x", "m", "v_hat", "buffers"]


def test_a_slot_cannot_be_named_buffers():
    with pytest.raises(ValueError, match="cannot be named 'buffers'"):
        encode(Slots(x=torch.zeros(LAYOUT.size), buffers=torch.zeros(LAYOUT.size)), {}, LAYOUT, "records")


def changed(name, content):
    records = as_bytes(encode(some_slots(), get_buffers(MODEL), LAYOUT, "records"))
    records["x"][name] = content
    return records


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (to_npy(np.zeros(1, np.float32)), "shape"),
        (to_npy(np.zeros((1, 3), np.float32)), "shape"),
        (to_npy(np.zeros(2, np.float64)), "is <f8"),
        (to_npy(np.zeros(2, ">f4")), "is >f4"),
        (to_npy(np.zeros(2, np.float32))[:-3], "bytes of numbers"),
        (to_npy(np.zeros(2, np.float32)) + b"\0" * 5000, "more than an array"),
        (pickle.dumps([1, 2]), "not a readable npy"),
        (b"", "not a readable npy"),
    ],
)
def test_unexpected_arrays_are_rejected(content, reason):
    with pytest.raises(Rejected, match=reason):
        decode(changed("0.bias", content), ("x", "m", "v_hat"), LAYOUT, get_buffers(MODEL), "records")


def test_an_array_of_objects_is_never_read():
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}, None], dtype=object), allow_pickle=True)
    with pytest.raises(Rejected):
        decode(changed("0.bias", stream.getvalue()), ("x", "m", "v_hat"), LAYOUT, get_buffers(MODEL), "records")


def test_a_broadcast_without_a_parameter_is_rejected_by_name():
    records = as_bytes(encode(some_slots(), get_buffers(MODEL), LAYOUT, "records"))
    del records["m"]["3.bias"]
    with pytest.raises(Rejected, match=r"did not send m of 3\.bias"):
        broadcast_from(records, *plain(("x", "m", "v_hat")), LAYOUT, get_buffers(MODEL), "records")
    del records["m"]
    with pytest.raises(Rejected, match=r"did not send m of 0\.weight"):
        broadcast_from(records, *plain(("x", "m", "v_hat")), LAYOUT, get_buffers(MODEL), "records")
    with pytest.raises(Rejected, match="must be in one record 'arrays'"):
        broadcast_from(records, *plain(("x",)), LAYOUT, {}, "packed")


def test_a_broadcast_without_a_buffer_is_rejected_by_name():
    records = as_bytes(encode(some_slots(), {}, LAYOUT, "records"))
    with pytest.raises(Rejected, match=r"did not send the buffer 1\.running_mean"):
        broadcast_from(records, *plain(("x",)), LAYOUT, get_buffers(MODEL), "records")
