"""Every option is defined once, and everything that shows or checks options is derived from the definition."""

import inspect
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import fedlalr as fl
from conftest import make_clients, make_model
from docs.tables import options_table
from fedlalr.common.option_types import Count, NotNegative, Positive, Seed, check_type
from fedlalr.config.schema import OPTIONS, Config
from fedlalr.federation.options import Options
from fedlalr.training import Training
from fedlalr.training.options import LocalOptions, options_in

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_signature_and_the_help_of_run_have_every_option():
    given = {name: p.default for name, p in inspect.signature(fl.run).parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert given == {each.name: each.default for each in fields(Options)}
    for each in fields(Options):
        assert f"    {each.name}: {each.metadata['doc']}" in fl.run.__doc__


def test_the_table_in_the_documentation_is_the_definitions():
    assert options_table() in PAGE.read_text(encoding="utf-8")


def test_a_configuration_has_the_options_with_their_defaults():
    defaults = {name: field.default for name, field in Config.model_fields.items() if name in OPTIONS}
    wanted = {each.name: each.default for each in fields(Options) if each.name in OPTIONS}
    different = {name for name in wanted if defaults[name] != wanted[name]}
    assert different == {"local", "schedule"}  # nested tables in a file
    assert defaults["local"].epochs == wanted["local"].count
    assert fl.schedules.create(defaults["schedule"].name) == wanted["schedule"]


def test_training_has_every_option_of_a_client():
    assert {each.name for each in options_in(LocalOptions, "client")} <= {each.name for each in fields(Training)}


def test_an_option_of_clients_is_defined_where_they_find_it():
    """With the scope "client", which is the default, one of the server would be in no fingerprint."""
    assert {each.name for each in options_in(Options, "client")} == {
        each.name for each in options_in(LocalOptions, "client")
    }


def test_a_misspelt_option_is_rejected_with_the_nearest():
    with pytest.raises(TypeError, match=r"fl\.run has no option 'batchsize'.*Did you mean 'batch_size'"):
        fl.run(make_model(), make_clients(), fl.FedAvg(), batchsize=3)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Count, (1, 10**6), (0, 1.0, True, "1", None)),
        (Count | None, (1, None), (0, "None")),
        (Positive, (1e-9, 3), (0, -1.0, float("nan"), float("inf"), True)),
        (NotNegative, (0, 0.5), (-1e-9, float("nan"), "0")),
        (Seed, (0, 2**63 - 1), (-1, 2**63, 0.5, True)),
        (bool, (True, False), (0, 1, None)),
    ],
)
def test_a_type_says_which_values_are_allowed(kind, good, bad):
    for value in good:
        check_type("it", value, kind)
    for value in bad:
        with pytest.raises((ValueError, TypeError), match="it must be"):
            check_type("it", value, kind)


@pytest.mark.slow
def test_a_type_checker_knows_the_options(tmp_path):
    text = "\n".join(
        [
            "import torch, fedlalr as fl",
            "clients = [(torch.randn(3, 2), torch.tensor([0, 1, 0]))]",
            "fl.run(torch.nn.Linear(2, 2), clients, fl.FedAvg(), rounds=3, dtype='bfloat16', sampling='size').plot()",
            "fl.run(model=torch.nn.Linear(2, 2), clients=clients, algorithm=fl.FedAvg(), local=fl.Steps(2))",
            "fl.run(torch.nn.Linear(2, 2), clients, fl.FedAvg(), round=3)",
            "fl.run(torch.nn.Linear(2, 2), clients, fl.FedAvg(), rounds='3')",
        ]
    )
    (tmp_path / "mine.py").write_text(text)
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-version", "3.11", "--cache-dir", ".mypy_cache", tmp_path / "mine.py"],
        capture_output=True,
        text=True,
        cwd=PAGE.parents[1],
        env={**os.environ, "MYPYPATH": "src"},
    )
    errors = [line for line in found.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 2, found.stdout + found.stderr
    assert 'mine.py:5: error: Unexpected keyword argument "round"' in errors[0]
    assert 'mine.py:6: error: Argument "rounds" to "__call__" of "Run" has incompatible type "str"' in errors[1]
