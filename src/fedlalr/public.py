"""The names of the library, which `import fedlalr as fl` gives: all that are imported here."""

# ruff: noqa: F403
from fedlalr import data as data
from fedlalr import hf as hf
from fedlalr import models as models
from fedlalr import theory as theory
from fedlalr.algorithms.registry import *
from fedlalr.algorithms.slots import Algorithm as Algorithm
from fedlalr.algorithms.slots import Context as Context
from fedlalr.algorithms.slots import Slots as Slots
from fedlalr.algorithms.slots import SlotTable as SlotTable
from fedlalr.federation import *
from fedlalr.training import *

_NAMES = [name for name in globals() if not name.startswith("_")]
