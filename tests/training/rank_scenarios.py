"""What the ranks of `test_distributed.py` do, each in a separate process."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from pathlib import Path

import torch
from torch import nn

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.training.ranks import join
from training.tokens import Rows, pad_tokens, token_clients, token_model, token_samples

SIZES = (7, 12, 6, 10, 11, 23)


def norm_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


class Norms:
    clients = frozenset({0, 5})

    def measure(self, state, context):
        return {name: float(value.norm()) for name, value in state.items()}


class Watcher(fl.Observer):
    """Probes the second round and keeps what it receives."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def probe(self, round):
        return Norms() if round == 2 else None

    def on_traces(self, round, lr, traces):
        self.seen.append(tuple(traces))

    def on_round(self, record):
        self.seen.append(record.round)


def job(engine: str, algorithm=None, **options):
    """A run and what its observer saw."""
    watcher = Watcher()
    settings = {"rounds": 3, "local": fl.Epochs(2), "batch_size": 4, "clients_per_round": 4, "weight_decay": 1e-2}
    settings |= {"test": make_clients((23,), seed=5)[0], "observers": [watcher], "device": "cpu"} | options
    model = settings.pop("model", None) or norm_model()
    clients = settings.pop("clients", None) or make_clients(SIZES)
    result = fl.run(model, clients, algorithm or fl.FedLALR(), engine=engine, **settings)
    return result, watcher.seen


class Halved:
    """Half the mean change, in another precision. Its repr has an address, which differs between ranks."""

    def reduce(self, values, reference, share):
        mean = fl.reductions.Mean().reduce(values, reference, share)
        return (reference + (mean - reference) / 2).double()


def margin(outputs, targets):
    """The margin of the worst test sample, which is not a mean over the ranks' shares."""
    return (outputs.gather(1, targets[:, None]) - outputs).min()


def with_nan() -> list:
    pairs = make_clients(SIZES)
    pairs[2][0][0] = float("nan")
    return pairs


DICTS = {
    "clients": [Rows(samples, ragged=True) for samples in token_clients()],
    "collate_fn": pad_tokens,
    "loss": "model",
    "test": Rows(token_samples(9, seed=9), ragged=True),
}
PERSONAL = {"personal": ("1.*", "4.*"), "buffers": "local", "test": None, "holdout": 0.2, "batch_size": 20}
ASYNCHRONOUS = {"asynchronous": fl.Async(2, 4), "speeds": 1.0, "clients_per_round": None, "observers": [], "rounds": 5}
PRIVATE = {
    "privacy": fl.Privacy(clip=0.1, noise_multiplier=1.0, units={"m": 0.1, "v_hat": 0.01, "buffers": 1.0}),
    "rounds": 6,  # cohorts of 2, 2, 2, 3, 0 and 1 clients
    "clients_per_round": 2,
}
JOBS = {
    "fedlalr": lambda engine: job(engine, weighting="samples"),
    "fedlalr max": lambda engine: job(engine, fl.FedLALR(momentum="restart", second_moment="max")),
    "scaffold": lambda engine: job(engine, fl.SCAFFOLD()),
    "recalibrated": lambda engine: job(engine, fl.FedAvg(), buffers="recalibrate"),
    "personal": lambda engine: job(engine, fl.SCAFFOLD(), **PERSONAL),
    "median": lambda engine: job(engine, reduce={"x": "median", "v_hat": "median"}, clients_per_round=None),
    "clipped": lambda engine: job(engine, max_norm_ratio=1.0, clients_per_round=None),
    "own": lambda engine: job(engine, reduce={"x": Halved(), "v_hat": fl.reductions.Max()}),
    "measured": lambda engine: job(engine, metrics={"margin": margin}),
    "nan": lambda engine: job(engine, clients=with_nan(), clients_per_round=None),
    "one sample": lambda engine: job(engine, clients=make_clients((7, 12, 6, 10, 1, 23)), clients_per_round=None),
    "two clients": lambda engine: job(engine, clients_per_round=2),
    "one client": lambda engine: job(engine, clients_per_round=1),
    "asynchronous": lambda engine: job(engine, **ASYNCHRONOUS),
    "private": lambda engine: job(engine, **PRIVATE),
    "dicts": lambda engine: job(engine, model=token_model(), **DICTS),
}
"""Runs that must give the same result on any number of ranks."""
UNEVEN = ("recalibrated", "personal", "median", "own", "nan", "two clients", "one client", "private", "dicts")
"""Those for three ranks: a cohort in unequal parts, without a client for every rank, or with a rejected one."""


def outcome(done):
    """The parts of a run that can be compared."""
    result, seen = done
    records = [
        (r.round, r.loss, r.accuracy, r.train_loss, r.bytes_up, r.clients, r.metrics, r.rejected)
        for r in result.history
    ]
    state = {**result.state, **{f"client {client}": own for client, own in result.personal.items()}}
    scores = [tuple(each) for r in result.history for each in r.per_client.values()]
    buffers = dict(result.model.named_buffers())
    return {"state": state, "buffers": buffers, "records": records, "scores": scores, "seen": seen}


def same_results(folder: Path) -> dict:
    names = UNEVEN if join(torch.device("cpu")).count == 3 else JOBS
    found = {name: outcome(JOBS[name]("distributed")) for name in names}
    found["stacked"] = outcome(job("distributed:stacked", model=make_model()))
    return found


def other_weights(folder: Path) -> dict:
    """Every rank draws different weights; those of the first rank are used."""
    return outcome(job("auto", model=norm_model(seed=join(torch.device("cpu")).rank)))


def files(folder: Path) -> dict:
    """Half a run, then the rest of it."""
    mine = folder / f"rank-{join(torch.device('cpu')).rank}"
    job("auto", rounds=2, run_dir=mine)
    done = outcome(job("auto", rounds=4, run_dir=mine, resume=True))
    return done | {"written": mine.exists()}


def other_settings(folder: Path) -> None:
    job("distributed", seed=join(torch.device("cpu")).rank)


def another_engine(folder: Path) -> None:
    job("workers:2")


class Stumble(fl.Observer):
    def on_round(self, record):
        if record.round == 2:
            raise OSError("the disk of the first rank is full")


class Halt(fl.Observer):
    def on_round(self, record):
        if record.round == 2:
            raise fl.Stop


def first_rank_stops(folder: Path) -> int:
    return len(job("distributed", observers=[Halt()])[0].history)


def first_rank_fails(folder: Path) -> None:
    job("distributed", observers=[Stumble()])


def last_rank_fails(folder: Path) -> None:
    ranks = join(torch.device("cpu"))

    def loss(outputs, targets):
        if not torch.is_grad_enabled() and ranks.rank == ranks.count - 1:
            raise ArithmeticError("this rank cannot evaluate")
        return nn.functional.cross_entropy(outputs, targets)

    big = make_clients((3000,), seed=5)[0]
    job("distributed", loss=loss, test=big)


class Deadly(nn.Module):
    """Ends the last rank while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, inputs):
        if self.training and int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(inputs)


def last_rank_dies(folder: Path) -> None:
    job("distributed", model=Deadly())


def play(rank: int, count: int, port: int, folder: Path, names: list[str]) -> None:
    """Be a rank: run the scenarios one after the other and write the result or error of each to a file."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    for name in names:
        try:
            found[name] = globals()[name](folder)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))


def main(folder: Path, count: int, names: list[str]) -> None:
    """Start the ranks: by fork, which is quick, and safe in a process that has not computed anything yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=play, args=(rank, count, port, folder, names)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
