"""The derivations themselves: the hand-written gradient is one, and methods coincide where their papers say so."""

from __future__ import annotations

import numpy as np
import pytest

from algorithms import derivations as d
from algorithms.numpy_federation import Batch, Federation, Method, Network, State, Vector, simulate
from closeness import assert_close

NETWORK = Network(features=4, hidden=5, classes=3)
SIZES = (4, 7, 3, 6, 5)


def client_data(seed: int = 0) -> list[Batch]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, 4)) + 0.5 * i, rng.integers(0, 3, size=n)) for i, n in enumerate(SIZES)]


def start_point(seed: int = 1) -> Vector:
    return 0.5 * np.random.default_rng(seed).normal(size=NETWORK.size)


def federation(steps: list[int], rounds: int = 3, lr: float = 0.1) -> Federation:
    data = client_data()
    plan = [{i: [data[i]] * steps[i] for i in range(len(SIZES))} for _ in range(rounds)]
    return Federation(NETWORK, plan, SIZES, lr, lr_decay=0.9, weight_decay=1e-3)


def final(method: Method, steps: list[int], rounds: int = 3, **slots: Vector | float) -> State:
    x = start_point()
    server = {"x": x} | {name: np.full_like(x, value) for name, value in slots.items()}
    return simulate(federation(steps, rounds), method, server)[-1][0]


def test_hand_gradient_matches_finite_differences() -> None:
    x, batch, h = start_point(), client_data()[1], 1e-6
    numeric = [
        (NETWORK.loss(x + h * unit, batch) - NETWORK.loss(x - h * unit, batch)) / (2 * h)
        for unit in np.eye(NETWORK.size)
    ]
    np.testing.assert_allclose(NETWORK.gradient(x, batch), numeric, rtol=1e-7, atol=1e-9)


def test_clipping_bounds_the_loss_gradient_before_weight_decay() -> None:
    x, batch = start_point(), client_data()[0]
    clipped = Federation(NETWORK, [], SIZES, 0.1, weight_decay=0.25, clip_norm=1e-2).oracle(batch)(x)
    assert np.linalg.norm(clipped - 0.25 * x) == pytest.approx(1e-2, rel=1e-12)


@pytest.mark.parametrize(
    ("method", "slots"),
    [
        (d.fedprox(0.0), {}),
        (d.fedcm(1.0), {"direction": 0.0}),
        (d.slowmo(1.0, 0.0), {"u": 0.0}),
        (d.fedavgm(1.0, 0.0), {"m": 0.0}),
        (d.fednova, {}),
    ],
    ids=["fedprox", "fedcm", "slowmo", "fedavgm", "fednova"],
)
def test_neutral_settings_are_fedavg(method: Method, slots: dict[str, float]) -> None:
    equal = [3] * len(SIZES)
    assert_close(final(method, equal, **slots)["x"], final(d.fedavg, equal)["x"])


def test_fednova_differs_from_fedavg_when_clients_take_unequal_steps() -> None:
    ragged = [1, 2, 3, 4, 5]
    assert np.abs(final(d.fednova, ragged)["x"] - final(d.fedavg, ragged)["x"]).max() > 1e-4


def test_scaffold_starts_as_fedavg_and_then_leaves_it() -> None:
    steps = [3] * len(SIZES)
    for rounds, same in ((1, True), (2, False)):
        gap = np.abs(final(d.scaffold, steps, rounds, c=0.0)["x"] - final(d.fedavg, steps, rounds)["x"]).max()
        assert bool(gap < 1e-14) is same


def test_scaffold_control_is_the_mean_of_the_clients_controls_at_full_participation() -> None:
    x = start_point()
    server, kept = simulate(federation([1, 2, 3, 2, 1]), d.scaffold, {"x": x, "c": np.zeros_like(x)})[-1]
    assert_close(server["c"], np.mean([kept[i]["c_i"] for i in range(len(SIZES))], axis=0))


def test_unamended_fedlada_is_fedlalr_with_restarted_momentum() -> None:
    steps = [1, 2, 3, 2, 1]
    lada = final(d.fedlada(0.9, 0.99, 1.0), steps, v_hat=1e-16, g_a=0.0)
    lalr = final(d.fedlalr(0.9, 0.99, "restart"), steps, v_hat=1e-16)
    assert_close(lada["x"], lalr["x"])


def test_unaligned_lalr_that_keeps_everything_is_fedlalr_with_restarted_momentum() -> None:
    steps = [1, 2, 3, 2, 1]
    aligned = final(d.aligned_lalr(0.9, 0.99, 1e-8, 0.0, 1.0, "max"), steps, v_hat=1e-16)
    lalr = final(d.fedlalr(0.9, 0.99, "restart", "max"), steps, v_hat=1e-16)
    assert_close(aligned["x"], lalr["x"])


def test_a_server_without_momentum_makes_diloco_local_adam() -> None:
    steps = [1, 2, 3, 2, 1]
    outer = final(d.diloco(1.0, 0.0, 0.9, 0.99, 1e-3), steps, m=0.0)
    assert_close(outer["x"], final(d.local_adam(0.9, 0.99, 1e-3), steps)["x"])


def test_joint_correction_of_one_client_restores_its_own_change() -> None:
    x, data = start_point(), client_data()
    alone = Federation(NETWORK, [{2: [data[2]] * 4}] * 3, SIZES, 0.01)
    none, joint = (
        simulate(alone, d.lafedopt(0.9, 0.99, 1e-8, how, d.average_server(1.0)), {"x": x})[-1][0]["x"]
        for how in ("none", "joint")
    )
    assert_close(joint, none)
