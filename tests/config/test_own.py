"""Your own problem on the command line: functions that make the model and the clients."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset
from typer.testing import CliRunner, Result

from fedlalr import config
from fedlalr.cli import app
from fedlalr.config.own import held_out
from fedlalr.data import Population
from fedlalr.data.population import as_clients
from fedlalr.report.html import write_report

MODULE = """
import torch
from torch import nn
from fedlalr.data import Partition, Population

nothing = 3
calls = []

def make(hidden=4, bias=True):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3, bias=bias))

def sized(inputs, classes, size=5):
    assert size == 5
    return nn.Linear(inputs, classes)

def flat(inputs, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))

def samples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return inputs, inputs[:, :3].argmax(1)

def clients(count=4, seed=0):
    calls.append(seed)
    return [samples(10 + i, 100 * seed + i) for i in range(count)], samples(40, 1)

def single():
    return [samples(1, i) for i in range(3)]

def without_test(count=4):
    return [samples(10 + i, i) for i in range(count)]

def population():
    inputs, targets = samples(30, 0)
    parts = Partition.from_lists([range(10), range(10, 30)])
    return Population(inputs, targets, parts, test=samples(20, 1), classes=3)

def lines():
    return [(x := torch.randn(12, 4), x[:, :1]) for _ in range(3)]

def tested_lines():
    return lines(), lines()[0]

def one_output():
    return nn.Linear(4, 1)

class OfDicts(nn.Linear):
    def forward(self, features, labels=None):
        logits = super().forward(features)
        return {"logits": logits, "loss": None if labels is None else nn.functional.cross_entropy(logits, labels)}

def of_dicts(classes):
    return OfDicts(4, classes)

def dicts():
    parts = [dict(zip(("features", "labels"), samples(10, i))) for i in range(4)]
    return parts[1:], parts[0]

def squares(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)

def broken():
    return 1 / 0

def no_model():
    return nn.Linear

def no_clients():
    return {"a": 1}

def two():
    return samples(10, 0), samples(10, 1)
"""
SMALL = ("rounds=2", "local.steps=1", "engine=reference", "-q")


@pytest.fixture(autouse=True)
def _own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("mine.py").write_text(MODULE)
    yield
    sys.modules.pop("mine", None)


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_run_of_your_own_is_complete_and_can_be_resumed_and_repeated() -> None:
    own = ("model=mine:make", "data=mine:clients", "model.hidden=6", "data.options.count=5", "seed=3")
    result = cli("run", *own, *SMALL, "--run-dir", "here", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["name"], summary["data"], summary["clients"]) == ("mine", "mine:clients", 5)
    assert summary["parameters"] == 4 * 6 + 6 + 6 * 3 + 3
    assert sys.modules["mine"].calls == [3]  # the run's seed
    assert summary["accuracy"] is not None
    text = Path("here/config.yaml").read_text()
    assert "partition" not in text
    assert cli("resume", "here", "rounds=4", "-q").exit_code == 0
    assert cli("run", "here/config.yaml", "rounds=4", "-q", "--run-dir", "again").exit_code == 0
    first, second = (config.RunDirectory(folder).records() for folder in ("here", "again"))
    assert [record.loss for record in first] == [record.loss for record in second]
    assert len(first) == 4


def test_the_initial_weights_are_a_function_of_the_seed() -> None:
    models = [
        config.build_model(config.load(None, ["model=mine:make", "data=mine:clients"]).model, as_clients(pairs()), seed)
        for seed in (0, 0, 1)
    ]
    first, second, third = (model[0].weight for model in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(10, 4), torch.randint(0, 3, (10,))) for _ in range(3)]


@pytest.mark.parametrize(
    ("settings", "accuracy"),
    [
        (("model=mine:make", "data=mine:without_test"), False),
        (("model=mine:sized", "data=mine:population"), True),
        (("model=mine:sized", "data=mine:clients"), True),
        (("model=mine:make", "data=mine:two"), False),
        (("model=mine:one_output", "data=mine:lines", "loss=mine:squares"), False),
        (("model=mine:of_dicts", "data=mine:dicts"), True),
        (("model=mine:of_dicts", "data=mine:dicts", "loss=model"), True),
        (("quickstart", "model=mlp", "data=mine:population"), True),
        (("quickstart", "model=mine:sized", "data={name: mine:population, validation: 0.3}"), True),
    ],
)
def test_every_kind_of_data_runs(settings: tuple[str, ...], accuracy: bool) -> None:
    result = cli("run", *settings, *SMALL, "clients_per_round=2", "--json")
    assert result.exit_code == 0, result.output
    assert (json.loads(result.stdout)["accuracy"] is not None) == accuracy


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize("model", ["model=mine:flat", "model={name: mine:flat}"])
def test_a_model_of_your_own_is_not_trained_on_data_that_nobody_named(command: str, model: str) -> None:
    result = cli(command, model, *SMALL)
    assert result.exit_code == 2, result.output
    told = "error: model=mine:flat is your own model, but nothing names its data: add data=module:function, such as "
    assert result.stderr.startswith(told)
    assert result.stderr.endswith("such as quickstart model=mine:flat\n")
    assert not Path("runs").exists()
    assert cli("run", "quickstart", model, *SMALL).exit_code == 0


def test_methods_are_compared_and_tuned_on_your_problem() -> None:
    own = ("model=mine:make", "data=mine:clients", *SMALL, "--seeds", "1", "--jobs", "1")
    grid = ("grid={fedlalr: {lr: [0.01, 0.1]}}", "--grid", "--grid-seeds", "1", "--run-dir", "tuned")
    result = cli("compare", *own, *grid, "--methods", "fedlalr")
    assert result.exit_code == 0, result.output
    assert "Learning rates chosen from 2 settings per method" in result.stdout
    assert result.stdout.endswith("Report: tuned/report.html\n")
    assert "mine:clients" in Path("tuned/report.html").read_text()
    result = cli("compare", *own, "--methods", "fedavg", "--vary", "model.hidden=3,5", "--run-dir", "both", "--json")
    assert json.loads(result.stdout)["report"] == "both/report.html"
    assert sorted(path.name for path in Path("both").iterdir() if path.is_dir()) == ["model.hidden-3", "model.hidden-5"]


def test_without_an_accuracy_methods_are_compared_by_their_losses() -> None:
    own = ("model=mine:one_output", "data=mine:lines", "loss=mine:squares", "--methods", "fedlalr,fedavg")
    grid = ("grid={fedlalr: {lr: [0.01, 0.1]}, fedavg: {lr: [1e-4, 0.1]}}", "--grid", "--grid-seeds", "1")
    result = cli("compare", *own, *grid, *SMALL[:-1], "--seeds", "1", "--jobs", "1", "--run-dir", "lines")
    assert result.exit_code == 0, result.output
    assert re.search(r"2/2  fedavg/seed-0: training loss [\d.]+, ", result.output)
    assert "fedavg: lr 0.1, loss " in result.stdout
    assert "final training loss" in Path("lines/table.md").read_text()
    assert not Path("lines/accuracy.png").exists()
    assert cli("report", "lines", "--figure", "sent.png").exit_code == 0
    assert ">training loss</text>" in (drawn := Path("sent.svg").read_text())
    assert ">FedAvg</text>" in drawn
    assert "0.9 is an accuracy, but" in cli("report", "lines", "--figure", "sent.png", "--target", "0.9").stderr


@pytest.mark.parametrize(
    ("settings", "name"),
    [(("data=mine:lines", "holdout=0.3"), "held-out loss"), (("data=mine:tested_lines",), "test loss")],
)
def test_progress_table_and_json_have_the_same_losses_under_the_same_name(settings: tuple[str, ...], name: str) -> None:
    own = ("model=mine:one_output", "loss=mine:squares", *settings, "methods={fedlalr: {lr: 1e-4}, fedavg: {lr: 0.1}}")
    result = cli("compare", *own, *SMALL[:-1], "--seeds", "1", "--jobs", "1", "--run-dir", "lines")
    assert result.exit_code == 0, result.output
    shown = dict(re.findall(rf"(\w+)/seed-0: {name} ([\d.]+), ", result.output))
    assert f"| method | final {name} |" in (table := Path("lines/table.md").read_text())
    content = json.loads(Path("lines/compare.json").read_text())
    assert (content["measure"], content["best"], content["target"]) == (name, "fedavg", None)
    for found in content["methods"]:
        assert f"{found['finals'][0]:.4g}" == shown[found["method"]]
        assert f" | {shown[found['method']]} | " in table


def test_methods_with_personal_parameters_are_tuned_and_compared_by_the_accuracy_of_the_clients() -> None:
    own = ("model=mine:make", "data=mine:clients", "personal=['2.*']", "holdout=0.3", "evaluate_every=2")
    grid = ("grid={fedlalr: {lr: [0.01, 0.1]}, fedavg: {lr: [0.01, 0.1]}}", "--grid", "--grid-seeds", "1")
    result = cli(
        "compare", *own, *grid, *SMALL, "--methods", "fedlalr,fedavg", "--seeds", "1", "--jobs", "1",
        "--run-dir", "own",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert re.search(r"fedavg: lr [\d.]+, accuracy ", result.stdout)
    assert "final accuracy" in (table := Path("own/table.md").read_text())
    assert "Without a test set, the accuracy is the mean over the clients' held-out samples." in table
    assert "Methods compared" in Path("own/report.html").read_text()


def test_a_report_does_not_import_your_module() -> None:
    assert cli("run", "model=mine:make", "data=mine:clients", *SMALL, "--run-dir", "here").exit_code == 0
    del sys.modules["mine"]
    Path("mine.py").write_text("raise SystemExit('imported')")
    page = write_report(["here"], "page.html").read_text()
    assert "This function made the clients; a report does not run it." in page


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model=mine:make", "data=absent.part:clients"], "data: there is no module 'absent' in "),
        (["model=mine:mke", "data=mine:clients"], "mine.py has no 'mke'; it has Partition, Population, make, sized"),
        (["model=mine:nothing", "data=mine:clients"], "model: mine:nothing is no function, but a int, 3"),
        (
            ["model=mine:no_model", "data=mine:clients"],
            "must return a torch.nn.Module; it returned a type",
        ),
        (["model=mine:make", "data=mine:no_clients"], "data: mine:no_clients must return clients as fl.run takes them"),
        (["model=mine:make", "data=mine:broken"], "data: mine:broken failed: ZeroDivisionError: division by zero ("),
        (
            ["model=mine:make", "data=mine:clients", "model.hiden=3"],
            "has no parameter 'hiden'; it has hidden, bias. Did",
        ),
        (["model=mine:make", "data=mine:clients", "data.options.n=3"], "has no parameter 'n'; it has count, seed"),
        (["model=mine:sized", "data=mine:lines"], "mine:sized needs 'classes'; set it with model.classes=…"),
        (
            ["quickstart", "model=mine:make"],
            "(16x8 and 4x4); data is digits, from quickstart; for your own, add data=mypackage.data:clients",
        ),
        (["model=mine:make", "data=mine:samples"], "mine:samples needs 'count'; set it with data.options.count=…"),
        (["model=mine:make", "data=mine:clients", "partition.alpha=1"], "partition is for the library's data sets"),
        (["model=mine:make", "data=mine:clients", "data.folder=x"], "folder and augment are for the library's data"),
        (["model=mine:make", "data=:clients"], "write your own function as package.module:function"),
        (["model=mine/x:make", "data=mine:clients"], "write your own function as package.module:function"),
        (["model=mine:make", "data=mine:clients", "loss=mse"], "write your own function as package.module:function"),
        (["data=mine:clients"], "The setting 'model' is missing"),
        (["data=digit"], "or name a function of yours, such as mypackage.data:clients. Did you mean 'digits'?"),
        (["model=mine:make", "data=mine:single", "data.validation=0.1"], "every client has only one"),
    ],
)
def test_a_mistake_is_a_clear_error(settings: list[str], message: str) -> None:
    result = cli("run", *settings, *SMALL)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [("import absent_library", "cannot be imported: No module named 'absent_library'"), ("1 +", "SyntaxError")],
)
def test_a_module_that_cannot_be_imported_says_why(text: str, message: str) -> None:
    Path("mine.py").write_text(text)
    result = cli("run", "model=mine:make", "data=mine:clients", *SMALL)
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_app_for_other_machines_needs_its_own_functions() -> None:
    pytest.importorskip("flwr", reason="Flower is not installed")
    for own in ("data=mine:clients", "model=mine:make", "loss=mine:squares"):
        result = cli("flower", "export", "quickstart", "app", own)
        assert result.exit_code == 2
        assert "an app runs on others" in result.stderr


class Numbers(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((2,), float(i)), i


@pytest.mark.parametrize("kind", ["pairs", "data sets"])
def test_held_out_samples_are_those_that_clients_lost(kind: str) -> None:
    numbers = torch.arange(10)
    given = [(numbers[:, None].float(), numbers), (numbers[:1, None].float(), numbers[:1])]
    clients = as_clients(given if kind == "pairs" else [Numbers(), Numbers()])
    left, test = held_out(clients, 0.3, seed=5)
    inputs, targets = test.batch(0, torch.arange(int(test.sizes[0])))
    assert isinstance(left, Population) == (kind == "pairs")
    kept = [left.batch(0, torch.arange(int(left.sizes[0])))[1].tolist(), targets[:3].tolist()]
    assert sorted(kept[0] + kept[1]) == list(range(10))
    assert left.sizes.tolist() == ([7, 1] if kind == "pairs" else [7, 7])  # a client keeps its only sample
    assert torch.equal(inputs[:, 0], targets.float())
