from dataclasses import asdict, replace
from fractions import Fraction

import pytest

from fedlalr.theory import Problem, constants

PLAIN = Problem(L=2, sigma=3, G_inf=2, d=5, gap=7, eps=1, beta1=0.5)


def test_constants_equal_the_values_worked_out_by_hand():
    # G² − ε² = 3, 2G = 4, 1 − β1 = 1/2
    assert asdict(constants(PLAIN)) == pytest.approx(
        {
            "gap": 4 * 7,
            "noise": 4 * 112.5,  # 5·2·5·9/4
            "C2_1": 4 * 160,  # 2·4·¼·4·5/¼
            "C2_2": 4 * 16,  # 4·4
            "C2_3": 4 * 80,  # 16·4·¼·5
            "C3_1": 4 * 180,  # 1.5·4·5·3/½
            "C3_2": 4 * 180,  # 3·5·3·4/(2·½)
            "C4_1": 4 * 675,  # 5·2·4·5·9/(8·¼)·(½ + ¼)
            "C4_2": 4 * 4500,  # 5·2·4·25·9/2
        },
        rel=1e-14,
    )


def test_powers_of_eps_and_beta1_are_those_of_the_paper():
    L, sigma2, G, d, gap, e, b = map(Fraction, ("3", "1/4", "1", "7", "2", "1/2", "9/10"))
    problem = Problem(L=3, sigma=0.5, G_inf=1, d=7, gap=2, eps=0.5, beta1=0.9)
    room = G**2 - e**2
    exact = {
        "gap": gap,
        "noise": 5 * L * d * sigma2 / (4 * e**2),
        "C2_1": 2 * L**2 * b**2 * G**2 * d / ((1 - b) ** 2 * e**4),
        "C2_2": L**2 * G**2 / e**4,
        "C2_3": L**2 * G**2 / e**4 * 4 * (1 - b) ** 2 * d,
        "C3_1": (2 - b) * G**2 * d * room / ((1 - b) * e**3),
        "C3_2": 3 * d * room * G**2 / (2 * e**3 * (1 - b)),
        "C4_1": 5 * L * G**2 * d * room**2 / (8 * e**6 * (1 - b) ** 2) * (2 * b**2 + (1 - b) ** 2),
        "C4_2": 5 * L * G**2 * d**2 * room**2 / (2 * e**6),
    }
    assert asdict(constants(problem)) == pytest.approx({k: float(2 * G * v) for k, v in exact.items()}, rel=1e-12)


def test_restart_drops_only_the_part_of_the_broadcast_momentum():
    kept, dropped = asdict(constants(PLAIN)), asdict(constants(PLAIN, restart=True))
    assert dropped.pop("C2_2") == 0
    assert kept.pop("C2_2") > 0
    assert kept == dropped


def test_constants_of_a_corollary_gather_their_parts():
    parts = constants(PLAIN)
    assert parts.C1 == 28 + 450
    assert parts.C2(3) == 640 + 64 * 9 + 320 * 81
    assert parts.C3(3) == 720 * 3 + 720
    assert parts.C4(3) == 2700 + 18000 * 3


def test_second_moments_without_room_leave_no_third_and_fourth_constant():
    parts = constants(replace(PLAIN, eps=2))
    assert parts.C3(3) == parts.C4(3) == 0


def test_bounded_gradients_imply_a_heterogeneity():
    assert PLAIN.heterogeneity == 4 * 5 * 4


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"L": 0}, "L"),
        ({"L": float("nan")}, "L"),
        ({"sigma": -1}, "sigma"),
        ({"G_inf": float("inf")}, "G_inf"),
        ({"d": 0}, "d"),
        ({"d": True}, "d"),
        ({"gap": -0.1}, "gap"),
        ({"eps": 0}, "eps"),
        ({"eps": 3}, "ε ≤ G∞"),
        ({"beta1": 1}, "beta1"),
    ],
)
def test_impossible_problems_are_refused_by_name(change, word):
    with pytest.raises(ValueError, match=word):
        replace(PLAIN, **change)


@pytest.mark.parametrize("change", [{"d": 2.5}, {"L": "large"}, {"gap": None}])
def test_wrong_types_are_refused(change):
    with pytest.raises((TypeError, ValueError), match="must be a"):
        replace(PLAIN, **change)


def test_constants_too_large_for_a_double_are_refused():
    with pytest.raises(ValueError, match="double precision"):
        constants(replace(PLAIN, eps=1e-60))
