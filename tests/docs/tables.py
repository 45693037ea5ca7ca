"""The tables in the documentation that are made of the code. Print them with `python tests/docs/tables.py`."""

from dataclasses import Field
from typing import Any

import torch

from fedlalr.algorithms import SCAFFOLD, Algorithm, FedAdam, FedAvg, FedLALR
from fedlalr.federation.combinations import COMBINATIONS
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.compression.compression import SHORT_FORMS, compression_for
from fedlalr.federation.options import in_reading_order

METHODS: dict[str, Algorithm] = {
    "FedAvg": FedAvg(),
    "FedAdam": FedAdam(),
    "SCAFFOLD": SCAFFOLD(),
    "FedLALR": FedLALR(),
    'FedLALR, `momentum="restart"`': FedLALR(momentum="restart"),
}
PARAMETERS = 1_000_000


def options_table() -> str:
    """The options of `fl.run`, in `docs/api.md`."""
    rows = [f"| `{each.name}` | {_default(each)} | {each.metadata['doc']} |" for each in in_reading_order()]
    return "\n".join(["| option | default | |", "|---|---|---|", *rows])


def _default(option: Field[Any]) -> str:
    return f"`{getattr(option.default, '__name__', repr(option.default))}`"


def combinations_table() -> str:
    """What cannot be combined, in `docs/compression.md`."""
    rows = [f"| {first} | {second} | {reason} |" for (first, second), reason in COMBINATIONS.items()]
    return "\n".join(["| feature | not with | because |", "|---|---|---|", *rows])


def bytes_table() -> str:
    """Bytes a parameter, up / down, of some methods without and with compression, in `docs/compression.md`."""
    forms = (None, *SHORT_FORMS)
    rows = [
        f"| {name} | {' | '.join('{:.3g} / {:.3g}'.format(*bytes_a_parameter(method, form)) for form in forms)} |"
        for name, method in METHODS.items()
    ]
    header = f"| | as it is | {' | '.join(f'`{name}`' for name in SHORT_FORMS)} |"
    return "\n".join([header, f"|---|{'---|' * len(forms)}", *rows])


def bytes_a_parameter(algorithm: Algorithm, chosen: str | None) -> tuple[float, float]:
    """Bytes up and down for a parameter of a float32 model and a client's round; a mean over periods."""
    compression = compression_for(chosen, algorithm)
    rounds = 3
    up, down = 0, 0
    for t in range(1, rounds + 1):
        channel = Channel(compression, algorithm.slots, PARAMETERS, torch.float32, 0, t)
        up, down = up + channel.bytes_up, down + channel.bytes_down
    return up / rounds / PARAMETERS, down / rounds / PARAMETERS


if __name__ == "__main__":
    print(options_table(), combinations_table(), bytes_table(), sep="\n\n")
