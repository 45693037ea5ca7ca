"""The caller's metrics."""

from __future__ import annotations

import json
import math

import pytest
import torch
from sklearn.metrics import f1_score
from torch import nn

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.federation.evaluation import evaluate
from fedlalr.federation.record import Distribution, Record

SETTINGS = {"rounds": 3, "batch_size": 4, "engine": "reference"}


def f1(outputs, targets):
    return f1_score(targets, outputs.argmax(1), average="macro")


def with_test():
    clients = make_clients()
    return clients, tuple(torch.cat(parts) for parts in zip(*clients, strict=True))


def test_a_measure_is_taken_of_the_whole_test_set_after_every_round(tmp_path):
    clients, test = with_test()
    result = fl.run(
        make_model(), clients, fl.FedLALR(lr=0.02), **SETTINGS, test=test, metrics={"f1": f1}, run_dir=tmp_path
    )
    model = result.model.to(test[0].dtype).eval()
    with torch.no_grad():
        assert result.history[-1].metrics == {"f1": pytest.approx(f1(model(test[0]), test[1]))}
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["metrics"] for line in lines] == [record.metrics for record in result.history]
    assert "f1 " in repr(result)


def test_a_run_resumes_with_what_it_measured_before(tmp_path):
    clients, test = with_test()
    options = {**SETTINGS, "test": test, "metrics": {"f1": f1}}
    whole = fl.run(make_model(), clients, fl.FedLALR(), **options)
    fl.run(make_model(), clients, fl.FedLALR(), **{**options, "rounds": 2}, run_dir=tmp_path)
    rest = fl.run(make_model(), clients, fl.FedLALR(), **options, run_dir=tmp_path, resume=True)
    assert [record.metrics for record in rest.history] == [record.metrics for record in whole.history]


def test_batches_are_put_together_in_the_order_of_the_test_set():
    inputs, targets = torch.randn(7, 4), torch.arange(7)
    seen = []
    evaluate(
        nn.Linear(4, 9),
        (inputs, targets),
        nn.functional.cross_entropy,
        batch_size=3,
        metrics={"seen": lambda outputs, wanted: seen.append((outputs.shape, wanted.tolist())) or 0},
    )
    assert seen == [((7, 9), list(range(7)))]


@pytest.mark.parametrize("ignored", [-100, 0])
def test_batches_of_different_lengths_are_padded_to_the_longest(ignored):
    """As `collate_fn` pads each batch by itself."""
    rows = [
        {"tokens": torch.tensor([1 + i % 4] * (2 + i)), "labels": torch.tensor([1 + i % 2] * (2 + i))} for i in range(7)
    ]
    seen = []

    def pad(samples):
        padded = {name: [sample[name] for sample in samples] for name in ("tokens", "labels")}
        return {
            name: nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=ignored if name == "labels" else 0)
            for name, values in padded.items()
        }

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.decide = nn.Embedding(5, 3)

        def forward(self, tokens):
            return {"logits": self.decide(tokens)}

    def share(logits, labels):
        seen.append(labels)
        return (logits.argmax(-1) == labels)[labels != ignored].float().mean()

    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    options = {**SETTINGS, "loss": loss, "collate_fn": pad, "test": rows, "metrics": {"share": share}}
    record = fl.run(Tagger(), [rows], fl.FedAvg(lr=0.1), **options).history[-1]
    assert record.metrics["share"] == pytest.approx(record.accuracy)
    assert torch.equal(seen[-1], pad(rows)["labels"])


def test_several_targets_are_left_to_an_observer_before_the_first_round():
    inputs, targets = {"input": torch.randn(6, 4)}, torch.arange(6) % 2
    data = inputs | {"first": targets, "second": targets}
    options = {"target": ["first", "second"], "test": data, "metrics": {"none": lambda outputs, targets: 0}}

    def loss(outputs, targets):
        return sum(nn.functional.cross_entropy(outputs, each) for each in targets.values())

    class Counting(nn.Linear):
        def forward(self, input):
            assert not self.training, "a round began"
            return super().forward(input)

    with pytest.raises(ValueError, match="the targets as one tensor each, not as a dict; for others, use an observer"):
        fl.run(Counting(4, 2), [data], fl.FedAvg(lr=0.1), **SETTINGS, loss=loss, **options)


def test_what_is_computed_in_bfloat16_is_measured_in_float32():
    clients, test = with_test()
    kinds = []
    fl.run(
        make_model().float(),
        [(inputs.float(), targets) for inputs, targets in clients],
        fl.FedAvg(lr=0.1),
        **{**SETTINGS, "rounds": 1},
        dtype=torch.bfloat16,
        test=(test[0].float(), test[1]),
        metrics={"kind": lambda outputs, targets: kinds.append(outputs.dtype) or 0},
    )
    assert kinds == [torch.float32]


def test_a_measure_that_is_no_number_survives_the_file():
    metrics = {"auc": math.nan, "f1": 0.25, "psnr": math.inf, "log": -math.inf}
    over = {"loss": Distribution(math.inf, math.nan, math.inf, 3)}
    record = Record(1, math.inf, None, 0.5, 0.1, 1.0, 1, 1, 2, epsilon=math.inf, metrics=metrics, per_client=over)
    plain = json.loads(record.to_json(), parse_constant=pytest.fail)  # JSON has neither NaN nor infinities
    assert plain["metrics"] == {"auc": None, "f1": 0.25, "psnr": "Infinity", "log": "-Infinity"}
    again = Record.from_json(record.to_json())
    assert repr(again) == repr(record)


def test_a_run_resumed_or_loaded_after_an_infinite_measure_remembers_it(tmp_path):
    clients, test = with_test()
    values = iter((math.inf, *range(20)))

    def run(rounds):
        stopping = fl.EarlyStopping(patience=3, metric="psnr", mode="max")
        metrics = {"psnr": lambda outputs, targets: next(values)}
        options = {**SETTINGS, "rounds": rounds, "test": test, "metrics": metrics, "observers": [stopping]}
        return fl.run(make_model(), clients, fl.FedAvg(lr=0.1), **options, run_dir=tmp_path, resume=rounds > 2)

    run(2).save(tmp_path / "result")
    assert fl.load(tmp_path / "result", make_model()).history[0].metrics == {"psnr": math.inf}
    assert run(9).history[-1].round == 4


def test_records_of_version_0_1_are_rejected_by_name():
    plain = json.loads(Record(1, 0.5, None, 0.5, 0.1, 1.0, 1, 1, 2).to_json())
    with pytest.raises(ValueError, match=r"written by fedlalr 0\.1"):
        Record.from_json(json.dumps(plain | {"buffer_bytes_up": 0, "buffer_bytes_down": 0}))


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        ([f1], TypeError, "metrics must be a dict of names and functions"),
        ({1: f1}, TypeError, "a metric's name must be a non-empty string, not 1"),
        ({"loss": f1}, ValueError, "every record has a 'loss' already; give your metric another name"),
        ({"f1": 0.5}, TypeError, r"the metric 'f1' must be a function of \(outputs, targets\)"),
        ({"one": lambda outputs: 0}, TypeError, r"'one' must be a function of .*, but yours takes \(outputs\)"),
        (
            {"all": lambda outputs, targets: outputs},
            ValueError,
            "the metric 'all' failed on outputs",
        ),
    ],
)
def test_what_is_no_metric_is_rejected(metrics, error, message):
    clients, test = with_test()
    with pytest.raises(error, match=message):
        fl.run(make_model(), clients, fl.FedAvg(), **SETTINGS, test=test, metrics=metrics)


def test_metrics_of_nothing_are_rejected():
    with pytest.raises(ValueError, match=r"metrics are computed on the test set; pass test="):
        fl.run(make_model(), make_clients(), fl.FedAvg(), **SETTINGS, metrics={"f1": f1})


def test_a_model_that_gives_more_than_a_tensor_has_no_metrics():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, inputs):
            return self.inner(inputs), inputs

    test = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    with pytest.raises(ValueError, match="one tensor each, not as a tuple"):
        evaluate(Pair(), test, lambda outputs, targets: outputs[0].mean(), metrics={"f1": f1})
