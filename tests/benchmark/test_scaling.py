"""The figure of `benchmarks/scaling.py`."""

import importlib.util
import sys
from pathlib import Path

from fedlalr.common.colours import COLOURS

FILE = Path(__file__).parents[2] / "benchmarks" / "scaling.py"
spec = importlib.util.spec_from_file_location("scaling", FILE)
assert spec is not None
assert spec.loader is not None
scaling = importlib.util.module_from_spec(spec)
sys.modules["scaling"] = scaling
spec.loader.exec_module(scaling)


def rows(**seconds):
    job = {"cohort": 10, "steps": 10, "width": 64}
    return [{"engine": engine, **job, "fedavg": time, "fedlalr": 2 * time} for engine, time in seconds.items()]


def test_no_engine_has_the_colour_of_a_method():
    assert len(set(scaling.COLOURS.values())) == len(scaling.ENGINES)
    assert not {colour.lower() for colour in scaling.COLOURS.values()} & set(COLOURS)


def test_the_fastest_engine_is_named_and_with_how_many_jobs_it_is():
    all_jobs = rows(reference=3.0, stacked=1.0, workers=2.0)
    assert scaling.fastest(all_jobs) == ("stacked", "")
    mixed = [*all_jobs, {**all_jobs[2], "cohort": 20, "fedavg": 0.1}, {**all_jobs[1], "cohort": 20, "fedavg": 0.2}]
    assert scaling.fastest(mixed) == ("stacked", " in 3 of 4 points")
