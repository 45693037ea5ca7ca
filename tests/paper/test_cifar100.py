"""The figures on CIFAR-100, on a small file of its format."""

import csv
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedlalr.cli import app
from fedlalr.data.fetch import Fact
from fedlalr.data.sources import SOURCES
from fedlalr.data.sources.cifar import CIFAR100
from fedlalr.data.sources.rawdata import Images
from fedlalr.data.sources.registry import image_files

EACH = 4
"""Training images of a class."""


@pytest.fixture(autouse=True)
def _small_cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data" / "cifar-100-binary"
    folder.mkdir(parents=True)
    rng, facts = np.random.default_rng(0), {}
    for name, count in (("train.bin", EACH), ("test.bin", 1)):
        fine = rng.permutation(np.repeat(np.arange(100, dtype=np.uint8), count))
        pixels = rng.integers(0, 256, (len(fine), 3072), dtype=np.uint8)
        content = np.column_stack([fine // 5, fine, pixels]).tobytes()
        (folder / name).write_bytes(content)
        facts[name] = Fact(len(content), "md5", hashlib.md5(content).hexdigest())
    small = replace(
        CIFAR100,
        images=Images("cifar100", (3, 32, 32), (EACH,) * 100, (1,) * 100),
        layouts=tuple(replace(layout, facts=facts) for layout in CIFAR100.layouts),
    )
    monkeypatch.setitem(SOURCES, "cifar100", image_files(small, "small", (), subfolders=("",)))
    monkeypatch.setenv("FEDLALR_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


def reproduce(figure: str, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["reproduce", figure, "--jobs", "1", "--run-dir", "here", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def lines_of(file: str) -> list[dict[str, str]]:
    (path,) = Path("here").glob(f"*/{file}")
    with path.open(newline="") as content:
        return list(csv.DictReader(content))


def test_its_labels_are_mapped_on_the_papers_scale_and_cifar10_is_left_out() -> None:
    told = reproduce("heterogeneity", "--scale", "paper", "--offline")
    assert "CIFAR-10 is not on this machine and was left out." in told
    lines = lines_of("heterogeneity.csv")
    assert {line["data"] for line in lines} == {"CIFAR-100"}
    assert len({line["class"] for line in lines}) == 100


def test_its_curves_are_run_with_the_papers_rates_for_it() -> None:
    tiny = ("rounds=1", "partition.clients=4", "clients_per_round=2", "local.steps=1", "batch_size=4")
    told = reproduce("cifar", *tiny, "--methods", "fedavg", "engine=reference")
    assert "Digits stand in for CIFAR-10, which is not on this machine." in told
    assert "CIFAR-100, Dirichlet 0.3" in told
    configs = list(Path("here").glob("*/runs/cifar100-*/fedavg/seed-0/config.yaml"))
    assert len(configs) == 2
    assert all("lr: 2.0" in path.read_text() for path in configs)
    assert {line["panel"] for line in lines_of("cifar.csv")} >= {
        "cifar100-dirichlet0.6-2of4",
        "cifar100-dirichlet0.3-2of4",
    }
