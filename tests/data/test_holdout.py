"""The samples that clients hold out for their evaluation."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from conftest import make_clients
from fedlalr.data.holdout import held_out, hold_out
from fedlalr.data.population import DatasetClients, as_clients


class Numbers(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        if not 0 <= place < self.count:
            raise IndexError(place)
        return torch.tensor([float(place)]), place


@pytest.mark.parametrize(
    "clients", [as_clients(make_clients((10, 1, 7, 2))), DatasetClients([*map(Numbers, (10, 1, 7, 2))])]
)
def test_every_sample_is_either_trained_on_or_held_out(clients):
    trained, tested = hold_out(clients, 0.3, seed=4)
    assert trained.sizes.tolist() == [7, 1, 5, 1]
    assert tested.sizes.tolist() == [3, 0, 2, 1]
    for client, size in enumerate(clients.sizes.tolist()):
        whole = clients.batch(client, torch.arange(size))[0]
        parts = [
            part.batch(client, torch.arange(int(part.sizes[client])))[0]
            for part in (trained, tested)
            if part.sizes[client]
        ]
        assert torch.equal(torch.cat(parts).sort(0).values, whole.sort(0).values)


def test_what_a_client_holds_out_follows_from_the_seed_and_the_client():
    sizes = np.array([50, 50, 50])
    first, again, other = (held_out(sizes, 0.2, seed).reshape(3, 50) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any(1).all()
    assert (first[0] != first[1]).any()
    alone = held_out(np.array([0, 0, 50]), 0.2, 1)  # on a node, which has only its own client
    assert (alone == first[2]).all()


def test_samples_are_held_out_from_all_places():
    held = held_out(np.full(2000, 10), 0.2, seed=0).reshape(2000, 10)
    assert (held.sum(1) == 2).all()
    assert np.abs(held.mean(0) - 0.2).max() < 0.04  # four standard deviations of 2,000 draws
