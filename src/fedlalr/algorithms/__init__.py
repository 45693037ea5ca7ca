"""The methods, one file each: pure functions on named slots."""

from fedlalr.algorithms import registry
from fedlalr.algorithms.local_sgd import LocalSGD
from fedlalr.algorithms.registry import *  # noqa: F403
from fedlalr.algorithms.registry import ALGORITHMS, create, options
from fedlalr.algorithms.slots import Algorithm, Context, Slots, SlotTable

__all__ = ["ALGORITHMS", "Algorithm", "Context", "LocalSGD", "SlotTable", "Slots", "create", "options"]
__all__ += registry.__all__
