"""The invariants of FedLALR: what must hold whatever the data, the gradients and the variant."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

import fedlalr as fl
from algorithms.numpy_federation import Batch, Network, Vector
from closeness import assert_close
from fedlalr.algorithms.slots import Context, Slots
from fedlalr.federation.replies.reducing import mean_change, reduce_slots, weights

VARIANTS = [(momentum, second) for momentum in ("average", "restart") for second in ("mean", "max")]
BETA1, BETA2, EPS = 0.9, 0.995, 1e-8
NETWORK = Network(features=4, hidden=5, classes=3)
SIZES = (7, 11, 5, 13, 8)
CPU = torch.device("cpu")

each_variant = pytest.mark.parametrize(("momentum", "second_moment"), VARIANTS)


def fedlalr(momentum: str = "average", second_moment: str = "mean", lr: float = 5e-3) -> fl.FedLALR:
    return fl.FedLALR(lr=lr, betas=(BETA1, BETA2), eps=EPS, momentum=momentum, second_moment=second_moment)


# Rounds from given gradients, for the properties -----------------------------------------------------


def magnitudes(smallest: float, largest: float) -> st.SearchStrategy[float]:
    sizes = st.floats(np.log10(smallest), np.log10(largest)).map(lambda exponent: 10.0**exponent)
    return st.builds(lambda size, sign: size * sign, sizes, st.sampled_from((-1.0, 1.0)))


gradients = hnp.arrays(  # [T, C, K, P]
    np.float64,
    st.tuples(st.integers(1, 3), st.sampled_from((1, 2, 3, 7, 50)), st.integers(1, 2), st.integers(1, 3)),
    elements=st.one_of(st.just(0.0), magnitudes(1e-12, 1e6)),
)


def play(algorithm: fl.FedLALR, server: Slots, steps: Tensor, sizes: Tensor, weighting: str) -> tuple[Slots, Slots]:
    """One round on a stack of clients whose gradients `[C, K, P]` are given: the replies and the server's new state."""
    cohort, k, _ = steps.shape
    context = Context(round=1, lr=algorithm.lr, steps=k, cohort=cohort, population=cohort)
    broadcast = server.only(*algorithm.slots.down)
    client = algorithm.start(broadcast, Slots())
    for gradient in steps.unbind(1):
        client = algorithm.step(client, gradient, broadcast, context)
    replies, _ = algorithm.finish(client, broadcast, context)
    share = weights(sizes, weighting, server.x.dtype, CPU)
    return replies, algorithm.update(server, reduce_slots(replies, broadcast, share, algorithm.slots), context)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None, max_examples=30)
@given(values=gradients, weighting=st.sampled_from(("uniform", "samples")))
def test_v_hat_never_decreases_and_honest_replies_lie_above_it(momentum, second_moment, dtype, values, weighting):
    algorithm = fedlalr(momentum, second_moment)
    rounds = torch.from_numpy(values).to(dtype)
    server = algorithm.init(torch.ones(rounds.shape[-1], dtype=dtype))
    floor = torch.tensor(EPS**2, dtype=dtype)
    assert (server.v_hat == floor).all()
    sizes = torch.arange(1, rounds.shape[1] + 1) * 7
    for steps in rounds:
        replies, after = play(algorithm, server, steps, sizes, weighting)
        assert (replies.v_hat >= server.v_hat).all()
        assert (after.v_hat >= server.v_hat).all()
        assert (after.v_hat >= floor).all()
        server = after


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None, max_examples=20)
@given(values=gradients, data=st.data())
def test_a_coordinate_without_gradient_keeps_its_value_exactly(momentum, second_moment, dtype, values, data):
    untouched = np.array(data.draw(st.lists(st.booleans(), min_size=values.shape[-1], max_size=values.shape[-1])))
    values[..., untouched] = 0.0
    algorithm = fedlalr(momentum, second_moment)
    server = start = algorithm.init(torch.full((values.shape[-1],), 1 / 3, dtype=dtype))
    for steps in torch.from_numpy(values).to(dtype):
        _, server = play(algorithm, server, steps, torch.ones(len(steps)), "uniform")
    for name, tensor in server.items():
        assert torch.equal(tensor[untouched], start[name][untouched])


@settings(deadline=None)
@given(
    g=hnp.arrays(np.float64, 5, elements=magnitudes(1e-4, 1e4)),
    lr=st.floats(1e-4, 1.0),
    beta1=st.floats(0.0, 0.99),
    beta2=st.floats(0.0, 0.999),
)
def test_the_first_step_has_one_length_wherever_the_gradient_outweighs_epsilon(g, lr, beta1, beta2):
    algorithm = fl.FedLALR(lr=lr, betas=(beta1, beta2), eps=EPS)
    server = algorithm.init(torch.zeros(5, dtype=torch.float64))
    _, after = play(algorithm, server, torch.from_numpy(g).view(1, 1, 5), torch.ones(1), "uniform")
    length = lr * (1 - beta1) / np.sqrt(1 - beta2)
    weight_of_epsilon = EPS**2 / ((1 - beta2) * g**2)
    np.testing.assert_array_less(np.abs(after.x.numpy() / length + np.sign(g)), weight_of_epsilon + 1e-12)


@settings(deadline=None, max_examples=50)
@given(values=hnp.arrays(np.float64, (4, 1, 5), elements=magnitudes(1e-6, 1e3)), lr=st.floats(1e-4, 1.0))
def test_with_one_local_step_x_moves_by_the_mean_of_the_clients_own_steps(values, lr):
    algorithm = fedlalr(lr=lr)
    server = algorithm.init(torch.zeros(5, dtype=torch.float64))
    g = values[:, 0]
    v_hats = np.maximum(EPS**2, BETA2 * EPS**2 + (1 - BETA2) * g**2)
    own_steps = (1 - BETA1) * g / np.sqrt(v_hats)
    _, after = play(algorithm, server, torch.from_numpy(values), torch.ones(4), "uniform")
    np.testing.assert_allclose(after.x.numpy(), -lr * own_steps.mean(0), rtol=1e-12, atol=1e-14 * lr)


def test_with_one_local_step_it_is_not_amsgrad_on_the_mean_gradient():
    """Clients that pull equally hard in rate, not in gradient: ten against minus one cancel out."""
    algorithm = fedlalr(lr=0.1)
    server = algorithm.init(torch.zeros(1, dtype=torch.float64))
    opposed = torch.tensor([10.0, -1.0], dtype=torch.float64).view(2, 1, 1)
    _, after = play(algorithm, server, opposed, torch.ones(2), "uniform")
    _, of_mean = play(algorithm, server, opposed.mean(0, keepdim=True), torch.ones(1), "uniform")
    assert abs(float(after.x)) < 1e-10
    assert float(of_mean.x) == pytest.approx(-0.1 * (1 - BETA1) / np.sqrt(1 - BETA2), rel=1e-6)


def test_the_float32_floor_survives_a_mean_over_fifty_clients():
    """The plain float32 mean of fifty equal numbers lies below them; the mean of changes does not."""
    v_hat = torch.full((50, 8), EPS**2, dtype=torch.float32)
    in_order = torch.zeros(8, dtype=torch.float32)
    for row in v_hat:
        in_order = in_order + row
    assert (in_order / 50 < v_hat[0]).all()
    share = weights(torch.ones(50), "uniform", torch.float32, CPU)
    assert torch.equal(mean_change(v_hat, v_hat[0], share), v_hat[0])


# Runs on data ----------------------------------------------------------------------------------------


def initial_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def client_data(sizes: tuple[int, ...] = SIZES) -> list[Batch]:
    rng = np.random.default_rng(7)
    return [(rng.normal(size=(n, 4)) + 0.4 * i, rng.integers(0, 3, size=n)) for i, n in enumerate(sizes)]


def tensors(data: list[Batch], dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    return [(torch.from_numpy(inputs).to(dtype), torch.from_numpy(targets)) for inputs, targets in data]


def run(clients: list[tuple[Tensor, Tensor]], algorithm: fl.FedLALR, model: nn.Module, **options: object) -> fl.Result:
    usual = {"rounds": 3, "local": fl.Steps(4), "batch_size": None, "seed": 3, "engine": "reference", "device": "cpu"}
    return fl.run(model, clients, algorithm, **(usual | options))


def flat(result: fl.Result, slot: str) -> Vector:
    return np.concatenate([tensor.numpy().ravel() for tensor in result.state[slot].values()])


@each_variant
def test_v_hat_never_decreases_from_round_to_round_of_a_float32_run(momentum, second_moment):
    clients = tensors(client_data(), torch.float32)
    options = {
        "local": fl.Epochs(2),
        "batch_size": 3,
        "clients_per_round": 3,
        "weight_decay": 1e-3,
        "schedule": fl.schedules.Exponential(0.9),
    }
    v_hats = [
        flat(run(clients, fedlalr(momentum, second_moment), initial_model(torch.float32), rounds=t, **options), "v_hat")
        for t in range(1, 6)
    ]
    assert (v_hats[0] >= np.float32(EPS**2)).all()
    assert all((later >= earlier).all() for earlier, later in pairwise(v_hats))


@each_variant
def test_an_input_that_is_always_zero_leaves_its_weights_exactly(momentum, second_moment):
    data = client_data(sizes=(2,) * 50)
    for inputs, _ in data:
        inputs[:, 2] = 0.0
    model = initial_model(torch.float32)
    before = model[0].weight.detach().clone()
    result = run(tensors(data, torch.float32), fedlalr(momentum, second_moment), model, rounds=2, local=fl.Steps(2))
    moved = {name: slot["0.weight"] for name, slot in result.state.items()}
    assert torch.equal(moved["x"][:, 2], before[:, 2])
    assert not torch.equal(moved["x"][:, 1], before[:, 1])
    assert (moved["v_hat"][:, 2] == torch.tensor(EPS**2)).all()
    assert "m" not in moved or (moved["m"][:, 2] == 0).all()


@pytest.mark.parametrize("second_moment", ["mean", "max"])
def test_v_hat_of_alignedlalr_shrinks_only_if_it_does_not_keep_everything(second_moment):
    clients = tensors(client_data(), torch.float32)

    def v_hats(keep: float) -> list[Vector]:
        method = fl.AlignedLALR(lr=5e-3, eps=1e-6, keep=keep, second_moment=second_moment)
        runs = [run(clients, method, initial_model(torch.float32), rounds=t, local=fl.Steps(2)) for t in range(1, 5)]
        assert not any(record.rejected for record in runs[-1].history)
        return [flat(result, "v_hat") for result in runs]

    assert all((later >= earlier).all() for earlier, later in pairwise(v_hats(1.0)))
    forgetful = v_hats(0.5)
    assert any((later < earlier).any() for earlier, later in pairwise(forgetful))
    assert all((values >= np.float32(1e-12)).all() for values in forgetful)


def amsgrad(x: Vector, batch: Batch, lr: float, steps: int, reseed_every: int | None) -> Iterator[tuple[Vector, ...]]:
    """AMSGrad without bias correction, the floor in its start value; v set to v̂ every so many steps."""
    m, v, v_hat = np.zeros_like(x), np.full_like(x, EPS**2), np.full_like(x, EPS**2)
    for n in range(steps):
        if reseed_every is not None and n % reseed_every == 0:
            v = v_hat
        g = NETWORK.gradient(x, batch)
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g**2
        v_hat = np.maximum(v_hat, v)
        x = x - lr * m / np.sqrt(v_hat)
        yield x, m, v_hat


def parameters(model: nn.Module) -> Vector:
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


def test_one_client_is_amsgrad_whose_v_is_reset_to_v_hat_every_round():
    batch = client_data()[1]
    result = run(tensors([batch]), fedlalr(lr=0.1), initial_model(), rounds=12)
    *_, (x, m, v_hat) = amsgrad(parameters(initial_model()), batch, 0.1, steps=48, reseed_every=4)
    for slot, wanted in {"x": x, "m": m, "v_hat": v_hat}.items():
        assert_close(flat(result, slot), wanted, tolerance=1e-10)
    *_, (never_reset, _, _) = amsgrad(parameters(initial_model()), batch, 0.1, steps=48, reseed_every=None)
    assert np.abs(never_reset - x).max() > 1e-4


def test_torch_adam_with_amsgrad_is_another_rule():
    """Same rate, betas, epsilon, gradients: bias correction alone takes it elsewhere in the very first step."""
    batch, lr = client_data()[1], 5e-3
    ((inputs, targets),) = tensors([batch])
    for steps in (1, 8):
        model = initial_model()
        adam = torch.optim.Adam(model.parameters(), lr=lr, betas=(BETA1, BETA2), eps=EPS, amsgrad=True)
        for _ in range(steps):
            adam.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            adam.step()
        ours = flat(run([(inputs, targets)], fedlalr(lr=lr), initial_model(), rounds=1, local=fl.Steps(steps)), "x")
        *_, (ams, _, _) = amsgrad(parameters(initial_model()), batch, lr, steps, reseed_every=None)
        assert_close(ours, ams)
        assert np.abs(ours - parameters(model)).max() > 0.2 * lr


@each_variant
def test_identical_clients_are_one_client(momentum, second_moment):
    ((inputs, targets),) = tensors(client_data()[1:2])
    one, five = (
        run([(inputs, targets)] * count, fedlalr(momentum, second_moment), initial_model()) for count in (1, 5)
    )
    for slot in one.state:
        assert_close(flat(five, slot), flat(one, slot))


@each_variant
@settings(deadline=None, max_examples=5)
@given(order=st.permutations(range(len(SIZES))))
def test_the_order_of_clients_does_not_matter_at_full_batch_and_participation(momentum, second_moment, order):
    clients = tensors(client_data())
    straight, shuffled = (
        run(listed, fedlalr(momentum, second_moment), initial_model(), rounds=2, local=fl.Steps(2))
        for listed in (clients, [clients[i] for i in order])
    )
    for slot in straight.state:
        assert_close(flat(shuffled, slot), flat(straight, slot))


@pytest.mark.parametrize(
    ("model_dtype", "compute"),
    [(torch.bfloat16, None), (torch.float16, None), (torch.float32, torch.bfloat16), (torch.float64, None)],
)
def test_moments_are_never_kept_in_half_precision(model_dtype, compute):
    """ε² = 1e-16 is zero in float16, and what the model computes in must not reach the moments."""
    assert torch.tensor(EPS**2, dtype=torch.float16) == 0
    wanted = torch.float64 if model_dtype == torch.float64 else torch.float32
    clients = tensors(client_data(), model_dtype)
    result = run(clients, fedlalr(), initial_model(model_dtype), rounds=2, dtype=compute)
    for slot, named in result.state.items():
        assert {tensor.dtype for tensor in named.values()} == {wanted}, slot
    assert (flat(result, "v_hat") >= np.float32(EPS**2)).all()
