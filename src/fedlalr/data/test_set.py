"""The test set, in any of the forms that a client's data may have. It is read like the data of a single client."""

from __future__ import annotations

import numpy as np
from torch.utils.data import DataLoader

from fedlalr.data.client_forms import as_pair, is_dataset
from fedlalr.data.collating import Collate, Target
from fedlalr.data.input_errors import check_rows, check_samples
from fedlalr.data.partition import Partition
from fedlalr.data.population import Clients, DatasetClients, Population
from fedlalr.data.trees import as_tree, length

_OF_LOADER = "; pass its data set, test.dataset, with collate_fn=test.collate_fn if it has its own"
_WANTED = "test must be a pair (inputs, targets), a dict of tensors or a data set with a length"


def as_test(test: object, target: Target | None = None, collate_fn: Collate | None = None) -> Clients:
    """A test set as one client's data: tensors as they are, a data set read batch by batch."""
    if isinstance(test, Population | DatasetClients):
        if len(test) != 1:
            raise TypeError(f"test is the data of {len(test)} clients; pass one test set, such as population.test")
        return test
    collated = collate_fn is not None
    by_index = is_dataset(test, collated)
    pair = None if by_index and collated else as_pair(test, "the test set's", target)
    if pair is None and by_index:
        held_out: Clients = DatasetClients([test], target=target, collate_fn=collate_fn)
    else:
        held_out = _of_pair(test if pair is None else pair)
    if int(held_out.sizes[0]) == 0:
        raise ValueError("the test set is empty; leave test out to run without one")
    return held_out


def is_one_tensor(test: Clients) -> bool:
    """Whether the inputs of a test set are a single tensor in memory, so that large batches are safe."""
    return isinstance(test, Population) and not isinstance(test.inputs, dict | tuple)


def _of_pair(test: object) -> Population:
    if not isinstance(test, tuple | list) or len(test) != 2:
        fix = _OF_LOADER if isinstance(test, DataLoader) else ""
        raise TypeError(f"{_WANTED}, not {type(test).__name__}{fix}")
    inputs, targets = map(as_tree, test)
    check_samples("the test set's samples", inputs, targets)
    check_rows("the test set's", "the test set has", inputs, targets)
    return Population(inputs, targets, Partition(np.arange(length(targets)), np.array([0, length(targets)])))
