from pathlib import Path

import pytest

from fedlalr import config
from fedlalr.common.named import nearest
from fedlalr.config import ConfigError
from fedlalr.config.loading import check, with_method
from fedlalr.config.schema import Config


def test_an_override_of_the_algorithm_uses_the_presets_settings_for_it() -> None:
    loaded = config.load("cifar10", ["algorithm=fedadam", "partition.alpha=0.3"])
    assert loaded.algorithm.name == "fedadam"
    assert loaded.algorithm.options["server_lr"] == 1.0
    assert loaded.algorithm.options["eps"] == 1e-2
    assert loaded.partition.alpha == 0.3


def test_a_single_option_can_also_be_changed() -> None:
    loaded = config.load("quickstart", ["algorithm.lr=0.03", "algorithm=fedadam"])
    assert loaded.algorithm.options["lr"] == 0.03
    assert loaded.algorithm.options["server_lr"] == config.load("quickstart").methods["fedadam"]["server_lr"]


@pytest.mark.parametrize(("preset", "schedule"), [("quickstart", "constant"), ("cifar10", "exponential")])
def test_a_warm_up_alone_is_added_to_the_schedule_of_the_preset_or_the_constant_one(preset: str, schedule: str) -> None:
    loaded = config.load(preset, ["schedule.warmup=5"]).schedule
    assert (loaded.name, loaded.options["warmup"]) == (schedule, 5)


def test_a_method_without_settings_in_the_preset_has_its_defaults() -> None:
    assert config.load("quickstart", ["algorithm=scaffold"]).algorithm.options["lr"] > 0


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("alpha=0.1", ["no setting 'alpha'", "Did you mean 'partition.alpha'?"]),
        (
            "partition.alhpa=1",
            ["'partition.alhpa'", "Did you mean 'partition.alpha'?", "partition has scheme, clients"],
        ),
        ("roundz=3", ["Did you mean 'rounds'?"]),
        ("data.options.seed=1", ["options.seed is no option of digits", "write partition.seed"]),
        ("data.options.folder=x", ["write data.folder"]),
        ("rounds=x", ["rounds cannot be 'x'", "valid integer"]),
        ("rounds=0", ["rounds cannot be 0", "greater than or equal to 1"]),
        ("rounds=true", ["rounds cannot be True"]),
        ("seed=-1", ["seed cannot be -1"]),
        ("batch_size=2.5", ["batch_size cannot be 2.5"]),
        (f"batch_size={10**20}", [f"batch_size cannot be {10**20}", "less than or equal to 2147483647"]),
        (f"local.epochs={10**20}", [f"local.epochs cannot be {10**20}", "less than or equal to 10000000"]),
        (f"algorithm.lr={10**400}", ["lr must be a finite number above 0, not 1000"]),
        (f"algorithm.betas=[0.9, {10**400}]", ["beta2 must lie in [0, 1), not 1000"]),
        ("engine=workers:1000000000", ["the number of workers must be a whole number from 1 to 1024"]),
        ("weight_decay=-1", ["weight_decay cannot be -1"]),
        ("schedule={name: exponential, factor: .inf}", ["schedule: Exponential's factor must lie in (0, 1], not inf"]),
        ("partition.scheme=dirichelet", ["choose one of dirichlet, dirichlet-classes", "Did you mean 'dirichlet'?"]),
        ("buffers=recalibrated", ["choose one of average, recalibrate, local", "Did you mean 'recalibrate'?"]),
        ("dtype=half", ["choose one of float32, float64"]),
        ("algorithm=fedadm", ["no algorithm 'fedadm'", "fedavg", "Did you mean 'fedadam'?"]),
        ("algorithm.server_rate=1", ["fedlalr has no option 'server_rate'", "lr, betas, eps"]),
        ("algorithm.lr=-1", ["lr must be a finite number above 0, not -1"]),
        ("algorithm.lr=fast", ["lr must be a finite number above 0, not 'fast'"]),
        ("algorithm.betas=0.9", ["pair (beta1, beta2)"]),
        ("model=cn", ["no model 'cn'", "Did you mean 'cnn'?"]),
        ("model.hiden=3", ["mlp has no option 'hiden'", "Did you mean 'hidden'?"]),
        ("data=cifar", ["choose one of digits", "Did you mean 'cifar10'?"]),
        ("data.validation=1", ["data.validation cannot be 1"]),
        ("engine=referense", ["choose one of auto, reference", "Did you mean 'reference'?"]),
        ("local=5", ["local cannot be 5", "write local.epochs=5 or local.steps=5"]),
        ("trajectory=5", ["trajectory cannot be 5", "trajectory.clients=…"]),
        ("local.epochs=0", ["local.epochs cannot be 0"]),
        ("local.start=3", ["local: start and base must be given together"]),
        ("local.base=1", ["local.base cannot be 1"]),
        ("local.unit=steps", ["unit is allowed only with start and base"]),
        ("methods.fedlarl.lr=3", ["no algorithm 'fedlarl'", "Did you mean 'fedlalr'?"]),
        ("methods.fedavg.momentum=3", ["fedavg has no option 'momentum'"]),
        ("grid.fedavg={lr: [0.1, -0.3]}", ["grid.fedavg.lr cannot be -0.3: lr must be a finite number above 0"]),
        ("grid.fedavg={lr: [0.1, .nan]}", ["grid.fedavg.lr cannot be nan"]),
        ("grid.fedavg={lr: []}", ["grid.fedavg.lr is empty"]),
        ("grid.fedavg={lr: [0.1, 0.3, 0.1]}", ["grid.fedavg.lr contains 0.1 twice"]),
        ("grid.fedavg={momentum: [0.1]}", ["grid.fedavg.momentum cannot be 0.1", "fedavg has no option 'momentum'"]),
        ("grid.fedlarl={lr: [0.1]}", ["grid.fedlarl", "Did you mean 'fedlalr'?"]),
        ("target=2", ["target cannot be 2"]),
        ("rounds.x=3", ["rounds cannot be {'x': 3}"]),
        ("algorithm=[1]", ["algorithm"]),
    ],
)
def test_invalid_settings_are_rejected_with_choices_and_a_suggestion(override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as rejected:
        config.load("quickstart", [override])
    for part in parts:
        assert part in str(rejected.value)


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as rejected:
        config.load("quickstart", ["rounds=0", "alpha=1", "engine=warp"])
    assert len(str(rejected.value).splitlines()) == 3


def test_an_unknown_preset_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"no preset 'quikstart'.*cifar10.*Did you mean 'quickstart'\?"):
        config.load("quikstart")


def test_a_dumped_configuration_reads_back_the_same(tmp_path: Path) -> None:
    for name in config.presets():
        loaded = config.load(name, ["seed=7"])
        (tmp_path / "config.yaml").write_text(config.dump(loaded), encoding="utf-8")
        assert config.load(tmp_path) == loaded
        assert config.load(tmp_path / "config.yaml") == loaded


def test_a_dumped_configuration_can_still_switch_to_another_method(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(config.dump(config.load("cifar10")), encoding="utf-8")
    assert config.load(file, ["algorithm=fedavg"]).algorithm.options == {"lr": 1.0}


def test_a_file_may_build_on_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: quickstart\nalgorithm: fedavg\nlocal: {steps: 2}\n", encoding="utf-8")
    loaded = config.load(file)
    assert (loaded.name, loaded.algorithm.name, loaded.local.steps, loaded.local.epochs) == ("mine", "fedavg", 2, None)
    assert loaded.data.name == "digits"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "must be a table of settings"),
        ("rounds: [\n", "is not valid YAML"),
        ("rounds: 1\nrounds: 2\n", "given twice"),
        ("preset: quikstart\n", "Did you mean 'quickstart'"),
        ("rounds: 3\n", "'data' is missing"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        config.load(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read"):
        config.load(tmp_path / "nowhere.yaml")


def test_a_file_in_another_encoding_should_be_saved_as_utf8(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("preset: quickstart\n", encoding="utf-16")
    with pytest.raises(ConfigError, match=r"mine\.yaml cannot be read: it is not UTF-8 text; save it in that"):
        config.load(tmp_path / "mine.yaml")


def test_a_file_with_the_other_suffix_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("preset: quickstart\n", encoding="utf-8")
    for given in ("mine.yml", "mine"):
        with pytest.raises(ConfigError, match=r"Did you mean '.*mine\.yaml'\?"):
            config.load(tmp_path / given)
    with pytest.raises(ConfigError) as rejected:
        config.load(tmp_path / "other.yml")
    assert "Did you mean" not in str(rejected.value)


def test_a_configuration_cannot_be_changed_in_place() -> None:
    loaded = config.load("quickstart")
    with pytest.raises(ValueError, match="frozen"):
        loaded.rounds = 3  # type: ignore[misc]


def test_another_method_keeps_the_problem() -> None:
    loaded = config.load("quickstart", ["partition.alpha=0.1"])
    other = with_method(loaded, "fedavg", seed=5)
    assert (other.algorithm.options, other.seed, other.partition.alpha) == (loaded.methods["fedavg"], 5, 0.1)
    assert with_method(loaded, loaded.algorithm.name).algorithm == loaded.algorithm


def test_the_problem_excludes_names_and_other_methods_settings() -> None:
    loaded = config.load("quickstart")
    renamed = check({**loaded.model_dump(), "name": "x", "methods": {}, "grid": {}, "target": None})
    assert renamed.problem() == loaded.problem()
    assert config.load("quickstart", ["seed=1"]).problem() != loaded.problem()
    assert config.load("quickstart", ["algorithm.lr=0.5"]).problem() != loaded.problem()


def test_nothing_is_suggested_if_no_name_is_similar() -> None:
    assert nearest("completely different", Config.model_fields) is None
