"""The methods, one file each: pure functions on named slots."""

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
from fedlalr.algorithms.local_sgd import LocalSGD
from fedlalr.algorithms.localadam import LocalAdam
from fedlalr.algorithms.mimelite import MimeLite
from fedlalr.algorithms.registry import ALGORITHMS, create, options
from fedlalr.algorithms.scaffold import SCAFFOLD
from fedlalr.algorithms.sharedamsgrad import SharedAMSGrad
from fedlalr.algorithms.slots import Algorithm, Context, Slots, SlotTable
from fedlalr.algorithms.slowmo import SlowMo

__all__ = [
    "ALGORITHMS",
    "SCAFFOLD",
    "Algorithm",
    "AlignedLALR",
    "Context",
    "DeltaSGD",
    "DiLoCo",
    "FedAMS",
    "FedAdagrad",
    "FedAdam",
    "FedAdamW",
    "FedAvg",
    "FedAvgM",
    "FedCM",
    "FedLADA",
    "FedLALR",
    "FedMuon",
    "FedNova",
    "FedProx",
    "FedYogi",
    "LAFedOpt",
    "LocalAdaAlter",
    "LocalAdam",
    "LocalSGD",
    "MimeLite",
    "SharedAMSGrad",
    "SlotTable",
    "Slots",
    "SlowMo",
    "create",
    "options",
]
