"""The noise that the server on Flower really adds: its scale, its distribution, and that no two draws are related.

The audit of `federation/privacy/test_audit.py` covers the clip, the sampling and the seeded noise of the simulator. On
Flower only the noise differs, which comes from the operating system. Here the server's state is observed before and
after private rounds: without replies its change is the noise alone, with replies it is the noise and the sum.

The noise is new in every test run. With the bounds below, a correct one is flagged once in ten million runs.
Power: 16,000 numbers of each slot in each round; a scale that is wrong by 5 % is nine standard errors off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chi2, kstest
from torch import Tensor, nn

pytest.importorskip("flwr", reason="Flower is not installed")

import fedlalr as fl
from fedlalr.federation.privacy.mechanism import secure_noise
from fedlalr.flower import FederatedStrategy
from fedlalr.flower.server import state
from flower.federation import POPULATION, InProcessGrid, nodes, simulated, strategy

CLIP, NOISE_MULTIPLIER, UNITS = 0.5, 0.9, {"x": 1.0, "m": 3.0, "v_hat": 20.0}
ROUNDS = 4
RARE, FAR = 1e-9, 6.5
"""Bounds on p-values, and on correlations in standard errors."""

Noise = Callable[[str, int, torch.device], Tensor]


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 2000), nn.Tanh(), nn.Linear(2000, 3)).double()


class Seen(fl.Observer):
    """The server's slots after every round, each as one vector in the order of `UNITS`.

    After the first round it raises v̂, so that the floor at ε² swallows no noise.
    """

    server: FederatedStrategy

    def __init__(self) -> None:
        self.slots: list[Tensor] = []

    def on_round(self, record: fl.Record) -> None:
        server = self.server.server
        if record.round == 1:
            slots = server.state.slots
            server.state = replace(server.state, slots=slots.replace(v_hat=slots.v_hat + 1000.0))
        now = server.state.slots
        self.slots.append(torch.stack([now[slot] / unit for slot, unit in UNITS.items()]))


def observed() -> NDArray[np.float64]:
    """The noise of rounds without replies, in standard deviations: `[rounds, slots, numbers]`."""
    private = fl.Privacy(clip=CLIP, noise_multiplier=NOISE_MULTIPLIER, units=UNITS)
    seen = Seen()
    settings = {"privacy": private, "rounds": ROUNDS + 1}
    seen.server = strategy(fl.FedLALR(), wide, settings, observers=[seen], join_deadline=0.001)
    seen.server.start(InProcessGrid({}))
    return (torch.stack(seen.slots).diff(dim=0) * POPULATION / (NOISE_MULTIPLIER * CLIP)).numpy()


def suspicious(noise: NDArray[np.float64]) -> set[str]:
    """What is wrong with numbers that should be independent and standard normal."""
    found = set()
    rows = noise.reshape(-1, noise.shape[-1])
    size = rows.shape[-1]
    tails = chi2(size).cdf((rows**2).sum(-1))
    if np.minimum(tails, 1 - tails).min() < RARE:
        found.add("scale")
    if kstest((rows / rows.std(-1, keepdims=True)).ravel(), "norm").pvalue < RARE:
        found.add("distribution")
    half = size // 2  # a pair of normal numbers has one radius and one angle
    pairs = [*combinations(rows, 2), *((row[:half], row[half : 2 * half]) for row in rows)]
    pairs += [(row[:-1], row[1:]) for row in rows]
    for one, other in pairs:
        for power in (1, 2):
            correlation = np.corrcoef(one**power, other**power)[0, 1]
            if abs(correlation) * len(one) ** 0.5 > FAR:
                found.add("independence")
    return found


def test_the_servers_noise_has_the_claimed_scale_and_is_independent_between_rounds_slots_and_numbers() -> None:
    assert suspicious(observed()) == set()


def test_a_sum_of_replies_gets_the_same_noise(tmp_path) -> None:
    """The change that exceeds the simulator's, which has hardly any noise. The clip is out of reach."""
    quiet, private = (fl.Privacy(clip=1e6, noise_multiplier=each) for each in (1e-25, 1e-6))
    method, one_round = fl.FedAvg(lr=0.1), {"rounds": 1}
    server = strategy(method, wide, one_round | {"privacy": private}, deadline=60, join_deadline=60)
    server.start(InProcessGrid(nodes(method, tmp_path, wide, one_round | {"privacy": private})))
    assert server.result is not None
    assert server.result.history[0].clients == POPULATION
    wanted = simulated(method, wide, one_round | {"privacy": quiet}).state["x"]
    noise = torch.cat([(server.result.state["x"][name] - wanted[name]).flatten() for name in wanted])
    assert suspicious((noise * POPULATION / (1e6 * 1e-6)).numpy()[None]) == set()


def scaled(factor: float) -> Noise:
    return lambda slot, count, device: factor * secure_noise(slot, count, device)


def always_the_same() -> Noise:
    drawn: dict[str, Tensor] = {}
    return lambda slot, count, device: drawn.setdefault(slot, secure_noise(slot, count, device))


def one_draw_for_all_slots() -> Noise:
    kept: list[Tensor] = []

    def draw(slot: str, count: int, device: torch.device) -> Tensor:
        if slot == "x":
            kept[:] = [secure_noise(slot, count, device)]
        return kept[0]

    return draw


def uniform(slot: str, count: int, device: torch.device) -> Tensor:
    return (torch.rand(count, dtype=torch.float64) - 0.5) * 12**0.5


def one_radius(slot: str, count: int, device: torch.device) -> Tensor:
    """Both halves with the same magnitudes, and independent signs."""
    first = secure_noise(slot, count, device)
    half = count // 2
    signs = torch.sign(secure_noise(slot, half, device))
    return torch.cat([first[:half], first[:half] * signs, first[2 * half :]])


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        pytest.param(scaled(0.5), {"scale"}, id="halved"),
        pytest.param(scaled(0.95), {"scale"}, id="5 % too weak"),
        pytest.param(always_the_same(), {"independence"}, id="the same in every round"),
        pytest.param(one_draw_for_all_slots(), {"independence"}, id="the same for all slots"),
        pytest.param(uniform, {"distribution"}, id="not normal"),
        pytest.param(one_radius, {"independence"}, id="the same magnitudes twice"),
    ],
)
def test_broken_noise_is_flagged(broken: Noise, found: set[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(state, "secure_noise", broken)
    assert found <= suspicious(observed())
