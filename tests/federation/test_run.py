"""`fl.run` end to end on the reference engine."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import fedlalr as fl
from closeness import assert_close
from conftest import make_clients, make_model
from fedlalr.federation.round import too_few
from fedlalr.federation.run import Simulation
from fedlalr.federation.sampling import sample
from fedlalr.federation.session import RepliesRejected

SETTINGS = {"rounds": 3, "local": fl.Epochs(2), "batch_size": 4, "engine": "reference"}


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in state.values()])


def test_training_lowers_the_loss_and_raises_the_accuracy(model, clients):
    test = (torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients]))
    result = fl.run(model, clients, fl.FedLALR(lr=0.02), **{**SETTINGS, "rounds": 25}, test=test)
    assert result.history[-1].loss < result.history[0].loss / 2
    assert result.history[-1].accuracy > 0.8
    assert [record.round for record in result.history] == list(range(1, 26))


def test_the_callers_model_is_never_changed(model, clients):
    before = copy.deepcopy(model.state_dict())
    result = fl.run(model, clients, fl.FedLALR(), **SETTINGS)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert result.model is not model
    assert not torch.equal(flat(result.state["x"]), flat(dict(model.named_parameters())))


def test_state_and_model_agree(model, clients):
    result = fl.run(model, clients, fl.FedLALR(), **SETTINGS)
    assert set(result.state) == {"x", "m", "v_hat"}
    for name, parameter in result.model.named_parameters():
        assert torch.equal(parameter, result.state["x"][name])
        assert result.state["v_hat"][name].shape == parameter.shape


def test_the_same_seed_gives_the_same_bits_and_another_does_not(model, clients):
    first, second, other = (
        fl.run(model, clients, fl.FedLALR(), **SETTINGS, clients_per_round=3, seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(flat(first.state["x"]), flat(second.state["x"]))
    assert not torch.equal(flat(first.state["x"]), flat(other.state["x"]))


def test_whole_numbers_of_numpy_make_the_run_that_python_s_make(model, clients, tmp_path):
    """A sweep over `np.arange` gives such numbers, and its run can be resumed with Python's integers."""
    counts = {"rounds": 3, "clients_per_round": 2, "batch_size": 4, "seed": 5, "checkpoint_every": 2, "min_clients": 1}
    numpy = {name: np.int64(value) for name, value in counts.items()}
    first = fl.run(model, clients, fl.FedLALR(), **numpy, engine="reference", run_dir=tmp_path)
    second = fl.run(model, clients, fl.FedLALR(), **counts, engine="reference")
    assert torch.equal(flat(first.state["x"]), flat(second.state["x"]))
    again = fl.run(model, clients, fl.FedLALR(), **counts, engine="reference", run_dir=tmp_path, resume=True)
    assert [record.round for record in again.history] == [1, 2, 3]


def test_frozen_parameters_are_neither_trained_nor_sent(model, clients):
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    result = fl.run(model, clients, fl.FedAvg(0.1), **SETTINGS)
    assert set(result.state["x"]) == {"2.weight", "2.bias"}
    assert torch.equal(result.model[0].weight, model[0].weight)
    assert result.history[0].bytes_up == 5 * (18 + 3) * 8


def test_a_parameter_that_no_loss_reaches_keeps_its_value(clients):
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3).double(), nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, inputs):
            return self.used(inputs)

    result = fl.run(Partly(), clients, fl.FedLALR(eps=1e-3), **SETTINGS)
    assert torch.equal(result.state["x"]["unused"], torch.ones(2, dtype=torch.float64))
    assert torch.equal(result.state["m"]["unused"], torch.zeros(2, dtype=torch.float64))
    assert torch.equal(result.state["v_hat"]["unused"], torch.full((2,), 1e-6, dtype=torch.float64))


def test_float_buffers_are_averaged_and_integer_ones_copied(clients):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    result = fl.run(model, clients, fl.FedAvg(0.05), rounds=1, local=fl.Steps(2), batch_size=None, engine="reference")
    alone = [
        fl.run(model, [client], fl.FedAvg(0.05), rounds=1, local=fl.Steps(2), batch_size=None, engine="reference").model
        for client in clients
    ]
    mean = torch.stack([one[1].running_mean for one in alone]).mean(0)
    assert_close(result.model[1].running_mean, mean)
    assert int(result.model[1].num_batches_tracked) == 2
    assert result.history[0].bytes_up == 5 * (4 * 6 + 6 + 6 + 6 + 6 * 3 + 3 + (6 + 6 + 1)) * 8


def test_recalibrated_statistics_belong_to_the_averaged_model(clients):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
    results = {
        how: fl.run(model, clients, fl.FedAvg(0.3), rounds=2, batch_size=None, buffers=how, engine="reference")
        for how in ("average", "recalibrate")
    }
    runs = {how: result.model for how, result in results.items()}
    trained = runs["recalibrate"]
    with torch.no_grad():
        means = torch.stack([trained[0](inputs).mean(0) for inputs, _ in clients]).mean(0)
    assert_close(trained[1].running_mean, means)
    assert not torch.allclose(runs["average"][1].running_mean, means, rtol=1e-3)
    plain, more = (result.history[0] for result in results.values())
    statistics, vector = 5 * (6 + 6 + 1) * 8, (4 * 6 + 6 + 6 + 6 + 6 * 3 + 3) * 8
    assert plain.bytes_up == plain.bytes_down == 5 * vector + statistics
    assert more.bytes_up == 5 * vector + 2 * statistics
    assert more.bytes_down == 5 * vector + 2 * statistics + 5 * vector


def test_statistics_do_not_suffer_from_how_large_they_were(clients):
    """A variance of 1e8 that becomes one of 1: in float32, a mean of changes from the first would be off by ten."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        model[1].running_var.fill_(1e8)
    single = [(inputs.float(), targets) for inputs, targets in clients]
    trained = fl.run(model, single, fl.FedAvg(0.01), rounds=1, batch_size=None, buffers="recalibrate").model
    with torch.no_grad():
        variances = torch.stack([trained[0](inputs).var(0) for inputs, _ in single]).mean(0)
    torch.testing.assert_close(trained[1].running_var, variances, rtol=1e-5, atol=0)


def test_recalibration_shows_in_the_first_rounds():
    """The averaged statistics belong to the clients' models; with recalibrated ones the averaged model does better."""
    digits = load_digits()
    inputs, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    parts = fl.data.partition(labels[:1500].numpy(), clients=20, scheme="dirichlet", alpha=0.3, seed=0)
    clients = [(inputs[:1500][rows], labels[:1500][rows]) for rows in parts]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    curves = {
        how: fl.run(
            model, clients, fl.FedLALR(lr=5e-3), rounds=3, local=fl.Epochs(3), batch_size=25, buffers=how,
            test=(inputs[1500:], labels[1500:]), engine="reference",
        ).history
        for how in ("average", "recalibrate")
    }  # fmt: skip
    average, recalibrated = ([record.accuracy for record in curves[how]] for how in curves)
    assert recalibrated[0] > average[0] + 0.05


def test_weight_decay_in_l2_and_decoupled_form():
    """One client, one full-batch step of FedAvg, by hand."""
    inputs, targets = torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.tensor([0])
    model = nn.Linear(2, 2, bias=False).double()
    weight = model.weight.detach().clone().requires_grad_()
    gradient = torch.autograd.grad(nn.functional.cross_entropy(inputs @ weight.T, targets), weight)[0]
    common = {"rounds": 1, "local": fl.Steps(1), "engine": "reference"}
    l2 = fl.run(model, [(inputs, targets)], fl.FedAvg(0.1), weight_decay=0.5, **common).state["x"]["weight"]
    assert_close(l2, weight - 0.1 * (gradient + 0.5 * weight))
    decoupled = fl.run(model, [(inputs, targets)], fl.FedAvg(0.1), decoupled_weight_decay=0.5, **common)
    expected = weight * (1 - 0.1 * 0.5) - 0.1 * gradient
    assert_close(decoupled.state["x"]["weight"], expected.detach())


def test_clipping_comes_before_weight_decay():
    inputs, targets = torch.tensor([[30.0, -20.0]], dtype=torch.float64), torch.tensor([1])
    model = nn.Linear(2, 2, bias=False).double()
    weight = model.weight.detach().clone().requires_grad_()
    gradient = torch.autograd.grad(nn.functional.cross_entropy(inputs @ weight.T, targets), weight)[0]
    clipped = gradient * min(1.0, 0.01 / float(gradient.norm()))
    result = fl.run(
        model, [(inputs, targets)], fl.FedAvg(1.0), rounds=1, local=fl.Steps(1), clip_norm=0.01, weight_decay=0.3,
        engine="reference",
    )  # fmt: skip
    torch.testing.assert_close(result.state["x"]["weight"], (weight - clipped - 0.3 * weight).detach())


def test_the_rate_decays_every_so_many_rounds(model, clients):
    halved = fl.run(model, clients, fl.FedAvg(1.0), **SETTINGS, schedule=fl.schedules.Exponential(0.5)).history
    assert [r.lr for r in halved] == [1.0, 0.5, 0.25]
    slower = fl.run(model, clients, fl.FedAvg(1.0), **SETTINGS, schedule=fl.schedules.Exponential(0.5, every=2)).history
    assert [r.lr for r in slower] == [1.0, 1.0, 0.5]


class Rotating(nn.Module):
    """Multiplies pairs of features by complex numbers, as rotary positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.tensor([0.5, 1.5])))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(inputs.reshape(-1, 2, 2).contiguous())
        return self.head(torch.view_as_real(pairs * self.turns).flatten(1).to(inputs.dtype))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_complex_buffers_stay_as_they_are_in_every_precision(clients, engine, dtype):
    given = [(inputs.to(dtype), targets) for inputs, targets in clients]
    model = Rotating()
    result = fl.run(model, given, fl.FedAvg(), **SETTINGS | {"engine": engine, "dtype": dtype})
    assert torch.equal(result.model.turns, model.turns)


class Attention(nn.Module):
    """Has a mask of infinities, a running minimum, which is infinite before the first batch, and odder buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("mask", torch.triu(torch.full((4, 4), -torch.inf), 1))
        self.register_buffer("least", torch.tensor(torch.inf))
        self.register_buffer("log_running_var", torch.tensor(-2.0))  # another thing than a variance
        self.register_buffer("places", torch.arange(4).to(torch.uint16))  # of which torch can do little

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.least.copy_(torch.minimum(self.least, inputs.detach().amin()))
        scores = self.norm(inputs)[:, :, None] + self.mask.to(inputs.dtype)
        return self.head((scores.softmax(2) * inputs[:, None]).sum(2))


@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("how", ["average", "recalibrate"])
def test_buffers_may_be_infinite_or_below_zero(clients, engine, how):
    settings = SETTINGS | {"batch_size": None, "engine": engine, "dtype": torch.float64, "buffers": how}
    result = fl.run(Attention(), clients, fl.FedAvg(), **settings)
    assert not any(record.rejected for record in result.history)
    assert torch.equal(result.model.mask, torch.triu(torch.full((4, 4), -torch.inf, dtype=torch.float64), 1))
    assert result.model.least.isfinite()


@pytest.mark.parametrize("schedule", [fl.schedules.Exponential(1e-4), fl.schedules.Linear(final=0.0)])
@pytest.mark.parametrize("algorithm", ["fedcm", "fedlada", "scaffold", "slowmo"])
def test_methods_that_divide_by_the_rate_outlive_its_decay(clients, algorithm, schedule):
    torch.manual_seed(0)
    single = [(inputs.float(), targets) for inputs, targets in clients]
    model = nn.Linear(single[0][0].shape[1], int(max(targets.max() for _, targets in single)) + 1)
    settings = SETTINGS | {"rounds": 13, "schedule": schedule}
    metrics = fl.run(model, single, fl.algorithms.create(algorithm), **settings).history
    assert len(metrics) == 13  # at 1e-48 of the rate, which is zero in single precision, or exactly 0 of it
    assert not any(record.rejected for record in metrics)


def test_a_rate_below_zero_stays_below_zero(model, clients):
    class Ascent(fl.FedAvg):
        lr = -0.1

        def __init__(self):
            pass

    metrics = fl.run(model, clients, Ascent(), **SETTINGS, schedule=fl.schedules.Exponential(0.5)).history
    assert [record.lr for record in metrics[:3]] == [-0.1, -0.05, -0.025]


def test_weighting_by_samples_differs_from_uniform_and_is_the_weighted_mean(model, clients):
    common = {"rounds": 1, "local": fl.Steps(3), "batch_size": None, "engine": "reference"}
    alone = torch.stack([flat(fl.run(model, [client], fl.FedAvg(0.1), **common).state["x"]) for client in clients])
    sizes = torch.tensor([float(len(y)) for _, y in clients], dtype=torch.float64)
    weighted = flat(fl.run(model, clients, fl.FedAvg(0.1), weighting="samples", **common).state["x"])
    assert_close(weighted, (alone * (sizes / sizes.sum())[:, None]).sum(0))
    uniform = flat(fl.run(model, clients, fl.FedAvg(0.1), **common).state["x"])
    assert_close(uniform, alone.mean(0))
    assert not torch.allclose(uniform, weighted)


def test_datasets_and_tensors_give_the_same_run(model, clients):
    class Own(Dataset):
        def __init__(self, pair):
            self.pair = pair

        def __len__(self):
            return len(self.pair[1])

        def __getitem__(self, index):
            return self.pair[0][index], self.pair[1][index]

    by_tensor = fl.run(model, clients, fl.FedLALR(), **SETTINGS)
    for wrapped in ([Own(pair) for pair in clients], [TensorDataset(*pair) for pair in clients]):
        assert torch.equal(
            flat(fl.run(model, wrapped, fl.FedLALR(), **SETTINGS).state["x"]), flat(by_tensor.state["x"])
        )


def test_what_a_data_set_makes_of_its_tensors_is_what_is_trained_on(model, clients):
    class Negated(torch.utils.data.TensorDataset):
        def __getitem__(self, place):
            inputs, targets = super().__getitem__(place)
            return -inputs, targets

    wanted = fl.run(model, [(-inputs, targets) for inputs, targets in clients], fl.FedLALR(), **SETTINGS)
    given = fl.run(model, [Negated(*pair) for pair in clients], fl.FedLALR(), **SETTINGS)
    assert_close(flat(given.state["x"]), flat(wanted.state["x"]))


def test_nan_in_the_data_rejects_that_client_and_no_other(model, clients):
    clients[2] = (torch.full_like(clients[2][0], math.nan), clients[2][1])
    with pytest.warns(RepliesRejected) as told:
        result = fl.run(model, clients, fl.FedLALR(), **SETTINGS)
    assert [str(warning.message) for warning in told] == [
        "round 1 rejected the reply of client 2 (x is not finite); result.history[0].rejected lists all rejected "
        "replies of that round",
        "client 2 has been rejected in each of its last 3 rounds (x is not finite), so the model does not learn from "
        "its data; run with debug=True to see what is wrong with it",
    ]
    assert told[0].filename == __file__
    assert [(r.clients, [x.client for x in r.rejected]) for r in result.history] == [(4, [2])] * 3
    assert "not finite" in result.history[0].rejected[0].reason
    others = fl.run(
        model, [c for i, c in enumerate(clients) if i != 2], fl.FedLALR(), **{**SETTINGS, "batch_size": None}
    )
    with pytest.warns(RepliesRejected):
        with_bad = fl.run(model, clients, fl.FedLALR(), **{**SETTINGS, "batch_size": None})
    assert_close(flat(others.state["x"]), flat(with_bad.state["x"]))


def test_too_few_usable_replies_fail_the_round_and_name_the_clients(model, clients):
    clients[2] = (torch.full_like(clients[2][0], math.nan), clients[2][1])
    with pytest.raises(
        fl.RoundFailed, match=r"round 1: 4 usable replies, but min_clients is 5.*client 2: x is not finite"
    ):
        fl.run(model, clients, fl.FedLALR(), **SETTINGS, min_clients=5)


@pytest.mark.parametrize("debug", [False, True])
def test_a_round_that_fails_points_to_a_closer_look_unless_it_was_taken(model, clients, debug):
    gaps = [(torch.full_like(inputs, math.nan), targets) for inputs, targets in clients]
    with pytest.raises(fl.RoundFailed) as failure:
        fl.run(model, gaps, fl.FedLALR(), **SETTINGS, debug=debug)
    assert ("debug=True" in str(failure.value)) is not debug


def test_a_reason_that_many_clients_share_is_given_once(model, clients):
    def only_by_itself(outputs, targets):
        if len(targets) > 2:  # the batch that is tried before the run is as small as that
            raise RuntimeError("too much")
        return nn.functional.cross_entropy(outputs, targets)

    with pytest.raises(fl.RoundFailed) as failure:
        fl.run(model, clients, fl.FedLALR(), **{**SETTINGS, "engine": "reference"}, loss=only_by_itself)
    assert "5 clients (0, 1, 2, 3, 4): RuntimeError: too much" in str(failure.value)
    assert str(failure.value).count("too much") == 1
    two_kinds = [fl.Rejection(0, "a"), *[fl.Rejection(client, "b") for client in range(1, 301)], fl.Rejection(301, "a")]
    assert too_few(1, 0, 1, two_kinds).endswith("client 0: a; 300 clients (1, 2, 3, 4, 5, …): b; client 301: a")


@pytest.mark.parametrize(
    ("error", "recorded"),
    [("photo-\udce9.png", r"photo-\udce9.png"), ("x" * (1 << 20), "x" * 900)],
    ids=["word", "size"],
)
def test_whatever_a_client_raises_is_recorded_and_the_run_continues(error, recorded, model, clients, tmp_path):
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, place):
            raise ValueError(error)

    mixed = [*(torch.utils.data.TensorDataset(*pair) for pair in clients), Broken()]
    for rounds in (2, 3):
        with pytest.warns(RepliesRejected):
            result = fl.run(model, mixed, fl.FedLALR(), **{**SETTINGS, "rounds": rounds}, run_dir=tmp_path, resume=True)
    [(client, reason)] = result.history[-1].rejected
    assert client == len(clients)
    assert recorded in reason
    assert len(reason) < 1200


def test_an_update_that_is_not_finite_fails_the_round(model, clients):
    with pytest.raises(fl.RoundFailed, match="server's v would no longer be finite after the update of FedAdam"):
        fl.run(model, clients, fl.FedAdam(lr=1e200), **SETTINGS)


def test_statistics_that_are_not_finite_fail_the_round(clients):
    """The new x is so large that the variance of the activations overflows."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    single = [(x.float(), y) for x, y in clients]
    settings = {**SETTINGS, "local": fl.Steps(1), "buffers": "recalibrate"}
    with pytest.raises(fl.RoundFailed, match=r"recalibrated buffer 1.running_\w+ is not finite.* lower the learning"):
        fl.run(model, single, fl.FedAvg(lr=1e30), **settings)


def test_half_precision_compute_keeps_moments_in_float32(clients):
    model = nn.Linear(4, 3)
    single = [(x.float(), y) for x, y in clients]
    result = fl.run(model, single, fl.FedLALR(), **SETTINGS, dtype=torch.bfloat16)
    assert {tensor.dtype for slot in result.state.values() for tensor in slot.values()} == {torch.float32}
    assert float(result.state["v_hat"]["weight"].min()) >= 1e-16 * 0.999


def test_regression_targets_have_a_loss_and_no_accuracy():
    torch.manual_seed(0)
    clients = [(torch.randn(10, 3), torch.randn(10, 1)) for _ in range(3)]
    result = fl.run(
        nn.Linear(3, 1),
        clients,
        fl.FedAvg(0.1),
        rounds=5,
        loss=nn.functional.mse_loss,
        test=clients[0],
        engine="reference",
    )
    assert result.history[-1].accuracy is None
    assert result.history[-1].loss < result.history[0].loss


def test_every_round_draws_exactly_m_clients_and_no_client_twice():
    for t in range(1, 50):
        cohort = sample(100, 7, seed=3, round=t)
        assert len(set(cohort.tolist())) == 7
        assert torch.equal(cohort, cohort.sort().values)
    seen = torch.cat([sample(100, 50, seed=3, round=t) for t in range(1, 200)])
    assert seen.bincount(minlength=100).min() > 50


def test_observers_see_the_run(model, clients):
    class Watch(fl.Observer):
        def __init__(self):
            self.seen = []

        def on_start(self, info):
            self.seen.append(("start", info.algorithm, info.population))

        def on_round(self, record):
            self.seen.append(("round", record.round))

        def on_end(self, result):
            self.seen.append(("end", len(result.history)))

    watch = Watch()
    fl.run(model, clients, fl.FedAvg(0.1), **{**SETTINGS, "rounds": 2}, observers=[watch])
    assert watch.seen == [("start", "FedAvg", 5), ("round", 1), ("round", 2), ("end", 2)]


def test_a_probe_sees_every_local_step_of_its_clients_and_include_puts_them_in(model, clients):
    class Norms:
        clients = frozenset({1, 3})

        def measure(self, state, context):
            return {"v_hat": float((state.v_hat**2).sum()), "step": float(context.step)}

    class Watch(fl.Observer):
        def __init__(self):
            self.traces = []

        def probe(self, round):
            return Norms() if round == 2 else None

        def include(self, round):
            return (1, 3) if round == 2 else ()

        def on_traces(self, round, lr, traces):
            self.traces += [(round, *trace) for trace in traces]

    watch = Watch()
    fl.run(
        model, clients, fl.FedLALR(), rounds=3, local=fl.Steps(4), batch_size=3, clients_per_round=2,
        observers=[watch], engine="reference",
    )  # fmt: skip
    assert [(t[0], t[1], t[2]) for t in watch.traces] == [(2, c, k) for c in (1, 3) for k in (1, 2, 3, 4)]
    values = [t[3]["v_hat"] for t in watch.traces[:4]]
    assert values == sorted(values)


class StopAt(fl.Observer):
    """Ends a run after a round, and keeps the models it received."""

    def __init__(self, round: int) -> None:
        self.round, self.models, self.rounds, self.ended = round, [], [], 0

    def on_model(self, round, model):
        self.models.append(model())

    def on_round(self, record):
        self.rounds.append(record.round)
        if record.round == self.round:
            raise fl.Stop

    def on_end(self, result):
        self.ended += 1


@pytest.mark.parametrize("every", [1, 10])
def test_an_observer_ends_a_run_which_resumes_later(tmp_path, every):
    def run(rounds, observers, **options):
        return fl.run(make_model(), make_clients(), fl.FedLALR(), rounds=rounds, observers=observers, **options)

    files = {"run_dir": tmp_path / "run", "checkpoint_every": every}
    first, second = StopAt(3), StopAt(9)
    ended = run(6, [first, second], **files)
    assert [record.round for record in ended.history] == first.rounds == second.rounds == [1, 2, 3]
    assert first.ended == second.ended == 1
    whole = run(6, [])
    on = run(6, [], resume=True, **files)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(on.model.state_dict()[name], value)


def test_an_observer_is_shown_the_model_of_every_round():
    watcher = StopAt(2)
    result = fl.run(make_model(), make_clients(), fl.FedLALR(), rounds=4, observers=[watcher])
    shown = [model.state_dict() for model in watcher.models]
    assert len(shown) == 2
    assert all(torch.equal(shown[1][name], value) for name, value in result.model.state_dict().items())
    assert any(not torch.equal(shown[0][name], value) for name, value in result.model.state_dict().items())


class Remembering(nn.Module):
    """Creates a buffer in its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((inputs.shape[1],), 2.0, dtype=inputs.dtype), persistent=False)
        return self.inner(inputs * self.scale)


@pytest.mark.parametrize("engine", ["reference", "stacked", "workers:2"])
def test_a_module_that_makes_a_buffer_at_first_sight_is_trained(engine, clients):
    result = fl.run(Remembering(), clients, fl.FedAvg(), **{**SETTINGS, "engine": engine})
    doubled = [(2 * inputs, targets) for inputs, targets in clients]
    right = fl.run(make_model(), doubled, fl.FedAvg(), **SETTINGS)
    assert_close(flat(result.state["x"]), flat(right.state["x"]))


def test_a_loss_of_one_number_in_a_row_is_that_number(model, clients):
    options = {**SETTINGS, "test": clients[0]}
    right = fl.run(model, clients, fl.FedAvg(), **options)
    mine = fl.run(model, clients, fl.FedAvg(), **options, loss=lambda o, t: nn.functional.cross_entropy(o, t)[None])
    assert torch.equal(flat(mine.state["x"]), flat(right.state["x"]))
    assert [record.loss for record in mine.history] == [record.loss for record in right.history]


@pytest.mark.parametrize("engine", ["reference", "stacked", "workers:2"])
@pytest.mark.parametrize("option", [{"padding_idx": 0}, {"padding_idx": -1}, {"sparse": True}], ids=str)
def test_embeddings_with_padding_or_sparse_gradients_train_on_every_engine(engine, option):
    def trained(engine: str, **option: object) -> fl.Result:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, **option), nn.Flatten(), nn.Linear(20, 3)).double()
        generator = torch.Generator().manual_seed(3)
        pairs = [
            (torch.randint(0, 9, (n, 5), generator=generator), torch.randint(0, 3, (n,), generator=generator))
            for n in (7, 12, 5)
        ]
        return fl.run(model, pairs, fl.FedAvg(lr=0.5), **{**SETTINGS, "engine": engine})

    dense = {name: value for name, value in option.items() if name != "sparse"}
    mine, right = trained(engine, **option), trained("reference", **dense)
    assert_close(flat(mine.state["x"]), flat(right.state["x"]))


@dataclass(frozen=True)
class Counting(fl.FedAvg):
    """Has a server state that is not shaped like the model, or lacks a slot to broadcast."""

    lacking: bool = False

    @property
    def slots(self) -> fl.SlotTable:
        return fl.SlotTable(down=("x", "count"), up={"x": "mean"})

    def init(self, params: torch.Tensor) -> fl.Slots:
        return fl.Slots(x=params) if self.lacking else fl.Slots(x=params, count=torch.zeros((), dtype=params.dtype))


@pytest.mark.parametrize(
    ("lacking", "message"),
    [(False, r"slot 'count' of Counting.init is \(\), .*each of the 51"), (True, "its init returns no count")],
)
def test_a_server_state_of_another_shape_is_rejected_before_any_training(model, clients, lacking, message):
    with pytest.raises(ValueError, match=message):
        fl.run(model, clients, Counting(lacking=lacking), **SETTINGS)


@dataclass(frozen=True)
class Unfinished(fl.FedAdam):
    """Loses or changes a slot of the server in its update."""

    fault: str = "none"

    def update(self, server: fl.Slots, reduced: fl.Slots, context: fl.Context) -> fl.Slots:
        right = super().update(server, reduced, context)
        changed = {"short": right.m[:3], "half": right.m.half(), "none": right.m}
        if self.fault != "no return":
            return fl.Slots(x=right.x, v=right.v) if self.fault == "lost" else right.replace(m=changed[self.fault])


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no return", "returns no x"),
        ("lost", "returns no m"),
        ("short", r"returns m as \[3\]"),
        ("half", r"returns m as \[51\], torch.float16"),
    ],
)
def test_an_update_that_loses_or_changes_a_slot_is_rejected_in_its_round(model, clients, fault, message, rounds):
    with pytest.raises(ValueError, match=rf"Unfinished.update must return all .*\(x, m, v\).*{message}"):
        fl.run(model, clients, Unfinished(fault=fault), **{**SETTINGS, "rounds": rounds})
    fl.run(model, clients, Unfinished(), **SETTINGS)


def test_a_result_shows_itself_in_one_line():
    clients = [(torch.zeros(20, 4), torch.zeros(20).long())] * 3
    shown = repr(fl.run(nn.Linear(4, 3), clients, fl.FedAvg(), rounds=2, test=clients[0]))
    assert re.fullmatch(
        r"Result\(FedAvg, 2 rounds: accuracy \d+\.\d%, test loss [\d.]+, 0\.00036 MB up, 0\.00036 MB down\)", shown
    )
    without = repr(fl.run(nn.Linear(4, 3), clients, fl.FedAvg(), rounds=1))
    assert without.startswith("Result(FedAvg, 1 round: training loss ")


@pytest.mark.parametrize(
    ("name", "meant"), [("on_rounds", "on_round"), ("on_round_end", "on_round"), ("on_stat", "on_start")]
)
def test_a_method_that_nobody_would_call_is_rejected_where_an_observer_is_defined(name, meant):
    with pytest.raises(TypeError, match=f"Mine.{name} would never be called; did you mean {meant}"):
        type("Mine", (fl.Observer,), {name: lambda self, record: None})
    type("Mine", (fl.Observer,), {"on_paper": lambda self: None, "on_round": lambda self, record: None})


@pytest.mark.parametrize("sampling", ["uniform", "round-robin"])
def test_rounds_that_are_planned_ahead_are_the_same(model, clients, sampling, monkeypatch):
    settings = {**SETTINGS, "engine": "stacked", "clients_per_round": 3, "sampling": sampling}
    before = fl.run(model, clients, fl.FedLALR(), **settings)
    start, planned = Simulation.start, []

    def started(self, state, choices):
        info = start(self, state, choices)
        self._plans_ahead = True  # as on a GPU
        plan = self._chosen.plan
        self._chosen.plan = lambda round, cohort: planned.append((round, cohort.tolist())) or plan(round, cohort)
        return info

    monkeypatch.setattr(Simulation, "start", started)
    after = fl.run(model, clients, fl.FedLALR(), **settings)
    assert torch.equal(flat(after.state["x"]), flat(before.state["x"]))
    assert [round for round, _ in planned] == [2, 3]
