import pytest

from fedlalr.config import ConfigError
from fedlalr.paper.verdicts import CLAIMS, CONTROL, DEFINITIONS, Check, Claim, load_verdicts, save_verdicts


def check(outcome, statement="a above b", **rest):
    return Check(statement, "here", "1 against 2", outcome, **{"seeds": (0, 1), **rest})


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], "not measured"),
        (["not measured", "not measured"], "not measured"),
        (["holds", "holds"], "holds"),
        (["holds", "not measured"], "not measured"),
        (["holds", "undecided"], "undecided"),
        (["undecided", "not measured"], "not measured"),
        (["undecided", "does not hold"], "does not hold"),
        (["does not hold", "not measured"], "does not hold"),
    ],
)
def test_a_claim_holds_if_all_statements_hold_and_fails_if_one_does(outcomes, expected):
    assert Claim("2", tuple(map(check, outcomes))).outcome() == expected


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["holds", "holds"], "holds"),
        (["does not hold", "does not hold"], "does not hold"),
        (["holds", "does not hold"], "undecided"),
        (["holds", "not measured"], "not measured"),
    ],
)
def test_windows_must_agree(outcomes, expected):
    assert Claim("1a", tuple(check(one, window="w") for one in outcomes)).outcome() == expected


def test_windows_of_two_curves_are_two_statements():
    claim = Claim("4c", (check("holds", "a: x", window="w"), check("does not hold", "b: x", window="w")))
    assert claim.outcome() == "does not hold"


def test_readings_are_judged_apart_and_controls_are_not_counted():
    claim = Claim("1b", (check("holds", reading="printed"), check("does not hold", reading="tuned")))
    assert claim.summary == "printed: holds (1 of 1 statements hold); tuned: does not hold (0 of 1 statements hold)"
    assert Claim("7", (check("holds"), check("does not hold", reading=CONTROL))).summary == (
        "holds (1 of 1 statements hold)"
    )


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ([check("holds"), check("holds", seeds=(0,))], "holds, one seed"),
        ([check("does not hold"), check("does not hold", seeds=(0,))], "does not hold"),
        ([check("does not hold", seeds=(0,)), check("holds")], "does not hold, one seed"),
        ([check("not measured", seeds=(0,))], "not measured"),
    ],
)
def test_a_verdict_that_rests_on_one_seed_is_marked(checks, verdict):
    assert Claim("2", tuple(checks)).verdict() == verdict


def test_every_outcome_is_counted():
    claim = Claim("2", (check("holds"), check("undecided"), check("not measured")))
    assert claim.summary == "not measured (1 of 3 statements hold, 1 undecided, 1 not measured)"


def test_verdicts_come_back_from_their_file(tmp_path):
    claim = Claim("3a", (check("holds", reading="tuned"), check("not measured", window="early")))
    save_verdicts([claim], ["Small runs."], tmp_path)
    assert [one for one in load_verdicts(tmp_path) if one.checks] == [claim]
    assert [one.key for one in load_verdicts(tmp_path)] == list(CLAIMS)


def test_a_figure_replaces_its_own_claims_and_keeps_those_of_others(tmp_path):
    save_verdicts([Claim("1a", (check("holds"),)), Claim("2", (check("holds"),))], ["Small runs."], tmp_path)
    save_verdicts([Claim("2", (check("does not hold"),))], ["Small runs."], tmp_path)
    known = {one.key: one.outcome() for one in load_verdicts(tmp_path)}
    assert (known["1a"], known["2"], known["3a"]) == ("holds", "does not hold", "not measured")


@pytest.mark.parametrize("content", ["[{", "null", '[{"number": 1, "checks": []}]'])
def test_damaged_verdicts_are_named(tmp_path, content):
    (tmp_path / "verdicts.json").write_text(content)
    with pytest.raises(
        ConfigError, match=r"verdicts.json is damaged or was written by an earlier version \(.*; move it away"
    ):
        save_verdicts([Claim("2", (check("holds"),))], ("These runs.",), tmp_path)
    assert (tmp_path / "verdicts.json").read_text() == content


def test_the_page_has_every_claim_its_statements_and_the_rules(tmp_path):
    _, page = save_verdicts([Claim("7", (check("does not hold", "a slope of −1/2"),))], ["Small runs."], tmp_path)
    text = page.read_text(encoding="utf-8")
    assert all(claim in text for claim in CLAIMS.values())
    assert "|  | a slope of −1/2 | here | 1 against 2 | seeds 0, 1 | does not hold |" in text
    assert all(definition in text for definition in DEFINITIONS)
    assert "\nSmall runs.\n" in text
