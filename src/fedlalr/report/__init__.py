"""Tables, figures and HTML reports of recorded runs."""

from fedlalr.report.comparison import Comparison, MethodOutcome, compare
from fedlalr.report.statistics import ConfidenceInterval, paired_difference, spread

__all__ = ["Comparison", "ConfidenceInterval", "MethodOutcome", "compare", "paired_difference", "spread"]
