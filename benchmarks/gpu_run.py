"""Where the time of a whole run on a GPU goes, from the start of the process to its last round, as one JSON object.

    python benchmarks/gpu_run.py cifar10 --data cifar10.safetensors --rounds 20
    python benchmarks/gpu_run.py pfl --rounds 200

cifar10: the preset of that name in bfloat16, with evaluation and checkpoints. pfl: pfl-research's CIFAR-10 benchmark
with FedAvg. Without --data, images are noise. First come ordinary rounds, then some in which training waits for the
GPU, then one under torch's profiler and five under cProfile. It reads no configuration, so it needs neither pydantic
nor PyYAML.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedlalr as fl
from fedlalr.data.transforms import STATISTICS
from fedlalr.federation.options import Options
from fedlalr.federation.record import Record
from fedlalr.federation.run import Simulation
from fedlalr.federation.session import Problem, Session

PROFILED = 5
"""Rounds under cProfile."""
POWER = "clocks.sm,power.draw,clocks_event_reasons.active"


class Laps:
    """Seconds between named moments."""

    def __init__(self) -> None:
        self.seconds = {"Python and its imports": round(age(), 2)}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        synchronise()
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 4)
        self._last = now


def age() -> float:
    """Seconds since this process was started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def images(file: Path | None) -> dict[str, torch.Tensor]:
    """CIFAR-10 from a file of the cache, or noise of its shape."""
    if file is not None:
        from safetensors.torch import load_file

        return load_file(file)
    generator = torch.Generator().manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    for part, count in (("", 50_000), ("test_", 10_000)):
        made[f"{part}inputs"] = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
        made[f"{part}targets"] = torch.arange(count) % 10
    return made


def paper(found: dict[str, torch.Tensor], device: str, laps: Laps) -> tuple[Any, ...]:
    """The preset cifar10 with dtype=bfloat16."""
    targets = found["targets"].long()
    partition = fl.data.partition(targets.numpy(), 100, "dirichlet", 0.6, 0)
    test = found["test_inputs"], found["test_targets"].long()
    transform = fl.data.FlipCrop(*STATISTICS["cifar10"])
    population = fl.data.Population(found["inputs"], targets, partition, transform=transform, test=test, classes=10)
    laps.lap("partition")
    torch.manual_seed(0)
    options = {
        "clients_per_round": 50,
        "local": fl.Epochs(5),
        "batch_size": 50,
        "schedule": fl.schedules.Exponential(0.998),
        "weight_decay": 1e-3,
        "dtype": torch.bfloat16 if device != "cpu" else None,
    }
    return fl.models.ConvMixer(), population, fl.FedLALR(lr=2e-3, betas=(0.9, 0.995), eps=1e-8), options


def pfl(found: dict[str, torch.Tensor], device: str, laps: Laps) -> tuple[Any, ...]:
    """The job of gpu_pfl.py with FedAvg."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    inputs, targets = found["inputs"].to(device).float() / 255, found["targets"].long().to(device)
    partition = fl.data.Partition(np.arange(len(targets)), np.arange(1001) * 50)
    population = fl.data.Population(inputs, targets, partition, classes=10)
    laps.lap("move the data")
    torch.manual_seed(0)
    return fl.models.DenseCNN(), population, fl.FedAvg(0.1), {"clients_per_round": 50, "batch_size": 10}


JOBS: dict[str, Callable[..., tuple[Any, ...]]] = {"cifar10": paper, "pfl": pfl}


def timed(rounds: Iterator[Record], count: int) -> tuple[list[float], list[Record]]:
    """Seconds from the end of one round to the end of the next, and their records."""
    seconds, records = [], []
    for _ in range(count):
        began = time.perf_counter()
        records.append(next(rounds))
        synchronise()
        seconds.append(time.perf_counter() - began)
    return seconds, records


def summary(seconds: Sequence[float], records: Sequence[Record]) -> dict[str, Any]:
    """Median milliseconds of a round and of its parts."""
    parts = {part: statistics.median(record.timing[part] for record in records) for part in records[-1].timing}
    rest = statistics.median(
        whole - sum(record.timing.values()) for whole, record in zip(seconds, records, strict=True)
    )
    whole = {"whole": statistics.median(seconds), "longest": max(seconds), "shortest": min(seconds)}
    return {name: round(1e3 * value, 3) for name, value in {**whole, **parts, "rest": rest}.items()}


@contextmanager
def waiting(session: Session) -> Iterator[None]:
    """Let training end only when the GPU has finished, so that its time is not counted as the next part's."""
    engine: Any = session.transport._chosen  # type: ignore[attr-defined]
    train = engine.train

    def waits(work: Any) -> Any:
        replies = train(work)
        synchronise()
        return replies

    engine.train = waits
    yield
    del engine.train


def kernels(step: Callable[[], object]) -> dict[str, Any]:
    """Milliseconds of every kernel of a call, and of the time in which the GPU was idle."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        synchronise()
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in seen.events() if event.device_type.name == "CUDA"
    )
    busy, idle, end = 0.0, [], spans[0][0]
    for start, stop in spans:
        if start > end:
            idle.append(start - end)
        busy += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    found = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    return {
        "span": round((end - spans[0][0]) / 1e3, 3),
        "busy": round(busy / 1e3, 3),
        "longest gaps": [round(gap / 1e3, 3) for gap in sorted(idle, reverse=True)[:12]],
        "kernels": [
            [round(event.self_device_time_total / 1e3, 3), event.count, event.key[:110]] for event in found[:45]
        ],
    }


def host(step: Callable[[], object], count: int) -> list[list[Any]]:
    """Milliseconds a round, calls and name of the functions in which the host spends most time, with what they call."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(count):
        step()
    profiler.disable()
    stats: dict[tuple[str, int, str], Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    found = sorted(stats.items(), key=lambda item: -item[1][3])[:70]
    return [
        [
            round(1e3 * each[3] / count, 3),
            each[1] / count,
            f"{'/'.join(Path(where[0]).parts[-2:])}:{where[1]} {where[2]}",
        ]
        for where, each in found
    ]


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Median clock and power of the GPU while something runs, by nvidia-smi."""
    seen: dict[str, Any] = {}
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        yield seen
        return
    command = ["nvidia-smi", f"--query-gpu={POWER}", "--format=csv,noheader,nounits", "-lms", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield seen
        process.terminate()
        lines = [line.split(", ") for line in (process.stdout.read() if process.stdout else "").splitlines()]
    lines = [line for line in lines if len(line) == 3][1:]
    if lines:
        seen["MHz"] = statistics.median(float(line[0]) for line in lines)
        seen["W"] = statistics.median(float(line[1]) for line in lines)
        seen["reasons"] = sorted({line[2].strip() for line in lines})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--data", type=Path, help="cifar10.safetensors of the cache (default: noise)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    result: dict[str, Any] = {"job": options.job, "torch": torch.__version__, "python": sys.version.split()[0]}
    laps = Laps()
    found = images(options.data)
    laps.lap("read the data")
    model, population, algorithm, settings = JOBS[options.job](found, options.device, laps)
    laps.lap("model")
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"rounds": 10**6, "device": options.device}
        if options.job == "cifar10":
            settings["run_dir"] = folder
        problem = Problem.of(model, population, algorithm, Options.named(settings))
        laps.lap("checks, and the first use of the GPU")
        with Session(problem, Simulation(problem)) as session:
            laps.lap("start the session")
            rounds = session.rounds()
            result |= measured(session, rounds, options.rounds)
    result["start, s"] = laps.seconds
    print(json.dumps(result, indent=1))


def measured(session: Session, rounds: Iterator[Record], count: int) -> dict[str, Any]:
    first, records = timed(rounds, 4)
    parts = [{name: round(value, 3) for name, value in record.timing.items()} for record in records]
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "engine": f"{session.info.engine}: {session.info.reason}",
        "first rounds, s": [round(seconds, 3) for seconds in first],
        "their parts, s": parts,
    }
    with watched() as gpu:
        result["rounds, ms"] = summary(*timed(rounds, count))
    result["gpu"] = gpu
    with waiting(session):
        result["rounds in which training waits, ms"] = summary(*timed(rounds, max(3, count // 5)))
    if torch.cuda.is_available():
        result["one round, ms"] = kernels(lambda: next(rounds))
        result["evaluation, ms"] = kernels(session._evaluate) if session.problem.test is not None else None
    result["host, ms a round"] = host(lambda: next(rounds), PROFILED)
    return result


if __name__ == "__main__":
    main()
