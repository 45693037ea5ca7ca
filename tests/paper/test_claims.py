"""Every rule on curves with a known answer, positive and negative."""

import numpy as np
import pytest

from fedlalr.paper.claims import above_all, cifar_claims, interval_claims, scalability_claims, shakespeare_claims
from fedlalr.paper.claims_measured import heterogeneity_claims, speedup_claims, trajectory_claims
from fedlalr.paper.curve_measures import final_accuracy
from fedlalr.paper.plans import Beside
from fedlalr.paper.speedup_results import Speedup, SpeedupPoint
from paper.synthetic_curves import ROUNDS, curves, moments, panel, rising, six, with_drop


def outcome(claim, words):
    """Whether the statements with these words hold."""
    found = [check.holds for check in claim.checks if words in check.statement]
    assert found, f"no statement has {words!r}: {[check.statement for check in claim.checks]}"
    return found[0] if len(set(found)) == 1 else found


# 1 and 2: CIFAR


def test_the_fastest_and_best_curve_makes_claim_1_hold():
    claim = cifar_claims([panel(six())])[0]
    assert (claim.number, claim.verdict) == (1, "holds")
    assert claim.checks[0].measured == "FedLALR 29.7 %, FedAvg 26.0 %: +3.7 points"


def test_a_curve_that_rises_faster_breaks_claim_1():
    claim = cifar_claims([panel(six(fedavg=rising(0.55, half=2)))])[0]
    assert outcome(claim, "early accuracy above every") is False
    assert outcome(claim, "final accuracy above every") is True
    assert claim.verdict == "does not hold"


def test_a_curve_that_ends_higher_breaks_claim_1():
    claim = cifar_claims([panel(six(lafedopt=rising(0.65, half=8)))])[0]
    assert outcome(claim, "early accuracy above every") is True
    assert outcome(claim, "final accuracy above every") is False
    assert outcome(claim, "below FedAdam's") is True


@pytest.mark.parametrize(("final", "like"), [(0.61, True), (0.63, False)])
def test_two_points_below_fedadam_are_the_limit_of_likeness(final, like):
    flat = np.full(ROUNDS, 0.6)
    claim = cifar_claims([panel(six(fedlalr=flat, fedadam=np.full(ROUNDS, final)))])[0]
    assert outcome(claim, "below FedAdam's") is like


def test_one_panel_where_it_does_not_hold_is_enough():
    good, bad = panel(six()), panel(six(fedavg=rising(0.7, half=1)), title="worse")
    claim = cifar_claims([good, bad])[0]
    assert claim.verdict == "does not hold"
    assert claim.summary == "does not hold: 4 of 6 statements hold"


def test_a_method_that_was_not_run_leaves_the_comparison_unmeasured():
    lines = six()
    del lines["fedamsv1"]
    claim = cifar_claims([panel(lines)])[0]
    assert outcome(claim, "early accuracy above every") is None
    assert "no finished run of FedAMSv1" in claim.checks[0].measured
    assert outcome(claim, "below FedAdam's") is True


@pytest.mark.parametrize(("final", "holds"), [(0.58, True), (0.63, False)])
def test_a_baseline_with_other_settings_is_compared_too(final, holds):
    tuned = Beside("fedadam", (("server_lr", 0.1),))
    lines = six() | {tuned.key: curves(rising(final, half=6), label=tuned.label)}
    claim = cifar_claims([panel(lines, beside=[tuned])])[0]
    assert outcome(claim, "final accuracy above every") is True
    assert outcome(claim, "final accuracy above that of FedAdam, server_lr 0.1") is holds
    assert claim.verdict == ("holds" if holds else "does not hold")


def test_fedlalr_with_other_settings_is_no_rival_of_itself():
    tuned = Beside("fedlalr", (("lr", 0.1),))
    lines = six() | {tuned.key: curves(rising(0.9), label=tuned.label)}
    claim = cifar_claims([panel(lines, beside=[tuned])])[0]
    assert (len(claim.checks), claim.verdict) == (3, "holds")


def test_fedlalr_with_other_settings_meets_the_others_with_theirs():
    mine, theirs = Beside("fedlalr", (("lr", 0.1),)), Beside("fedadam", (("server_lr", 0.1),))
    lines = six() | {
        mine.key: curves(rising(0.9), label=mine.label),
        theirs.key: curves(rising(0.8), label=theirs.label),
    }
    claim = cifar_claims([panel(lines, beside=[mine, theirs])])[0]
    assert outcome(claim, "FedLALR: final accuracy above that of FedAdam, server_lr 0.1") is False
    assert outcome(claim, "FedLALR, lr 0.1: final accuracy above that of FedAdam, server_lr 0.1") is True


def test_a_missing_run_with_other_settings_is_named():
    tuned = [Beside(method, (("lr", 0.1),)) for method in ("fedavg", "fedadam", "lafedopt")]
    lines = six() | {one.key: curves(rising(0.3), label=one.label) for one in tuned[1:]}
    claim = cifar_claims([panel(lines, beside=tuned)])[0]
    assert outcome(claim, "final accuracy above every other method's with other settings") is None
    assert any(check.measured == "no finished run of FedAvg, lr 0.1" for check in claim.checks)


def test_a_tie_agrees_with_nobody():
    flat = curves(rising(0.5), rising(0.5), rising(0.5))
    check = above_all(
        panel({"fedlalr": flat, "fedavg": flat}), final_accuracy, "fedlalr", ("fedavg",), "accuracy", True
    )
    assert check.holds is False
    assert "below in 0 of 3 seeds" in check.measured


def test_the_mean_over_seeds_decides_and_the_seeds_that_agree_are_told():
    ahead, behind = rising(0.60), rising(0.50)
    lines = {key: curves(rising(0.54), rising(0.54), rising(0.54)) for key in six()}
    lines["fedlalr"] = curves(ahead, ahead, behind)
    check = cifar_claims([panel(lines)])[0].checks[1]
    assert check.holds is True
    assert check.seeds == (0, 1, 2)
    assert "above in 2 of 3 seeds" in check.measured
    assert "[" in check.measured


def test_drops_of_the_three_and_none_of_fedlalr_make_claim_2_hold():
    dropping = {name: with_drop(rising(0.5), 0.08) for name in ("fedadam", "fedamsv1", "fedamsv2")}
    claim = cifar_claims([panel(six(**dropping))])[1]
    assert (claim.number, claim.verdict) == (2, "holds")


@pytest.mark.parametrize("name", ["fedadam", "fedamsv1", "fedamsv2"])
def test_a_baseline_without_a_drop_breaks_claim_2(name):
    dropping = {n: with_drop(rising(0.5), 0.08) for n in ("fedadam", "fedamsv1", "fedamsv2") if n != name}
    assert cifar_claims([panel(six(**dropping))])[1].verdict == "does not hold"


@pytest.mark.parametrize(("depth", "marked"), [(0.04, False), (0.07, True)])
def test_five_points_make_a_drop_marked(depth, marked):
    claim = cifar_claims([panel(six(fedlalr=with_drop(rising(0.6, half=1), depth)))])[1]
    assert outcome(claim, "FedLALR: no marked drop") is not marked


def test_a_run_that_broke_off_is_a_drop_and_is_told():
    broken = curves(rising(0.5)[:20], failures=["round 21: not finite"])
    claim = cifar_claims([panel(six(fedadam=broken))])[1]
    check = next(check for check in claim.checks if check.statement.startswith("FedAdam"))
    assert check.holds is True
    assert "1 of 1 runs failed" in check.measured


# 3: scalability


def cohorts(quarter=0.60, half=0.60, three=0.60, **changes):
    return [
        panel(six(fedlalr=rising(quarter, half=3), **changes), "data, 25", "25"),
        panel(six(fedlalr=rising(three, half=3), **changes), "data, 75", "75"),
        panel({"fedlalr": curves(rising(half, half=3))}, "data, 50", "50"),
    ]


def test_equal_and_steepest_cohorts_make_claim_3_hold():
    (claim,) = scalability_claims(cohorts())
    assert (claim.number, claim.verdict, len(claim.checks)) == (3, "holds", 3)


@pytest.mark.parametrize("which", ["quarter", "half", "three"])
def test_a_cohort_that_ends_elsewhere_breaks_claim_3(which):
    (claim,) = scalability_claims(cohorts(**{which: 0.55}))
    assert outcome(claim, "cohorts at most 2 points apart") is False


def test_a_steeper_method_breaks_claim_3():
    (claim,) = scalability_claims(cohorts(fedavg=rising(0.6, half=1)))
    assert outcome(claim, "early accuracy above every") is False
    assert outcome(claim, "cohorts at most") is True


def test_a_cohort_without_runs_leaves_equality_unmeasured():
    quarter, three, _ = cohorts()
    (claim,) = scalability_claims([quarter, three, panel({}, "data, 50", "50")])
    assert outcome(claim, "cohorts at most") is None
    assert claim.verdict == "not measured"


# 4: interval


def intervals(best=0.62, other=0.60, fixed=0.60, early=(5.0, 7.0)):
    return panel(
        {
            "log-3-4": curves(rising(best)),
            "log-4-2": curves(rising(other, half=early[0])),
            "steps-10": curves(rising(fixed, half=early[1])),
        }
    )


def test_claim_4_holds_on_curves_made_to_fit():
    (claim,) = interval_claims([intervals()])
    assert (claim.number, claim.verdict, len(claim.checks)) == (4, "holds", 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"best": 0.595}, "3 + ⌊log₄ t⌋: final accuracy above"),
        ({"best": 0.595}, "3 + ⌊log₄ t⌋: final test loss below"),
        ({"other": 0.55, "fixed": 0.60}, "final accuracy like"),
        ({"early": (7.0, 5.0)}, "early test loss below"),
    ],
)
def test_each_statement_of_claim_4_can_fail(change, words):
    (claim,) = interval_claims([intervals(**change)])
    assert outcome(claim, words) is False
    assert claim.verdict == "does not hold"


# 5: Shakespeare


def plays(non_iid=None, iid=None):
    rough = with_drop(rising(0.4, half=12), 0.1)
    common = {"fedamsv1": rough, "fedamsv2": rough, "fedadam": rising(0.45, half=8), "fedavg": rising(0.44, half=4.5)}
    first = {"fedlalr": rising(0.5, half=5), "lafedopt": rising(0.48, half=4.2), **common, **(non_iid or {})}
    second = {"fedlalr": rising(0.5, half=4), "lafedopt": rising(0.48, half=4.5), **common, **(iid or {})}
    return [panel(six(**first), "play, non-IID", "non-IID"), panel(six(**second), "play, IID", "IID")]


def test_claim_5_holds_on_curves_made_to_fit():
    (claim,) = shakespeare_claims(plays())
    assert claim.number == 5
    assert {check.statement: check.measured for check in claim.checks if not check.holds} == {}


@pytest.mark.parametrize(
    ("change", "words", "where"),
    [
        ({"iid": {"fedlalr": rising(0.43, half=3)}}, "FedLALR: final accuracy above every", "play, IID"),
        ({"non_iid": {"fedlalr": rising(0.43, half=3)}}, "FedLALR: final accuracy above every", "play, non-IID"),
        ({"iid": {"fedlalr": rising(0.5, half=7)}}, "FedLALR: early accuracy above every", "play, IID"),
        ({"non_iid": {"lafedopt": rising(0.48, half=7)}}, "LAFedOpt: early accuracy slightly above", "play, non-IID"),
        ({"non_iid": {"lafedopt": rising(0.49, half=1)}}, "LAFedOpt: early accuracy slightly above", "play, non-IID"),
        ({"iid": {"fedavg": rising(0.44, half=20)}}, "FedAvg: early accuracy above at least three", "play, IID"),
        ({"iid": {"fedavg": rising(0.55, half=4.5)}}, "FedAvg: final accuracy below that of FedLALR", "play, IID"),
        ({"iid": {"fedamsv1": rising(0.45, half=1)}}, "FedAMSv1: early accuracy below at least three", "play, IID"),
        ({"iid": {"fedamsv2": rising(0.4, half=12)}}, "FedAMSv2: roughness above", "play, IID"),
    ],
)
def test_each_statement_of_claim_5_can_fail(change, words, where):
    (claim,) = shakespeare_claims(plays(**change))
    found = [check.holds for check in claim.checks if words in check.statement and check.where == where]
    assert found == [False]


# 6: second moments


def followed(*points):
    return [panel({"fedlalr-trajectory": curves(*[rising(0.5)] * len(points), trajectories=points)})]


def test_moments_that_grow_at_two_paces_make_claim_6_hold():
    (claim,) = trajectory_claims(followed(moments({0: 1.0, 1: 1.0}, {0: 0.5, 1: 0.2})))
    assert (claim.number, claim.verdict) == (6, "holds")
    assert claim.checks[1].measured == "paces differ by 60, 60 %"


def test_a_moment_that_stands_still_breaks_claim_6():
    (claim,) = trajectory_claims(followed(moments({0: 1.0, 1: 1.0}, {0: 0.5, 1: 0.0})))
    assert outcome(claim, "larger after the last") is False
    assert outcome(claim, "paces of ‖v̂‖² differ") is True


@pytest.mark.parametrize(("pace", "differs"), [(0.98, False), (0.9, True)])
def test_five_per_cent_tell_paces_apart(pace, differs):
    (claim,) = trajectory_claims(followed(moments({0: 1.0, 1: 1.0}, {0: 1.0, 1: pace})))
    assert outcome(claim, "paces of ‖v̂‖² differ") is differs


def test_the_paces_of_rounds_and_seeds_are_averaged():
    same, apart = {0: 1.0, 1: 1.0}, {0: 1.0, 1: 0.8}
    mixed = [*moments(same, same, rounds=(1,)), *moments(same, apart, rounds=(3,))]
    (claim,) = trajectory_claims(followed(mixed, moments(same, same)))
    assert claim.checks[1].measured == "paces differ by 0, 10 %"
    assert claim.checks[1].holds is False
    (claim,) = trajectory_claims(followed(mixed))
    assert claim.checks[1].measured == "paces differ by 0, 20 %"
    assert claim.checks[1].holds is True


def test_without_a_trajectory_claim_6_is_not_measured():
    (claim,) = trajectory_claims([panel({})])
    assert claim.verdict == "not measured"


# 7: speed-up


def measured(slope_N, slope_T=-0.5, variant="Algorithm 1", clients=(1, 2, 4, 8)):
    return [
        SpeedupPoint(variant, N, 1, 1, steps, 0.1, False, 0, (N**slope_N * steps**slope_T,))
        for steps in (2**12, 2**13, 2**14)
        for N in clients
    ]


@pytest.mark.parametrize(
    ("slopes", "holds"),
    [((-0.5, -0.5), True), ((-0.53, -0.5), True), ((-0.25, -0.5), False), ((0.0, -0.5), False), ((-0.5, -1.0), False)],
)
def test_the_slope_decides_on_claim_7(slopes, holds):
    (claim,) = speedup_claims(Speedup(tuple(measured(*slopes))))
    assert (claim.number, claim.checks[0].holds) == (7, holds)


def test_every_variant_is_judged_and_one_that_does_not_speed_up_is_enough():
    points = (*measured(-0.5), *measured(-0.1, variant="restart"))
    (claim,) = speedup_claims(Speedup(points))
    assert [check.holds for check in claim.checks] == [True, False]
    assert claim.verdict == "does not hold"


def test_too_few_points_in_the_regime_are_not_measured():
    (claim,) = speedup_claims(Speedup(tuple(measured(-0.5, clients=(64,)))))
    assert claim.verdict == "not measured"


# 8: heterogeneity


@pytest.mark.parametrize(("few", "verdict"), [(8.0, "holds"), (9.4, "does not hold")])
def test_fewer_labels_at_the_smaller_parameter_decide_on_claim_8(few, verdict):
    (claim,) = heterogeneity_claims({"data": {0.6: [9.2, 9.4], 0.3: [few, few]}}, [0, 1])
    assert (claim.number, claim.verdict, claim.checks[0].seeds) == (8, verdict, (0, 1))
