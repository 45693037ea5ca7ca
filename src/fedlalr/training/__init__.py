"""How a cohort of clients trains locally: the engines."""

from fedlalr.training.interfaces import Engine, Probe, Replies, Trace, Training, Work
from fedlalr.training.intervals import Epochs, Interval, LogInterval, Steps

__all__ = ["Engine", "Epochs", "Interval", "LogInterval", "Probe", "Replies", "Steps", "Trace", "Training", "Work"]
