"""The round and the run: sample, train, check, reduce, step, evaluate, record, checkpoint."""

from fedlalr.federation import schedules
from fedlalr.federation.asynchronous.settings import Async
from fedlalr.federation.compression import codecs
from fedlalr.federation.compression.compression import Compression
from fedlalr.federation.early_stopping import EarlyStopping
from fedlalr.federation.gradient_norms import GradientNorms
from fedlalr.federation.observers import Observer, RunInfo, Stop
from fedlalr.federation.privacy.privacy import Privacy
from fedlalr.federation.record import Record
from fedlalr.federation.replies import reductions
from fedlalr.federation.replies.screening import Rejection
from fedlalr.federation.result import Result, load
from fedlalr.federation.round import RoundFailed
from fedlalr.federation.run import run
from fedlalr.federation.session import RepliesRejected
from fedlalr.federation.storage.checkpoint import CheckpointError
from fedlalr.federation.storage.journal import RunDirectoryError
from fedlalr.federation.stragglers import Stragglers
from fedlalr.federation.trajectory import Trajectory

__all__ = [
    "Async",
    "CheckpointError",
    "Compression",
    "EarlyStopping",
    "GradientNorms",
    "Observer",
    "Privacy",
    "Record",
    "Rejection",
    "RepliesRejected",
    "Result",
    "RoundFailed",
    "RunDirectoryError",
    "RunInfo",
    "Stop",
    "Stragglers",
    "Trajectory",
    "codecs",
    "load",
    "reductions",
    "run",
    "schedules",
]
