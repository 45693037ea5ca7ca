"""Converts flat slots to named arrays and back, in either layout. Handles tensors and npy bytes, not the transport.

records    one record per slot:    x: {0.weight: …, 0.bias: …}, m: {…}, v_hat: {…}, buffers: {…}
A slot that has a codec is one array of bytes under the name `encoded`, in the layout "records".

packed     one record for all:     arrays: {x/0.weight: …, x/0.bias: …, m/0.weight: …, buffers/1.running_mean: …}
A slot with one number for each parameter (`SlotTable.blocks`) has arrays without dimensions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.replies.payload import ENCODED, Rejected, array_from_npy, as_tensor, flat_slot
from fedlalr.training.interfaces import Buffers
from fedlalr.training.layout import Layout

LAYOUTS = ("records", "packed")
BUFFERS, PACKED = "buffers", "arrays"

Arrays = dict[str, NDArray[Any]]


def encode(
    slots: Slots,
    buffers: Buffers,
    layout: Layout,
    how: str,
    blocks: Collection[str] = (),
    content: Mapping[str, Tensor] | None = None,
) -> dict[str, Arrays]:
    """Slots `[P]` and buffers as arrays under the names of the module's parameters, in records.

    `content` has the bytes of slots that have a codec; they are sent instead of the slots' numbers.
    """
    if BUFFERS in slots:
        raise ValueError(f"a slot cannot be named {BUFFERS!r}: that name is used for the module's buffers")
    content = content or {}
    records = {
        slot: {ENCODED: _array(content[slot])}
        if slot in content
        else {name: _array(view.flatten()[0] if slot in blocks else view) for name, view in layout.views(flat).items()}
        for slot, flat in slots.items()
    }
    if buffers:
        records[BUFFERS] = {name: _array(buffer) for name, buffer in buffers.items()}
    if how == "records":
        return records
    return {PACKED: {f"{record}/{name}": array for record, arrays in records.items() for name, array in arrays.items()}}


def decode(
    records: Mapping[str, Mapping[str, bytes]],
    names: Iterable[str],
    layout: Layout,
    buffers: Buffers,
    how: str,
    blocks: Collection[str] = (),
    encoded: Mapping[str, int] | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Named arrays of the expected slots, and of the buffers, from records of npy bytes; or `Rejected`.

    `encoded` has the sizes of slots that have a codec.

    Unexpected names keep their bytes: the next check rejects them by name. Missing names stay missing.
    """
    shapes, encoded = dict(zip(layout.names, layout.shapes, strict=True)), encoded or {}
    slots: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for record, arrays in _unpacked(records, how).items():
        for name, content in arrays.items():
            known: tuple[Sequence[int], torch.dtype] | None = None
            if record == BUFFERS and name in buffers:
                known = buffers[name].shape, buffers[name].dtype
            elif record in encoded and name == ENCODED:
                known = (encoded[record],), torch.uint8
            elif record in names and name in shapes:
                known = () if record in blocks else shapes[name], layout.dtype
            label = f"buffer {name}" if record == BUFFERS else f"{record}/{name}"
            array = content if known is None else array_from_npy(label, content, *known)
            (found if record == BUFFERS else slots.setdefault(record, {}))[name] = array
    return slots, found


def broadcast_from(
    records: Mapping[str, Mapping[str, bytes]],
    names: Iterable[str],
    channel: Channel,
    layout: Layout,
    buffers: Buffers,
    how: str,
) -> tuple[Slots, Buffers]:
    """The server's broadcast as flat slots and buffers. `buffers` are those of the client's module."""
    names, blocks = tuple(names), channel.slots.blocks
    encoded = {name: channel.size_down(name) for name in channel.compression.down}
    slots, found = decode(records, names, layout, buffers, how, blocks, encoded)
    flat = {}
    for slot in names:
        if slot in encoded:
            if ENCODED not in slots.get(slot, {}):
                raise Rejected(f"the server did not send the bytes of {slot}; does it use the same compression?")
            content = as_tensor(slot, slots[slot][ENCODED], (encoded[slot],), torch.uint8)
            flat[slot] = channel.decode_broadcast(slot, content)
            continue
        if missing := [name for name in layout.names if name not in slots.get(slot, {})]:
            raise Rejected(f"the server did not send {slot} of {missing[0]}; does it train the same module?")
        flat[slot] = flat_slot(slot, slots[slot], layout, blocks)
    if missing := [name for name in buffers if name not in found]:
        raise Rejected(f"the server did not send the buffer {missing[0]}; does it train the same module?")
    return Slots(**flat), {name: as_tensor(name, found[name], like.shape, like.dtype) for name, like in buffers.items()}


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().contiguous().numpy()
    return array


def _unpacked(records: Mapping[str, Mapping[str, bytes]], how: str) -> dict[str, dict[str, bytes]]:
    if how == "records":
        return {record: dict(arrays) for record, arrays in records.items()}
    if list(records) != [PACKED]:
        raise Rejected(f"the arrays must be in one record {PACKED!r}, not in {', '.join(map(repr, records)) or 'none'}")
    unpacked: dict[str, dict[str, bytes]] = {}
    for key, content in records[PACKED].items():
        record, _, name = key.partition("/")
        unpacked.setdefault(record, {})[name] = content
    return unpacked
