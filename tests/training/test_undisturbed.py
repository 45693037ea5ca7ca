"""The caller's torch state does not change the result of a run, and a run does not change that state."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.federation.storage import tensor_files

engines = pytest.mark.parametrize("engine", ["reference", "stacked", "workers:2"])


def trained(engine: str, model: nn.Module | None = None, **options: object) -> fl.Result:
    clients = [(inputs.float(), targets) for inputs, targets in make_clients()]  # autocast leaves float64 as it is
    settings = {"rounds": 3, "local": fl.Steps(3), "batch_size": 4, "test": clients[0], "engine": engine, **options}
    return fl.run((model or make_model()).float(), clients, fl.FedLALR(lr=0.01), **settings)


def assert_same(mine: fl.Result, right: fl.Result) -> None:
    for slot, values in right.state.items():
        assert all(torch.equal(mine.state[slot][name], value) for name, value in values.items())
    assert all(map(torch.equal, mine.model.buffers(), right.model.buffers()))
    assert [record.loss for record in mine.history] == [record.loss for record in right.history]


@engines
def test_a_run_inside_inference_mode_trains(engine):
    right = trained(engine)
    with torch.inference_mode():
        mine = trained(engine)
    assert_same(mine, right)
    assert not any(parameter.is_inference() for parameter in mine.model.parameters())


@engines
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_run_inside_autocast_computes_in_its_own_precision_with_its_own_weights(engine, dtype, enabled):
    right = trained(engine, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        mine = trained(engine, dtype=dtype)
    assert_same(mine, right)


class Drawing(nn.Module):
    """A module that draws random numbers even in evaluation mode, like a variational one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, inputs: Tensor) -> Tensor:
        shift = random.random() + np.random.rand()  # as Wav2Vec2 draws the time steps that it masks
        return self.inner(inputs + 0.1 * torch.randn_like(inputs) + 0.1 * shift)


def seed_all(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@engines
def test_a_module_that_draws_is_measured_by_the_seed_and_leaves_the_callers_generators_alone(engine):
    model = Drawing()
    seed_all(1)
    first = trained(engine, model)
    seed_all(2)
    expected = torch.rand(()), random.random(), np.random.rand()
    seed_all(2)
    assert_same(trained(engine, model), first)
    assert (torch.rand(()), random.random(), np.random.rand()) == expected


class Mixing(nn.Module):
    """Creates a tensor without a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs @ torch.full((4, 4), 0.3))


@engines
def test_another_default_precision_holds_wherever_clients_train(engine):
    torch.set_default_dtype(torch.float64)
    try:
        result = fl.run(Mixing(), make_clients(), fl.FedAvg(), rounds=1, engine=engine)
    finally:
        torch.set_default_dtype(torch.float32)
    assert result.history[0].rejected == ()


class Samples(Dataset):
    """The samples of a client one by one."""

    def __init__(self, pair: tuple[Tensor, Tensor]) -> None:
        self.pair = pair

    def __len__(self) -> int:
        return len(self.pair[1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pair[0][index], self.pair[1][index]


@engines
@pytest.mark.filterwarnings("ignore::fedlalr.RepliesRejected")
@pytest.mark.parametrize(
    ("algorithm", "kind"), [(fl.FedLALR(), "pairs"), (fl.SCAFFOLD(), "datasets")], ids=["fedlalr", "scaffold"]
)
def test_another_default_device_changes_nothing(engine, algorithm, kind, tmp_path):
    """The meta device stands in for a GPU here: tensors on it have no values."""
    clients = make_clients((8, 12, 6, 10, 14))
    clients[3][0][0] = float("nan")
    model = nn.Sequential(make_model()[0], nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    settings = {"clients_per_round": 4, "batch_size": 4, "buffers": "recalibrate", "weighting": "samples"}
    settings |= {"test": clients[0], "local": fl.Epochs(2), "engine": engine, "device": "cpu"}
    given = [Samples(pair) for pair in clients] if kind == "datasets" else clients
    right = fl.run(model, given, algorithm, rounds=3, **settings)
    assert any(record.rejected for record in right.history)
    tensor_files._type_name.cache_clear()  # so that the names are found again inside
    with torch.device("meta"):  # set_default_device(None) breaks get_default_device in torch 2.7 to 2.9
        fl.run(model, given, algorithm, rounds=2, run_dir=tmp_path, **settings)
        mine = fl.run(model, given, algorithm, rounds=3, run_dir=tmp_path, resume=True, **settings)
    assert_same(mine, right)


@engines
def test_statistics_behind_dropout_are_taken_anew_by_the_seed(engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3))
    generator = torch.Generator().manual_seed(3)
    clients = [
        (torch.randn(n, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in (8, 12, 16)
    ]
    runs = []
    for state in (1, 2):
        torch.manual_seed(state)
        runs.append(fl.run(model, clients, fl.FedAvg(), rounds=2, batch_size=4, buffers="recalibrate", engine=engine))
    assert_same(*runs)


@pytest.mark.parametrize(
    ("load", "threads", "engine", "expected"),
    [(100, 2, "reference", 1), (0.5, 2, "reference", 0), (100, 1, "reference", 0), (100, 2, "workers:1", 0)],
    ids=["busy", "idle", "one thread", "workers"],
)
def test_a_busy_machine_gets_advice_and_the_threads_stay(load, threads, engine, expected, monkeypatch, recwarn):
    monkeypatch.setattr("os.getloadavg", lambda: (load * (os.cpu_count() or 1), 0, 0))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        trained(engine)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    advice = [str(warning.message) for warning in recwarn if "this machine is busy" in str(warning.message)]
    assert len(advice) == expected
    assert all("set OMP_NUM_THREADS=1 or call torch.set_num_threads(1)" in told for told in advice)
