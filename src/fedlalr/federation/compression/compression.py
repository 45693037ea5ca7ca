"""Which codec each slot has in each direction, and how often it is sent: `Compression`, and its short forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fedlalr.algorithms.slots import Algorithm, SlotTable
from fedlalr.common.named import built, check_known, check_names, check_options, options_of
from fedlalr.common.option_types import Count, check_type
from fedlalr.federation.compression.codecs import BFloat16, Codec, Int, Log, has_feedback

CODECS: dict[str, Callable[..., Codec]] = {"bfloat16": BFloat16, "int": Int, "log": Log}
"""Codecs by their names in configurations."""


@dataclass(frozen=True)
class Compression:
    """Codecs by slot, for the clients' replies (`up`) and the broadcast (`down`); other slots travel as they are.

    every: slot → n: clients send the slot in rounds 1, n + 1, 2n + 1, …; in other rounds the server's value stands.

    A codec is an object such as `fl.codecs.Int(bits=8, feedback=True)`, or in a configuration its name, or a mapping
    such as `{"name": "int", "bits": 8, "feedback": True}`.
    """

    up: Mapping[str, Codec] = field(default_factory=dict)
    down: Mapping[str, Codec] = field(default_factory=dict)
    every: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for direction in ("up", "down"):
            given = getattr(self, direction)
            if not isinstance(given, Mapping):
                raise TypeError(f"{direction} must be a dict from slot to codec, not {given!r}")
            codecs = {slot: _as_codec(f"{direction} of {slot}", codec) for slot, codec in given.items()}
            object.__setattr__(self, direction, codecs)
        if not isinstance(self.every, Mapping):
            raise TypeError(f"every must be a dict from slot to a number of rounds, not {self.every!r}")
        for slot, rounds in self.every.items():
            check_type(f"every of {slot}", rounds, Count)

    @property
    def with_feedback(self) -> tuple[str, ...]:
        """The slots whose errors clients keep."""
        return tuple(slot for slot, codec in self.up.items() if has_feedback(codec))

    @property
    def residuals(self) -> tuple[str, ...]:
        """The names under which they keep them."""
        return tuple(map(residual, self.with_feedback))

    def waiting(self, round: int) -> set[str]:
        """The slots that clients do not send in a round."""
        return {slot for slot, rounds in self.every.items() if (round - 1) % rounds}

    def check(self, algorithm: Algorithm) -> None:
        """Reject what does not fit an algorithm's slots."""
        table, method = algorithm.slots, type(algorithm).__name__
        for direction, sends, slots in (
            ("up", "uploads", tuple(table.up)),
            ("down", "broadcasts", table.down),
            ("every", "uploads", tuple(table.up)),
        ):
            given = getattr(self, direction)
            check_names(f"compression: {direction} names the slot", given, f"{method} {sends}", slots)
        for slot in (*self.up, *self.down):
            if slot in table.blocks:
                one = "one number for each parameter tensor"
                raise ValueError(f"compression: {slot} of {method} is sent as {one}; leave it out")
        for slot, codec in self.up.items():
            _check_up(slot, codec, algorithm)
        for slot, codec in self.down.items():
            _check_down(slot, codec, algorithm)
        for slot in self.every:
            if slot == "x" or slot not in table.down:
                why = "x carries what was learned" if slot == "x" else "the server does not have a value of its own"
                raise ValueError(f"compression: {slot} must be sent in every round, because {why}")
        _check_periods(self.every, table)


def residual(slot: str) -> str:
    """The name of the error that a client keeps for a slot."""
    return f"residual.{slot}"


NONE = Compression()


def compression_for(given: str | Compression | Mapping[str, Any] | None, algorithm: Algorithm) -> Compression:
    """The compression that a user chose, checked against the algorithm."""
    if given is None:
        return NONE
    if isinstance(given, str):
        check_known("there is no compression", given, SHORT_FORMS, ", or give fl.Compression(up=…, down=…)")
        found = SHORT_FORMS[given](algorithm)
    elif isinstance(given, Mapping):
        check_options("compression", given, options_of(Compression))
        found = Compression(**{name: value for name, value in given.items() if value is not None})
    elif isinstance(given, Compression):
        found = given
    else:
        raise TypeError(f"compression must be fl.Compression(…), a short form or None, not {given!r}")
    found.check(algorithm)
    return found


def _short_form(algorithm: Algorithm, change: Codec, model: Codec, every: int) -> Compression:
    """Codecs for the slots that an algorithm has. The first upload is the model or its change.

    Momentum is rounded to the nearest: methods divide it by √v̂, so stochastic rounding of a tiny number to a whole step
    could make a huge step of it. Down, nearest is better for all: no mean over clients removes the noise.
    """
    table = algorithm.slots
    up: dict[str, Codec] = {}
    for slot in table.up:
        if slot in table.blocks:
            continue  # one number for each parameter tensor
        if slot in table.grows and starting_value(algorithm, slot) >= 0:
            up[slot] = Log(4)
        elif is_relative(algorithm, slot):
            up[slot] = BFloat16()
        elif slot == next(iter(table.up)):
            up[slot] = change
        else:
            up[slot] = Int(8, rounding="nearest" if slot in table.down else "stochastic")
    down: dict[str, Codec] = {}
    for slot in table.down:
        if slot in table.blocks:
            continue
        if slot == "x":
            down[slot] = model
        elif not is_relative(algorithm, slot):
            down[slot] = Int(8, rounding="nearest")
        else:
            down[slot] = Log(8) if _stays_positive(algorithm, slot) else BFloat16()
    periodic = (*table.grows, *_momenta(table)) if table.grows and every > 1 else ()
    return Compression(up, down, dict.fromkeys(periodic, every))


SHORT_FORMS: dict[str, Callable[[Algorithm], Compression]] = {
    "balanced": partial(_short_form, change=Int(8, feedback=True), model=BFloat16(), every=1),
    "smallest": partial(_short_form, change=Int(4, feedback=True), model=Int(8, rounding="nearest"), every=3),
}
"""Balanced: the model's changes in 8 bits, growth in 4; down, the model in bfloat16. Smallest: the model's changes in 4
bits, growth in 4 in every third round; down, the model in 8 bits."""


def _momenta(table: SlotTable) -> list[str]:
    """Slots beside the model that are synchronised and may shrink, such as momentum."""
    return [slot for slot in list(table.up)[1:] if slot in table.down and slot not in table.grows]


def is_relative(algorithm: Algorithm, slot: str) -> bool:
    """Whether the small numbers of a slot need the relative precision of the large ones, since methods divide by it."""
    table: SlotTable = algorithm.slots
    return slot != "x" and (slot in table.grows or slot in table.relative or starting_value(algorithm, slot) > 0)


def _stays_positive(algorithm: Algorithm, slot: str) -> bool:
    start = starting_value(algorithm, slot)
    return start > 0 or (slot in algorithm.slots.grows and start >= 0)


def starting_value(algorithm: Algorithm, slot: str) -> float:
    """The initial value of a slot on the server, 0 if it has none."""
    with torch.no_grad():
        initial = algorithm.init(torch.zeros(1, dtype=torch.float64, device="cpu"))
    return float(initial[slot].min()) if slot in initial else 0.0


def _check_periods(every: Mapping[str, int], table: SlotTable) -> None:
    """Reject momentum that is newer than the second moments by whose root it is divided: it may be far too large."""
    for slot in table.grows:
        for other in _momenta(table):
            if every.get(slot, 1) != every.get(other, 1):
                raise ValueError(
                    f"compression: {other} and {slot} must be sent in the same rounds, because {other} may be divided "
                    f"by the root of {slot}; give both the same number in every"
                )


def _check_up(slot: str, codec: Codec, algorithm: Algorithm) -> None:
    grows = slot in algorithm.slots.grows
    if grows and has_feedback(codec):
        raise ValueError(
            f"compression: {slot} of {type(algorithm).__name__} can only grow, and the error of an earlier reply could "
            f"lower it; use Log, or feedback=False, for its way up"
        )
    if isinstance(codec, Log) and not (grows and starting_value(algorithm, slot) >= 0):
        raise ValueError(
            f"compression: {slot} of {type(algorithm).__name__} can shrink, and Log writes only growth; "
            f"use BFloat16 or Int for its way up"
        )
    if isinstance(codec, Int) and is_relative(algorithm, slot) and not grows:
        raise ValueError(f"compression: {_too_coarse(slot, algorithm)}; use BFloat16 for its way up")


def _check_down(slot: str, codec: Codec, algorithm: Algorithm) -> None:
    if isinstance(codec, Log) and not _stays_positive(algorithm, slot):
        raise ValueError(
            f"compression: {slot} of {type(algorithm).__name__} can be negative, and Log writes only numbers "
            f"above zero; use BFloat16 or Int for its way down"
        )
    if isinstance(codec, Int) and is_relative(algorithm, slot):
        raise ValueError(f"compression: {_too_coarse(slot, algorithm)}; use Log or BFloat16 for its way down")


def _too_coarse(slot: str, algorithm: Algorithm) -> str:
    method = type(algorithm).__name__
    return f"{method} divides by {slot} or its root, and Int rounds the small numbers of a block to zero"


def _as_codec(where: str, given: object) -> Codec:
    given = built(given, CODECS, f"{where}: there is no codec", f"{where}: the codec {{!r}}")
    if isinstance(given, type) or not isinstance(given, Codec):
        raise TypeError(
            f"{where}: a codec is an object such as fl.codecs.Int(bits=8), or one of {', '.join(map(repr, CODECS))} "
            f"with its options, not {given!r}"
        )
    return given
