"""The round and the run: sample, train, check, reduce, step, evaluate, record."""

from fedlalr.federation.metrics import Record
from fedlalr.federation.observers import Observer, RunInfo
from fedlalr.federation.run import Result, run
from fedlalr.federation.screening import Rejection
from fedlalr.federation.server import RoundFailed

__all__ = ["Observer", "Record", "Rejection", "Result", "RoundFailed", "RunInfo", "run"]
