import pytest
import yaml

from fedlalr.config import yaml_file


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-2", -2),
        ("+7", 7),
        ("0", 0),
        ("1.", 1.0),
        ("true", True),
        ("null", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("'5'", "5"),
        (".inf", float("inf")),
        ("[1, 2.5, a]", [1, 2.5, "a"]),
    ],
)
def test_values_are_read_as_people_mean_them(text: str, value: object) -> None:
    read = yaml_file.parse(text)
    assert read == value
    assert type(read) is type(value)


def test_a_duplicate_key_is_rejected() -> None:
    with pytest.raises(yaml.YAMLError, match="'rounds' is given twice"):
        yaml_file.parse("rounds: 1\nrounds: 2\n")


def test_no_object_is_constructed() -> None:
    with pytest.raises(yaml.YAMLError):
        yaml_file.parse("!!python/object/apply:os.getcwd []")


def test_dumped_values_can_be_read_back() -> None:
    value = {"eps": 1e-8, "betas": [0.9, 0.995], "folder": None, "name": "no", "text": "a: b", "on": True, "count": 3}
    assert yaml_file.parse(yaml_file.dump(value)) == value
