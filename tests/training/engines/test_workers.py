"""The workers engine: several processes give the reference engine's bits, and the death of one is reported."""

from __future__ import annotations

import copy
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.data.population import as_clients
from fedlalr.federation.round import Rules, run_round
from fedlalr.federation.session import initial_state
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.engines.shared_memory import ship, unship
from fedlalr.training.engines.workers import WorkerDied, WorkersEngine, end_idle_workers
from fedlalr.training.interfaces import Training
from fedlalr.training.layout import Layout


class Own(Dataset):
    """A data set that only this test module defines."""

    def __init__(self, pair):
        self.pair = pair

    def __len__(self):
        return len(self.pair[1])

    def __getitem__(self, index):
        return self.pair[0][index], self.pair[1][index]


class Mapped(Dataset):
    """A client's part of a memory-mapped file."""

    def __init__(self, inputs, start, targets):
        self.inputs, self.start, self.targets = inputs, start, targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return torch.from_numpy(np.array(self.inputs[self.start + index])), self.targets[index]


class Norm(nn.Module):
    """A module that only this test module defines, with buffers and a convolution."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Linear(3, 3)

    def forward(self, inputs):
        maps = self.norm(self.convolution(inputs.view(-1, 1, 2, 2)))
        return self.head(maps.flatten(1))


class Deadly(nn.Module):
    """Kills its own process when it sees client 3's marker."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, inputs):
        if self.training and (inputs == 99).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(inputs)


class Squares:
    clients = frozenset({1, 4})

    def measure(self, state, context):
        return {"v_hat": float((state.v_hat**2).sum())}


def training(model=None, clients=None, algorithm=None, **options) -> Training:
    model = model or make_model()
    settings = {"local": fl.Steps(3), "batch_size": 4, "weight_decay": 1e-3} | options
    return Training(
        model=model,
        layout=Layout.of(model),
        clients=as_clients(clients or make_clients()),
        algorithm=algorithm or fl.FedLALR(),
        loss=nn.functional.cross_entropy,
        device=torch.device("cpu"),
        buffers="recalibrate",
        **settings,
    )


def two_rounds(engine, setting: Training, probe=None):
    state, traces = initial_state(setting), []
    for cohort in (torch.arange(5), torch.tensor([0, 2, 3])):
        outcome = run_round(state, cohort, 0.01, engine, setting, Rules(), probe)
        state, traces = outcome.state, [*traces, *outcome.traces]
        probe = None
    return state, traces


def assert_equal_states(mine, theirs, **tolerance):
    for ours, reference in ((mine.slots, theirs.slots), (mine.buffers, theirs.buffers)):
        assert list(ours) == list(reference)
        for name in ours:
            torch.testing.assert_close(ours[name], reference[name], **(tolerance or {"rtol": 0, "atol": 0}))
    assert set(mine.kept) == set(theirs.kept)
    for client, slots in mine.kept.items():
        assert all(torch.equal(tensor, theirs.kept[client][name]) for name, tensor in slots.items())


@pytest.mark.parametrize("algorithm", [fl.FedLALR(), fl.SCAFFOLD()], ids=["fedlalr", "scaffold"])
def test_the_bits_are_the_references_whatever_the_number_of_workers(algorithm):
    setting = training(algorithm=algorithm)
    probe = Squares() if isinstance(algorithm, fl.FedLALR) else None
    expected, traces = two_rounds(ReferenceEngine(setting), setting, probe)
    for count in (1, 2):
        setting = training(algorithm=algorithm)
        engine = WorkersEngine(setting, count)
        try:
            state, seen = two_rounds(engine, setting, probe)
        finally:
            engine.close()
        assert_equal_states(state, expected)
        assert seen == traces


def test_modules_and_data_sets_of_a_test_module_and_statistics_travel():
    clients = [Own(pair) for pair in make_clients((8, 12, 4, 8, 12))]
    torch.manual_seed(0)
    model = Norm().double()
    setting = training(copy.deepcopy(model), clients)
    expected, _ = two_rounds(ReferenceEngine(setting), setting)
    setting = training(model, clients)
    engine = WorkersEngine(setting, 2)
    try:
        state, _ = two_rounds(engine, setting)
    finally:
        engine.close()
    assert_equal_states(state, expected, rtol=1e-10, atol=1e-14)


def shipped(value):
    """A value as another process receives it, and the bytes copied for it."""
    arena, bounds = ship(value)
    with closing(arena):
        return unship(arena, bounds), arena.size


def test_clients_over_a_memory_mapped_file_share_the_file(tmp_path: Path):
    pairs = make_clients((8, 12, 4, 8, 12))
    np.save(tmp_path / "inputs.npy", torch.cat([inputs for inputs, _ in pairs] * 1000).numpy())
    clients = [
        Mapped(np.load(tmp_path / "inputs.npy", mmap_mode="r"), start, targets)
        for start, (_, targets) in zip((0, 8, 20, 24, 32), pairs, strict=True)
    ]
    setting = training(clients=clients)
    assert shipped(setting)[1] < (tmp_path / "inputs.npy").stat().st_size / 10
    with closing(WorkersEngine(setting, 2)) as engine:
        state, _ = two_rounds(engine, setting)
    assert_equal_states(state, two_rounds(ReferenceEngine(setting), setting)[0])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_parts_of_memory_mapped_files_arrive_as_they_are(mode, order, tmp_path: Path):
    np.save(tmp_path / "file.npy", np.asarray(np.arange(24.0).reshape(4, 6), order=order))
    whole = np.load(tmp_path / "file.npy", mmap_mode=mode)
    if mode != "r":
        whole[0, 0] = 7  # in the file, or in a private copy of its page
    parts = [whole, whole[1:3], whole[::-1, 1::2], np.asarray(whole)[2], whole.T, whole[[2, 0]], whole[4:]]
    for mine, theirs in zip(shipped(parts)[0], parts, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_memory_that_several_clients_share_is_copied_once():
    array, tensor = np.ones(10_000), torch.ones(10_000)
    views, size = shipped([array[:], array[:], tensor[:], tensor.view(100, 100)])
    assert size < array.nbytes + 4 * len(tensor) + 5_000
    assert [view.shape for view in views] == [(10_000,), (10_000,), (10_000,), (100, 100)]
    assert all(bool((view == 1).all()) for view in views)


def test_a_client_that_raises_is_named_and_the_others_continue():
    pairs = make_clients()
    pairs[2] = (pairs[2][0], pairs[2][1] + 7)
    setting = training(clients=pairs)
    engine = WorkersEngine(setting, 2)
    try:
        outcome = run_round(initial_state(setting), torch.arange(5), 0.01, engine, setting, Rules())
    finally:
        engine.close()
    assert [rejection.client for rejection in outcome.rejected] == [2]
    assert "IndexError" in outcome.rejected[0].reason
    assert outcome.accepted == 4


def test_a_worker_that_dies_is_reported_with_its_client_and_nothing_is_left():
    pairs = make_clients()
    pairs[3] = (torch.full_like(pairs[3][0], 99), pairs[3][1])
    setting = training(Deadly(), pairs)
    engine = WorkersEngine(setting, 2)
    pids = [process.popen.pid for process in engine._processes]
    try:
        with pytest.raises(WorkerDied, match=r"was killed by signal 9 while it trained client 3"):
            run_round(initial_state(setting), torch.arange(5), 0.01, engine, setting, Rules())
    finally:
        engine.close()
        end_idle_workers()
    assert all(not _alive(pid) for pid in pids)


def test_the_processes_of_a_finished_run_serve_the_next():
    first = WorkersEngine(training(), 1)
    pid = first._processes[0].popen.pid
    first.close()
    second = WorkersEngine(training(algorithm=fl.FedAvg(0.1)), 1)
    assert second._processes[0].popen.pid == pid
    second.close()


class InterruptedAtTheStart(WorkersEngine):
    """Ctrl-C arrives while the processes start up."""

    def _receive(self, process):
        raise KeyboardInterrupt


class InterruptedInAMessage(WorkersEngine):
    """Ctrl-C arrives when half of a round's orders have been sent."""

    def _send(self, process, message, descriptor=None):
        if self._arena is None:  # the setup
            return super()._send(process, message, descriptor)
        os.write(process.connection.fileno(), b"half")
        raise KeyboardInterrupt


@pytest.mark.parametrize(("interrupted", "count"), [(InterruptedAtTheStart, 1), (InterruptedInAMessage, 2)])
def test_the_run_after_an_interrupted_one_gets_no_answer_that_was_meant_for_it(interrupted, count):
    setting = training()

    def played(kind):
        with closing(kind(setting, count)) as engine:
            return two_rounds(engine, setting)[0]

    with pytest.raises(KeyboardInterrupt):
        played(interrupted)
    assert_equal_states(played(WorkersEngine), two_rounds(ReferenceEngine(setting), setting)[0])


@pytest.mark.parametrize("where", ["here", "there"])
def test_what_cannot_be_sent_is_rejected_with_the_reason(where):
    class Stubborn(nn.Linear):
        def __reduce__(self):
            if where == "here":
                raise TypeError("I stay where I am")
            return _fall_apart, ()

    with pytest.raises(ValueError, match=r"cannot be sent to worker processes \(TypeError: I stay where I am\)"):
        WorkersEngine(training(Stubborn(4, 3)), 1)


def _fall_apart():
    raise TypeError("I stay where I am")


class Noisy(Dataset):
    """Draws from every random generator."""

    def __init__(self, pair):
        self.pair = pair

    def __len__(self):
        return len(self.pair[1])

    def __getitem__(self, index):
        noise = torch.randn(4, dtype=torch.float64) + random.random() + np.random.rand()
        return self.pair[0][index] + noise, self.pair[1][index]


def test_modules_and_data_sets_draw_what_they_draw_on_the_reference_whatever_the_number_of_workers():
    states = []
    for make in (ReferenceEngine, partial(WorkersEngine, count=1), partial(WorkersEngine, count=2)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        setting = training(model, [Noisy(pair) for pair in make_clients()])
        engine = make(setting)
        try:
            states.append(two_rounds(engine, setting)[0])
        finally:
            engine.close()
    for state in states[1:]:
        assert_equal_states(state, states[0])


def test_it_rejects_another_device():
    setting = training()
    object.__setattr__(setting, "device", torch.device("cuda"))
    with pytest.raises(ValueError, match="trains on the CPU"):
        WorkersEngine(setting)


SCRIPT = """
import torch, fedlalr as fl
class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def forward(self, inputs):
        return self.layer(inputs)
torch.manual_seed(0)
clients = [(torch.randn(6, 4), torch.randint(0, 2, (6,))) for _ in range(3)]
result = fl.run(Mine(), clients, fl.FedLALR(), rounds=2, engine="workers:1")
print(result.info.engine, result.history[-1].round)
"""


def test_it_runs_without_a_main_guard_and_without_a_file():
    """The test below runs it from a file."""
    done = subprocess.run([sys.executable, "-"], input=SCRIPT, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["workers", "2"], done.stderr


def test_a_worker_goes_at_once_when_the_run_is_killed_and_no_signal_but_that_reaches_it(tmp_path: Path):
    """Even while it trains a client that never finishes."""
    path = tmp_path / "mine.py"
    busy = "        if os.getpid() != RUN:\n            print(os.getpid(), flush=True)\n            while True: pass\n"
    path.write_text("import os\nRUN = os.getpid()\n" + SCRIPT.replace("        return", f"{busy}        return"))
    run = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    worker = int(run.stdout.readline())
    for number in (signal.SIGINT, signal.SIGTERM):  # of the terminal's group or of Slurm's job: the run handles them
        os.kill(worker, number)
    time.sleep(0.1)
    assert _alive(worker)
    run.kill()
    run.wait()
    run.stdout.close()
    deadline = time.monotonic() + 30
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(worker)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
