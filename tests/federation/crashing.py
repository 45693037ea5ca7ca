"""Runs a federation in processes that die, again and again, until it finishes. Started as a script by the tests.

One host process imports everything once; every attempt is a child forked from it. A child is killed

- at the n-th operation on files below its run directory, for every n in turn (`operations`),
- on entering each stage of each round, the aggregation's too (`stages`), or
- after a random time (`times`), so that it also dies in the middle of writing a file or of training.

After every death another child resumes. The bits of the end result are compared with an undisturbed run's.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedlalr as fl
from fedlalr.algorithms import create
from fedlalr.federation import round as server
from fedlalr.federation.replies import reducing
from fedlalr.federation.storage import journal as rundir
from fedlalr.federation.storage import tensor_files

torch.set_num_threads(1)


def problem(width: int) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    clients = [(torch.randn(n, 8), torch.randint(0, 3, (n,))) for n in (7, 12, 5, 9)]
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3)), clients


def train(options: dict, run_dir: Path | None, end: Path) -> None:
    tensor_files.FILES = options["kept_files"]
    model, clients = problem(options["width"])
    how = {"clients_per_round": options["cohort"]}
    if options["asynchronous"] is not None:
        how = {"asynchronous": options["asynchronous"], "speeds": 1.0}
    result = fl.run(
        model, clients, create(options["algorithm"], **options["hyperparameters"]), rounds=options["rounds"],
        local=fl.Steps(2), batch_size=4, engine=options["engine"], run_dir=run_dir,
        resume=run_dir is not None, checkpoint_every=options["every"], test=clients[0], **how,
    )  # fmt: skip
    tensors = {f"{slot}/{n}": value for slot, values in result.state.items() for n, value in values.items()}
    tensors |= {f"buffer/{n}": value for n, value in result.model.named_buffers()}
    tensors["losses"] = torch.tensor([[r.loss, r.train_loss, r.accuracy] for r in result.history], dtype=torch.float64)
    aside = end.with_suffix(".aside")
    save_file(tensors, aside)
    aside.rename(end)


def child(options: dict, run_dir: Path | None, end: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Fork an attempt, which may first schedule its own death."""
    pid = os.fork()
    if pid:
        return pid
    try:
        prepare()
        train(options, run_dir, end)
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_operation(n: int, run_dir: Path) -> None:
    """Die at the n-th operation on files of the run directory."""
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event in EVENTS and any(str(run_dir) in str(a) for a in arguments):
            count += 1
            if count == n:
                die()

    sys.addaudithook(hook)


def die_at_stage(place: object, stage: str, round: int) -> None:
    """Die on entering a function for the round-th time."""
    original, count = getattr(place, stage), 0

    def dying(*arguments: object, **named: object) -> object:
        nonlocal count
        count += 1
        if count == round:
            die()
        return original(*arguments, **named)

    setattr(place, stage, dying)


STAGES = [
    (server, "screen"),
    (reducing, "reduce_slots"),
    (reducing, "reduce_buffers"),
    (server, "update_slots"),
    (rundir, "save_checkpoint"),
    (rundir.Journal, "_remove_old"),
    (rundir.Journal, "_append"),
]
EVENTS = (
    "open",
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "os.listdir",
    "os.scandir",
    "shutil.rmtree",
)


def status(pid: int) -> int:
    """0 if the child finished, minus the signal that killed it, or its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def same(first: Path, second: Path) -> bool:
    one, two = load_file(first), load_file(second)
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


def finish(options: dict, run_dir: Path, end: Path, undisturbed: Path) -> None:
    code = status(child(options, run_dir, end))
    if code:
        raise SystemExit(f"the resumed run ended with {code}")
    if not same(end, undisturbed):
        raise SystemExit("the resumed run gave other bits")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    if [json.loads(line)["round"] for line in lines] != list(range(1, options["rounds"] + 1)):
        raise SystemExit("metrics.jsonl does not have every round once")


def half_written(run_dir: Path) -> bool:
    return any((run_dir / "checkpoint").glob(".writing-*"))


def operations(options: dict, root: Path, undisturbed: Path) -> dict[str, int]:
    """Die at every operation on files in turn."""
    n, tally = options["first"], {"kills": 0, "half_written": 0, "resumed": 0}
    while True:
        run_dir, end = root / f"at-{n}", root / f"at-{n}.end"
        code = status(child(options, run_dir, end, lambda n=n, run_dir=run_dir: die_at_operation(n, run_dir)))
        if code == 0:
            return tally
        if code != -signal.SIGKILL:
            raise SystemExit(f"the run that should die at operation {n} ended with {code}")
        tally["kills"] += 1
        tally["half_written"] += half_written(run_dir)
        finish(options, run_dir, end, undisturbed)
        tally["resumed"] += 1
        shutil.rmtree(run_dir)
        n += options["stride"]


def stages(options: dict, root: Path, undisturbed: Path) -> dict[str, int]:
    """Die on entering each stage of each round."""
    tally = {"kills": 0, "resumed": 0}
    for place, stage in STAGES:
        for round in range(1, options["rounds"] + 1):
            run_dir, end = root / f"{stage}-{round}", root / f"{stage}-{round}.end"
            code = status(child(options, run_dir, end, lambda a=place, b=stage, c=round: die_at_stage(a, b, c)))
            if code != -signal.SIGKILL:
                raise SystemExit(f"the run that should die at {stage} of round {round} ended with {code}")
            tally["kills"] += 1
            finish(options, run_dir, end, undisturbed)
            tally["resumed"] += 1
            shutil.rmtree(run_dir)
    return tally


def times(options: dict, root: Path, undisturbed: Path) -> dict[str, int]:
    """Die after random times, again and again, until enough deaths are counted. Some are interrupts instead."""
    chance = random.Random(options["seed"])
    began = time.perf_counter()
    status(child(options, root / "clock", root / "clock.end"))
    longest = time.perf_counter() - began
    tally = {"kills": 0, "interrupts": 0, "half_written": 0, "resumed": 0}
    while tally["kills"] + tally["interrupts"] < options["deaths"]:
        run_dir, end = root / f"run-{tally['resumed']}", root / f"run-{tally['resumed']}.end"
        for _ in range(4):
            pid = child(options, run_dir, end)
            time.sleep(chance.uniform(0, 0.8 * longest))
            death = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT])
            os.kill(pid, death)
            code = status(pid)
            if code == 0:
                break
            if code not in (-signal.SIGKILL, -signal.SIGINT, 130):
                raise SystemExit(f"the killed run ended with {code}")
            tally["kills" if death == signal.SIGKILL else "interrupts"] += 1
            tally["half_written"] += half_written(run_dir)
        finish(options, run_dir, end, undisturbed)
        tally["resumed"] += 1
        shutil.rmtree(run_dir)
    return tally


DEFAULTS = {
    "algorithm": "fedlalr", "hyperparameters": {}, "width": 16, "rounds": 3, "engine": "reference", "every": 1,
    "seed": 0, "first": 1, "stride": 1, "deaths": 10, "cohort": 3, "kept_files": 64,
    "asynchronous": None,
}  # fmt: skip


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with SIGINT ignored
    for place, (kind, given) in enumerate(json.loads(sys.argv[2])):
        root, options = Path(sys.argv[1]) / str(place), DEFAULTS | given
        root.mkdir()
        undisturbed = root / "undisturbed.end"
        code = status(child(options, None, undisturbed))
        if code:
            raise SystemExit(f"the undisturbed run ended with {code}")
        suite = {"operations": operations, "stages": stages, "times": times}[kind]
        print(json.dumps(suite(options, root, undisturbed)), flush=True)
