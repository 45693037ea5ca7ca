"""The same seed gives the same bits, however an engine splits its work and whatever Python's hash seed is.

That any number of ranks agrees up to the rounding of a sum is tested with the distributed engine.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.federation.storage.journal import RunDirectoryError
from fedlalr.training.engines.registry import ENGINES

SETTINGS = {"rounds": 3, "local": fl.Epochs(2), "batch_size": 4, "clients_per_round": 4, "seed": 5}


def run(engine: str, model: nn.Module | None = None, **options: object) -> fl.Result:
    algorithm = options.pop("algorithm", fl.FedLALR())
    return fl.run(model or make_model(), make_clients(), algorithm, engine=engine, **(SETTINGS | options))


def dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.ReLU(), nn.Linear(6, 3)).double()


def same(first: fl.Result, second: fl.Result) -> bool:
    return all(torch.equal(value, second.state[s][n]) for s, slot in first.state.items() for n, value in slot.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_seed_gives_the_same_bits_on_every_engine(engine):
    assert same(run(engine), run(engine))
    assert not same(run(engine), run(engine, seed=6))


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_dropout_is_drawn_by_the_seed_whatever_was_drawn_before(engine):
    first = run(engine, dropout())
    torch.rand(17)
    assert same(first, run(engine, dropout()))
    assert not same(first, run(engine, dropout(), seed=6))


@pytest.mark.parametrize("algorithm", [fl.FedLALR(), fl.SCAFFOLD(0.1)], ids=lambda a: type(a).__name__)
def test_any_number_of_workers_gives_the_bits_of_the_reference(algorithm):
    alone = run("reference", algorithm=algorithm)
    for count in (1, 2, 3):
        assert same(alone, run(f"workers:{count}", algorithm=algorithm)), count


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_resumes_to_the_same_bits_on_every_engine(engine, tmp_path):
    run(engine, run_dir=tmp_path, rounds=1)
    assert same(run(engine), run("auto", run_dir=tmp_path, resume=True))


def test_a_run_does_not_resume_with_another_engine(tmp_path):
    run("stacked", run_dir=tmp_path, rounds=1)
    with pytest.raises(
        RunDirectoryError, match="was started with engine 'stacked' and cannot be resumed with 'workers'"
    ):
        run("workers", run_dir=tmp_path, resume=True)


SCRIPT = """
import sys, torch, fedlalr as fl
from conftest import make_clients, make_model
torch.set_num_threads(1)
fl.run(
    make_model(), make_clients(), fl.FedLALR(), rounds=int(sys.argv[1]), local=fl.Epochs(2), batch_size=4,
    clients_per_round=4, seed=5, engine="reference", run_dir=sys.argv[2], resume=True,
)
"""


def test_a_run_started_in_a_process_with_another_hash_seed_resumes_to_the_same_bits(tmp_path):
    """Sets of strings have another order there, on which neither a result nor the facts of a run may depend."""
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, "2", str(tmp_path)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert same(run("reference"), run("reference", run_dir=tmp_path, resume=True))
