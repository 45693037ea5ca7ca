"""Batches that are trees: every engine and form of data gives the result of plain tensors on the reference engine."""

import pytest
import torch
from torch import nn

import fedlalr as fl
from closeness import difference
from fedlalr.federation.evaluation import evaluate
from training.tokens import Rows, pad_tokens, token_clients, token_loss, token_model, token_samples

TOLERANCE = 1e-10
TEST = token_samples(5, seed=99)


class Padded(nn.Module):
    """The same transformer on one tensor of ids and mask, as a caller had to write it for plain pairs."""

    def __init__(self):
        super().__init__()
        self.inner = token_model()

    def forward(self, both):
        return self.inner(both[:, 0], both[:, 1]).logits


def train(clients, engine="reference", model=None, **options):
    chosen = {"loss": token_loss, "rounds": 2, "batch_size": 4, "device": "cpu"} | options
    return fl.run(model or token_model(), clients, fl.FedLALR(lr=0.01), engine=engine, **chosen)


def parameters(result):
    return torch.cat([value.flatten() for value in result.state["x"].values()])


@pytest.fixture(scope="module")
def right():
    """Plain pairs of one tensor each, on the reference engine."""

    def plain(samples):
        return torch.stack([samples["input_ids"], samples["attention_mask"]], 1), samples["labels"]

    return train([plain(client) for client in token_clients()], model=Padded(), test=plain(TEST))


def pairs(clients):
    return [({k: v for k, v in client.items() if k != "labels"}, client["labels"]) for client in clients]


FORMS = {
    "dicts of tensors": (token_clients(), {}),
    "pairs of a dict and a tensor": (pairs(token_clients()), {}),
    "pairs of a tuple and a tensor": ([(tuple(inputs.values()), t) for inputs, t in pairs(token_clients())], {}),
    "data sets of dicts": ([Rows(client) for client in token_clients()], {}),
    "ragged data sets": ([Rows(client, ragged=True) for client in token_clients()], {"collate_fn": pad_tokens}),
    "the model's loss": (token_clients(), {"loss": "model"}),
    "several targets": (
        token_clients(),
        {"target": ["labels"], "loss": lambda logits, targets: token_loss(logits, targets["labels"])},
    ),
}


@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_result_of_plain_tensors(form, engine, right):
    clients, options = FORMS[form]
    mine = train(clients, engine, **options)
    assert mine.info.engine == engine
    assert not mine.history[-1].rejected
    assert difference(parameters(mine), parameters(right)) <= TOLERANCE


@pytest.mark.parametrize("form", ["dicts of tensors", "ragged data sets"])
def test_workers_and_ranks_train_on_trees(form, right):
    clients, options = FORMS[form]
    for engine in ("workers:2", "distributed:stacked"):
        assert difference(parameters(train(clients, engine, **options)), parameters(right)) <= TOLERANCE


def test_trees_of_fixed_shape_are_pooled_and_others_are_read_batch_by_batch():
    assert train(token_clients(), rounds=1).info.reason == "requested"
    ragged, options = FORMS["ragged data sets"]
    assert "read batch by batch, because collate_fn forms" in train(ragged, rounds=1, **options).info.reason


@pytest.mark.parametrize("test", [TEST, pairs([TEST])[0], Rows(TEST), [Rows(TEST)[i] for i in range(5)]])
@pytest.mark.parametrize("loss", [token_loss, "model"])
def test_a_test_set_may_have_any_form(test, loss, right):
    record = train(token_clients(), test=test, loss=loss, metrics={"logits": lambda o, t: o.shape[-1]}).history[-1]
    assert record.loss == pytest.approx(right.history[-1].loss, rel=1e-12)
    assert record.metrics == {"logits": 11}


def test_the_loss_of_a_test_set_weighs_every_token_equally_whatever_the_batches():
    losses = [evaluate(token_model(), TEST, token_loss, batch_size=size).loss for size in (5, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
