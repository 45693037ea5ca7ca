"""The raw data sets: found on this machine, in the cache or on the network, verified, and read into plain tensors."""

from fedlalr.data.fetch import DataCorrupt, DataNotFound, Progress
from fedlalr.data.sources.rawdata import RawData
from fedlalr.data.sources.registry import SOURCES, Available, Description, available, describe, fetch, raw

__all__ = [
    "SOURCES",
    "Available",
    "DataCorrupt",
    "DataNotFound",
    "Description",
    "Progress",
    "RawData",
    "available",
    "describe",
    "fetch",
    "raw",
]
