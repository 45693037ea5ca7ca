"""The generated parts of the pages on results, from real runs and from verdicts with a known answer."""

import json
import math
import shutil
from pathlib import Path

import pytest

from fedlalr.config import ConfigError
from fedlalr.paper import results_page
from fedlalr.paper.results_page import (
    FAMILIES,
    NO_RUN,
    SECONDS,
    Line,
    claims_table,
    compressed,
    lines_of,
    main,
    one_number,
    recommended_table,
    seconds_tables,
    write_pages,
)
from fedlalr.paper.verdicts import Check, Claim, save_verdicts

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ROLES = RESULTS / "paper-dtype-bfloat16" / "runs" / "shakespeare-natural-10of100"


def check(outcome, **rest):
    return Check("a: above b", "here", "1 against 2", outcome, **{"seeds": (0, 1, 2), **rest})


def page(folder, text="<!-- begin claims --><!-- end claims -->"):
    for name in ("README.md", "details.md"):
        (folder / name).write_text(text, encoding="utf-8")


def test_bold_needs_several_seeds_and_a_star_marks_one():
    claims = [
        Claim("1b", (check("holds", reading="as printed"), check("does not hold", reading="tuned", seeds=(0,)))),
        Claim("2", (check("undecided"),)),
        Claim("3a"),
    ]
    rows = claims_table(claims).splitlines()[2:]
    assert rows[0] == f"| 1b. {claims[0].text} | **holds** | does not hold\\* | 1 against 2 |"
    assert rows[1].endswith("| undecided |  | 1 against 2 |")
    assert rows[2].endswith("| not run |  | – |")


def test_a_claim_that_holds_in_one_panel_and_is_undecided_or_not_run_in_another_says_where():
    six, three = (
        [Check(statement, f"CIFAR-10, Dirichlet {where}", "", outcome, (0, 1, 2)) for statement, outcome in told]
        for where, told in (("0.6", [("a", "holds"), ("b", "holds")]), ("0.3", [("a", "undecided"), ("b", "holds")]))
    )
    row = claims_table([Claim("2", (*six, *three))]).splitlines()[2]
    assert "| **holds** at Dirichlet 0.6, undecided at Dirichlet 0.3 |" in row
    three = [Check("a", "CIFAR-10, Dirichlet 0.3", "", "not measured")]
    row = claims_table([Claim("2", (*six, *three))]).splitlines()[2]
    assert "| **holds** at Dirichlet 0.6 |" in row, "a panel that was not run is not named"


def test_the_number_is_that_of_a_deciding_statement_of_the_first_measured_reading():
    missing, steps = check("not measured", reading="in epochs"), [check("holds", reading="in steps", number="+1")]
    assert one_number(Claim("4a", (missing, *steps, check("does not hold", reading="in steps", number="−2")))) == "−2"
    windows = [check(outcome, window="w") for outcome in ("holds", "does not hold", "holds")]
    assert one_number(Claim("1a", tuple(windows))) == "2 of 3 windows"


def test_pages_are_rewritten_between_their_marks_only(tmp_path):
    page(
        tmp_path,
        "before\n<!-- begin claims -->\nstale\n<!-- end claims -->\nafter\n<!-- begin planned --><!-- end planned -->",
    )
    (tmp_path / "paper").mkdir()
    save_verdicts([Claim("8", (check("holds"),))], ["Runs."], tmp_path / "paper")
    planned = {"command": "fedlalr reproduce interval", "runs": ["a", "b"]}
    (tmp_path / "paper" / "interval.json").write_text(json.dumps({"figure": "interval", "planned": planned}))
    main([str(tmp_path)])
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- begin claims -->")
    assert "stale" not in text
    assert "| **holds** |" in text
    assert "after\n" in text
    assert "# interval: 2 runs\nfedlalr reproduce interval\n" in text
    main([str(tmp_path)])
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == text


def test_a_measured_claim_is_not_hidden_by_a_folder_that_did_not_measure_it(tmp_path):
    page(tmp_path)
    for name, claims in (("paper", []), ("paper-dtype", [Claim("8", (check("holds"),))])):
        (tmp_path / name).mkdir()
        save_verdicts(claims, ["Runs."], tmp_path / name)
    write_pages(tmp_path)
    assert "| **holds** |" in (tmp_path / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "message"),
    [("<!-- begin claims -->", "without <!-- end claims -->"), ("<!-- begin figures -->", "there are only claims")],
)
def test_marks_that_cannot_be_filled_are_named(tmp_path, text, message):
    page(tmp_path, text)
    with pytest.raises(ConfigError, match=message):
        write_pages(tmp_path)


def test_a_missing_folder_ends_with_the_usage(tmp_path):
    with pytest.raises(SystemExit, match="usage"):
        main([str(tmp_path / "nowhere")])


def test_lines_are_methods_with_their_rates_over_their_seeds():
    lines = {line.label: line for line in lines_of(ROLES, 0.40)}
    assert "FedLALR, lr 0.015, eps 0.0001" in lines
    file = ROLES / "fedavg+lr-5" / "seed-0" / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    first = next(record for record in records if record["accuracy"] >= 0.40)
    line = lines["FedAvg, lr 5"]
    assert (line.seeds, line.rounds) == (1, first["round"])
    assert line.final == pytest.approx(sum(record["accuracy"] for record in records[-10:]) / 10)
    assert line.gigabytes == pytest.approx(sum(r["bytes_up"] for r in records[: first["round"]]) / 1e9)
    assert all(line.rounds == math.inf for line in lines_of(ROLES, 0.9))


def test_compression_is_judged_on_the_rounds_and_seeds_that_both_runs_have():
    cells = {}
    for name in ("fedlalr+lr-0.015-eps-0.0001", "fedlalr+smallest-lr-0.015-eps-0.0001"):
        file = ROLES / name / "seed-0" / "metrics.jsonl"
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()][:40]
        cells[name] = sum(r["bytes_up"] for r in records), sum(r["accuracy"] for r in records[-10:]) / 10
    (large, before), (small, after) = cells.values()
    assert f"{small / large:.2f}" == "0.09"
    assert compressed(ROLES).endswith(" points, one seed")
    assert abs(after - before) < 0.003


def test_only_compression_of_the_same_settings_is_compared(tmp_path):
    shutil.copytree(ROLES / "fedavg+smallest-lr-5", tmp_path / "fedavg+smallest-lr-5")
    assert compressed(tmp_path) == NO_RUN
    shutil.copytree(ROLES / "fedavg+lr-5", tmp_path / "fedavg+lr-5")
    assert compressed(tmp_path) == "FedAvg `smallest`: 0.13 of the bytes up, +0.2 points, one seed"


def test_seconds_to_the_target_are_its_rounds_times_the_seconds_of_a_round():
    tables = seconds_tables(RESULTS)
    assert tables.count("| FedAvg, lr 0.1 |") == 1, "a method is in the table of its own family only"
    row = next(line for line in tables.splitlines() if line.startswith("| FedAvg, lr 1 |"))
    place = f"{FAMILIES[0].folder}/fedavg"
    firsts = []
    for seed in range(3):
        lines = (RESULTS / place / f"seed-{seed}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        firsts.append(next(r["round"] for r in map(json.loads, lines) if r["accuracy"] >= 0.75))
    seconds = json.loads((RESULTS / SECONDS).read_text(encoding="utf-8"))[place]["seconds"]
    assert row.endswith(f" {seconds:.3g} | {sum(firsts) / 3 * seconds:.3g} |")
    assert f"| {sum(firsts) / 3:.0f} |" in row


def test_new_runs_are_recommended_by_themselves(tmp_path):
    family = next(family for family in FAMILIES if family.folder == "vit/runs")
    shutil.copytree(ROLES / "fedavg" / "seed-0", tmp_path / family.folder / "fedavg" / "seed-0")
    page(tmp_path, "<!-- begin recommended --><!-- end recommended -->")
    write_pages(tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"| {family.name} | FedAvg, lr 1: 45.5 %, one seed | FedAvg, lr 1: 35 % in round 10, one seed |" in text
    assert f"| GPT of 0.8 million parameters, Shakespeare by role | {NO_RUN} | {NO_RUN} | {NO_RUN} |" in text


def test_all_that_are_first_are_recommended_and_fewer_than_three_seeds_are_marked(monkeypatch):
    lines = [
        Line("A", seeds=3, final=0.5, rounds=28 / 3, gigabytes=2.0),
        Line("B", seeds=3, final=0.4, rounds=28 / 3, gigabytes=2.0),
        Line("C", seeds=3, final=0.4, rounds=28 / 3, gigabytes=6.0),
        Line("D", seeds=2, final=0.6, rounds=math.inf, gigabytes=math.inf),
    ]
    monkeypatch.setattr(results_page, "lines_of", lambda *_: lines)
    row = next(line for line in recommended_table(RESULTS).splitlines() if line.startswith("| ViT"))
    assert [cell.strip() for cell in row.split("|")[2:5]] == [
        "D: 60.0 %, two seeds",
        "A or B: 35 % in round 9",
        "A or B: 2.0 GB to 35 %",
    ]


def test_the_stored_pages_are_those_that_the_stored_runs_give(tmp_path):
    for name in ("README.md", "details.md"):
        shutil.copy(RESULTS / name, tmp_path / name)
    for entry in RESULTS.iterdir():
        if entry.is_dir() or entry.name == SECONDS:
            (tmp_path / entry.name).symlink_to(entry)
    write_pages(tmp_path)
    for name in ("README.md", "details.md"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (RESULTS / name).read_text(encoding="utf-8")
