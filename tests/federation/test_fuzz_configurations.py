"""Arbitrary configuration files and overrides give a configuration or a `ConfigError`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st

from federation.fuzzing import SLOW, damaged, fuzz, json_values
from fedlalr import config
from fedlalr.config import ConfigError
from fedlalr.config.overrides import parse_overrides
from fedlalr.config.schema import Config

PRESET = config.dump(config.load("quickstart")).encode()
keys = st.sampled_from(
    [*Config.model_fields, *(f"algorithm.{name}" for name in ("name", "lr", "betas", "eps")), "partition.alpha"]
)


def load_text(content: bytes) -> Config | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "some.yaml"
        file.write_bytes(content)
        try:
            return config.load(file)
        except ConfigError as error:
            message = str(error)
    assert len(message) < 20_000
    return None


@fuzz("configurations", SLOW, content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode) | damaged(PRESET))
def test_a_file_is_a_configuration_or_a_config_error(content):
    found = load_text(content)
    if found is not None:
        assert load_text(config.dump(found).encode()) == found
    return found is not None


@fuzz("configurations", SLOW, tree=st.dictionaries(keys, json_values, max_size=5))
def test_any_values_under_the_right_keys_are_a_configuration_or_a_config_error(tree):
    base = json.loads(json.dumps(config.load("quickstart").model_dump()))
    for key, value in tree.items():
        section, _, option = key.partition(".")
        if option and isinstance(base.get(section), dict):
            base[section][option] = value
        else:
            base[section] = value
    return load_text(json.dumps(base).encode()) is not None


@fuzz(
    "configurations",
    SLOW,
    texts=st.lists(st.text(max_size=40) | st.tuples(keys, st.text(max_size=20)).map("=".join), max_size=4),
)
def test_any_overrides_are_a_configuration_or_a_config_error(texts):
    try:
        parse_overrides(texts)
    except ConfigError:
        understood = False
    else:
        understood = True
    try:
        config.load("quickstart", texts)
    except ConfigError:
        return False
    assert understood
    return True


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 1_500,
        b"{a: " * 1_500,
        b"- " * 1_500 + b"a",
        b"description: &a [x, x, x, x, x, x, x, x, x]\n"
        + b"".join(b"k%d: &%c [%s]\n" % (i, 98 + i, b", ".join([b"*%c" % (97 + i)] * 9)) for i in range(9)),
        b"rounds: " + b"9" * 5_000,
        b"rounds: 1e999999999",
        b"a: !!python/object/apply:os.system ['true']",
        b"\xff\xfe\x00",
        b"&a [*a]",
        b"description: &a {b: *a}",
    ],
    ids=["lists", "tables", "dashes", "laughs", "digits", "exponent", "python", "utf-16", "cycle", "cycle 2"],
)
def test_a_bomb_in_a_configuration_is_a_config_error(content):
    assert load_text(content) is None
