"""Batches that are trees: every engine and form of data gives the result of plain tensors on the reference engine."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedlalr as fl
from closeness import difference
from fedlalr.federation.evaluation import evaluate
from fedlalr.federation.storage.journal import RunDirectoryError
from fedlalr.training.stacked.cuda_graphs import StaticSteps
from fedlalr.training.stacked.engine import StackedEngine
from fedlalr.training.stacked.trial import CannotStack
from training.tokens import Rows, TinyTransformer, pad_tokens, token_clients, token_loss, token_model, token_samples

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
    assert "read batch by batch, because collate_fn forms the batches" in train(ragged, rounds=1, **options).info.reason


@pytest.mark.parametrize("test", [TEST, pairs([TEST])[0], Rows(TEST), [Rows(TEST)[i] for i in range(5)]])
@pytest.mark.parametrize("loss", [token_loss, "model"])
def test_a_test_set_may_have_any_form(test, loss, right):
    record = train(token_clients(), test=test, loss=loss, metrics={"logits": lambda o, t: o.shape[-1]}).history[-1]
    assert record.loss == pytest.approx(right.history[-1].loss, rel=1e-12)
    assert record.metrics == {"logits": 11}


def test_the_loss_of_a_test_set_weighs_every_token_equally_whatever_the_batches():
    losses = [evaluate(token_model(), TEST, token_loss, batch_size=size).loss for size in (5, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def fixed_memory(training):
    """The stacked engine with its steps in fixed memory: what a GPU captures, here without capturing."""
    engine = StackedEngine(training)
    engine._static = StaticSteps(training, engine._gradient, engine._fused, capture=False)
    return engine


@pytest.mark.parametrize("loss", [token_loss, "model"])
def test_steps_in_fixed_memory_take_trees(loss, right):
    mine = train(token_clients(), fixed_memory, loss=loss)
    assert difference(parameters(mine), parameters(right)) <= TOLERANCE


class Normed(nn.Module):
    """Two inputs of different dtypes, and BatchNorm."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, place, values):
        return {"logits": self.head(self.norm(self.embed(place) + values)), "more": values}


@pytest.mark.parametrize("inputs", [dict, tuple])
def test_statistics_are_recalibrated_on_trees(inputs):
    def client(count):
        parts = {"place": torch.randint(5, (count,)), "values": torch.randn(count, 3).double()}
        return parts if inputs is dict else tuple(parts.values()), torch.randint(2, (count,))

    torch.manual_seed(0)
    model, clients = Normed().double(), [client(count) for count in (6, 8, 10)]
    options = {"loss": nn.functional.cross_entropy, "buffers": "recalibrate", "test": clients[0]}
    results = [train(clients, engine, model, **options) for engine in ("reference", "stacked")]
    assert difference(parameters(results[1]), parameters(results[0])) <= TOLERANCE
    for mine, wanted in zip(results[1].model.buffers(), results[0].model.buffers(), strict=True):
        assert difference(mine, wanted) <= TOLERANCE
    assert results[0].history[-1].accuracy is not None


def test_a_loss_that_ignores_a_label_of_its_own_is_exact_under_padding():
    def padded_by_zero(logits, labels):
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)

    clients = [client | {"labels": client["labels"].clamp(min=0)} for client in token_clients()]
    results = [train(clients, engine, loss=padded_by_zero) for engine in ("reference", "stacked")]
    assert difference(*map(parameters, results)) <= TOLERANCE


def test_ignored_single_labels_are_exact_under_padding():
    """No label of the samples that are tried before the run is ignored."""
    torch.manual_seed(0)
    clients = [(torch.randn(n, 4).double(), torch.randint(3, (n,))) for n in (9, 6, 5)]
    clients[1][1][:4] = clients[2][1][1] = -100
    options = {"loss": lambda outputs, labels: nn.functional.cross_entropy(outputs, labels)}
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double()
    results = [train(clients, engine, model, **options) for engine in ("reference", "stacked")]
    assert difference(*map(parameters, results)) <= TOLERANCE


class PerSample(TinyTransformer):
    """Its loss divides by the number of samples, padding included."""

    def forward(self, input_ids, attention_mask, labels):
        logits = super().forward(input_ids, attention_mask).logits
        each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"logits": logits, "loss": each / len(labels)}


class SeesPadding(TinyTransformer):
    """Ignores the mask."""

    def forward(self, input_ids, attention_mask, labels=None):
        return super().forward(input_ids, torch.ones_like(attention_mask), labels)


@pytest.mark.parametrize(
    ("model", "form", "options", "message"),
    [
        (PerSample, "dicts of tensors", {"loss": "model"}, "clients differ in size, and padding changes the result"),
        (SeesPadding, "ragged data sets", {}, "collate_fn pads batches, .* or see what attention_mask hides"),
    ],
)
def test_what_padding_changes_is_not_stacked(model, form, options, message):
    clients, more = FORMS[form]
    with pytest.raises(CannotStack, match=message):
        train(clients, "stacked", model().double(), **(more | options))
    assert not train(clients, "reference", model().double(), rounds=1, **(more | options)).history[-1].rejected


def test_any_loss_of_the_model_is_stacked_if_nothing_is_padded():
    torch.manual_seed(0)
    model, clients = PerSample().double(), token_clients((4, 4))
    results = [train(clients, engine, model, loss="model") for engine in ("reference", "stacked")]
    assert difference(*map(parameters, results)) <= TOLERANCE


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {"token_type_ids": torch.zeros(7, 6)},
            {},
            "client 0's inputs have the key 'token_type_ids', which the model does not take; TinyTransformer.forward "
            "takes input_ids, attention_mask, labels",
        ),
        ({}, {"test": TEST | {"more": TEST["labels"]}}, "the test set's inputs have the key 'more', which the model"),
        ({}, {"model": Padded(), "loss": "model"}, "client 0's inputs have the key 'input_ids', which .* takes both"),
        ({}, {"loss": "modell"}, "loss must be a function of .*, or 'model', not 'modell'"),
        ({}, {"loss": lambda *given: F.cross_entropy(*given)}, r"the loss cannot be computed from .*\(2, 6, 11\)"),
        ({}, {"target": ["labels"]}, "the loss gets the targets as they are, here dict"),
    ],
)
def test_wrong_input_is_rejected_with_a_message(change, options, message):
    with pytest.raises(ValueError, match=message):
        train([token_clients()[0] | change], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 3}, "target must be a key of the samples"),
        ({"target": []}, "target must be a key of the samples"),
        ({"collate_fn": "pad"}, "collate_fn must be a function of a list of samples, not 'pad'"),
    ],
)
def test_options_of_another_type_are_rejected(options, message):
    with pytest.raises(TypeError, match=message):
        train(token_clients(), **options)


def test_a_model_that_returns_no_loss_cannot_train_with_its_own():
    class Silent(nn.Linear):
        def forward(self, input, labels):
            return super().forward(input)

    pair = (torch.zeros(3, 4), torch.zeros(3).long())
    with pytest.raises(ValueError, match=r"must return an object whose loss is one number, .* a Tensor with no loss"):
        fl.run(Silent(4, 3), [pair], fl.FedAvg(), loss="model", rounds=1)


def test_a_run_on_trees_resumes_with_the_same_data_only(tmp_path):
    options = {"run_dir": tmp_path / "run", "resume": True, "test": Rows(TEST)}
    train(token_clients(), rounds=1, **options)
    other = [client | {"attention_mask": torch.ones_like(client["attention_mask"])} for client in token_clients()]
    with pytest.raises(RunDirectoryError, match=r"different settings: data\.inputs\.attention_mask was"):
        train(other, **options)
    with pytest.raises(RunDirectoryError, match=r"test\.targets was"):
        train(token_clients(), **(options | {"test": Rows(TEST | {"labels": TEST["input_ids"]})}))
    assert len(train(token_clients(), **options).history) == 2


def test_the_debugger_describes_trees(capsys):
    clients = token_clients()
    clients[1]["input_ids"][0, 0] = 99
    train(clients, rounds=1, debug=True, batch_size=None)
    assert "inputs['input_ids']: 3 × 6 int64, from 0 to 99" in capsys.readouterr().err
