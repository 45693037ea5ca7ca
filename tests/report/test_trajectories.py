import math
from pathlib import Path

from fedlalr.federation.trajectory import QUANTILES, V_HAT_SQUARED, TrajectoryPoint
from fedlalr.report.runs import ReportedRun, read_run
from fedlalr.report.trajectories import trajectories_of


def drawn(*points: TrajectoryPoint) -> dict[str, object]:
    found = trajectories_of(ReportedRun(Path("run"), [], trajectory=points), "label")
    assert found is not None
    return found


def test_rounds_stand_side_by_side_with_a_mark_where_each_begins() -> None:
    found = drawn(
        *(TrajectoryPoint(round, client, step, {"a": 1.0}) for round in (1, 31) for client in (4, 2) for step in (1, 2))
    )
    assert found["marks"] == [{"x": 1, "round": 1}, {"x": 3, "round": 31}]
    first, second = found["clients"]
    assert (first["client"], second["client"]) == (2, 4)
    assert first["x"] == [1, 2, 3, 4]
    assert first["round"] == [1, 1, 31, 31]


def test_a_client_that_ends_earlier_has_a_shorter_line() -> None:
    found = drawn(
        TrajectoryPoint(1, 0, 1, {"a": 1.0}), TrajectoryPoint(1, 0, 2, {"a": 2.0}), TrajectoryPoint(1, 1, 1, {"a": 3.0})
    )
    assert [client["x"] for client in found["clients"]] == [[1, 2], [1]]


def test_quantiles_become_a_band_around_the_one_nearest_the_middle() -> None:
    (client,) = drawn(TrajectoryPoint(1, 0, 1, {"r, 10 %": 1.0, "r, 40 %": 2.0, "r, 99.5 %": 3.0, "b": math.nan}))[
        "clients"
    ]
    assert client["values"] == {"b": {"y": [None]}, "r": {"y": [2.0], "low": [1.0], "high": [3.0]}}


def test_what_the_observer_records_is_two_quantities(comparison_folder: Path) -> None:
    found = trajectories_of(read_run(comparison_folder / "fedlalr" / "seed-0"), "label")
    assert found is not None
    assert [quantity["name"] for quantity in found["quantities"]] == [V_HAT_SQUARED, "α/√v̂"]
    assert f"{100 * QUANTILES[0]:g} to {100 * QUANTILES[-1]:g} %" in found["quantities"][1]["detail"]
    band = found["clients"][0]["values"]["α/√v̂"]
    assert all(low <= y <= high for low, y, high in zip(band["low"], band["y"], band["high"], strict=True))


def test_a_run_without_a_trajectory_has_none() -> None:
    assert trajectories_of(ReportedRun(Path("run"), []), "label") is None
