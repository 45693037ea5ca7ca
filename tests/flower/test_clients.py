"""A node's data gives the same batches as its client in a simulation."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from conftest import make_clients
from fedlalr.data import Population
from fedlalr.data.partition import Partition
from fedlalr.data.population import as_clients
from fedlalr.data.transforms import FlipCrop
from fedlalr.flower.client_data import RemoteClients, own_data


def images(sizes=(4, 6, 5)):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 256, (sum(sizes), 3, 8, 8), generator=generator, dtype=torch.uint8)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    transform = FlipCrop((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    return Population(inputs, torch.arange(sum(sizes)), Partition(np.arange(sum(sizes)), offsets), transform=transform)


def test_augmentation_depends_on_the_clients_id():
    everyone = images()
    mine = Population(
        everyone.inputs[4:10],
        everyone.targets[4:10],
        Partition(np.arange(6), np.array([0, 6])),
        transform=everyone.transform,
    )
    alone = own_data(mine, 1, 3)
    positions = torch.tensor([5, 0, 2])
    for wanted, found in zip(
        everyone.training_batch(1, positions, 7, 2, 3), alone.training_batch(1, positions, 7, 2, 3), strict=True
    ):
        assert torch.equal(wanted, found)
    assert alone.sizes.tolist() == [0, 6, 0]


def test_a_population_of_all_clients_is_used_unchanged():
    everyone = images()
    assert own_data(everyone, 2, 3) is everyone


class Listed(Dataset):
    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


class Stream(IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        return iter([(torch.zeros(2), 0)] * 3)


@pytest.mark.parametrize("kind", ["pair", "tensors", "dataset"])
def test_pairs_and_data_sets_give_the_simulations_batches(kind):
    pairs = make_clients()
    inputs, targets = pairs[3]
    data = {
        "pair": (inputs, targets),
        "tensors": TensorDataset(inputs, targets),
        "dataset": Listed([(x, int(y)) for x, y in zip(inputs, targets, strict=True)]),
    }[kind]
    alone, everyone = own_data(data, 3, 5), as_clients(pairs)
    positions = torch.tensor([8, 1])
    assert torch.equal(alone.batch(3, positions)[0], everyone.batch(3, positions)[0])
    assert torch.equal(alone.batch(3, positions)[1], everyone.batch(3, positions)[1])
    assert int(alone.sizes[3]) == 9


@pytest.mark.parametrize(
    ("data", "error", "reason"),
    [
        ("text", TypeError, r"must be a pair \(inputs, targets\) .* population, as fl.data.load does"),
        ((np.zeros((2, 3)), np.zeros(2)), TypeError, "client 1 consists of NumPy arrays; .*torch.from_numpy"),
        (DataLoader(Listed([(torch.zeros(2), 0)])), TypeError, "client 1 is a DataLoader; pass its data set"),
        (Stream(), TypeError, "Read the samples of a stream into tensors first"),
        ((torch.zeros(1, 2), torch.tensor(0)), TypeError, "client 1's targets .*single number; .*unsqueeze"),
        ((torch.zeros(0, 2), torch.zeros(0)), ValueError, "client 1 has no samples"),
        (images((1, 2)), ValueError, "returned 2 clients"),
    ],
)
def test_data_that_cannot_be_this_clients_is_rejected(data, error, reason):
    with pytest.raises(error, match=reason):
        own_data(data, 1, 3)


def test_a_list_of_pairs_goes_through_the_collate_fn():
    def pad(samples):
        inputs, targets = zip(*samples, strict=True)
        return torch.nn.utils.rnn.pad_sequence(list(inputs), batch_first=True), torch.stack(targets)

    samples = [(torch.ones(length), torch.tensor(length)) for length in (2, 4, 3)]
    inputs, targets = own_data(samples, 1, 3, collate_fn=pad).batch(1, torch.tensor([0, 1]))
    assert inputs.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert targets.tolist() == [2, 4]


def test_the_server_has_no_data():
    with pytest.raises(RuntimeError, match="is on its node"):
        RemoteClients(2).training_batch(1, torch.tensor([0]), 0, 1, 1)


def test_a_client_trains_on_the_transformed_samples_of_its_data_set():
    class Negated(TensorDataset):
        def __getitem__(self, place):
            inputs, targets = super().__getitem__(place)
            return -inputs, targets

    inputs, targets = torch.randn(4, 3), torch.arange(4)
    found, _ = own_data(Negated(inputs, targets), 1, 3).batch(1, torch.tensor([0, 2]))
    assert torch.equal(found, -inputs[[0, 2]])
