"""Samples that are dicts or tuples: which forms are accepted, what they become, and what is rejected."""

import pytest
import torch
from torch.utils.data import TensorDataset

from fedlalr.data import client_forms
from fedlalr.data.collating import collate
from fedlalr.data.partition import Partition
from fedlalr.data.population import DatasetClients, Population, as_clients
from fedlalr.data.test_set import as_test
from fedlalr.data.trees import leaves, map_tree, named_leaves
from fedlalr.training.stacked.feed import gather
from training.tokens import Rows, pad_tokens, token_samples

SAMPLES = token_samples(5, seed=1)
INPUTS = {name: SAMPLES[name] for name in ("input_ids", "attention_mask")}
TABLE = [{name: values[i].tolist() for name, values in SAMPLES.items()} for i in range(5)]


def hugging_face(columns=None, **formatted):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({name: values.tolist() for name, values in (columns or SAMPLES).items()})
    return table.with_format(**formatted) if formatted else table


def equal(mine, wanted):
    mine, wanted = named_leaves(mine), named_leaves(wanted)
    return mine.keys() == wanted.keys() and all(
        mine[name].dtype == wanted[name].dtype and torch.equal(mine[name], wanted[name]) for name in mine
    )


POOLED = {
    "a dict of tensors": lambda: SAMPLES,
    "a pair": lambda: (INPUTS, SAMPLES["labels"]),
    "a list of dicts": lambda: TABLE,
    "Hugging Face, lists": hugging_face,
    "Hugging Face, tensors": lambda: hugging_face(type="torch"),
}


@pytest.mark.parametrize("form", POOLED)
def test_samples_of_fixed_shape_are_pooled(form):
    client = POOLED[form]()
    pool = as_clients([client, client])
    assert isinstance(pool, Population)
    assert equal(pool.batch(1, torch.tensor([4, 2])), map_tree(lambda leaf: leaf[[4, 2]], (INPUTS, SAMPLES["labels"])))


@pytest.mark.parametrize("form", [*POOLED, "a torch Dataset"])
def test_a_test_set_has_the_same_forms(form):
    held_out = as_test(POOLED[form]() if form in POOLED else Rows(SAMPLES))
    wanted = map_tree(lambda leaf: leaf[1:3], (INPUTS, SAMPLES["labels"]))
    assert equal(held_out.batch(0, torch.tensor([1, 2])), wanted)


def test_a_population_of_clients_is_no_test_set():
    with pytest.raises(TypeError, match=r"test is the data of 2 clients; .*population\.test"):
        as_test(as_clients([SAMPLES, SAMPLES]))


def test_what_may_be_computed_or_does_not_fit_is_read_batch_by_batch(monkeypatch):
    def clients():
        return as_clients([TABLE, TABLE])

    assert isinstance(as_clients([Rows(SAMPLES)]), DatasetClients)
    assert isinstance(as_clients([hugging_face().with_transform(lambda batch: batch)]), DatasetClients)
    assert isinstance(as_clients([TABLE], collate_fn=torch.utils.data.default_collate), DatasetClients)
    bytes_each = sum(leaf[0].nbytes for leaf in leaves(SAMPLES))
    monkeypatch.setattr(client_forms, "MOST_POOLED", 10 * bytes_each)
    assert isinstance(clients(), Population)
    monkeypatch.setattr(client_forms, "MOST_POOLED", 10 * bytes_each - 1)
    assert isinstance(clients(), DatasetClients)
    assert equal(clients().batch(0, torch.arange(5)), (INPUTS, SAMPLES["labels"]))


@pytest.mark.parametrize(
    ("sample", "target", "wanted"),
    [
        ({"x": 1, "labels": 2}, None, ({"x": 1}, 2)),
        ({"x": 1, "label": 2}, None, ({"x": 1}, 2)),
        ({"x": 1, "label": 2, "y": 3}, "y", ({"x": 1, "label": 2}, 3)),
        ({"x": 1, "start": 2, "end": 3}, ["start", "end"], ({"x": 1}, {"start": 2, "end": 3})),
        (({"x": 1}, {"y": 2}), None, ({"x": 1}, {"y": 2})),
        (((torch.tensor(1), torch.tensor(4)), 2), None, ((1, 4), 2)),
        ({"x": [0.5, 1.0], "mask": [True, False], "label": 0.5}, None, ({"x": [0.5, 1.0], "mask": [True, False]}, 0.5)),
        (([1, 4], [[2, 3], [5, 6]]), None, (torch.tensor([1, 4]), torch.tensor([[2, 3], [5, 6]]))),
    ],
)
def test_inputs_and_targets_of_a_sample(sample, target, wanted):
    assert equal(collate([sample], "the", target), map_tree(lambda leaf: torch.as_tensor(leaf)[None], wanted))


def test_numbers_in_pairs_keep_the_dtype_of_torchs_own_collation():
    inputs, targets = collate([(1.5, 0.5), (2.5, 1)], "the")
    assert (inputs.dtype, targets.dtype) == (torch.float64, torch.float64)


def test_a_collate_fn_forms_the_batches_and_its_dict_is_split():
    clients = as_clients([Rows(SAMPLES, ragged=True)], collate_fn=pad_tokens)
    positions = torch.tensor([0, 3])
    longest = int(SAMPLES["attention_mask"][positions].sum(1).max())
    wanted = map_tree(lambda leaf: leaf[positions, :longest], (INPUTS, SAMPLES["labels"]))
    assert equal(clients.batch(0, positions), wanted)
    moved = clients.to(torch.device("cpu"))
    assert equal(moved.batch(0, positions), wanted)
    again = as_clients(DatasetClients([Rows(SAMPLES, ragged=True)]), collate_fn=pad_tokens)
    assert equal(again.batch(0, positions), wanted)


def test_a_collate_fn_pads_pairs_in_a_list_too():
    def pad(samples):
        inputs, targets = zip(*samples, strict=True)
        return torch.nn.utils.rnn.pad_sequence(list(inputs), batch_first=True), torch.tensor(targets)

    pairs = [(torch.ones(1), 0), (torch.ones(2), 1)]
    wanted = (torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([0, 1]))
    lists = [list(pair) for pair in pairs]
    for read in (
        as_clients([pairs], collate_fn=pad),
        as_clients([lists], collate_fn=pad),
        as_test(pairs, collate_fn=pad),
    ):
        assert equal(read.batch(0, torch.arange(2)), wanted)
    with pytest.raises(ValueError, match="client 1 has no samples; leave empty clients out"):
        as_clients([pairs, []], collate_fn=pad)


def test_a_collate_fn_forms_the_batches_of_a_tensor_dataset_for_training_and_tests_but_not_of_a_pair_for_tests():
    def scaled(samples):
        inputs, targets = zip(*samples, strict=True)
        return 10 * torch.stack(inputs), torch.stack(targets)

    pair, both = (torch.tensor([1.0, 2.0]), torch.tensor([0, 1])), torch.arange(2)
    for read in (as_clients([TensorDataset(*pair)], collate_fn=scaled), as_test(TensorDataset(*pair), None, scaled)):
        assert equal(read.batch(0, both), (10 * pair[0], pair[1]))
    assert equal(as_test(pair, None, scaled).batch(0, both), pair)


@pytest.mark.parametrize(
    ("collate_fn", "message"),
    [
        (lambda samples: 1 / 0, "collate_fn cannot form a batch of client 0's samples: ZeroDivisionError"),
        (lambda samples: samples[0]["input_ids"], "must return a dict of tensors or a pair .*, not a Tensor"),
        (lambda samples: {"x": 1, "labels": torch.zeros(2)}, r"must return tensors, but inputs\['x'\] is a int"),
        (lambda samples: (torch.zeros(3, 2), torch.zeros(2)), r"returned inputs of shape \(3, 2\) for 2 samples"),
        (lambda samples: {"x": torch.zeros(2)}, "without labels or label; name the target's key with target="),
    ],
)
def test_a_collate_fn_that_returns_something_else_is_rejected(collate_fn, message):
    clients = as_clients([Rows(SAMPLES)], collate_fn=collate_fn)
    with pytest.raises(ValueError, match=message):
        clients.batch(0, torch.arange(2))


@pytest.mark.parametrize(
    ("clients", "options", "kind", "message"),
    [
        ([INPUTS], {}, ValueError, "client 0's samples are dicts of .*, without labels or label; .*target="),
        (
            [SAMPLES],
            {"target": "y"},
            ValueError,
            "client 0's samples have no key 'y' for target=; they have 'input_ids'",
        ),
        (
            [SAMPLES],
            {"collate_fn": pad_tokens},
            TypeError,
            "collate_fn= forms batches .*, but client 0 consists of ten",
        ),
        (
            [SAMPLES, (INPUTS["input_ids"], SAMPLES["labels"])],
            {},
            ValueError,
            "client 1's and client 0's inputs differ",
        ),
        (
            [SAMPLES, token_samples(5, seed=2, length=4)],
            {},
            ValueError,
            r"client 1's inputs\['input_ids'\] are \(4,\) torch.int64 per sample, client 0's \(6,\)",
        ),
        ([SAMPLES | {"labels": torch.zeros(3)}], {}, ValueError, r"client 0 has 5 inputs\['input_ids'\] but 3 targets"),
        ([[{"x": [1, 2], "label": 0}, {"x": [1], "label": 0}]], {}, ValueError, "different shapes.*pass collate_fn="),
        ((INPUTS, SAMPLES["labels"]), {}, TypeError, "not tuple of the inputs and targets of all clients"),
    ],
)
def test_clients_that_do_not_fit_are_rejected_with_a_message(clients, options, kind, message):
    with pytest.raises(kind, match=message):
        as_clients(clients, **options)


def test_hugging_face_data_sets_that_do_not_fit_are_rejected_with_a_message():
    ragged = {"x": torch.zeros(2), "label": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"text as their input 'text'; .*dataset.remove_columns"):
        as_clients([hugging_face(ragged).add_column("text", ["a", "b"])])
    with pytest.raises(
        ValueError, match=r"inputs 'more' of different shapes, such as \(1,\) and \(2,\); pass collate_fn="
    ):
        as_clients([hugging_face(ragged).add_column("more", [[1], [1, 2]])])
    with pytest.raises(TypeError, match=r"not Dataset; split one data set .*dataset.shard\(10, i\)"):
        as_clients(hugging_face())
    with pytest.raises(ValueError, match="client 1 has no samples"):
        as_clients([hugging_face(), hugging_face().select([])])


def test_a_population_pools_trees():
    pool = Population(INPUTS, {"labels": SAMPLES["labels"]}, Partition.from_lists([[0, 1], [4]]))
    assert equal(
        pool.batch(1, torch.tensor([0])), map_tree(lambda leaf: leaf[4:], (INPUTS, {"labels": SAMPLES["labels"]}))
    )
    assert pool.to(torch.device("cpu")) is pool
    found = gather(pool, torch.tensor([[0, 1], [2, 3]]), None, None)
    assert found.inputs["input_ids"].shape == (2, 2, 6)
    with pytest.raises(TypeError, match="or tuples or dicts of tensors, not dict and Tensor"):
        Population({"input_ids": [1, 2]}, SAMPLES["labels"], Partition.from_lists([[0]]))
