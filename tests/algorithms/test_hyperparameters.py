"""Hyper-parameters are frozen, and every bad value is refused with a message that says what is allowed."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from fedlalr.algorithms import ALGORITHMS, FedAMS, FedLALR, LAFedOpt, create, options

POSITIVE = ("lr", "server_lr", "eps", "server_eps", "initial", "gamma", "vector_rate")
FRACTIONS = ("beta1", "beta", "momentum", "align")
SHARES = {"fedcm": "alpha", "fedlada": "alpha", "alignedlalr": "keep"}
FLAGS = [("fedlalr", "bias_correction"), ("alignedlalr", "bias_correction"), ("fedadamw", "blocks")]
PAIRS = {"betas": "", "server_betas": " of server_betas"}
CHOICES = {
    ("fedlalr", "momentum"): "'average', 'restart'",
    ("fedlalr", "second_moment"): "'mean', 'max'",
    ("alignedlalr", "second_moment"): "'mean', 'max'",
    ("fedadam", "bias_correction"): "False, True, 'flower'",
    ("lafedopt", "server"): "'average', 'adam'",
    ("lafedopt", "correction"): "'none', 'local', 'joint'",
    ("localadam", "moments"): "'keep', 'restart', 'average'",
    ("mimelite", "base"): "'momentum', 'adam'",
}


def having(*wanted: str) -> list[tuple[str, str]]:
    """The (algorithm, option) pairs of the given options, choices left out."""
    return [(n, o) for n in ALGORITHMS for o in options(n) if o in wanted and (n, o) not in CHOICES]


def check_rejected(name: str, message: str, **values: object) -> None:
    """Not a test for each option and value: pytest would take longer than the checks."""
    with pytest.raises(ValueError, match=f"^{message}"):
        create(name, **values)


def test_a_rate_or_floor_must_be_a_finite_number_above_zero() -> None:
    for name, option in [*having(*POSITIVE), ("slowmo", "alpha")]:
        for value in (0, -1.0, math.nan, math.inf, "0.1", True, [0.1]):
            check_rejected(name, f"{option} must be a finite number above 0(?: or None)?, not ", **{option: value})


def test_each_beta_must_lie_in_zero_to_one() -> None:
    for name, option in having(*PAIRS):
        for value in (-0.1, 1, 1.5, math.nan, "0.9"):
            for place, pair in enumerate([(value, 0.5), (0.5, value)], start=1):
                message = rf"beta{place}{PAIRS[option]} must lie in \[0, 1\), not "
                check_rejected(name, message, **{option: pair})


def test_betas_must_be_a_pair() -> None:
    for name, option in having(*PAIRS):
        for value in (0.9, (0.9,), (0.9, 0.99, 0.999), "ab", None):
            check_rejected(name, rf"{option} must be a pair \(beta1, beta2\), not ", **{option: value})


def test_a_decay_must_lie_in_zero_to_one() -> None:
    for name, option in having(*FRACTIONS):
        for value in (-0.1, 1, math.nan, None):
            check_rejected(name, rf"{option} must lie in \[0, 1\), not ", **{option: value})


def test_the_share_of_the_own_gradient_must_lie_above_zero_and_up_to_one() -> None:
    for name, option in SHARES.items():
        for value in (0, -0.1, 1.1, math.nan, "0.1"):
            check_rejected(name, rf"{option} must lie in \(0, 1\], not ", **{option: value})


def test_a_switch_is_on_or_off() -> None:
    for name, option in FLAGS:
        for value in (1, "flower", None):
            with pytest.raises(TypeError, match=rf"^{option} must be True or False, not "):
                create(name, **{option: value})


def test_a_start_or_pull_must_not_be_negative() -> None:
    for name, option in having("initial_v", "mu", "delta"):
        for value in (-1e-9, math.inf, "0"):
            check_rejected(
                name, f"{option} must be a finite number of at least 0(?: or None)?, not ", **{option: value}
            )


@pytest.mark.parametrize(("name", "option"), CHOICES)
def test_a_choice_outside_the_list_is_refused_with_the_list(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option} must be one of {CHOICES[name, option]}, not 'median'$"):
        create(name, **{option: "median"})


@pytest.mark.parametrize("option", [0, 3, "1", None], ids=repr)
def test_fedams_has_options_one_and_two(option: object) -> None:
    with pytest.raises(ValueError, match=r"^option must be one of 1, 2, not "):
        FedAMS(option=option)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("fedlalr", {"betas": (0, 0)}),
        ("fedadam", {"initial_v": 0, "bias_correction": True}),
        ("fedadagrad", {"initial_v": 0, "beta1": 0}),
        ("fedcm", {"alpha": 1}),
        ("fedlada", {"alpha": 1}),
        ("fedprox", {"mu": 0}),
        ("alignedlalr", {"align": 0, "keep": 1}),
        ("fedadamw", {"align": 0}),
        ("diloco", {"momentum": 0}),
        ("fedmuon", {"align": 0, "beta": 0}),
        ("slowmo", {"beta": 0}),
        ("fedavgm", {"momentum": 0}),
        ("deltasgd", {"delta": 0}),
    ],
)
def test_the_closed_ends_of_the_ranges_are_allowed(name: str, values: dict[str, object]) -> None:
    made = create(name, **values)
    assert {option: getattr(made, option) for option in values} == values


@pytest.mark.parametrize("name", ALGORITHMS)
def test_hyperparameters_are_frozen(name: str) -> None:
    algorithm = create(name)
    for option in options(name):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(algorithm, option, getattr(algorithm, option))


def test_every_option_is_checked_somewhere_here() -> None:
    others = {"initial_v", "mu", "delta", *SHARES.values(), *(option for _, option in [*CHOICES, *FLAGS])}
    checked = {*POSITIVE, *FRACTIONS, *PAIRS, *others}
    assert {option for name in ALGORITHMS for option in options(name)} == checked


def test_replacing_a_hyperparameter_checks_it_again() -> None:
    with pytest.raises(ValueError, match=r"^server_lr must be a finite number above 0, not -1$"):
        dataclasses.replace(LAFedOpt(), server_lr=-1)


@pytest.mark.parametrize("value", [np.float32(0.01), torch.tensor(0.01)])
def test_a_number_of_another_library_is_told_the_way_to_pythons(value):
    with pytest.raises(ValueError, match=r"lr must be a finite number above 0, not .*; convert it with float\(value\)"):
        FedLALR(lr=value)
    assert FedLALR(lr=float(value)).lr == pytest.approx(0.01)
