"""The round and the run: sample, train, check, reduce, step, evaluate, record, checkpoint."""

from fedlalr.federation.checkpoint import CheckpointError
from fedlalr.federation.gradient_norms import GradientNorms
from fedlalr.federation.inbox import Inbox
from fedlalr.federation.metrics import Record
from fedlalr.federation.observers import Observer, RunInfo, Stop
from fedlalr.federation.payload import Expected, Reply
from fedlalr.federation.robust import Bounded, Max, Mean, Median, Trimmed
from fedlalr.federation.run import RepliesRefused, Result, run
from fedlalr.federation.rundir import RunDirectoryError
from fedlalr.federation.screening import Rejection, screen, screen_reply
from fedlalr.federation.server import RoundFailed
from fedlalr.federation.trajectory import Trajectory

__all__ = [
    "Bounded",
    "CheckpointError",
    "Expected",
    "GradientNorms",
    "Inbox",
    "Max",
    "Mean",
    "Median",
    "Observer",
    "Record",
    "Rejection",
    "RepliesRefused",
    "Reply",
    "Result",
    "RoundFailed",
    "RunDirectoryError",
    "RunInfo",
    "Stop",
    "Trajectory",
    "Trimmed",
    "run",
    "screen",
    "screen_reply",
]
