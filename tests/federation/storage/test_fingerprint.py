"""How changed client data are detected: a run is not resumed with different data."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.data.partition import Partition
from fedlalr.data.population import DatasetClients, Population
from fedlalr.federation.options import Options
from fedlalr.federation.storage import fingerprint
from fedlalr.federation.storage.fingerprint import SAMPLES, facts_of
from fedlalr.federation.storage.journal import RunDirectoryError


class Own(Dataset):
    """A client's data set, which counts how often it is read."""

    reads = 0

    def __init__(self, pair, change=lambda inputs, target: (inputs, target)):
        self.pair, self.change = pair, change

    def __len__(self):
        return len(self.pair[1])

    def __getitem__(self, index):
        Own.reads += 1
        return self.change(self.pair[0][index], self.pair[1][index])


def run(clients, folder, rounds=2):
    options = {"local": fl.Steps(2), "batch_size": 4, "clients_per_round": 3, "engine": "reference"}
    return fl.run(make_model(), clients, fl.FedLALR(), rounds=rounds, run_dir=folder, resume=True, **options)


def datasets(change=lambda inputs, target: (inputs, target), whose=range(5)):
    return [Own(pair, change if client in whose else lambda *sample: sample) for client, pair in enumerate(PAIRS)]


def data_facts(clients):
    training = Options(device="cpu").training(make_model(), fl.FedLALR(), clients)
    facts = facts_of(training, clients, None, {})
    return {name.removeprefix("data."): value for name, value in facts.items() if name.startswith("data.")}


PAIRS = make_clients()
CHANGES = {
    "labels": (lambda inputs, target: (inputs, (target + 1) % 3), "targets"),
    "inputs": (lambda inputs, target: (inputs + 1, target), "inputs"),
}


@pytest.mark.parametrize("whose", [range(5), [0], [2], [4]], ids=["all", "first", "middle", "last"])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_run_is_not_resumed_with_other_samples_behind_its_datasets(kind, whose, tmp_path):
    change, name = CHANGES[kind]
    run(datasets(), tmp_path)
    with pytest.raises(RunDirectoryError, match=rf"cannot be resumed with different settings: data\.{name} was"):
        run(datasets(change, whose), tmp_path, rounds=4)
    assert len(run(datasets(), tmp_path, rounds=4).history) == 4


def pool(changed=()):
    """Two hundred clients with 25 samples each; the samples of some clients are changed."""
    inputs = torch.linspace(0, 1, 20_000, dtype=torch.float64).view(5000, 4).clone()
    for client in changed:
        inputs[25 * client : 25 * (client + 1)] += 1
    return Population(inputs, torch.arange(5000) % 3, Partition(np.arange(5000), np.arange(0, 5001, 25)))


@pytest.mark.parametrize("client", [1, 2, 100, 199])
def test_a_run_is_not_resumed_with_other_inputs_of_one_client_of_a_population(client, tmp_path):
    run(pool(), tmp_path)
    with pytest.raises(RunDirectoryError, match=r"cannot be resumed with different settings: data\.inputs was"):
        run(pool([client]), tmp_path, rounds=4)
    assert len(run(pool(), tmp_path, rounds=4).history) == 4


class Noisy(Own):
    """Adds noise from a private generator to the inputs, but not to the targets."""

    def __init__(self, pair, shift=0):
        super().__init__(pair)
        self.generator, self.shift = np.random.default_rng(), shift

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs + self.generator.normal(), (target + self.shift) % 3


def test_a_run_whose_datasets_augment_their_inputs_resumes_but_not_with_other_targets(tmp_path):
    run([Noisy(pair) for pair in PAIRS], tmp_path)
    with pytest.raises(RunDirectoryError, match=r"data\.targets was"):
        run([Noisy(pair, shift=1) for pair in PAIRS], tmp_path, rounds=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(run([Noisy(pair) for pair in PAIRS], tmp_path, rounds=4).history) == 4
    assert data_facts(DatasetClients([Noisy(pair) for pair in PAIRS]))["inputs"] == "different at every read"


def test_drawing_from_torchs_generator_to_read_a_sample_does_not_disturb_the_callers():
    clients = DatasetClients(datasets(lambda inputs, target: (inputs + torch.rand(1), target)))
    training = Options(device="cpu").training(make_model(), fl.FedLALR(), clients)
    before = torch.get_rng_state()
    assert facts_of(training, clients, None, {})["data.inputs"] == "different at every read"
    assert torch.equal(torch.get_rng_state(), before)


def test_a_client_that_cannot_be_read_is_left_out_of_rounds_and_does_not_end_the_run(tmp_path):
    def fails(inputs, target):
        raise OSError("the disk is gone")

    with pytest.warns(fl.RepliesRejected, match="the disk is gone"):
        assert len(run(datasets(fails, [3]), tmp_path, rounds=4).history) == 4
    with pytest.raises(RunDirectoryError, match=r"data\.inputs was"):
        run(datasets(), tmp_path, rounds=5)


@pytest.mark.parametrize(("clients", "each"), [(1, 4), (100, 4), (1024, 4), (1500, 2), (4096, 1), (100_000, 1)])
def test_the_number_of_samples_that_are_read_is_bounded(clients, each):
    pair = (torch.zeros(9, 4, dtype=torch.float64), torch.zeros(9, dtype=torch.int64))
    one, Own.reads = Own(pair), 0
    data_facts(DatasetClients([one] * clients))
    sampled = min(clients, SAMPLES)
    assert Own.reads == each * (sampled + min(sampled, fingerprint.CLIENTS_READ_TWICE))
    assert each * sampled <= SAMPLES


def test_a_million_clients_of_a_population_are_sampled_from_the_first_to_the_last():
    n = 1_000_000
    population = Population(
        torch.zeros(n, 1), torch.zeros(n, dtype=torch.int64), Partition(np.arange(n), np.arange(n + 1))
    )
    before = data_facts(population)
    for changed in (0, n - 1):
        population.inputs[changed] = 1
        assert data_facts(population)["inputs"] != before["inputs"]
        population.inputs[changed] = 0
    assert data_facts(population) == before


def test_every_input_of_a_small_test_set_counts(tmp_path):
    def tested(changed):
        inputs = torch.zeros(200, 4, dtype=torch.float64)
        inputs[changed] = 1
        test = (inputs, torch.zeros(200, dtype=torch.int64))
        options = {"local": fl.Steps(1), "batch_size": 4, "run_dir": tmp_path, "resume": True}
        return fl.run(make_model(), PAIRS, fl.FedLALR(), rounds=1, test=test, engine="reference", **options)

    tested(102)
    with pytest.raises(RunDirectoryError, match=r"test\.inputs was"):
        tested(103)
