"""Replies from remote clients: their form is checked before anything is computed from them.

The checks cover names, shapes, dtypes, byte order, contiguity and counts, and that the reply belongs to this run, this
round and a client of its cohort. Nothing is cast, broadcast, reordered or guessed: whatever does not fit is rejected,
with its name.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlalr.algorithms.slots import Slots, SlotTable
from fedlalr.federation.compression.channel import Channel
from fedlalr.training.interfaces import Buffers, Replies
from fedlalr.training.layout import Layout

LARGEST_COUNT = 10**9
"""A client that claims more samples or local steps than this is rejected."""
LONGEST_NAME, LONGEST_TEXT = 100, 200
"""Metrics with longer names or values are dropped."""
LARGEST_METRIC = 1e300
NOBODY = -1
"""The client of a reply that does not name one."""
ENCODED = "encoded"
"""In place of the names of parameters: the bytes of a slot that has a codec."""
LONGEST_HEADER = 1024
"""The largest npy header that is parsed, in bytes."""


class Rejected(ValueError):
    """Why a reply was rejected."""


@dataclass(frozen=True)
class Reply:
    """One client's answer, as received. Nothing in it is trusted."""

    client: int
    run: str
    round: int
    contract: str
    """The digest of the hyper-parameters the client trained with, see `fingerprint.contract`."""
    samples: Any
    steps: Any
    slots: Mapping[str, Mapping[str, Any]]
    """Slot → parameter → array, or `ENCODED` → bytes."""
    buffers: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Numbers such as `loss`, used only in the records."""


@dataclass(frozen=True)
class Expected:
    """What the replies of a round must look like."""

    run: str
    round: int
    clients: frozenset[int]
    """The cohort."""
    contract: str
    layout: Layout
    table: SlotTable
    broadcast: Slots
    buffers: Buffers = field(default_factory=dict)
    answered: frozenset[int] = frozenset()
    """Clients that have already replied."""
    steps: Callable[[int], int] | None = None
    """Number of samples → local steps of a client in this round, if known."""
    partial: bool = False
    """Whether a client may send fewer local steps, since the run has a deadline."""
    channel: Channel | None = None
    """How slots are encoded; None: all travel as they are."""
    counts: bool = True
    """Whether replies contain the numbers of samples and steps; private ones do not."""

    @property
    def encoded(self) -> dict[str, int]:
        """The slots that have a codec, with the bytes that each of them takes."""
        channel = self.channel
        return {} if channel is None else {n: channel.size_up(n) for n in channel.compression.up if n in self.table.up}


def unpack(reply: Reply, expected: Expected) -> Replies:
    """The reply as a stack of one; raises `Rejected`."""
    client = _check_origin(reply, expected)
    samples, steps = _counts(reply, expected) if expected.counts else (1, 1)
    layout, table = expected.layout, expected.table
    _check_names("slots", reply.slots, table.up)
    slots, encoded = {}, expected.encoded
    for slot in table.up:
        named = reply.slots[slot]
        if slot in encoded:
            slots[slot] = _decoded(slot, named, encoded[slot], expected)
            continue
        _check_names(f"the parameters of {slot}", named, layout.names)
        slots[slot] = flat_slot(slot, named, layout, table.blocks)[None].to(expected.broadcast.x.device)
    _check_names("buffers", reply.buffers, expected.buffers)
    buffers = {
        name: as_tensor(f"buffer {name}", reply.buffers[name], like.shape, like.dtype)[None].to(like.device)
        for name, like in expected.buffers.items()
    }
    loss = clean_metrics(reply.metrics).get("loss", math.nan)
    return Replies(
        clients=torch.tensor([client]),
        samples=torch.tensor([samples]),
        steps=torch.tensor([steps]),
        losses=torch.tensor([float(loss) if isinstance(loss, int | float) else math.nan], dtype=torch.float64),
        slots=Slots(**slots),
        buffers=buffers,
        kept=Slots(),
    )


def _counts(reply: Reply, expected: Expected) -> tuple[int, int]:
    """A client's numbers of samples and local steps."""
    samples, steps = check_count("samples", reply.samples), check_count("steps", reply.steps)
    due = steps if expected.steps is None else expected.steps(samples)
    if steps > due or (steps < due and not expected.partial):
        most = "at most " if expected.partial else ""
        raise Rejected(f"steps is {steps:,}, but a client with {samples:,} samples takes {most}{due:,} in this round")
    return samples, steps


def flat_slot(slot: str, named: Mapping[str, Any], layout: Layout, blocks: Collection[str]) -> Tensor:
    """A slot's arrays as one vector `[P]`; raises `Rejected`. A slot in `blocks` has one number for each parameter."""
    parts = [
        as_tensor(f"{slot}/{name}", named[name], () if slot in blocks else shape, layout.dtype).expand(shape)
        for name, shape in zip(layout.names, layout.shapes, strict=True)
    ]
    return torch.cat([part.reshape(-1) for part in parts])


def _decoded(slot: str, named: Mapping[str, Any], size: int, expected: Expected) -> Tensor:
    """A slot `[1, P]` from its bytes, which may be anything of the right size."""
    assert expected.channel is not None
    _check_names(f"the parts of {slot}", named, [ENCODED])
    content = as_tensor(f"{slot}/{ENCODED}", named[ENCODED], (size,), torch.uint8)
    try:
        with torch.no_grad():
            broadcast = expected.broadcast
            return expected.channel.decode_reply(slot, content[None].to(broadcast.x.device), broadcast)
    except Exception as error:  # a user's codec may raise anything
        raise Rejected(f"{slot} cannot be decoded: {type(error).__name__}: {error}") from error


def as_tensor(name: str, array: object, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """An array or tensor of exactly this shape and dtype as a tensor on the CPU; else raises `Rejected`."""
    shape = tuple(shape)
    if isinstance(array, np.ndarray):
        if not array.dtype.isnative:
            raise Rejected(f"{name} has swapped bytes ({array.dtype.str})")
        kind: object = numpy_dtype(dtype)
        contiguous = array.flags.c_contiguous
    elif isinstance(array, Tensor):
        if array.layout is not torch.strided or array.is_quantized or array.device.type == "meta":
            raise Rejected(f"{name} is not a plain tensor")
        kind, contiguous = dtype, array.is_contiguous()
    else:
        raise Rejected(f"{name} is a {type(array).__name__} and not an array")
    if array.dtype != kind:
        raise Rejected(f"{name} is {array.dtype}, but {dtype} is expected")
    if tuple(array.shape) != shape:
        raise Rejected(f"{name} has shape {tuple(array.shape)}, but {shape} is expected")
    if not contiguous:
        raise Rejected(f"{name} is not contiguous")
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array.view(np.ndarray) if array.flags.writeable else array.copy())
    return array.detach()


def check_count(name: str, value: Any) -> int:
    """A whole number from 1 to `LARGEST_COUNT`; else raises `Rejected`."""
    number = value.item() if isinstance(value, np.integer | np.floating) else value
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not 1 <= number <= LARGEST_COUNT or number != int(number):
        raise Rejected(f"{name} is {_short(value)}, but a whole number from 1 to {LARGEST_COUNT:,} is expected")
    return int(number)


def clean_metrics(metrics: object) -> dict[str, int | float | str]:
    """The metrics to record: finite numbers and short texts with short names. The rest is dropped.

    >>> clean_metrics({"loss": 0.5, "accuracy": float("nan"), "note": "x" * 10_000})
    {'loss': 0.5}
    """
    kept: dict[str, int | float | str] = {}
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        if not isinstance(name, str) or len(name) > LONGEST_NAME:
            continue
        if isinstance(value, bool | int | float | np.integer | np.floating):
            number = value.item() if isinstance(value, np.generic) else value
            if -LARGEST_METRIC <= number <= LARGEST_METRIC:
                kept[name] = number
        elif isinstance(value, str) and len(value) <= LONGEST_TEXT:
            kept[name] = value
    return kept


def array_from_npy(name: str, content: bytes, shape: Iterable[int], dtype: torch.dtype) -> NDArray[Any]:
    """The array in the bytes of an npy file, or `Rejected`. Reads no pickles and allocates no more than expected."""
    shape, wanted = tuple(shape), numpy_dtype(dtype)
    if len(content) > LONGEST_HEADER + math.prod(shape) * wanted.itemsize:
        raise Rejected(f"{name} has {len(content):,} bytes, more than an array of shape {shape} has")
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise Rejected(f"{name} is in npy format {version}, but 1.0 or 2.0 is expected")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        found_shape, fortran, found = read(stream, max_header_size=LONGEST_HEADER)
    except Rejected:
        raise
    except Exception as error:  # parsing the header of arbitrary bytes may raise anything
        raise Rejected(f"{name} is not a readable npy array: {type(error).__name__}") from error
    if found.hasobject:
        raise Rejected(f"{name} holds Python objects, which are never read")
    if not found.isnative or found != wanted:
        raise Rejected(f"{name} is {found.str}, but {wanted.str} is expected")
    if found_shape != shape or (fortran and len(shape) > 1):
        order = " in Fortran order" if fortran else ""
        raise Rejected(f"{name} has shape {found_shape}{order}, but {shape} is expected")
    rest = len(content) - stream.tell()
    if rest != math.prod(shape) * wanted.itemsize:
        raise Rejected(f"{name} has {rest:,} bytes of numbers, but {math.prod(shape) * wanted.itemsize:,} are expected")
    return np.frombuffer(content, wanted, offset=stream.tell()).reshape(shape)


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """NumPy's equivalent of a torch dtype; `Rejected` if there is none (bfloat16)."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        raise Rejected(f"NumPy has no {dtype}; send it as a tensor") from None


def client_of(reply: Reply) -> int:
    """The id of the client that a reply names, or `NOBODY` if it is not a valid id."""
    is_whole = isinstance(reply.client, int | np.integer) and not isinstance(reply.client, bool)
    return int(reply.client) if is_whole and 0 <= reply.client <= LARGEST_COUNT else NOBODY


def _check_origin(reply: Reply, expected: Expected) -> int:
    """The client that a reply comes from; `Rejected` unless its reply is expected."""
    if not isinstance(reply.run, str) or reply.run != expected.run:
        raise Rejected(f"the reply belongs to run {_short(reply.run)}, but this is {expected.run!r}")
    if not isinstance(reply.round, int) or reply.round != expected.round:
        raise Rejected(f"the reply belongs to round {_short(reply.round)}, but this is round {expected.round}")
    client = client_of(reply)
    if client == NOBODY:
        raise Rejected(f"the reply names client {_short(reply.client)}, but a whole number from 0 on is expected")
    if client in expected.answered:
        raise Rejected("the client has already replied")
    if client not in expected.clients:
        raise Rejected("the client is not in this round's cohort")
    if not isinstance(reply.contract, str) or reply.contract != expected.contract:
        raise Rejected("the client trained with different hyper-parameters")
    return client


def _check_names(what: str, given: object, expected: Iterable[str]) -> None:
    expected = list(expected)
    if not isinstance(given, Mapping):
        raise Rejected(f"{what} must be a mapping of names, not a {type(given).__name__}")
    missing = [name for name in expected if name not in given]
    extra = [name for name in given if name not in expected]
    if missing:
        raise Rejected(f"{what}: {_listed(missing)} missing")
    if extra:
        raise Rejected(f"{what}: {_listed(extra)} not expected")


def _listed(names: list[Any]) -> str:
    shown = ", ".join(_short(name) for name in names[:3])
    if len(names) > 3:
        return f"{shown} and {len(names) - 3} more are"
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) > LARGEST_COUNT**2:
        return "a huge number"  # Python does not print integers of thousands of digits
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
