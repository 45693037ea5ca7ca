"""The paper's theory as functions: step sizes, bounds term by term, communication to a target. See docs/theory.md."""

from fedlalr.theory.bounds import Bound, Term, corollary1, corollary2, rounds_to_speedup, theorem1, theorem2
from fedlalr.theory.communication import (
    Communication,
    communication,
    rounds_fixed,
    rounds_growing,
    rounds_log,
    rounds_log_summed,
)
from fedlalr.theory.dominance import Dominance, dominance, plot_dominance
from fedlalr.theory.problem import ASSUMPTIONS, Constants, Problem, constants
from fedlalr.theory.step_sizes import StepSize, adaptive_step_size, cap, largest_smoothness, log_intervals, step_size

__all__ = [
    "ASSUMPTIONS",
    "Bound",
    "Communication",
    "Constants",
    "Dominance",
    "Problem",
    "StepSize",
    "Term",
    "adaptive_step_size",
    "cap",
    "communication",
    "constants",
    "corollary1",
    "corollary2",
    "dominance",
    "largest_smoothness",
    "log_intervals",
    "plot_dominance",
    "rounds_fixed",
    "rounds_growing",
    "rounds_log",
    "rounds_log_summed",
    "rounds_to_speedup",
    "step_size",
    "theorem1",
    "theorem2",
]
