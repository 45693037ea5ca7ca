import pytest

from fedlalr.config import ConfigError
from fedlalr.paper.curve_measures import DEFINITIONS
from fedlalr.paper.verdicts import CLAIMS, Check, Claim, load_verdicts, save_verdicts


def check(holds, statement="a above b"):
    return Check(statement, "here", "1 against 2", holds, (0, 1))


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([], "not measured"),
        ([None, None], "not measured"),
        ([True, True], "holds"),
        ([True, None], "not measured"),
        ([True, False], "does not hold"),
        ([False, None], "does not hold"),
    ],
)
def test_a_claim_holds_where_all_statements_hold_and_fails_where_one_does(outcomes, verdict):
    assert Claim(1, tuple(map(check, outcomes))).verdict == verdict


def test_what_was_not_measured_is_counted():
    assert Claim(1, (check(True), check(None))).summary == (
        "not measured in full: 1 of 1 statements hold, 1 not measured"
    )


def test_verdicts_come_back_from_their_file(tmp_path):
    claim = Claim(3, (check(True), check(None)))
    save_verdicts([claim], ["Small runs."], tmp_path)
    assert [one for one in load_verdicts(tmp_path) if one.checks] == [claim]
    assert [one.number for one in load_verdicts(tmp_path)] == list(CLAIMS)


def test_a_figure_replaces_its_own_claims_and_keeps_those_of_others(tmp_path):
    save_verdicts([Claim(1, (check(True),)), Claim(2, (check(True),))], ["Small runs."], tmp_path)
    save_verdicts([Claim(2, (check(False),))], ["Small runs."], tmp_path)
    known = {one.number: one.verdict for one in load_verdicts(tmp_path)}
    assert (known[1], known[2], known[3]) == ("holds", "does not hold", "not measured")


@pytest.mark.parametrize("content", ["[{", "null", '[{"number": 1}]'])
def test_damaged_verdicts_are_named(tmp_path, content):
    (tmp_path / "verdicts.json").write_text(content)
    with pytest.raises(ConfigError, match=r"verdicts.json is damaged \(.*; move it away"):
        save_verdicts([Claim(1, (check(True),))], ("These runs.",), tmp_path)
    assert (tmp_path / "verdicts.json").read_text() == content


def test_the_page_has_every_claim_its_statements_and_the_rules(tmp_path):
    _, page = save_verdicts([Claim(7, (check(False, "a slope of −1/2"),))], ["Small runs."], tmp_path)
    text = page.read_text(encoding="utf-8")
    assert all(claim in text for claim in CLAIMS.values())
    assert "| a slope of −1/2 | here | 1 against 2 | seeds 0, 1 | does not hold |" in text
    assert all(definition in text for definition in DEFINITIONS)
    assert "\nSmall runs.\n" in text
