"""Federated optimisation with client-specific adaptive learning rates."""

from fedlalr.common.interrupts import exit_quietly_during_imports

exit_quietly_during_imports()  # before torch, which takes seconds

# ruff: noqa: E402
from fedlalr import data, models, theory
from fedlalr.algorithms import (
    SCAFFOLD,
    Algorithm,
    Context,
    DeltaSGD,
    FedAdagrad,
    FedAdam,
    FedAMS,
    FedAvg,
    FedAvgM,
    FedCM,
    FedLADA,
    FedLALR,
    FedNova,
    FedProx,
    FedYogi,
    LAFedOpt,
    LocalAdaAlter,
    LocalAdam,
    MimeLite,
    SharedAMSGrad,
    Slots,
    SlotTable,
    SlowMo,
)
from fedlalr.federation import (
    CheckpointError,
    GradientNorms,
    Observer,
    Record,
    Rejection,
    RepliesRejected,
    Result,
    RoundFailed,
    RunDirectoryError,
    RunInfo,
    Stop,
    Trajectory,
    run,
)
from fedlalr.federation.compression import codecs
from fedlalr.federation.compression.compression import Compression
from fedlalr.federation.replies import reductions
from fedlalr.training import Engine, Epochs, Interval, LogInterval, Probe, Replies, Steps, Trace, Training, Work

__version__ = "0.2.0"

__all__ = [
    "SCAFFOLD",
    "Algorithm",
    "CheckpointError",
    "Compression",
    "Context",
    "DeltaSGD",
    "Engine",
    "Epochs",
    "FedAMS",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedCM",
    "FedLADA",
    "FedLALR",
    "FedNova",
    "FedProx",
    "FedYogi",
    "GradientNorms",
    "Interval",
    "LAFedOpt",
    "LocalAdaAlter",
    "LocalAdam",
    "LogInterval",
    "MimeLite",
    "Observer",
    "Probe",
    "Record",
    "Rejection",
    "Replies",
    "RepliesRejected",
    "Result",
    "RoundFailed",
    "RunDirectoryError",
    "RunInfo",
    "SharedAMSGrad",
    "SlotTable",
    "Slots",
    "SlowMo",
    "Steps",
    "Stop",
    "Trace",
    "Training",
    "Trajectory",
    "Work",
    "codecs",
    "data",
    "models",
    "reductions",
    "run",
    "theory",
]
