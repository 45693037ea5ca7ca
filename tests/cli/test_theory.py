import io
import json
import runpy
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fedlalr.cli import app
from fedlalr.theory import Problem, theorem1


def theory(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["theory", *arguments])


SMALL = ("-N", "16", "-K", "8", "-T", "4096", "--eps", "0.5", "--G", "1.6", "--sigma", "1.6", "-d", "8", "--gap", "2.8")


def test_every_bound_is_printed_term_by_term_with_the_largest_marked() -> None:
    result = theory(*SMALL)
    assert result.exit_code == 0, result.output
    for heading in ("Theorem 1, as stated", "Theorem 1, as the proof ends", "Corollary 1", "Corollary 2"):
        assert heading in result.stdout
    assert "506 ←" in result.stdout
    assert result.stdout.count("sum (vacuous)") == 4
    assert result.stdout.count("is vacuous") == 1
    assert "the cap does not bind" in result.stdout
    assert "121 kB" in result.stdout
    assert "80.9 kB" in result.stdout  # momentum is not sent where it is restarted


def test_the_papers_setting_violates_its_theorem_and_the_output_says_so() -> None:
    result = theory("--alpha", "2e-3")
    assert "L > 7.5e-07" in result.stdout
    assert "the cap binds" in result.stdout
    assert "Corollary 1," not in result.stdout  # it has its own step size built in


def test_json_has_the_numbers_of_the_functions() -> None:
    plain = json.loads(theory(*SMALL, "--json").stdout)
    problem = Problem(L=1.0, sigma=1.6, G_inf=1.6, d=8, gap=2.8, eps=0.5, beta1=0.9)
    assert plain["bounds"][0]["total"] == pytest.approx(theorem1(problem, N=16, K=8, T=4096).total)
    assert plain["bounds"][0]["dominant"] == "αN/T"
    assert plain["bounds"][0]["vacuous"] is True
    assert plain["step_size"]["alpha"] == pytest.approx(0.0220971)
    assert plain["communication"]["K = 8"]["complexity"] == pytest.approx(1 / (8 * 0.01**2))


def test_growing_intervals_use_theorem_2() -> None:
    result = theory("-N", "4", "-T", "100", "--start", "3", "--base", "4", "--eps", "0.5", "-d", "8")
    assert "Theorem 2, as the proof ends" in result.stdout
    assert "Theorem 1" not in result.stdout
    assert "K = 50" not in result.stdout


def test_the_map_of_the_largest_terms_is_drawn(tmp_path: Path) -> None:
    result = theory(*SMALL, "--plot", str(tmp_path / "terms.png"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "terms.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--start", "3"), "must be given together"),
        (("--eps", "2"), "is above G_inf"),
        (("-N", "0"), "N"),
        (("--plot", "/proc/q/terms.png"), "/proc/q/terms.png cannot be written: No such file"),
        (
            ("--plot", "terms.foo"),
            "--plot terms.foo has no supported format; the name of a figure must end in one of .png, .svg, .pdf",
        ),
        (("--plot", "/proc"), "--plot /proc is a folder; name the figure in it, such as /proc/figure.png"),
    ],
)
def test_invalid_arguments_are_explained(arguments: tuple[str, ...], message: str) -> None:
    result = theory(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_module_runs_as_a_command_and_a_terminal_without_greek_still_gets_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["fedlalr", "theory", "-N", "4", "--start", "3", "--base", "4"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("fedlalr", run_name="__main__")
    assert end.value.code in (None, 0), shown.getvalue()
    assert b"K_t = 3 + ?log_4 t?" in shown.getvalue()
