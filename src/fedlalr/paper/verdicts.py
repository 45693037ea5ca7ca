"""Verdicts: statements about measured curves, each of which holds, does not hold, is undecided, or was not measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from fedlalr.common.files import write_whole
from fedlalr.config.errors import ConfigError

MARKED_DROP = 0.05
EQUIVALENT, EQUIVALENT_LOSS = 0.02, 0.05
SLIGHTLY = 0.05
TARGETS = (0.55, 0.60, 0.65, 0.70)
"""Accuracies on CIFAR-10 to which curves race."""

DEFINITIONS = (
    "above, below: paired by seed, over the seeds that both curves have",
    "undecided: Student's 95 % interval of the difference over the seeds contains zero, or the limit in question",
    "one seed: there is no interval; the number itself decides, and the verdict is marked",
    "windows: first to 55, 60, 65 and 70 %, the first quarter and the first half of the rounds; a statement holds if "
    "it holds in all of them, does not hold if it fails in all, and is undecided otherwise",
    "early accuracy or loss: its mean over the first quarter of the rounds",
    "final accuracy or loss: its mean over the last tenth of the rounds",
    f"marked drop: the accuracy falls more than {MARKED_DROP * 100:g} points below its best so far",
    "roughness: the sum of all falls of the accuracy from one round to the next",
    f"like: at most {EQUIVALENT * 100:g} points apart, losses {EQUIVALENT_LOSS:g}",
    f"slightly: at most {SLIGHTLY * 100:g} points",
    "a run that failed counts as accuracy 0 from then on",
    "a claim holds if all of its statements hold, and does not hold if one of them fails",
)
"""The terms used in verdicts."""
Outcome = Literal["holds", "does not hold", "undecided", "not measured"]

CLAIMS: Mapping[str, str] = {
    "1a": "CIFAR: FedLALR converges fastest of six",
    "1b": "CIFAR: FedLALR ends slightly better than the others",
    "1c": "CIFAR: FedLALR and FedAdam generalise comparably",
    "2": "CIFAR: FedLALR is more stable than FedAdam and FedAMS, which drop markedly",
    "3a": "Cohorts of 25, 50 and 75 are equivalent for FedLALR",
    "3b": "FedLALR's curve is the steepest with 25 and 75",
    "4a": "Interval 3 + ⌊log₄ t⌋ beats 4 + ⌊log₂ t⌋ and K = 10",
    "4b": "4 + ⌊log₂ t⌋ ends like K = 10, its loss falls faster early",
    "4c": "Growing intervals reduce communication",
    "5a": "Shakespeare: FedLALR is best, and the fastest on IID data",
    "5b": "Non-IID: FedLALR and LAFedOpt lead, LAFedOpt is slightly faster",
    "5c": "Non-IID: FedAvg is fast and ends lowest; FedAMS is slow, at first unstable",
    "5d": "IID: FedAvg, LAFedOpt, FedAdam are rapid, end below FedLALR; FedAMS is not smooth",
    "6": "‖v̂‖² grows at a different pace for each client",
    "7": "N clients speed convergence up linearly, in four forms",
    "8": "A smaller Dirichlet parameter leaves clients fewer labels",
}
"""The paper's claims; letters mark parts that are judged separately."""
CONTROL = "control"
"""The reading of statements that the paper does not make; they are shown and not counted."""


@dataclass(frozen=True)
class Check:
    """One statement, where it was checked, and the result."""

    statement: str
    """The rule itself, in the terms of `DEFINITIONS`."""
    where: str
    measured: str
    outcome: Outcome
    seeds: tuple[int, ...] = ()
    reading: str = ""
    """What is judged apart from the rest: settings as printed or tuned, intervals in epochs or in steps."""
    window: str = ""
    """One of several ways to measure the same thing."""
    number: str = ""
    """The difference in short."""

    @property
    def one_seed(self) -> bool:
        return len(self.seeds) == 1

    @property
    def verdict(self) -> str:
        """The outcome, marked if it rests on one seed."""
        return self.outcome + (", one seed" if self.one_seed and self.outcome != "not measured" else "")


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, or a part of one, as a list of statements."""

    key: str
    checks: tuple[Check, ...] = ()

    @property
    def text(self) -> str:
        return CLAIMS[self.key]

    @property
    def readings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(check.reading for check in self.checks if check.reading != CONTROL))

    def of(self, reading: str) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.reading == reading)

    def outcome(self, reading: str = "") -> Outcome:
        """Of one reading: does not hold if a statement fails, holds if all hold.

        Windows are ways to measure one statement: it holds if it holds in all of them, and fails if it fails in all.
        """
        return conjunction(outcomes_of(self.of(reading)))

    def one_seed(self, reading: str = "") -> bool:
        """Whether the verdict rests on a single seed: that of every failing statement, or of a holding one."""
        if self.outcome(reading) == "does not hold":
            return all(check.one_seed for check in self.of(reading) if check.outcome == "does not hold")
        return any(check.one_seed for check in self.of(reading))

    def verdict(self, reading: str = "") -> str:
        """The outcome of one reading in words, marked if it rests on one seed."""
        outcome = self.outcome(reading)
        return outcome + (", one seed" if outcome != "not measured" and self.one_seed(reading) else "")

    @property
    def summary(self) -> str:
        """The verdict of every reading, with the number of statements behind it.

        >>> held, failed = Check("a", "", "", "holds"), Check("b", "", "", "does not hold")
        >>> Claim("8", (held, failed, Check("c", "", "", "not measured"))).summary
        'does not hold (1 of 3 statements hold, 1 not measured)'
        """
        parts = []
        for reading in self.readings:
            checks = self.of(reading)
            counts = [sum(check.outcome == one for check in checks) for one in ("holds", "undecided", "not measured")]
            counted = [f"{counts[0]} of {len(checks)} statements hold"]
            counted += [f"{n} {name}" for n, name in zip(counts[1:], ("undecided", "not measured"), strict=True) if n]
            parts.append(f"{f'{reading}: ' if reading else ''}{self.verdict(reading)} ({', '.join(counted)})")
        return "; ".join(parts) or "not measured"


def outcomes_of(checks: Iterable[Check]) -> list[Outcome]:
    """The outcome of every statement, with all windows of a statement together."""
    windows: dict[str, list[Outcome]] = {}
    single: list[Outcome] = []
    for check in checks:
        subject = f"{check.statement.partition(':')[0]}, {check.where}"
        (windows.setdefault(subject, []) if check.window else single).append(check.outcome)
    return single + [_agreed(outcomes) for outcomes in windows.values()]


def conjunction(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of statements that are all claimed."""
    for worst in ("does not hold", "not measured", "undecided"):
        if worst in outcomes:
            return worst
    return "holds" if outcomes else "not measured"


def _agreed(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of several ways to measure one statement, which is undecided unless they agree."""
    if "not measured" in outcomes:
        return "not measured"
    return outcomes[0] if len(set(outcomes)) == 1 else "undecided"


def save_verdicts(claims: Iterable[Claim], scope: Sequence[str], folder: Path) -> list[Path]:
    """Merge claims into `verdicts.json` in the folder, and write it and `verdicts.md`.

    `scope` describes the runs in sentences.
    """
    plain, page = folder / "verdicts.json", folder / "verdicts.md"
    known = {claim.key: claim for claim in [*load_verdicts(folder), *claims]}
    every = [known.get(key, Claim(key)) for key in CLAIMS]
    entries = [{"key": one.key, "text": one.text, "verdict": one.summary, **asdict(one)} for one in every]
    write_whole(plain, json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
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
            Claim(entry["key"], tuple(Check(**{**check, "seeds": tuple(check["seeds"])}) for check in entry["checks"]))
            for entry in entries
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is damaged or was written by an earlier version ({error!r}); move it away, and every figure will "
            "rewrite its verdicts"
        ) from error


def markdown(claims: Sequence[Claim], scope: Sequence[str]) -> str:
    """A table of the claims, a table of the statements of each, and the terms they use."""
    lines = ["# The paper's claims, measured", "", " ".join(scope), ""]
    lines += ["| claim | | verdict |", "|---|---|---|"]
    lines += [f"| {claim.key} | {claim.text} | {claim.summary} |" for claim in claims]
    for claim in claims:
        if claim.checks:
            lines += ["", f"## Claim {claim.key}: {claim.text}", ""]
            lines += ["| | statement | where | measured | seeds | verdict |", "|---|---|---|---|---|---|"]
            lines += [
                f"| {check.reading} | {check.statement} | {check.where} | {check.measured} | "
                f"{seeds_in_words(check.seeds)} | {check.verdict} |"
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
