"""Verdicts: statements about measured curves, each of which holds, does not hold, or was not measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fedlalr.common.files import write_whole
from fedlalr.config.errors import ConfigError
from fedlalr.paper.curve_measures import DEFINITIONS

Verdict = Literal["holds", "does not hold", "not measured"]

CLAIMS: Mapping[int, str] = {
    1: "CIFAR: FedLALR rises fastest of the six methods and ends slightly best (in the conclusion: like FedAdam)",
    2: "CIFAR: FedAdam, FedAMSv1 and FedAMSv2 show marked drops during training, FedLALR does not",
    3: "Cohorts of 25, 50 and 75 give FedLALR equivalent results, and the steepest curve",
    4: "Local steps 3 + ⌊log₄ t⌋ beat 4 + ⌊log₂ t⌋ and 10; 4 + ⌊log₂ t⌋ ends like 10, its loss falls faster early",
    5: "Shakespeare: FedLALR ends best, and is fastest on IID data; LAFedOpt is slightly faster early on non-IID data; "
    "FedAvg is fast and ends lower; FedAMS is slow and not smooth",
    6: "‖v̂‖² rises within a round, at a different pace for each client",
    7: "N clients speed convergence up linearly: fixed and growing interval, restarted momentum, maximum",
    8: "A smaller Dirichlet parameter leaves a client with fewer labels",
}
"""The paper's claims by number."""


@dataclass(frozen=True)
class Check:
    """One statement, where it was checked, and the result."""

    statement: str
    """The rule itself, in the terms of `DEFINITIONS`."""
    where: str
    measured: str
    holds: bool | None
    """None if it could not be measured."""
    seeds: tuple[int, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return "not measured" if self.holds is None else "holds" if self.holds else "does not hold"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper as a list of statements."""

    number: int
    checks: tuple[Check, ...] = ()

    @property
    def text(self) -> str:
        return CLAIMS[self.number]

    @property
    def verdict(self) -> Verdict:
        """Holds if every statement holds; does not hold if one fails; otherwise not measured."""
        outcomes = [check.holds for check in self.checks]
        if False in outcomes:
            return "does not hold"
        return "holds" if outcomes and all(outcomes) else "not measured"

    @property
    def summary(self) -> str:
        """The verdict, with the number of statements behind it.

        >>> Claim(8, (Check("a", "", "", True), Check("b", "", "", False), Check("c", "", "", None))).summary
        'does not hold: 1 of 2 statements hold, 1 not measured'
        """
        measured = [check.holds for check in self.checks if check.holds is not None]
        if not measured:
            return self.verdict
        missing = len(self.checks) - len(measured)
        verdict = "not measured in full" if self.verdict == "not measured" else self.verdict
        return (
            f"{verdict}: {sum(measured)} of {len(measured)} statements hold"
            f"{f', {missing} not measured' if missing else ''}"
        )


def save_verdicts(claims: Iterable[Claim], scope: Sequence[str], folder: Path) -> list[Path]:
    """Merge claims into `verdicts.json` in the folder, and write it and `verdicts.md`.

    `scope` describes the runs in sentences.
    """
    plain, page = folder / "verdicts.json", folder / "verdicts.md"
    known = {claim.number: claim for claim in load_verdicts(folder)} | {claim.number: claim for claim in claims}
    every = [known.get(number, Claim(number)) for number in CLAIMS]
    write_whole(plain, json.dumps([_as_dict(claim) for claim in every], indent=1, ensure_ascii=False) + "\n")
    write_whole(page, markdown(every, scope))
    return [plain, page]


def load_verdicts(folder: Path) -> list[Claim]:
    """Read what `save_verdicts` wrote; empty without a file."""
    path = folder / "verdicts.json"
    if not path.is_file():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [
            Claim(
                entry["number"], tuple(Check(**{**check, "seeds": tuple(check["seeds"])}) for check in entry["checks"])
            )
            for entry in entries
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}); move it away, and every figure will rewrite its verdicts"
        ) from error


def markdown(claims: Sequence[Claim], scope: Sequence[str]) -> str:
    """A table of the claims, a table of the statements of each, and the terms they use."""
    lines = ["# The paper's claims, measured", "", " ".join(scope), ""]
    lines += ["| claim | | verdict |", "|---|---|---|"]
    lines += [f"| {claim.number} | {claim.text} | {claim.summary} |" for claim in claims]
    for claim in claims:
        if claim.checks:
            lines += ["", f"## Claim {claim.number}: {claim.text}", ""]
            lines += ["| statement | where | measured | seeds | verdict |", "|---|---|---|---|---|"]
            lines += [
                f"| {check.statement} | {check.where} | {check.measured} | {seeds_in_words(check.seeds)} | "
                f"{check.verdict} |"
                for check in claim.checks
            ]
    return "\n".join([*lines, "", "## Words", "", *(f"- {definition}" for definition in DEFINITIONS)]) + "\n"


def seeds_in_words(seeds: Sequence[int]) -> str:
    """
    >>> seeds_in_words((0, 1, 2)), seeds_in_words((0, 2)), seeds_in_words((3,)), seeds_in_words(())
    ('seeds 0–2', 'seeds 0, 2', 'seed 3', '–')
    """
    if not seeds:
        return "–"
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]}–{seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"


def _as_dict(claim: Claim) -> dict[str, Any]:
    return {"number": claim.number, "text": claim.text, "verdict": claim.verdict, **asdict(claim)}
