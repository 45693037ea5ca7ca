"""The round and the run: sample, train, check, reduce, step, evaluate, record, checkpoint."""

from fedlalr.federation.early_stopping import EarlyStopping
from fedlalr.federation.gradient_norms import GradientNorms
from fedlalr.federation.observers import Observer, RunInfo, Stop
from fedlalr.federation.record import Record
from fedlalr.federation.replies.payload import Expected, Reply
from fedlalr.federation.replies.screening import Rejection, screen
from fedlalr.federation.result import Result
from fedlalr.federation.round import RoundFailed
from fedlalr.federation.run import run
from fedlalr.federation.session import RepliesRejected
from fedlalr.federation.storage.checkpoint import CheckpointError
from fedlalr.federation.storage.journal import RunDirectoryError
from fedlalr.federation.storage.saved_result import load
from fedlalr.federation.trajectory import Trajectory

__all__ = [
    "CheckpointError",
    "EarlyStopping",
    "Expected",
    "GradientNorms",
    "Observer",
    "Record",
    "Rejection",
    "RepliesRejected",
    "Reply",
    "Result",
    "RoundFailed",
    "RunDirectoryError",
    "RunInfo",
    "Stop",
    "Trajectory",
    "load",
    "run",
    "screen",
]
