"""Tables and figures of what runs recorded."""

from fedlalr.report.comparison import Comparison, Outcome, compare
from fedlalr.report.statistics import Interval, paired_difference, spread

__all__ = ["Comparison", "Interval", "Outcome", "compare", "paired_difference", "spread"]
