"""How a cohort of clients trains locally: the engines."""

from fedlalr.training.engines import ENGINES, create_engine
from fedlalr.training.intervals import Epochs, Interval, LogInterval, Steps
from fedlalr.training.work import Engine, Probe, Replies, Trace, Training, Work

__all__ = [
    "ENGINES",
    "Engine",
    "Epochs",
    "Interval",
    "LogInterval",
    "Probe",
    "Replies",
    "Steps",
    "Trace",
    "Training",
    "Work",
    "create_engine",
]
