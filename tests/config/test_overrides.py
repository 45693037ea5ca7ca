import itertools

import pytest

from fedlalr.config import ConfigError
from fedlalr.config.overrides import merge, parse_overrides


def test_the_order_of_overrides_does_not_matter() -> None:
    texts = ["algorithm=fedadam", "algorithm.lr=0.03", "partition.alpha=0.1", "rounds=20"]
    trees = [parse_overrides(order) for order in itertools.permutations(texts)]
    assert all(tree == trees[0] for tree in trees)
    assert trees[0] == {
        "algorithm": {"name": "fedadam", "lr": 0.03},
        "partition": {"alpha": 0.1},
        "rounds": 20,
    }


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["rounds"], "'rounds' is not an override; write key=value"),
        (["=3"], "is not an override"),
        (["a..b=3"], "is not an override"),
        (["rounds=[1"], "cannot be read"),
        (["rounds=1", "rounds=2"], "'rounds' is given twice"),
        (["rounds=1", "rounds.x=2"], "contradicts another override"),
    ],
)
def test_malformed_overrides_are_rejected(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        parse_overrides(texts)


def test_another_algorithm_drops_the_old_ones_options() -> None:
    base = {"algorithm": {"name": "fedlalr", "eps": 1e-8}, "rounds": 5}
    assert merge(base, {"algorithm": {"name": "fedavg"}}) == {"algorithm": {"name": "fedavg"}, "rounds": 5}
    assert merge(base, {"algorithm": {"lr": 1.0}})["algorithm"] == {"name": "fedlalr", "eps": 1e-8, "lr": 1.0}


def test_a_section_given_as_a_word_can_be_refined() -> None:
    assert merge({"model": "mlp"}, {"model": {"hidden": 3}}) == {"model": {"name": "mlp", "hidden": 3}}
    assert merge({"partition": {"clients": 5}}, {"partition": "iid"}) == {"partition": {"clients": 5, "scheme": "iid"}}


def test_one_kind_of_interval_drops_the_others() -> None:
    assert merge({"local": {"epochs": 5}}, {"local": {"steps": 2}}) == {"local": {"steps": 2}}
    log = merge({"local": {"epochs": 5}}, {"local": {"start": 3, "base": 4.0}})
    assert log == {"local": {"start": 3, "base": 4.0}}
    assert merge(log, {"local": {"unit": "epochs"}})["local"] == {"start": 3, "base": 4.0, "unit": "epochs"}
    assert merge(log, {"local": {"epochs": 1}})["local"] == {"epochs": 1}


def test_merging_changes_neither_side() -> None:
    base, changes = {"partition": {"alpha": 0.3}}, {"partition": {"alpha": 0.1}}
    merge(base, changes)
    assert base == {"partition": {"alpha": 0.3}}
    assert changes == {"partition": {"alpha": 0.1}}


def test_a_methods_setting_changes_an_algorithm_that_contains_it() -> None:
    base = {"algorithm": {"name": "fedavg", "lr": 0.1}, "methods": {"fedavg": {"lr": 0.1}}}
    assert merge(base, {"methods": {"fedavg": {"lr": 0.5}}})["algorithm"]["lr"] == 0.5
    assert merge(base, {"methods": {"fedadam": {"lr": 0.5}}})["algorithm"]["lr"] == 0.1
