"""Warm nodes: a trainer process stays alive between messages, and every way in which it can fail is named."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed")
if sys.platform != "linux":
    pytest.skip("nodes stay warm on Linux only", allow_module_level=True)

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

import fedlalr as fl
from fedlalr.flower import FederatedStrategy, client_app
from fedlalr.flower.client import station, trainer
from fedlalr.flower.client.frames import BEAT, Frame, receive, send
from fedlalr.flower.client.named import Names
from fedlalr.flower.client.relay import Relay
from fedlalr.flower.client.station import Station, TrainerError, TrainingFailed, open_folder
from fedlalr.flower.client.trainer import Trainer
from fedlalr.flower.export import export, for_nodes
from flower.in_process import InProcessGrid, Node

TASK = '''
"""A client whose samples can kill or stop the process that reads them."""

import os
import signal
from pathlib import Path

import torch
import fedlalr as fl

FAULT = Path(__file__).parent.parent / "fault"


class Samples(torch.utils.data.Dataset):
    def __init__(self, client):
        generator = torch.Generator().manual_seed(client)
        self.inputs = torch.randn(8, 3, generator=generator)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if FAULT.exists():
            number = int(FAULT.read_text())
            FAULT.unlink()
            os.kill(os.getpid(), number)
        return self.inputs[index], index % 2


def model(context):
    (Path(__file__).parent.parent / "calls").open("a").write("model ")
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def data(context):
    return Samples(context.node_config["partition-id"])


def algorithm(context):
    return fl.FedLALR(lr=0.01)


settings = {"local": fl.Epochs(1), "batch_size": 4, "device": "cpu"}
'''
NAMES = {part: f"warm_app.task:{part}" for part in ("model", "data", "algorithm", "settings")}
WARM, COLD = 70, 71
"""Node ids."""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """An app, and a folder of sockets, for all tests of this file; ends the trainers."""
    folder = tmp_path_factory.mktemp("app")
    (folder / "warm_app").mkdir()
    (folder / "warm_app" / "__init__.py").touch()
    (folder / "warm_app" / "task.py").write_text(TASK)
    with pytest.MonkeyPatch.context() as patch, subprocess.Popen(["sleep", "3600"]) as node:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setattr("os.getppid", lambda: node.pid)  # the process that starts relays
        patch.syspath_prepend(folder)
        yield folder / "warm_app"
        locks = [lock.read_text() for lock in folder.glob("fedlalr-*/*.lock")]
        node.kill()
    assert all(ended(json.loads(text)["pid"]) for text in locks if text), "trainers end with their node"


def running(package):
    """The process id of the warm node's trainer."""
    (lock,) = package.parent.glob(f"fedlalr-*/*-{WARM}.lock")
    return json.loads(lock.read_text())["pid"]


def run(rounds, faults=None, **run_config):
    """A warm and a cold node; `faults` are called before rounds. Returns the result."""
    warm = client_app(**NAMES)
    import warm_app.task as task

    cold = client_app(task.model, task.data, task.algorithm, task.settings)
    grid = InProcessGrid(
        {
            WARM: Node(warm, {"partition-id": 0}, run_config=run_config),
            COLD: Node(cold, {"partition-id": 1}, run_config=run_config),
        }
    )

    class Faults(fl.Observer):
        def include(self, round):
            (faults or {}).get(round, lambda: None)()
            return ()

    strategy = FederatedStrategy(
        task.model(None),
        task.algorithm(None),
        {**task.settings, "rounds": rounds},
        population=2,
        poll=0.001,
        observers=[Faults()],
    )
    strategy.start(grid)
    return strategy.result


def rejections(result):
    return [[(one.client, one.reason) for one in record.rejected] for record in result.history]


def test_a_warm_node_gives_the_simulators_bits_and_builds_its_model_once(package):
    calls = package.parent / "calls"
    found = run(3)
    import warm_app.task as task

    mine = calls.read_text().count("model")
    first = running(package)
    wanted = fl.run(
        task.model(None), [task.Samples(0), task.Samples(1)], task.algorithm(None), engine="reference", rounds=3,
        **task.settings,
    )  # fmt: skip
    assert rejections(found) == [[], [], []]
    assert torch.equal(found.state["v_hat"]["weight"], wanted.state["v_hat"]["weight"])
    assert torch.equal(found.model.weight, wanted.model.weight)
    assert mine == 1 + 4 + 1, "the server, the cold node for its announcement and each round, the trainer once"
    run(1)
    assert running(package) == first, "another run of the same app and settings uses the same trainer"


def test_an_app_that_changed_during_a_run_is_named_until_it_is_restored(package):
    task = package / "task.py"
    faults = {2: lambda: task.write_text(TASK + "\n# changed"), 3: lambda: task.write_text(TASK)}
    found = rejections(run(3, faults))
    assert [len(one) for one in found] == [0, 1, 0]
    client, reason = found[1][0]
    assert client == 0
    assert "the app's files or this node's configuration changed during the run" in reason


@pytest.mark.skipif(os.getuid() != 0, reason="only root can listen as another user")
def test_a_socket_of_another_user_is_named(package):
    run(1)
    (path,) = package.parent.glob(f"fedlalr-*/*-{WARM}.sock")
    aside, strangers = path.with_suffix(".aside"), []

    def replace():
        path.rename(aside)
        code = "import os, socket, time; s = socket.socket(socket.AF_UNIX); s.bind('s'); os.setuid(65534); s.listen(); "
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code + "print(flush=True); time.sleep(600)"],
            stdout=subprocess.PIPE,
            cwd=path.parent,
        )
        process.stdout.readline()
        (path.parent / "s").rename(path)
        strangers.append(process)

    try:
        found = rejections(run(2, {2: replace}))
    finally:
        for process in strangers:
            process.kill()
            process.communicate()
    aside.rename(path)
    assert found[0] == []
    assert f"user 65534, not this node's user 0, listens on {path}" in found[1][0][1]


def test_an_error_in_the_trainer_is_reported_and_the_trainer_stays(package):
    content = RecordDict({"fedlalr": ConfigRecord({"run": "ab"})})
    with Station(WARM, time.monotonic() + 600) as place:
        with pytest.raises(TrainingFailed, match=r"^ValueError: the instruction's round must be int, not None$"):
            place.ask(setup(), Frame("train", "", content, context()))
        before = place._running
        found = place.ask(
            setup(), Frame("query", "", RecordDict(), context(RecordDict({"mine": ConfigRecord({"a": 1})})))
        )
        assert place._running == before
    assert found.content["fedlalr"]["client"] == 0
    assert found.context.state["mine"]["a"] == 1, "the app's own state is kept"


def test_a_trainer_killed_in_mid_training_is_named_and_the_next_round_starts_another(package):
    fault = package.parent / "fault"
    first = []

    def kill():
        first.append(running(package))
        fault.write_text(str(int(signal.SIGKILL)))

    found = rejections(run(3, {2: kill}))
    assert [len(one) for one in found] == [0, 1, 0]
    assert found[1][0][0] == 0
    assert f"the node's trainer (process {first[0]}) ended during its work" in found[1][0][1]
    assert running(package) != first[0]


def test_a_trainer_killed_between_messages_costs_no_round(package):
    run(1)
    found = rejections(run(2, {2: lambda: os.kill(running(package), signal.SIGKILL)}))
    assert found == [[], []]


def test_a_hung_trainer_is_named_and_ended(package, monkeypatch):
    run(1)
    pid = running(package)
    fault = package.parent / "fault"

    def stop():
        monkeypatch.setattr(station, "SILENCE", 1.0)
        fault.write_text(str(int(signal.SIGSTOP)))

    found = rejections(run(2, {2: stop}))
    assert found[0] == []
    assert f"the node's trainer (process {pid}) hung: no sign of life for 1 s" in found[1][0][1]
    assert ended(pid)


def ended(pid, seconds=60):
    """Whether a process ends; it may stay a zombie of this one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_another_configuration_gets_another_trainer(package):
    with Station(5, time.monotonic() + 600) as place:
        place._connect(setup()).close()
        first = place._running["pid"]
        place._connect(setup()).close()
        assert place._running["pid"] == first
        place._connect(setup(rounds=2)).close()
        assert place._running["pid"] != first
    assert ended(first)


def test_a_message_that_expires_ends_the_trainer(package):
    with Station(6, time.monotonic() + 600) as place:
        place._connect(setup()).close()
        place.until = time.monotonic() + 0.2  # while it imports torch
        pid = place._running["pid"]
        with pytest.raises(TrainerError, match=rf"\(process {pid}\) did not finish before its message expired"):
            place.ask(setup(), Frame("query", "", RecordDict(), context()))
    assert ended(pid)


def context(state=None, **run_config):
    return Context(1, WARM, {"partition-id": 0}, state or RecordDict(), run_config)


def setup(**run_config):
    names = Names(**NAMES)
    return Relay(names)._setup(names.digest(context(**run_config)))


def test_a_relay_waits_for_the_lock_only_until_its_message_expires(package):
    with (
        Station(1, time.monotonic() + 600),
        pytest.raises(TrainerError, match="was busy with another message until this one expired"),
        Station(1, time.monotonic() + 0.1),
    ):
        pass


def test_a_trainer_that_cannot_start_is_reported(package):
    with (
        Station(2, time.monotonic() + 600) as place,
        pytest.raises(TrainerError, match=r"\(process \d+\) ended while it started; the node's log says why"),
    ):
        place.ask({"digest": "ab", "path": []}, Frame("query", "", RecordDict(), context()))


def test_a_trainer_ends_with_its_node_and_leaves_no_file(package):
    node = subprocess.Popen(["sleep", "600"])
    with Station(3, time.monotonic() + 600, starter=node.pid) as place:
        place._start(setup())
        place._dial().close()
        pid, name, folder = place._running["pid"], place.name, place.path
    assert {file.suffix for file in folder.glob(f"{name}.*")} == {".sock", ".lock"}
    node.kill()  # not waited for: a zombie has ended, too
    assert ended(pid)
    node.wait()
    assert list(folder.glob(f"{name}.*")) == []


def test_an_idle_trainer_ends_unless_a_relay_is_about_to_connect(package):
    with Station(4, time.monotonic() + 600) as place:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(place._address)
        listener.listen()
        inherited = {"listener": listener.detach(), "folder": os.dup(place.folder), "name": place.name}
        idle = Trainer(setup() | inherited)
        assert not idle._leave(), "the relay holds the lock"
        path, name = place.path, place.name
    idle.serve(idle=0.01)
    assert list(path.glob(f"{name}.*")) == []
    idle.listener.close()
    os.close(idle.folder)


def test_a_trainer_ends_if_its_relay_has_gone(monkeypatch):
    codes = queue.Queue()
    monkeypatch.setattr("os._exit", codes.put)
    relay, worker = socket.socketpair()
    with worker, trainer.signs_of_life(worker):
        relay.close()
        assert codes.get(timeout=60) == 1


def test_a_trainer_at_work_shows_signs_of_life(monkeypatch):
    monkeypatch.setattr(trainer, "PULSE", 0.01)
    relay, worker = socket.socketpair()
    with relay, worker, relay.makefile("rb") as stream, trainer.signs_of_life(worker):
        assert [receive(stream).kind for _ in range(3)] == [BEAT] * 3


def test_frames_keep_every_record_and_name_a_closed_connection():
    arrays = ArrayRecord({"a": Array(np.arange(6.0).reshape(2, 3)), "b": Array(np.array(1, np.int64))})
    records = {"x": arrays, "none": ArrayRecord(), "c": ConfigRecord({"p": [1, 2]}), "n": MetricRecord({"loss": 0.5})}
    near, far = socket.socketpair()
    with near, far, far.makefile("rb") as stream:
        send(near, Frame("train", "text", RecordDict(records), context(RecordDict({"s": arrays}), lr=0.1)))
        found = receive(stream)
        assert found.content == RecordDict(records)
        assert found[:2] == ("train", "text")
        assert found.context == context(RecordDict({"s": arrays}), lr=0.1)
        near.close()
        with pytest.raises(EOFError):
            receive(stream)


def test_a_folder_that_others_can_enter_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path, descriptor = open_folder()
    os.close(descriptor)
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o750)
    with pytest.raises(TrainerError, match=r"must belong to user \d+ alone \(mode 700\), but .* mode 750; remove it"):
        open_folder()
    path.rmdir()
    path.symlink_to(tmp_path)
    with pytest.raises(TrainerError, match="cannot be opened"):
        open_folder()


def test_a_trainer_does_not_answer_another_user(monkeypatch):
    monkeypatch.setattr(trainer, "peer", lambda connection: os.getuid() + 1)
    near, far = socket.socketpair()
    with near.makefile("rb") as stream:
        Trainer.welcome(None, far)
        assert stream.read() == b""
    near.close()


def test_names_and_objects_cannot_be_mixed_and_names_must_be_importable(package):
    with pytest.raises(ValueError, match=r"data must be a name such as 'my_app.task:data', not <function"):
        client_app("warm_app.task:model", lambda context: None, "warm_app.task:algorithm")
    with pytest.raises(ValueError, match=r"not 'fedlalr'; client_app takes all of its functions by name, or none"):
        client_app("warm_app.task:model", "warm_app.task:data", "fedlalr")
    with pytest.raises(ModuleNotFoundError, match="names a function in no_such_app, which cannot be imported"):
        Names("no_such_app.task:model", "no_such_app.task:data", "no_such_app.task:algorithm").digest(context())


@pytest.mark.parametrize("why", ["the node's configuration", "another system", "runtime dependencies"])
def test_a_cold_node_trains_in_the_messages_process(package, monkeypatch, why):
    config = {"partition-id": 0, "warm": False} if why == "the node's configuration" else {"partition-id": 0}
    if why == "another system":
        monkeypatch.setattr("sys.platform", "darwin")
    if why == "runtime dependencies":
        monkeypatch.setattr("sys.argv", ["flwr-clientapp", "--allow-runtime-dependency-installation"])
    monkeypatch.setattr(Station, "__init__", None)
    grid = InProcessGrid({WARM: Node(client_app(**NAMES), config)})
    (answer,) = grid.send_and_receive([Message(RecordDict(), WARM, "query")])
    assert answer.content["fedlalr"]["client"] == 0


WITHOUT_TORCH = """
import importlib, sys
for app in sys.argv[1:]:
    folder, _, module = app.rpartition(":")
    sys.path.insert(0, folder)
    importlib.import_module(module).app
from fedlalr.flower.client import station
heavy = {"torch", "scipy", "pydantic", "sklearn", "matplotlib"} & set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else 0)
"""


def test_the_process_of_a_message_imports_neither_torch_nor_the_library(tmp_path):
    export(for_nodes("quickstart", [], 2), tmp_path / "app")
    example = Path(__file__).parents[2] / "examples" / "flower"
    apps = [f"{tmp_path / 'app'}:quickstart_app.client_app", f"{example}:digits_app.client_app"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *apps], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
