"""Frames on the socket between a relay and its trainer: a few values, records and the node's context.

A frame is the length of its head (8 bytes), the head (JSON), and the bytes whose lengths the head lists. Arrays are
sent as they are, without a copy and without protobuf's limit of 2 GB; Flower's functions convert the rest.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, BinaryIO, NamedTuple

from flwr.app import Array, ArrayRecord, Context, RecordDict
from flwr.common.serde import context_from_proto, context_to_proto, recorddict_from_proto, recorddict_to_proto
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

BEAT = "beat"
"""The kind of a frame that only shows that the trainer is alive."""
_LENGTH = struct.Struct("!Q")


class Frame(NamedTuple):
    """A request: Flower's type of the message, its content and the context. Or a reply, a beat, an error."""

    kind: str
    text: str = ""
    content: RecordDict = RecordDict()
    context: Context | None = None


def send(connection: socket.socket, frame: Frame) -> None:
    """Write a frame."""
    arrays = dict(frame.content.array_records)
    others = RecordDict({name: record for name, record in frame.content.items() if name not in arrays})
    plain = recorddict_to_proto(others).SerializeToString()
    context = b"" if frame.context is None else context_to_proto(frame.context).SerializeToString()
    listed = [
        [
            record,
            [[name, array.dtype, list(array.shape), array.stype, len(array.data)] for name, array in items.items()],
        ]
        for record, items in arrays.items()
    ]
    head: dict[str, Any] = {"kind": frame.kind, "text": frame.text, "arrays": listed}
    head |= {"plain": len(plain), "context": len(context)}
    encoded = json.dumps(head).encode()
    connection.sendall(_LENGTH.pack(len(encoded)) + encoded + plain + context)
    for items in arrays.values():
        for array in items.values():
            connection.sendall(array.data)


def receive(stream: BinaryIO) -> Frame:
    """Read a frame; raises `EOFError` if the other side has gone."""
    head = json.loads(_read(stream, *_LENGTH.unpack(_read(stream, _LENGTH.size))))
    content = recorddict_from_proto(ProtoRecordDict.FromString(_read(stream, head["plain"])))
    given = _read(stream, head["context"])
    for record, items in head["arrays"]:
        content[record] = ArrayRecord(
            {
                name: Array(dtype=dtype, shape=tuple(shape), stype=stype, data=_read(stream, size))
                for name, dtype, shape, stype, size in items
            }
        )
    context = context_from_proto(ProtoContext.FromString(given)) if given else None
    return Frame(head["kind"], head["text"], content, context)


def _read(stream: BinaryIO, size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise EOFError("the other side closed the connection")
    return found
