"""The table of sizes in `docs/compression.md`: `python -m fedlalr.federation.compression.tables`."""

from __future__ import annotations

import torch

from fedlalr.algorithms import SCAFFOLD, Algorithm, FedAdam, FedAvg, FedLALR
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.compression.compression import SHORT_FORMS, compression_for

METHODS: dict[str, Algorithm] = {
    "FedAvg": FedAvg(),
    "FedAdam": FedAdam(),
    "SCAFFOLD": SCAFFOLD(),
    "FedLALR": FedLALR(),
    'FedLALR, `momentum="restart"`': FedLALR(momentum="restart"),
}
PARAMETERS = 1_000_000


def bytes_a_parameter(algorithm: Algorithm, chosen: str | None) -> tuple[float, float]:
    """Bytes up and down for a parameter of a float32 model and a client's round; a mean over periods."""
    compression = compression_for(chosen, algorithm)
    rounds = 3
    up, down = 0, 0
    for t in range(1, rounds + 1):
        channel = Channel(compression, algorithm.slots, PARAMETERS, torch.float32, 0, t)
        up, down = up + channel.bytes_up, down + channel.bytes_down
    return up / rounds / PARAMETERS, down / rounds / PARAMETERS


def bytes_table() -> str:
    """Bytes a parameter, up / down, of some methods without and with compression."""
    forms = (None, *SHORT_FORMS)
    rows = [
        f"| {name} | {' | '.join('{:.3g} / {:.3g}'.format(*bytes_a_parameter(method, form)) for form in forms)} |"
        for name, method in METHODS.items()
    ]
    header = f"| | as it is | {' | '.join(f'`{name}`' for name in SHORT_FORMS)} |"
    return "\n".join([header, f"|---|{'---|' * len(forms)}", *rows])


if __name__ == "__main__":
    print(bytes_table())
