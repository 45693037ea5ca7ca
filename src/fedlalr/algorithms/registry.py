"""Algorithms by the names used in configuration files and on the command line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fedlalr.algorithms.adaalter import LocalAdaAlter
from fedlalr.algorithms.alignedlalr import AlignedLALR
from fedlalr.algorithms.deltasgd import DeltaSGD
from fedlalr.algorithms.diloco import DiLoCo
from fedlalr.algorithms.fedadagrad import FedAdagrad
from fedlalr.algorithms.fedadam import FedAdam
from fedlalr.algorithms.fedadamw import FedAdamW
from fedlalr.algorithms.fedams import FedAMS
from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.fedavgm import FedAvgM
from fedlalr.algorithms.fedcm import FedCM
from fedlalr.algorithms.fedlada import FedLADA
from fedlalr.algorithms.fedlalr import FedLALR
from fedlalr.algorithms.fedmuon import FedMuon
from fedlalr.algorithms.fednova import FedNova
from fedlalr.algorithms.fedprox import FedProx
from fedlalr.algorithms.fedyogi import FedYogi
from fedlalr.algorithms.lafedopt import LAFedOpt
from fedlalr.algorithms.localadam import LocalAdam
from fedlalr.algorithms.mimelite import MimeLite
from fedlalr.algorithms.scaffold import SCAFFOLD
from fedlalr.algorithms.sharedamsgrad import SharedAMSGrad
from fedlalr.algorithms.slots import Algorithm
from fedlalr.algorithms.slowmo import SlowMo
from fedlalr.common.named import check_known, created, options_of

__all__ = ["SCAFFOLD", "AlignedLALR", "DeltaSGD", "DiLoCo", "FedAMS", "FedAdagrad", "FedAdam", "FedAdamW", "FedAvg"]
__all__ += ["FedAvgM", "FedCM", "FedLADA", "FedLALR", "FedMuon", "FedNova", "FedProx", "FedYogi", "LAFedOpt"]
__all__ += ["LocalAdaAlter", "LocalAdam", "MimeLite", "SharedAMSGrad", "SlowMo"]
"""The methods that `fl` exports."""


def _by_name(*kinds: type[Algorithm]) -> dict[str, Callable[..., Algorithm]]:
    return {kind.__name__.lower(): kind for kind in kinds}


ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    **_by_name(FedLALR, FedAvg, FedAdam),
    "fedamsv1": partial(FedAMS, option=1),
    "fedamsv2": partial(FedAMS, option=2),
    **_by_name(LAFedOpt),
    "adaalter": LocalAdaAlter,
    **_by_name(SharedAMSGrad, FedCM, SlowMo, FedProx, SCAFFOLD, FedNova, FedAdagrad, FedYogi, FedAvgM, FedLADA),
    **_by_name(LocalAdam, MimeLite, DeltaSGD, AlignedLALR, FedAdamW, DiLoCo, FedMuon),
}
"""Name → factory; `fedamsv1` and `fedamsv2` are one class with its option fixed."""
PAPER_METHODS = ("fedlalr", "fedavg", "fedadam", "fedamsv1", "fedamsv2", "lafedopt")
"""The six methods that the FedLALR paper compares."""


def create(name: str, /, **hyperparameters: object) -> Algorithm:
    """Create an algorithm by name. Lists, as read from configuration files, become tuples.

    >>> create("fedamsv2", lr=0.5, betas=[0.9, 0.98])
    FedAMS(lr=0.5, server_lr=0.1, betas=(0.9, 0.98), eps=None, option=2, bias_correction=False)
    """
    frozen = {option: tuple(v) if isinstance(v, list) else v for option, v in hyperparameters.items()}
    algorithm: Algorithm = created(name, frozen, ALGORITHMS, "there is no algorithm")
    return algorithm


def options(name: str) -> dict[str, object]:
    """The options of an algorithm with their defaults, without those that its name already fixes."""
    check_known("there is no algorithm", name, ALGORITHMS)
    return dict(options_of(ALGORITHMS[name]))
