"""Every rule on curves with a known answer, positive and negative."""

from dataclasses import replace

import numpy as np
import pytest

from fedlalr.paper.claims import cifar_claims, interval_claims, scalability_claims, shakespeare_claims
from fedlalr.paper.claims_measured import heterogeneity_claims, speedup_claims, trajectory_claims
from fedlalr.paper.comparing import above
from fedlalr.paper.curve_measures import FINAL
from fedlalr.paper.plans import Beside
from fedlalr.paper.speedup_results import CONTROLS, Speedup, SpeedupPoint
from paper.synthetic_curves import ROUNDS, curves, interval_panel, moments, panel, rising, six, with_drop

HOLDS, FAILS, OPEN, MISSING = "holds", "does not hold", "undecided", "not measured"


def claims_of(claims):
    return {claim.key: claim for claim in claims}


def outcome(claim, words, reading=None):
    """The outcome of the statements with these words."""
    found = [c.outcome for c in claim.checks if words in c.statement and reading in (None, c.reading)]
    assert found, f"no statement has {words!r}: {[check.statement for check in claim.checks]}"
    return found[0] if len(set(found)) == 1 else found


# 1 and 2: CIFAR


def test_the_fastest_and_best_curve_is_first_in_every_window():
    claims = claims_of(cifar_claims([panel(six(fedadam=rising(0.59, half=6)))]))
    assert [claims[key].outcome("as printed") for key in ("1a", "1b", "1c")] == [HOLDS, HOLDS, HOLDS]
    windows = [check.window for check in claims["1a"].checks]
    assert windows == ["first round at 55 %", "early accuracy", "accuracy over the first half"]  # nobody reaches 60 %
    assert claims["1a"].checks[1].measured == "FedLALR 29.7 %, FedAvg 26.0 %: +3.7 points"
    assert claims["1a"].verdict("as printed") == "holds, one seed"


def test_windows_that_disagree_leave_the_speed_undecided():
    early_bird = rising(0.55, half=1)  # first at the start, but never at 55 %
    claim = claims_of(cifar_claims([panel(six(fedavg=early_bird))]))["1a"]
    assert outcome(claim, "first round at 55 %") == HOLDS
    assert outcome(claim, "early accuracy") == FAILS
    assert claim.outcome("as printed") == OPEN


def test_a_curve_that_is_faster_in_every_window_breaks_claim_1a_alone():
    claims = claims_of(cifar_claims([panel(six(fedavg=rising(0.58, half=1)))]))
    assert claims["1a"].outcome("as printed") == FAILS
    assert claims["1b"].outcome("as printed") == HOLDS


def test_a_curve_that_ends_higher_breaks_claim_1b():
    claims = claims_of(cifar_claims([panel(six(lafedopt=rising(0.65, half=8)))]))
    assert claims["1b"].outcome("as printed") == FAILS


@pytest.mark.parametrize(("final", "like"), [(0.61, HOLDS), (0.59, HOLDS), (0.63, FAILS), (0.57, FAILS)])
def test_comparable_is_at_most_two_points_apart_in_both_directions(final, like):
    flat = np.full(ROUNDS, 0.6)
    claims = claims_of(cifar_claims([panel(six(fedlalr=flat, fedadam=np.full(ROUNDS, final)))]))
    assert claims["1c"].outcome("as printed") == like


def test_one_panel_where_it_does_not_hold_is_enough():
    good, bad = panel(six()), panel(six(fedavg=rising(0.7, half=5)), title="worse")
    claim = claims_of(cifar_claims([good, bad]))["1b"]
    assert claim.summary == "as printed: does not hold, one seed (1 of 2 statements hold)"


def test_a_method_that_was_not_run_leaves_the_comparison_unmeasured():
    lines = six(fedadam=rising(0.59, half=6))
    del lines["fedamsv1"]
    claims = claims_of(cifar_claims([panel(lines)]))
    assert claims["1b"].verdict("as printed") == MISSING
    assert claims["1b"].checks[0].measured == "planned, not run: FedAMSv1"
    assert claims["1c"].outcome("as printed") == HOLDS


@pytest.mark.parametrize(("final", "expected"), [(0.58, HOLDS), (0.63, FAILS)])
def test_tuned_settings_are_judged_apart_and_others_keep_the_printed_ones(final, expected):
    tuned = Beside("fedadam", (("server_lr", 0.1),))
    lines = six() | {tuned.key: curves(rising(final, half=6), label=tuned.label)}
    claim = claims_of(cifar_claims([panel(lines, beside=[tuned])]))["1b"]
    assert claim.readings == ("as printed", "tuned")
    assert (claim.outcome("as printed"), claim.outcome("tuned")) == (HOLDS, expected)


def test_fedlalr_tuned_meets_the_others_tuned():
    mine, theirs = Beside("fedlalr", (("lr", 0.1),)), Beside("fedadam", (("server_lr", 0.1),))
    lines = six() | {
        mine.key: curves(rising(0.9), label=mine.label),
        theirs.key: curves(rising(0.8), label=theirs.label),
    }
    claim = claims_of(cifar_claims([panel(lines, beside=[mine, theirs])]))["1b"]
    assert claim.outcome("tuned") == HOLDS
    assert claim.of("tuned")[0].measured == "FedLALR, lr 0.1 89.6 %, FedAdam, server_lr 0.1 79.6 %: +10.0 points"


def test_a_missing_tuned_run_is_named():
    tuned = Beside("fedavg", (("lr", 0.1),))
    claim = claims_of(cifar_claims([panel(six(), beside=[tuned])]))["1b"]
    assert (claim.outcome("as printed"), claim.outcome("tuned")) == (HOLDS, MISSING)
    assert claim.of("tuned")[0].measured == "planned, not run: FedAvg, lr 0.1"


def test_a_tie_is_not_below():
    flat = curves(rising(0.5), rising(0.5), rising(0.5))
    check = above(panel({"fedlalr": flat, "fedavg": flat}), FINAL, "fedlalr", ("fedavg",), "", lower=True)
    assert check.outcome == FAILS
    assert "below in 0 of 3 seeds" in check.measured


@pytest.mark.parametrize(
    ("mine", "expected"), [((0.60, 0.60, 0.50), OPEN), ((0.60, 0.61, 0.60), HOLDS), ((0.50, 0.51, 0.50), FAILS)]
)
def test_an_interval_that_contains_zero_is_undecided(mine, expected):
    lines = {key: curves(rising(0.54), rising(0.54), rising(0.54)) for key in six()}
    lines["fedlalr"] = curves(*map(rising, mine))
    claim = claims_of(cifar_claims([panel(lines)]))["1b"]
    assert claim.verdict("as printed") == expected
    assert claim.checks[0].seeds == (0, 1, 2)
    assert f"above in {sum(end > 0.54 for end in mine)} of 3 seeds" in claim.checks[0].measured
    assert "[" in claim.checks[0].measured


def test_runs_that_never_reach_an_accuracy_are_later_than_those_that_do():
    lines = {key: curves(*[rising(0.5)] * 3) for key in six()}
    lines["fedlalr"] = curves(rising(0.6), rising(0.61), rising(0.62))
    claim = claims_of(cifar_claims([panel(lines)]))["1a"]
    assert outcome(claim, "first round at 55 %") == HOLDS
    assert "FedAvg never" in claim.checks[0].measured


DROPPING = {name: with_drop(rising(0.5), 0.08) for name in ("fedadam", "fedamsv1", "fedamsv2")}


def test_smaller_falls_than_those_of_the_three_make_claim_2_hold_even_with_a_marked_drop():
    claim = claims_of(cifar_claims([panel(six(**DROPPING, fedlalr=with_drop(rising(0.6), 0.06)))]))["2"]
    assert claim.outcome("as printed") == HOLDS


@pytest.mark.parametrize("name", DROPPING)
def test_a_baseline_without_a_drop_breaks_claim_2(name):
    claim = claims_of(cifar_claims([panel(six(**{**DROPPING, name: rising(0.5)}))]))["2"]
    assert claim.outcome("as printed") == FAILS


def test_larger_falls_than_those_of_the_three_break_claim_2():
    claim = claims_of(cifar_claims([panel(six(**DROPPING, fedlalr=with_drop(rising(0.6), 0.2)))]))["2"]
    assert outcome(claim, "largest fall below") == FAILS


@pytest.mark.parametrize(("depth", "marked"), [(0.04, FAILS), (0.07, HOLDS)])
def test_five_points_make_a_drop_marked(depth, marked):
    claim = claims_of(cifar_claims([panel(six(fedadam=with_drop(rising(0.6, half=1), depth)))]))["2"]
    assert outcome(claim, "FedAdam: a marked drop") == marked


def fall(*depths):
    return curves(*[with_drop(rising(0.5, half=1), depth) for depth in depths])


def falling(*depths):
    return six(fedlalr=fall(0.05, 0.06, 0.05), **dict.fromkeys(DROPPING, fall(*depths)))


def test_the_falls_are_judged_over_both_degrees_and_shown_for_each():
    clear, mixed = panel(falling(0.30, 0.31, 0.20)), panel(falling(0.10, 0.11, 0.25), title="b")
    claim = claims_of(cifar_claims([clear, mixed]))["2"]
    falls = {
        (check.where, check.reading): (check.outcome, check.number)
        for check in claim.checks
        if "largest fall below that of FedAdam" in check.statement
    }
    together = f"{clear.panel.title} and {mixed.panel.short}"
    assert [outcome for outcome, _ in falls.values()] == [HOLDS, HOLDS, OPEN]
    # 5.33 − (30 + 31 + 20 + 10 + 11 + 25) / 6
    assert falls[together, "as printed"][1].startswith("FedLALR against FedAdam: −15.8 points [")
    assert set(falls) == {(together, "as printed"), (clear.panel.title, "control"), (mixed.panel.title, "control")}
    assert claim.outcome("as printed") == HOLDS
    assert outcome(claim, "FedAdam: a marked drop", "as printed") == HOLDS


def test_degrees_of_which_one_was_not_run_with_all_methods_are_judged_apart():
    partial = falling(0.30, 0.31, 0.30)
    del partial["fedamsv1"]
    claim = claims_of(cifar_claims([panel(falling(0.30, 0.31, 0.30)), panel(partial, title="b")]))["2"]
    assert {check.reading for check in claim.checks} == {"as printed"}
    assert outcome(claim, "largest fall below that of FedAMSv1") == [HOLDS, MISSING]
    assert claim.outcome("as printed") == MISSING


def test_degrees_without_a_common_seed_cannot_be_judged_together():
    lines = falling(0.30, 0.31, 0.30)
    other = {key: replace(line, seeds=tuple(seed + 3 for seed in line.seeds)) for key, line in lines.items()}
    claim = claims_of(cifar_claims([panel(lines), panel(other, title="b")]))["2"]
    assert claim.outcome("as printed") == MISSING


def test_a_failed_run_is_a_drop_and_is_named():
    broken = curves(rising(0.5)[:20], failures=["round 21: not finite"])
    claim = claims_of(cifar_claims([panel(six(fedadam=broken))]))["2"]
    check = next(check for check in claim.checks if check.statement.startswith("FedAdam"))
    assert check.outcome == HOLDS
    assert "1 of 1 runs failed" in check.measured


# 3: scalability


def cohorts(quarter=0.60, half=0.60, three=0.60, **changes):
    return [
        panel(six(fedlalr=rising(quarter, half=3), **changes), "data, 25", "25"),
        panel(six(fedlalr=rising(three, half=3), **changes), "data, 75", "75"),
        panel({"fedlalr": curves(rising(half, half=3))}, "data, 50", "50"),
    ]


def test_equal_and_steepest_cohorts_make_claim_3_hold():
    claims = claims_of(scalability_claims(cohorts()))
    assert [claims[key].outcome("as printed") for key in ("3a", "3b")] == [HOLDS, HOLDS]
    assert claims["3a"].checks[0].statement == "FedLALR, 25: final accuracy at most 2 points from that of 50"


@pytest.mark.parametrize("which", ["quarter", "half", "three"])
def test_a_cohort_that_ends_elsewhere_breaks_claim_3a(which):
    claims = claims_of(scalability_claims(cohorts(**{which: 0.55})))
    assert claims["3a"].outcome("as printed") == FAILS


def test_a_steeper_method_breaks_claim_3b():
    claims = claims_of(scalability_claims(cohorts(fedavg=rising(0.6, half=1))))
    assert (claims["3a"].outcome("as printed"), claims["3b"].outcome("as printed")) == (HOLDS, FAILS)


def test_a_cohort_without_runs_leaves_equality_unmeasured():
    quarter, three, usual = cohorts()
    usual.lines.clear()
    claims = claims_of(scalability_claims([quarter, three, usual]))
    assert claims["3a"].outcome("as printed") == MISSING


# 4: interval


def intervals(unit="steps", best=0.62, other=0.60, fixed=0.60, halves=(3.0, 5.0, 7.0)):
    finals = (fixed, best, other)
    return interval_panel(unit, [curves(rising(f, half=h)) for f, h in zip(finals, np.roll(halves, 1), strict=True)])


def test_claim_4_holds_on_curves_made_to_fit_and_units_are_judged_apart():
    claims = claims_of(interval_claims([interval_panel("epochs", []), intervals()]))
    for key in ("4a", "4b", "4c"):
        assert claims[key].readings == ("in epochs", "in steps")
        assert (claims[key].outcome("in epochs"), claims[key].outcome("in steps")) == (MISSING, HOLDS)
    assert claims["4a"].checks[0].measured == "planned, not run: 3 + ⌊log₄ t⌋, 4 + ⌊log₂ t⌋, K = 10"


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ({"best": 0.595}, "4a", "3 + ⌊log₄ t⌋: final accuracy above"),
        ({"best": 0.595}, "4a", "3 + ⌊log₄ t⌋: final test loss below"),
        ({"other": 0.55, "fixed": 0.60}, "4b", "final accuracy at most 2 points from"),
        ({"other": 0.55, "fixed": 0.60}, "4b", "final test loss at most 0.05 from"),
        ({"halves": (3.0, 7.0, 5.0)}, "4b", "early test loss below"),
        ({"halves": (3.0, 7.0, 2.0)}, "4c", "first round at 55 % below"),
    ],
)
def test_each_statement_of_claim_4_can_fail(change, key, words):
    claim = claims_of(interval_claims([intervals(**change)]))[key]
    assert outcome(claim, words) == FAILS
    assert claim.outcome("in steps") == FAILS


# 5: Shakespeare


def plays(non_iid=None, iid=None):
    rough = with_drop(with_drop(rising(0.45, half=12), 0.1), 0.1, at=6)
    common = {"fedamsv1": rough, "fedamsv2": rough}
    first = {"fedlalr": rising(0.5, half=3.5), "lafedopt": rising(0.48, half=3), "fedavg": rising(0.39, half=3.5)}
    second = {"fedlalr": rising(0.5, half=3), "lafedopt": rising(0.48, half=4), "fedavg": rising(0.44, half=4)}
    return [
        panel(six(**common, fedadam=rising(0.45, half=8), **{**first, **(non_iid or {})}), "play, non-IID", "non-IID"),
        panel(six(**{**common, "fedadam": rising(0.45, half=8), **second, **(iid or {})}), "play, IID", "IID"),
    ]


def test_claim_5_holds_on_curves_made_to_fit():
    claims = shakespeare_claims(plays())
    assert [claim.key for claim in claims] == ["5a", "5b", "5c", "5d"]
    failed = {c.statement: c.measured for claim in claims for c in claim.checks if c.outcome != HOLDS}
    assert failed == {}


@pytest.mark.parametrize(
    ("change", "key", "words", "where"),
    [
        ({"iid": {"fedlalr": rising(0.43, half=3)}}, "5a", "FedLALR: final accuracy above", "play, IID"),
        ({"non_iid": {"fedlalr": rising(0.43, half=3)}}, "5a", "FedLALR: final accuracy above", "play, non-IID"),
        ({"iid": {"fedlalr": rising(0.5, half=7)}}, "5a", "FedLALR: early accuracy above", "play, IID"),
        ({"non_iid": {"fedlalr": rising(0.5, half=9)}}, "5b", "FedLALR: early accuracy above", "play, non-IID"),
        ({"non_iid": {"lafedopt": rising(0.42, half=3)}}, "5b", "LAFedOpt: final accuracy above", "play, non-IID"),
        ({"non_iid": {"lafedopt": rising(0.48, half=7)}}, "5b", "LAFedOpt: early accuracy at most", "play, non-IID"),
        ({"non_iid": {"lafedopt": rising(0.49, half=1)}}, "5b", "LAFedOpt: early accuracy at most", "play, non-IID"),
        ({"non_iid": {"fedavg": rising(0.39, half=20)}}, "5c", "FedAvg: early accuracy above", "play, non-IID"),
        ({"non_iid": {"fedavg": rising(0.46, half=4)}}, "5c", "FedAvg: final accuracy below", "play, non-IID"),
        ({"iid": {"fedadam": rising(0.45, half=20)}}, "5d", "FedAdam: early accuracy above", "play, IID"),
        (
            {"iid": {"fedavg": rising(0.55, half=4.5)}},
            "5d",
            "FedLALR: final accuracy above that of FedAvg",
            "play, IID",
        ),
        ({"iid": {"fedamsv2": rising(0.4, half=12)}}, "5d", "FedAMSv2: roughness above", "play, IID"),
    ],
)
def test_each_statement_of_claim_5_can_fail(change, key, words, where):
    claim = claims_of(shakespeare_claims(plays(**change)))[key]
    assert [c.outcome for c in claim.checks if words in c.statement and c.where == where] == [FAILS]


@pytest.mark.parametrize(
    ("curve", "words"),
    [
        (with_drop(rising(0.45, half=1), 0.1, at=6), "FedAMSv1: early accuracy below"),
        (with_drop(rising(0.45, half=12), 0.1, at=30), "FedAMSv1: roughness over the first quarter above"),
    ],
)
def test_fedams_must_be_slow_and_unstable_at_the_start(curve, words):
    claim = claims_of(shakespeare_claims(plays(non_iid={}, iid={})))["5c"]
    assert outcome(claim, words) == HOLDS
    non_iid, iid = plays()
    non_iid.lines["fedamsv1"] = curves(curve)
    assert outcome(claims_of(shakespeare_claims([non_iid, iid]))["5c"], words) == FAILS


def test_half_of_the_others_can_be_undecided():
    lines = {key: curves(*[rising(0.5 + 0.001 * i) for i in range(3)]) for key in six()}
    lines["fedavg"] = curves(rising(0.6), rising(0.4), rising(0.52))
    claim = claims_of(shakespeare_claims([panel(lines, "play, non-IID", "non-IID")]))["5c"]
    assert outcome(claim, "FedAvg: early accuracy above that of at least three") == OPEN


# 6: second moments


def followed(*points):
    return [panel({"fedlalr-trajectory": curves(*[rising(0.5)] * len(points), trajectories=points)})]


def test_moments_that_grow_at_two_paces_make_claim_6_hold():
    (claim,) = trajectory_claims(followed(moments({0: 1.0, 1: 1.0}, {0: 0.5, 1: 0.2})))
    assert (claim.key, claim.verdict(), len(claim.checks)) == (
        "6",
        "holds, one seed",
        1,
    )  # growth itself is not counted
    assert claim.checks[0].measured == "paces differ by 60, 60 %"


@pytest.mark.parametrize(("pace", "differs"), [(0.98, FAILS), (0.9, HOLDS)])
def test_five_per_cent_tell_paces_apart(pace, differs):
    (claim,) = trajectory_claims(followed(moments({0: 1.0, 1: 1.0}, {0: 1.0, 1: pace})))
    assert claim.outcome() == differs


def test_paces_are_averaged_over_rounds_and_seeds_decide():
    same, apart = {0: 1.0, 1: 1.0}, {0: 1.0, 1: 0.8}
    mixed = [*moments(same, same, rounds=(1,)), *moments(same, apart, rounds=(3,))]
    (claim,) = trajectory_claims(followed(mixed, moments(same, same)))
    assert claim.checks[0].measured == "paces differ by 0, 10 %"
    assert claim.outcome() == OPEN
    (claim,) = trajectory_claims(followed(mixed))
    assert (claim.checks[0].measured, claim.outcome()) == ("paces differ by 0, 20 %", HOLDS)


def test_without_a_trajectory_claim_6_is_not_measured():
    (claim,) = trajectory_claims([panel({})])
    assert claim.outcome() == MISSING


# 7: speed-up


def measured(slope_N, slope_T=-0.5, variant="Algorithm 1", clients=(1, 2, 4, 8), noise=0.0):
    factors = np.random.default_rng(0).uniform(1 - noise, 1 + noise, 3 * len(clients))
    sizes = [(steps, N) for steps in (2**12, 2**13, 2**14) for N in clients]
    return [
        SpeedupPoint(variant, N, 1, 1, steps, 0.1, False, 0, (factor * N**slope_N * steps**slope_T,))
        for (steps, N), factor in zip(sizes, factors, strict=True)
    ]


@pytest.mark.parametrize(
    ("slopes", "noise", "expected"),
    [
        ((-0.5, -0.5), 0.0, HOLDS),
        ((-0.53, -0.5), 0.0, HOLDS),
        ((-0.25, -0.5), 0.0, FAILS),
        ((0.0, -0.5), 0.0, FAILS),
        ((-1.0, -1.0), 0.0, FAILS),
        ((-0.5, -0.5), 0.6, OPEN),
    ],
)
def test_the_slope_and_its_interval_decide_on_claim_7(slopes, noise, expected):
    (claim,) = speedup_claims(Speedup(tuple(measured(*slopes, noise=noise))))
    assert (claim.key, claim.outcome()) == ("7", expected)


def test_every_variant_is_judged_and_one_that_does_not_speed_up_is_enough():
    points = (*measured(-0.5), *measured(-0.1, variant="restart"))
    (claim,) = speedup_claims(Speedup(points))
    assert [check.outcome for check in claim.checks] == [HOLDS, FAILS]
    assert claim.outcome() == FAILS


def test_the_control_is_shown_and_not_counted():
    points = (*measured(-0.5), *measured(-0.1, variant=CONTROLS[0]))
    (claim,) = speedup_claims(Speedup(points))
    assert [check.reading for check in claim.checks] == ["", "control"]
    assert (claim.readings, claim.outcome(), claim.outcome("control")) == (("",), HOLDS, FAILS)


def test_too_few_points_in_the_regime_are_not_measured():
    (claim,) = speedup_claims(Speedup(tuple(measured(-0.5, clients=(64,)))))
    assert claim.outcome() == MISSING


# 8: heterogeneity


@pytest.mark.parametrize(("few", "expected"), [(8.0, HOLDS), (9.35, OPEN), (10.0, FAILS)])
def test_fewer_labels_at_the_smaller_parameter_decide_on_claim_8(few, expected):
    labels = {0.6: [9.2, 9.4, 9.3], 0.3: [few, few + 0.01, few - 0.01]}
    (claim,) = heterogeneity_claims({"data": labels}, [0, 1, 2])
    assert (claim.key, claim.verdict(), claim.checks[0].seeds) == ("8", expected, (0, 1, 2))
