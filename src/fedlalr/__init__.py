"""Federated optimisation with client-specific adaptive learning rates."""

from fedlalr import data, models
from fedlalr.algorithms import FedAvg, FedLALR
from fedlalr.algorithms.slots import Algorithm, Context, Slots, SlotTable
from fedlalr.federation import Observer, Record, Rejection, Result, RoundFailed, run
from fedlalr.training import Epochs, LogInterval, Steps

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Context",
    "Epochs",
    "FedAvg",
    "FedLALR",
    "LogInterval",
    "Observer",
    "Record",
    "Rejection",
    "Result",
    "RoundFailed",
    "SlotTable",
    "Slots",
    "Steps",
    "data",
    "models",
    "run",
]
