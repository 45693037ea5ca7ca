import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedlalr import config
from fedlalr.config import ConfigError, RunDirectory
from fedlalr.config.build import build_interval, build_model, build_population
from fedlalr.config.run_dir import summarise
from fedlalr.config.schema import LocalConfig, ModelConfig
from fedlalr.data import Population, load, partition
from fedlalr.federation import Observer, Record, RoundFailed
from fedlalr.models import CNN, MLP
from fedlalr.training import Epochs, LogInterval, Steps
from settings import replaced

SMALL = ("rounds=3", "partition.clients=12", "clients_per_round=3", "local.steps=2", "engine=reference")


def small(*overrides: str) -> config.Config:
    return config.load("quickstart", replaced(SMALL, overrides))


def values(records: list[Record]) -> list[tuple[float, float | None]]:
    return [(record.loss, record.accuracy) for record in records]


def test_intervals_follow_the_configuration() -> None:
    assert build_interval(LocalConfig(epochs=5)) == Epochs(5)
    assert build_interval(LocalConfig(steps=7)) == Steps(7)
    assert build_interval(LocalConfig(start=3, base=4.0)) == LogInterval(3, 4.0)
    assert build_interval(LocalConfig(start=3, base=2, unit="epochs")) == LogInterval(3, 2, "epochs")


def test_sizes_of_a_model_follow_from_the_data() -> None:
    population = load("digits", clients=10)
    mlp = build_model(ModelConfig(name="mlp", hidden=[8, 4]), population, seed=0)
    assert isinstance(mlp, MLP)
    assert [tuple(p.shape) for p in mlp.parameters()][::2] == [(8, 64), (4, 8), (10, 4)]
    cnn = build_model(ModelConfig(name="cnn"), population, seed=0)
    assert isinstance(cnn, CNN)
    assert cnn.head.in_features == 32 * 2 * 2
    vit = build_model(ModelConfig(name="vit", dim=12, heads=2, layers=1), population, seed=0)
    assert (vit.embedding.in_features, len(vit.positions), vit.head.out_features) == (16, 4, 10)


def test_the_length_of_a_gpt_follows_from_the_data() -> None:
    text = Population(torch.zeros(6, 9).long(), torch.zeros(6, 9).long(), partition([0] * 6, 2, "iid"), classes=7)
    gpt = build_model(ModelConfig(name="gpt", dim=12, heads=2, layers=1), text, seed=0)
    assert gpt(torch.zeros(2, 9).long()).shape == (2, 7, 9)
    with pytest.raises(ValueError, match="10 tokens are longer than its length of 9"):
        gpt(torch.zeros(2, 10).long())


def test_the_seed_determines_the_weights_and_leaves_the_global_generator_alone() -> None:
    population, section = load("digits", clients=10), ModelConfig(name="logistic")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second, other = (build_model(section, population, seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(next(first.parameters()), next(second.parameters()))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_the_partition_uses_the_runs_seed_by_default() -> None:
    assert build_population(small("seed=1")).partition == load("digits", clients=12, seed=1).partition
    assert build_population(small("seed=1", "partition.seed=5")).partition == load("digits", 12, seed=5).partition


def test_options_of_the_partition_are_used() -> None:
    dealt = build_population(small("partition.scheme=shards", "partition.classes_per_client=1")).partition
    assert len(dealt) == 12


def test_a_run_directory_repeats_the_run(tmp_path: Path) -> None:
    result = config.execute(small(), tmp_path / "first")
    again = config.execute(config.load(tmp_path / "first" / "config.yaml"), tmp_path / "second")
    assert values(again.history) == values(result.history)
    assert RunDirectory(tmp_path / "first").config().problem() == small().problem()


def test_every_setting_reaches_the_run(tmp_path: Path) -> None:
    """Each setting that should matter changes the outcome."""
    plain = values(config.execute(small()).history)
    for override in (
        "seed=1",
        "partition.alpha=5.0",
        "model.hidden=8",
        "algorithm.lr=0.1",
        "algorithm=fedavg",
        "clients_per_round=4",
        "local.steps=3",
        "batch_size=3",
        "schedule={name: exponential, factor: 0.5}",
        "weight_decay=0.1",
        "decoupled_weight_decay=5.0",
        "accumulate=2",
        "trainable=*.bias",
        "clip_norm=1e-3",
        "dtype=float64",
        "data.validation=0.5",
        "reduce={x: median}",
        "max_norm_ratio=1.01",
    ):
        assert values(config.execute(small(override)).history) != plain, override


def test_records_are_written_during_the_run(tmp_path: Path) -> None:
    class Looks(Observer):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_round(self, record: Record) -> None:
            self.seen.append(len(RunDirectory(tmp_path).records()))

    looks = Looks()
    config.execute(small(), tmp_path, [looks])
    assert looks.seen == [1, 2, 3]


def test_the_summary_says_how_it_ended(tmp_path: Path) -> None:
    result = config.execute(small(), tmp_path)
    summary = RunDirectory(tmp_path).summary()
    assert summary is not None
    assert summary["status"] == "finished"
    assert summary["accuracy"] == result.history[-1].accuracy
    assert summary["bytes_up"] == result.bytes_up
    assert summary["bytes_down"] == result.bytes_down
    endless = replace(result.history[-1], loss=math.inf)
    assert summarise(small(), result.info, [endless])["loss"] is None


def test_incompatible_settings_are_rejected_before_anything_is_written(tmp_path: Path) -> None:
    for override, message in (
        ("clients_per_round=500", "only 12 clients"),
        ("partition.clients=5000", "cannot share"),
        ("model.hidden=0", "hidden must be a whole number of at least 1"),
        ("partition.scheme=natural", "is no natural partition"),
        ("data.options={x: 1}", "has no option 'x'"),
        ("device=cuda:77", "cuda"),
        ("reduce={v: median}", "v"),
    ):
        with pytest.raises(ConfigError, match=message):
            config.execute(small(override), tmp_path / "run")
        assert not (tmp_path / "run" / "config.yaml").exists()
    config.execute(small(), tmp_path / "run")


def test_a_directory_with_a_run_is_not_touched(tmp_path: Path) -> None:
    config.execute(small(), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="already contains a run"):
        config.execute(small("seed=1"), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_overwriting_starts_from_scratch_and_keeps_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    config.execute(small(), tmp_path)
    config.execute(small("seed=1", "rounds=2"), tmp_path, overwrite=True)
    assert len(RunDirectory(tmp_path).records()) == 2
    assert RunDirectory(tmp_path).config().seed == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_in_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        config.execute(small(), tmp_path / "file" / "run")


def test_a_failed_round_leaves_a_summary_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(RoundFailed):
        config.execute(small("algorithm=fedavg", "algorithm.lr=1e30"), tmp_path)
    summary = RunDirectory(tmp_path).summary()
    assert summary is not None
    assert summary["status"] == "failed"
    assert "round" in summary["failure"]


def test_an_interrupted_run_leaves_its_records_and_can_be_resumed(tmp_path: Path) -> None:
    class Interrupts(Observer):
        def on_round(self, record: Record) -> None:
            if record.round == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        config.execute(small(), tmp_path, [Interrupts()])
    directory = RunDirectory(tmp_path)
    assert (directory.summary() or {})["status"] == "interrupted"
    assert len(directory.records()) == 2
    result = config.execute(directory.config(), tmp_path, resume=True)
    assert values(result.history) == values(config.execute(small()).history)
    assert (directory.summary() or {})["status"] == "finished"
