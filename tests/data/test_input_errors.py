"""Clients in a form that a run cannot read are rejected, with advice on how to convert them."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fedlalr.data.partition import Partition
from fedlalr.data.population import DatasetClients, Population, as_clients

PAIR = (torch.zeros(4, 2), torch.zeros(4).long())


class Given(Dataset):
    """A data set of what it is given."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i]


class Indexed:
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return torch.zeros(2), 0


class Stream(IterableDataset):
    """Knows its length, for the loaders that ask for it, and no sample by its place."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([(torch.zeros(2), 0)] * 3)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({"north": PAIR}, r"not dict; pass its values: list\(clients.values\(\)\)"),
        ({"north": PAIR}.values(), r"not dict_values; convert it with list\(clients\)"),
        (iter([PAIR]), r"not list_iterator; convert it with list\(clients\)"),
        (Partition.from_lists([[0], [1]]), r"not Partition; .*fl.data.Population\(inputs, targets, partition\)"),
        (PAIR, r"not tuple of the inputs and targets of all clients; partition them with fl.data.partition\(targets"),
        (TensorDataset(*PAIR), "not TensorDataset; split one data set into several"),
        (
            [PAIR, DataLoader(TensorDataset(*PAIR))],
            "client 1 is a DataLoader; pass its data set, loader.dataset: .* sampler and shuffling do not count",
        ),
        ([([[1.0], [2.0]], [0, 1])], r"client 0 is a pair of list and list; .*torch.tensor\(values\)"),
        ([([torch.zeros(3), torch.zeros(5)], PAIR[1])], "a pair of list and Tensor; .* pad sequences to one length"),
        ([[(torch.zeros(2), 0)] * 3], r"client 0 is a list of 3; .* \(torch.stack\(\[input for input, _ in samples"),
        ([[(torch.zeros(2), 0)] * 3], "if they differ in length, pass collate_fn="),
        ([(*PAIR, PAIR[1])], "client 0 is a tuple of 3; every client must be a pair"),
        ([Stream()], "client 0 is a Stream; .*Read the samples of a stream into tensors first"),
        ([PAIR, (PAIR[0].to_sparse(), PAIR[1])], r"client 1's inputs are a sparse tensor; .*inputs.to_dense\(\)"),
        ([(torch.tensor(1.0), torch.tensor(1))], r"client 0's inputs are a single number; .*inputs.unsqueeze\(0\)"),
        (
            [{"ids": [[1], [2]]}],
            r"client 0 is a dict whose \['ids'\] is a list; .*torch.tensor\(values\), or return_tensors='pt'",
        ),
        (
            [{"ids": torch.zeros(2), "on": True}],
            r"client 0 is a dict whose \['on'\] is a bool; every value must be a tensor",
        ),
        ([Indexed()], r"client 0 is a Indexed; .*Wrap it in a class Own\(torch.utils.data.Dataset\)"),
    ],
)
def test_clients_of_another_form_are_refused_with_what_to_make_of_them(clients, message):
    with pytest.raises(TypeError, match=message):
        as_clients(clients)


def test_tables_of_pandas_are_refused_with_the_way_to_tensors():
    pandas = pytest.importorskip("pandas")
    table, column = pandas.DataFrame({"a": [1.5, 2.0]}), pandas.Series([0, 1])
    for client in (table, (table, column)):
        with pytest.raises(TypeError, match=r"client 0 consists of pandas tables; .*dtype=torch.float32\)"):
            as_clients([client])
    as_clients([(torch.tensor(table.to_numpy(), dtype=torch.float32), torch.tensor(column.to_numpy()))])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            [{f"column {i}": i for i in range(9)}] * 2,
            "dicts of 'column 0', .* 'column 4', …, without labels or label; .*with target=, such as target='column 8'",
        ),
        ([{"y": 0, "ids": 1, "mask": 1}] * 2, "such as target='y'"),
        ([{"ids": 1, "labels": 0}, {"ids": 1, "mask": 1, "labels": 0}], "samples have different keys, such as mask"),
        ([{"labels": 0}] * 2, "only the target's key, 'labels'; the model needs inputs"),
        ([{"text": "some words", "labels": 0}] * 2, r"text as their input 'text'; .*dataset.remove_columns\(names\)"),
        ([(torch.zeros(2), torch.zeros(2), 0)] * 2, r"not 3 items; .* as a tuple, \(\(first, second\), target\)"),
        ([([torch.zeros(2), torch.zeros(2)], 0)] * 2, "or a tuple or dict of them, not a list"),
        ([("some words", 0)] * 2, "text as their input; convert words to numbers"),
        ([(torch.zeros(2), "yes")] * 2, "text as their target"),
        (
            [(torch.zeros(3), 0), (torch.zeros(5), 0)],
            r"inputs of different shapes, .* \(3,\) and \(5,\); pass collate_fn=",
        ),
        ([{"x": [1, 2], "label": 0}, {"x": [1], "label": 0}], r"inputs 'x' of .* \(1,\) and \(2,\); pass collate_fn="),
        ([(torch.zeros(3), torch.zeros(2)), (torch.zeros(3), torch.zeros(1))], r"targets of different shapes"),
        (
            [{"image": object(), "label": 0}] * 2,
            "must return tensors, arrays or numbers as the input 'image' .*not a object",
        ),
    ],
)
def test_samples_of_another_form_are_refused_with_what_to_make_of_them(samples, message):
    clients = DatasetClients([Given([(torch.zeros(1), 0)]), Given(samples)])
    with pytest.raises(ValueError, match=message):
        clients.batch(1, torch.arange(2))


def test_a_population_of_lists_is_told_to_be_tensors():
    with pytest.raises(TypeError, match=r"two tensors, .*, not list and list; .*torch.tensor\(values\)"):
        Population([[0.0]], [1], Partition.from_lists([[0]]))


def test_samples_of_several_lengths_in_a_nested_tensor_are_told_to_be_padded():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    wanted = r"inputs are a nested tensor; .*torch.nested.to_padded_tensor\(inputs, 0\)"
    with pytest.raises(TypeError, match=f"client 0's {wanted}"):
        as_clients([(nested, torch.tensor([0, 1]))])
    with pytest.raises(TypeError, match=f"the {wanted}"):
        Population(nested, torch.tensor([0, 1]), Partition.from_lists([[0], [1]]))
    as_clients([(torch.nested.to_padded_tensor(nested, 0), torch.tensor([0, 1]))])
